"""The policy pack: `pulumi preview --stack <stack> --policy-pack infra/policy`. Every rule is mandatory."""

import sys
from pathlib import Path

try:
    import pulumi_policy  # pyright: ignore[reportMissingImports] # of this folder's own environment
except ModuleNotFoundError:
    print("infra.policy: is a policy pack; `make install-policy`, then pulumi preview --policy-pack infra/policy", file=sys.stderr)
    raise SystemExit(0 if "--help" in sys.argv else 2) from None

sys.path.insert(0, str(Path(__file__).parents[2]))  # the engine runs this file by itself

from infra.policy import rules


def validation(rule: rules.Rule):
    def validate(stack, report) -> None:
        resources = [rules.Resource(each.resource_type, each.name, each.props) for each in stack.resources]
        urns = {(each.resource_type, each.name): each.urn for each in stack.resources}
        for resource, violation in rules.violations(rule, resources):
            report(f"{resource.name} {violation}", urns[resource.type, resource.name])

    return pulumi_policy.StackValidationPolicy(rule.__name__.replace("_", "-"), (rule.__doc__ or "").strip(), validate)


pulumi_policy.PolicyPack("flotilla", [validation(rule) for rule in rules.RULES], pulumi_policy.EnforcementLevel.MANDATORY)
