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

sys.path.insert(0, str(Path(__file__).parents[2]))  # the engine runs this file by itself

from infra.policy import rules
from infra.policy.resource import Resource, Rule


def validation(rule: Rule):
    def validate(stack, report) -> None:
        resources = [Resource(each.resource_type, each.name, each.props) for each in stack.resources]
        urns = {(each.resource_type, each.name): each.urn for each in stack.resources}
        for resource, violation in rules.violations(rule, resources):
            report(f"{resource.name} {violation}", urns[resource.type, resource.name])

    return pulumi_policy.StackValidationPolicy(rule.__name__.replace("_", "-"), (rule.__doc__ or "").strip(), validate)


pulumi_policy.PolicyPack("flotilla", [validation(rule) for rule in rules.RULES], pulumi_policy.EnforcementLevel.MANDATORY)
