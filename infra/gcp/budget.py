"""What a month may cost: mails at shares of the limit. It stops nothing."""

from __future__ import annotations

from dataclasses import dataclass

import pulumi
from pulumi_gcp import billing, monitoring, organizations

from stacks.settings import cloud


@dataclass(frozen=True)
class BudgetArgs:
    project: str
    settings: cloud.Budget


class Budget(pulumi.ComponentResource):
    """A budget of the project on its billing account, with one notification channel for each address."""

    def __init__(self, name: str, args: BudgetArgs, opts: pulumi.ResourceOptions | None = None):
        super().__init__("flotilla:gcp:Budget", name, None, opts)
        child = pulumi.ResourceOptions(parent=self)
        channels = [
            monitoring.NotificationChannel(
                f"{name}-mail{index}", type="email", display_name=f"Budget of {name}", labels={"email_address": address}, opts=child
            )
            for index, address in enumerate(args.settings.emails)
        ]
        project = organizations.get_project_output(project_id=args.project, opts=pulumi.InvokeOutputOptions(parent=self))
        units, cents = divmod(round(args.settings.monthly * 100), 100)
        billing.Budget(
            name,
            billing_account=args.settings.billing_account or "",
            display_name=f"flotilla {name}",
            amount={"specified_amount": {"currency_code": args.settings.currency, "units": str(units), "nanos": cents * 10_000_000}},
            budget_filter={"projects": [pulumi.Output.concat("projects/", project.number)], "calendar_period": "MONTH"},
            threshold_rules=[{"threshold_percent": percent / 100, "spend_basis": "CURRENT_SPEND"} for percent in args.settings.thresholds],
            all_updates_rule={
                "monitoring_notification_channels": [channel.id for channel in channels],
                "disable_default_iam_recipients": True,
            },
            opts=child,
        )
        self.register_outputs({})
