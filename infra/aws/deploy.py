"""Deployment from GitHub Actions without keys: a role that jobs of one repository's environment take on.

https://docs.github.com/en/actions/how-tos/secure-your-work/security-harden-deployments/oidc-in-aws
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import pulumi
from pulumi_aws import iam

from infra.aws.deploy_policies import boundary, github, identity, network, storage
from infra.aws.policies import Account

ISSUER = "token.actions.githubusercontent.com"


@dataclass(frozen=True)
class DeployArgs:
    """`provider` is the ARN of the account's OIDC provider for GitHub, of which there can be one; None makes it."""

    account: Account
    stack: str
    environment: str
    repository: str
    provider: str | None


class Deploy(pulumi.ComponentResource):
    """The role, and a boundary that no role which it makes can exceed."""

    def __init__(self, name: str, args: DeployArgs, opts: pulumi.ResourceOptions | None = None):
        super().__init__("flotilla:aws:Deploy", name, None, opts)
        child = pulumi.ResourceOptions(parent=self)
        provider: pulumi.Input[str] = (
            args.provider
            or iam.OpenIdConnectProvider(f"{name}-github", url=f"https://{ISSUER}", client_id_lists=["sts.amazonaws.com"], opts=child).arn
        )
        subject = f"repo:{args.repository}:environment:{args.environment}"
        trusted = pulumi.Output.from_input(provider).apply(lambda arn: json.dumps(github(arn, ISSUER, subject)))
        role = iam.Role(f"{name}-deploy", assume_role_policy=trusted, max_session_duration=7200, opts=child)
        account, stack = args.account, args.stack
        bounds = iam.Policy(f"{name}-boundary", policy=json.dumps(boundary(account, stack)), opts=child).arn
        documents: dict[str, pulumi.Input[str]] = {
            "network": json.dumps(network(account, stack)),
            "storage": json.dumps(storage(account, stack)),
            "identity": bounds.apply(lambda arn: json.dumps(identity(account, stack, arn))),
        }
        for what, text in documents.items():
            iam.RolePolicy(f"{name}-deploy-{what}", role=role.id, policy=text, opts=child)
        self.role_arn, self.boundary_arn = role.arn, bounds
        self.register_outputs({"role": role.arn, "boundary": bounds})
