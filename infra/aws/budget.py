"""What holds for the whole account: a monthly budget with mail before it is spent, and defaults of disks and instances.

The budget counts the whole account: a filter by tag counts nothing until an administrator activates the tag for cost allocation, and
then only what came after.
"""

from __future__ import annotations

import pulumi
from pulumi_aws import budgets, ebs, ec2

from stacks.settings import cloud


class Budget(pulumi.ComponentResource):
    """Mail at each threshold of what was spent, and when the month is on its way beyond the limit."""

    def __init__(self, name: str, budget: cloud.Budget, opts: pulumi.ResourceOptions | None = None):
        super().__init__("flotilla:aws:Budget", name, None, opts)
        actual = [("ACTUAL", threshold) for threshold in budget.thresholds]
        made = budgets.Budget(
            f"{name}-monthly",
            budget_type="COST",
            time_unit="MONTHLY",
            limit_amount=f"{budget.monthly:.2f}",
            limit_unit=budget.currency,
            notifications=[
                {
                    "comparison_operator": "GREATER_THAN",
                    "notification_type": kind,
                    "threshold": threshold,
                    "threshold_type": "PERCENTAGE",
                    "subscriber_email_addresses": list(budget.emails),
                }
                for kind, threshold in [*actual, ("FORECASTED", 100)]
            ],
            opts=pulumi.ResourceOptions(parent=self),
        )
        self.register_outputs({"budget": made.name})


class AccountDefaults(pulumi.ComponentResource):
    """For all of the account in this region: new disks are encrypted and new instances want IMDSv2; dstack's say neither by themselves."""

    def __init__(self, name: str, opts: pulumi.ResourceOptions | None = None):
        super().__init__("flotilla:aws:AccountDefaults", name, None, opts)
        # They are the account's: others rely on them by the time this stack goes.
        child = pulumi.ResourceOptions(parent=self, retain_on_delete=True)
        ebs.EncryptionByDefault(name, enabled=True, opts=child)
        ec2.InstanceMetadataDefaults(name, http_tokens="required", http_put_response_hop_limit=2, opts=child)
        self.register_outputs({})
