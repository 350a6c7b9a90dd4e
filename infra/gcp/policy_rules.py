"""What a stack may not create on GCP: the rules of the policy pack (infra/policy), each a function of its name.

The standard library alone, as the pack has an environment of its own. Disks are always encrypted here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from infra.policy.shared import Exempt, Resource, decoded, is_true, items, missing_tags, open_ranges

NAMES = r"resource\.name(\.startsWith\('[^']{12,}'\)| == '[^']+')( \|\| resource\.name(\.startsWith\('[^']{12,}'\)| == '[^']+'))*"
MAKES = rf"resource\.type == 'cloudresourcemanager\.googleapis\.com/Project' \|\| {NAMES}"
SMALL = ("e2-micro", "e2-small")  # of a machine that is reached from outside
BASTION = "the one machine that is reached from outside: small, without GPU, open to the networks of flotilla:access.allow alone"
EXCEPTIONS = {
    "no_public_address": (
        Exempt("gcp:compute/address:Address", "flotilla-{stack}-bastion", BASTION),
        Exempt(
            "gcp:compute/instance:Instance",
            "flotilla-{stack}-bastion",
            BASTION,
            lambda props: props.get("machineType") in SMALL and not props.get("guestAccelerators") and not props.get("serviceAccount"),
        ),
    ),
    "tagged": (Exempt("pulumi:providers:gcp", "gcp-plain", "instance templates cannot change their labels in place, services have none"),),
}
# Each kind that a stack makes, by its module. A kind that is new here needs what it must look like in the rules below.
KINDS = frozenset(
    f"gcp:{module}/{kind[0].lower()}{kind[1:]}:{kind}"
    for module, kinds in {
        "billing": "AccountIamMember Budget",
        "compute": (
            "Address Disk DiskResourcePolicyAttachment Firewall HealthCheck Instance InstanceFromTemplate "
            "InstanceGroupManager InstanceTemplate Network PerInstanceConfig ResizeRequest ResourcePolicy Router "
            "RouterNat Subnetwork SubnetworkIAMMember"
        ),
        "filestore": "Instance",
        "iam": "WorkloadIdentityPool WorkloadIdentityPoolProvider",
        "kms": "CryptoKey CryptoKeyIAMMember KeyRing",
        "monitoring": "NotificationChannel",
        "projects": "IAMCustomRole IAMMember Service",
        "secretmanager": "Secret SecretIamMember SecretVersion",
        "serviceaccount": "Account IAMMember",
        "storage": "Bucket BucketIAMMember",
    }.items()
    for kind in kinds.split()
)
GITHUB = "https://token.actions.githubusercontent.com"
# A service account, or jobs of one repository on GitHub.
MEMBER = (
    r"serviceAccount:[\w.@-]+"
    r"|principal://iam\.googleapis\.com/projects/\w+/locations/global/workloadIdentityPools/[\w-]+/subject/repo:[\w.-]+/[\w.-]+:[\w:./-]+"
)
# Roles by the kind of grant. On a project: what is no way up, then what is only with a condition, then what the stack's deployer has.
ROLES = {
    "gcp:billing/accountIamMember:AccountIamMember": ("billing.costsManager", "billing.viewer"),
    "gcp:compute/subnetworkIAMMember:SubnetworkIAMMember": ("compute.networkUser",),
    "gcp:kms/cryptoKeyIAMMember:CryptoKeyIAMMember": ("cloudkms.cryptoKeyEncrypterDecrypter",),
    "gcp:projects/iAMMember:IAMMember": (
        *("artifactregistry.reader", "iam.securityReviewer", "logging.logWriter", "monitoring.metricWriter", "viewer"),
    ),
    "gcp:secretmanager/secretIamMember:SecretIamMember": ("secretmanager.admin", "secretmanager.secretAccessor"),
    "gcp:serviceaccount/iAMMember:IAMMember": ("iam.serviceAccountUser", "iam.workloadIdentityUser"),
    "gcp:storage/bucketIAMMember:BucketIAMMember": ("storage.objectUser",),
}
ON_PROJECT = "gcp:projects/iAMMember:IAMMember"
# role -> what the condition says, wherever it is given
CONDITIONED = {
    "cloudkms.admin": MAKES,
    "storage.admin": MAKES,
    "cloudkms.cryptoKeyDecrypter": r"resource\.name == '[^']+'",
    "cloudkms.cryptoKeyEncrypterDecrypter": r"resource\.name == '[^']+'",
    "iap.tunnelResourceAccessor": r"destination\.ip == '[\d.]+' && destination\.port == 22",
    "resourcemanager.projectIamAdmin": r"api\.getAttribute\('iam\.googleapis\.com/modifiedGrantsByRole', \[\]\)\.hasOnly\(\[[^()\[\]]+\]\)",
    "storage.objectUser": NAMES,
    "storage.objectViewer": NAMES,
}
# of the account for deployments alone, by the grant's name
DEPLOYS = ("file.editor", "monitoring.notificationChannelEditor", "serviceusage.serviceUsageAdmin")
MACHINES = (  # the same, of machines with a name of the stack
    r"(\(resource\.type != 'compute\.googleapis\.com/\w+' \|\| "
    r"resource\.name\.extract\('/\w+/\{name\}'\)\.startsWith\('flotilla-[\w-]+-'\)\)( && |$)){3}"
)
CUSTOM_ROLE = r"projects/[\w.:-]+/roles/flotilla_\w+"
PERMISSION = r"compute\.\w+\.(?!setIamPolicy)\w+"


def no_public_address(resource: Resource) -> Iterator[str]:
    if resource.kind.startswith("Instance"):
        for nic in items(resource.props, "networkInterfaces"):
            if nic.get("accessConfigs") or nic.get("ipv6AccessConfigs"):
                yield "gets a public address"
    if resource.kind == "Address" and resource.props.get("addressType") != "INTERNAL":
        yield "is a public address"


def no_open_ingress(resource: Resource) -> Iterator[str]:
    props = resource.props
    if resource.kind == "Firewall" and props.get("direction") != "EGRESS" and props.get("allows"):
        if not (props.get("sourceRanges") or props.get("sourceTags") or props.get("sourceServiceAccounts")):
            yield "names no source, which is everybody"
        yield from open_ranges(props.get("sourceRanges") or [])


def private_buckets(resource: Resource) -> Iterator[str]:
    """Soft delete in place of versions, which folders exclude."""
    props = resource.props
    if resource.type == "gcp:storage/bucket:Bucket":
        if props.get("publicAccessPrevention") != "enforced":
            yield "may be made public"
        if not is_true(props.get("uniformBucketLevelAccess")):
            yield "has access lists for single objects"
        if not (props.get("softDeletePolicy") or {}).get("retentionDurationSeconds"):
            yield "does not keep what is deleted"


def tagged(resource: Resource) -> Iterator[str]:
    if resource.type == "pulumi:providers:gcp":
        yield from missing_tags(decoded(resource.props.get("defaultLabels")))


def narrow_rights(resource: Resource) -> Iterator[str]:
    props = resource.props
    if resource.type in ROLES and (role := props.get("role")) and not _may_be_given(resource, role):
        yield f"gives {role}"
    for member in (props.get("member"), *(props.get("members") or [])):
        if member and not re.fullmatch(MEMBER, member):
            yield f"gives rights to {member}"
    if resource.kind == "IAMCustomRole":
        for permission in props.get("permissions") or []:
            if not re.fullmatch(PERMISSION, permission):
                yield f"gives {permission}"
    if resource.kind == "WorkloadIdentityPoolProvider":
        jobs = {**(props.get("attributeMapping") or {})} == {"google.subject": "assertion.sub"}
        if (props.get("oidc") or {}).get("issuerUri") != GITHUB or not jobs:
            yield "trusts others than GitHub's jobs by their subject"
        if not re.fullmatch(r"assertion\.repository == '[\w.-]+/[\w.-]+'", str(props.get("attributeCondition"))):
            yield "trusts every repository"


def _may_be_given(resource: Resource, role: str) -> bool:
    short = role.removeprefix("roles/")
    if short in ROLES[resource.type] or resource.type != ON_PROJECT:
        return short in ROLES[resource.type]
    expression = (resource.props.get("condition") or {}).get("expression")
    if short in CONDITIONED:
        return re.fullmatch(CONDITIONED[short], str(expression)) is not None
    deployer = bool(resource.stack) and resource.name.startswith(f"flotilla-{resource.stack}-up-")
    if deployer and short == "compute.admin":
        return re.fullmatch(MACHINES, str(expression)) is not None
    return (deployer and short in DEPLOYS) or re.fullmatch(CUSTOM_ROLE, role) is not None
