"""Deployment from GitHub Actions without keys: roles that jobs of one repository take on.

https://docs.github.com/en/actions/how-tos/secure-your-work/security-harden-deployments/oidc-in-aws
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import pulumi
from pulumi_aws import iam

from infra.aws.deploy_policies import boundary, github, identity, network, preview, storage
from infra.aws.policies import Account

ISSUER = "token.actions.githubusercontent.com"
MAIN = "ref:refs/heads/main"  # in the subject of a job of that branch


@dataclass(frozen=True)
class DeployArgs:
    """`provider` is the ARN of the account's OIDC provider for GitHub, of which there can be one; None makes it."""

    account: Account
    stack: str
    environment: str
    repository: str
    provider: str | None


class Deploy(pulumi.ComponentResource):
    """A role that deploys, with a boundary that no role of its making can exceed; and one that previews pull requests."""

    def __init__(self, name: str, args: DeployArgs, opts: pulumi.ResourceOptions | None = None):
        super().__init__("flotilla:aws:Deploy", name, None, opts)
        child = pulumi.ResourceOptions(parent=self)
        provider: pulumi.Input[str] = (
            args.provider
            or iam.OpenIdConnectProvider(f"{name}-github", url=f"https://{ISSUER}", client_id_lists=["sts.amazonaws.com"], opts=child).arn
        )
        account, stack = args.account, args.stack
        deploys = self._role(f"{name}-deploy", provider, f"repo:{args.repository}:environment:{args.environment}")
        # Pull requests, and on the main branch the look for drift, which asks nobody's approval.
        previews = self._role(f"{name}-preview", provider, *(f"repo:{args.repository}:{where}" for where in ("pull_request", MAIN)))
        bounds = iam.Policy(f"{name}-boundary", policy=json.dumps(boundary(account, stack)), opts=child).arn
        documents: dict[str, pulumi.Input[str]] = {
            "network": json.dumps(network(account, stack)),
            "storage": json.dumps(storage(account, stack)),
            "identity": bounds.apply(lambda arn: json.dumps(identity(account, stack, arn))),
        }
        for what, text in documents.items():
            iam.RolePolicy(f"{name}-deploy-{what}", role=deploys.id, policy=text, opts=child)
        iam.RolePolicy(f"{name}-preview", role=previews.id, policy=json.dumps(preview(account)), opts=child)
        self.role_arn, self.preview_arn, self.boundary_arn = deploys.arn, previews.arn, bounds
        self.register_outputs({"deploy": deploys.arn, "preview": previews.arn, "boundary": bounds})

    def _role(self, name: str, provider: pulumi.Input[str], *subjects: str) -> iam.Role:
        trusted = pulumi.Output.from_input(provider).apply(lambda arn: json.dumps(github(arn, ISSUER, list(subjects))))
        opts = pulumi.ResourceOptions(parent=self)
        return iam.Role(name, assume_role_policy=trusted, max_session_duration=7200, opts=opts)
