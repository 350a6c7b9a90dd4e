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
MAKING = "resource.type == 'cloudresourcemanager.googleapis.com/Project'"
READ = ("viewer", "iam.securityReviewer")  # what a refresh reads
# What the deployments' own account changes beside what it reads. Not accounts, custom roles, pools and who may act as whom: whoever
# could change these could raise himself, so they are made by a person's `up`.
WRITE = ("file.editor", "monitoring.notificationChannelEditor", "serviceusage.serviceUsageAdmin")
OWNED = ("storage.admin", "cloudkms.admin", "compute.admin")  # of what has this stack's own name alone
# Of these Compute Engine tells IAM the name; of networks, groups and addresses it does not, so they are the project's.
NAMED = {"Instance": "instances", "Disk": "disks", "InstanceTemplate": "instanceTemplates"}


@dataclass(frozen=True)
class DeployArgs:
    stack: str
    project: str
    region: str
    environment: str
    ci: Ci
    billing_account: str | None  # whose budget the stack keeps
    nodes: pulumi.Output[str]  # full name of the nodes' service account
    granted: list[pulumi.Output[str]]  # Google's roles that the stack's own accounts have on the project
    bucket: str | None = None  # for checkpoints, that is there already
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
            self._grant(f"{name}-{role}", args, account.member, writes=role == "up")
            if args.control:
                self._control(f"{name}-{role}", args, args.control, account.member, role)
            self._state(f"{name}-{role}", args, account.member, writes=role == "up")
            if role == "up":
                self._may_grant(f"{name}-{role}", args, account.member)
                self._owns(f"{name}-{role}", args, account.member)
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
        """Google's roles of the nodes, and no more: what deployments may do themselves is for a person to change.

        Not dstack's custom role: whoever may change a role and give it to himself has all.

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

    def _owns(self, name: str, args: DeployArgs, member: pulumi.Output[str]) -> None:
        """Buckets, keys and machines of this stack's names. One that is not made yet is asked for of the project, or of its place.

        https://docs.cloud.google.com/iam/docs/conditions-resource-attributes
        """
        place = f"projects/{args.project}/locations/{args.region}"
        buckets = [f"flotilla-{args.stack}-", *([f"{args.bucket}/"] if args.bucket else [])]
        within = {
            "storage.admin": [
                *([f"resource.name == 'projects/_/buckets/{args.bucket}'"] if args.bucket else []),
                *(f"resource.name.startsWith('projects/_/buckets/{bucket}')" for bucket in buckets),
            ],
            "cloudkms.admin": [
                f"resource.name == '{place}'",
                f"resource.name.startsWith('{place}/keyRings/flotilla-{args.stack}-')",
            ],
        }
        whole = {role: " || ".join([MAKING, *names]) for role, names in within.items()} | {"compute.admin": named(args.stack)}
        for role in OWNED:
            projects.IAMMember(
                f"{name}-{role}",
                project=args.project,
                role=f"roles/{role}",
                member=member,
                condition={"title": f"what {args.stack} makes", "expression": whole[role]},
                opts=self._child,
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

    def _grant(self, name: str, args: DeployArgs, member: pulumi.Output[str], writes: bool) -> None:
        for role in (*READ, *(WRITE if writes else ())):
            projects.IAMMember(f"{name}-{role}", project=args.project, role=f"roles/{role}", member=member, opts=self._child)
        if args.billing_account:
            kind = "roles/billing.costsManager" if writes else "roles/billing.viewer"
            billing.AccountIamMember(f"{name}-billing", billing_account_id=args.billing_account, role=kind, member=member, opts=self._child)


def named(stack: str) -> str:
    """That a machine, disk or template has a name of the stack, as an IAM condition; of other kinds of resources it says nothing."""
    kinds = (
        f"(resource.type != 'compute.googleapis.com/{kind}' || resource.name.extract('/{path}/{{name}}').startsWith('flotilla-{stack}-'))"
        for kind, path in NAMED.items()
    )
    return " && ".join(kinds)
