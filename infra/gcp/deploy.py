"""Who deploys from continuous integration: GitHub's own tokens, exchanged for those of a service account; no key anywhere."""

from __future__ import annotations

from dataclasses import dataclass

import pulumi
from pulumi_gcp import billing, iam, projects, secretmanager, serviceaccount

from infra.gcp import names
from infra.gcp.control import READS_SECRET, Control
from stacks.settings.cloud import Ci

ISSUER = "https://token.actions.githubusercontent.com"
PROJECT = "flotilla"  # of Pulumi.yaml
MAIN = "ref:refs/heads/main"  # in the subject of a job of that branch
GRANT = "roles/resourcemanager.projectIamAdmin"
READ = ("roles/viewer", "roles/iam.securityReviewer")  # what a preview refreshes
WRITE = (  # one for each kind of resource in infra/gcp
    "roles/compute.admin",
    "roles/iam.roleAdmin",
    "roles/iam.serviceAccountAdmin",
    "roles/iam.workloadIdentityPoolAdmin",
    "roles/serviceusage.serviceUsageAdmin",
    "roles/storage.admin",
    "roles/cloudkms.admin",
    "roles/file.editor",
    "roles/monitoring.notificationChannelEditor",
)


@dataclass(frozen=True)
class DeployArgs:
    stack: str
    project: str
    region: str
    environment: str
    ci: Ci
    billing_account: str | None  # whose budget the stack keeps
    nodes: pulumi.Output[str]  # full name of the nodes' service account
    granted: list[pulumi.Output[str]]  # roles that the stack's own accounts have on the project
    control: Control | None = None


class Deploy(pulumi.ComponentResource):
    """`up`: the account for the GitHub environment of the stack. `preview`: the account for pull requests, which reads alone."""

    outputs: dict[str, pulumi.Output[str]]  # for google-github-actions/auth: the provider's name, the accounts' addresses

    def __init__(self, name: str, args: DeployArgs, opts: pulumi.ResourceOptions | None = None):
        super().__init__("flotilla:gcp:Deploy", name, None, opts)
        self._child = pulumi.ResourceOptions(parent=self)
        pool, provider = self._pool(name, args.ci)
        # Previews are for pull requests, and on the main branch for the look for drift, which asks nobody's approval.
        subjects = {"up": (f"environment:{args.environment}",), "preview": ("pull_request", MAIN)}
        self.outputs = {"deploy_provider": provider}
        for role, allowed in subjects.items():
            account = serviceaccount.Account(
                f"{name}-{role}",
                project=args.project,
                account_id=names.account(f"{name}-{role}"),
                display_name=f"GitHub, pulumi {role} of {name}",
                opts=self._child,
            )
            for index, subject in enumerate(allowed):
                serviceaccount.IAMMember(
                    f"{name}-{role}-github" + (f"-{index}" if index else ""),
                    service_account_id=account.name,
                    role="roles/iam.workloadIdentityUser",
                    # GitHub's token says for which environment or branch, or that it is for a pull request.
                    member=pulumi.Output.concat("principal://iam.googleapis.com/", pool, f"/subject/repo:{args.ci.github}:{subject}"),
                    opts=self._child,
                )
            self._grant(f"{name}-{role}", args, account.member, WRITE if role == "up" else READ)
            if args.control:
                self._control(f"{name}-{role}", args, args.control, account.member, role)
            self._state(f"{name}-{role}", args, account.member, writes=role == "up")
            if role == "up":
                self._may_grant(f"{name}-{role}", args, account.member)
            self.outputs[f"deploy_{role}_account"] = account.email
        self.register_outputs(self.outputs)

    def _pool(self, name: str, ci: Ci) -> tuple[pulumi.Output[str], pulumi.Output[str]]:
        """Names of the pool and of its provider; GCP keeps a deleted pool's id for 30 days, so a shared pool may be named."""
        if ci.provider:
            return pulumi.Output.from_input(ci.provider), pulumi.Output.from_input(f"{ci.provider}/providers/github")
        pool = iam.WorkloadIdentityPool(
            name, workload_identity_pool_id=names.pool(name), display_name=f"GitHub of {name}"[:32], opts=self._child
        )
        provider = iam.WorkloadIdentityPoolProvider(
            name,
            workload_identity_pool_id=pool.workload_identity_pool_id,
            workload_identity_pool_provider_id="github",
            attribute_mapping={"google.subject": "assertion.sub"},
            attribute_condition=f"assertion.repository == '{ci.github}'",
            oidc={"issuer_uri": ISSUER},
            opts=self._child,
        )
        return pool.name, provider.name

    def _may_grant(self, name: str, args: DeployArgs, member: pulumi.Output[str]) -> None:
        """Roles of the stack's other accounts, and no more: what deployments may do themselves is for a person to change.

        https://docs.cloud.google.com/iam/docs/setting-limits-on-granting-roles
        """
        only = pulumi.Output.all(*args.granted).apply(lambda roles: ", ".join(f"'{role}'" for role in roles))
        expression = pulumi.Output.concat("api.getAttribute('iam.googleapis.com/modifiedGrantsByRole', []).hasOnly([", only, "])")
        projects.IAMMember(
            f"{name}-grant",
            project=args.project,
            role=GRANT,
            member=member,
            condition={"title": "roles of the stack's accounts", "expression": expression},
            opts=self._child,
        )
        serviceaccount.IAMMember(
            f"{name}-as-nodes", service_account_id=args.nodes, role="roles/iam.serviceAccountUser", member=member, opts=self._child
        )

    def _control(self, name: str, args: DeployArgs, node: Control, member: pulumi.Output[str], role: str) -> None:
        """A refresh reads the token too: who previews decrypts the state, which holds it as well. Who deploys makes the machine anew, and
        reaches its server with flotilla:dstack.drive."""
        secretmanager.SecretIamMember(
            f"{name}-token", project=args.project, secret_id=node.secret, role=READS_SECRET, member=member, opts=self._child
        )
        if role != "up":
            return
        secretmanager.SecretIamMember(
            f"{name}-secret", project=args.project, secret_id=node.secret, role="roles/secretmanager.admin", member=member, opts=self._child
        )
        as_user = "roles/iam.serviceAccountUser"
        serviceaccount.IAMMember(f"{name}-as-server", service_account_id=node.runs_as, role=as_user, member=member, opts=self._child)
        # By address and port: a grant on the machine itself goes with it. https://docs.cloud.google.com/iap/docs/using-tcp-forwarding
        expression = node.address.apply(lambda address: f"destination.ip == '{address}' && destination.port == 22")
        projects.IAMMember(
            f"{name}-iap",
            project=args.project,
            role="roles/iap.tunnelResourceAccessor",
            member=member,
            condition={"title": f"control node of {args.stack}", "expression": expression},
            opts=self._child,
        )

    def _state(self, name: str, args: DeployArgs, member: pulumi.Output[str], writes: bool) -> None:
        """Pulumi's state where infra/gcp/bootstrap.py keeps it: this stack's alone, and its lists; a preview writes nothing.

        By conditions of the project's grants, as the bucket may be elsewhere: https://docs.cloud.google.com/iam/docs/conditions-resource-attributes
        """
        bucket, key = names.state_bucket(args.project), names.state_key(args.project, args.region)
        files = f"projects/_/buckets/{bucket}/objects/.pulumi/"
        own = [
            f"{files}stacks/{PROJECT}/{args.stack}.json",
            *(f"{files}{what}/{PROJECT}/{args.stack}/" for what in ("backups", "history", "locks/organization")),
        ]
        owns = " || ".join([f"resource.name == '{files}meta.yaml'", *(f"resource.name.startsWith('{path}')" for path in own)])
        grants = {
            "state": ("roles/storage.objectUser" if writes else "roles/storage.objectViewer", owns),
            "state-list": ("roles/storage.objectViewer", f"resource.name == 'projects/_/buckets/{bucket}'"),
            "state-key": (f"roles/cloudkms.cryptoKey{'EncrypterDecrypter' if writes else 'Decrypter'}", f"resource.name == '{key}'"),
        }
        for what, (role, expression) in grants.items():
            projects.IAMMember(
                f"{name}-{what}",
                project=args.project,
                role=role,
                member=member,
                condition={"title": f"{what} of {args.stack}", "expression": expression},
                opts=self._child,
            )

    def _grant(self, name: str, args: DeployArgs, member: pulumi.Output[str], roles: tuple[str, ...]) -> None:
        for role in roles:
            projects.IAMMember(f"{name}-{role.rpartition('/')[2]}", project=args.project, role=role, member=member, opts=self._child)
        if args.billing_account:
            kind = "roles/billing.costsManager" if roles is WRITE else "roles/billing.viewer"
            billing.AccountIamMember(f"{name}-billing", billing_account_id=args.billing_account, role=kind, member=member, opts=self._child)
