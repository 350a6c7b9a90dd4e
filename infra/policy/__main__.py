"""The policy pack, which Pulumi runs: `pulumi preview --stack <stack> --policy-pack infra/policy`. Every rule is mandatory.

Its own environment is made by `make install-policy`.
"""

import sys
from pathlib import Path

if __package__:  # `python -m infra.policy`; the engine runs the file by its path, which is in no package
    asked = {"-h", "--help"} & {*sys.argv}
    print((__doc__ or "").strip(), file=sys.stdout if asked else sys.stderr)
    sys.exit(0 if asked else 2)

import pulumi_policy  # pyright: ignore[reportMissingImports] # of this folder's own environment
from pulumi_policy.proxy import UnknownValueError  # pyright: ignore[reportMissingImports]

sys.path.insert(0, str(Path(__file__).parents[2]))  # the engine runs this file by itself

from infra.policy import rules
from infra.policy.shared import Resource, Rule, StackRule


def per_resource(rule: Rule):
    def validate(args, report) -> None:
        for violation in rules.violations(rule, _resource(args), UnknownValueError):
            report(f"{args.name} {violation}")

    return pulumi_policy.ResourceValidationPolicy(_name(rule), (rule.__doc__ or "").strip(), validate)


def per_stack(rule: StackRule):
    def validate(args, report) -> None:
        resources = [_resource(each) for each in args.resources]
        for resource, each in zip(resources, args.resources, strict=True):
            for violation in rule(resource, resources):
                report(f"{resource.name} {violation}", each.urn)

    return pulumi_policy.StackValidationPolicy(_name(rule), (rule.__doc__ or "").strip(), validate)


def _resource(args) -> Resource:
    """Its URN begins with the stack: urn:pulumi:STACK::PROJECT::..."""
    return Resource(args.resource_type, args.name, args.props, args.urn.split("::")[0].rpartition(":")[2])


def _name(rule: Rule | StackRule) -> str:
    return rule.__name__.replace("_", "-")


POLICIES = [*map(per_resource, rules.RULES), *map(per_stack, rules.STACK_RULES)]
pulumi_policy.PolicyPack("flotilla", POLICIES, pulumi_policy.EnforcementLevel.MANDATORY)
