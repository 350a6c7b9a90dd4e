"""IAM policy documents, as plain data: who may do what to which resources.

Where `*` stands for a resource, the API takes nothing narrower:
https://docs.aws.amazon.com/service-authorization/latest/reference/list_amazonec2.html (Describe*)
https://docs.aws.amazon.com/service-authorization/latest/reference/list_amazonelasticcontainerregistry.html (GetAuthorizationToken)
https://docs.aws.amazon.com/service-authorization/latest/reference/list_amazoncloudwatch.html (PutMetricData)
https://docs.aws.amazon.com/service-authorization/latest/reference/list_servicequotas.html
What dstack calls: https://dstack.ai/docs/concepts/backends#aws
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from stacks.places.aws import partition

PULL = ("BatchCheckLayerAvailability", "BatchGetImage", "GetDownloadUrlForLayer")
STATE_KEY = "alias/flotilla-state"  # of the key for Pulumi's secrets, and for the bucket of its state
NAMESPACE = "Flotilla"  # of metrics
WRITE_LOGS = ("CreateLogStream", "DescribeLogStreams", "PutLogEvents")
Statement = dict[str, Any]
Document = dict[str, Any]


@dataclass(frozen=True)
class Account:
    """Where ARNs begin."""

    id: str
    region: str

    @property
    def partition(self) -> str:
        return partition(self.region).name

    def arn(self, service: str, resource: str) -> str:
        """The ARN of something in the account and region."""
        return f"arn:{self.partition}:{service}:{self.region}:{self.id}:{resource}"

    def iam(self, resource: str) -> str:
        return f"arn:{self.partition}:iam::{self.id}:{resource}"


def state_bucket(account: Account) -> str:
    """Of Pulumi's state, for all stacks of an account's region; infra/aws/bootstrap.py makes it."""
    return f"flotilla-state-{account.id}-{account.region}"


def bucket_arn(account: Account, name: str) -> str:
    return f"arn:{account.partition}:s3:::{name}"


def path(stack: str) -> str:
    """Of the stack's roles, which tell them apart from a deployment's own."""
    return f"/flotilla/{stack}/"


def document(*statements: Statement) -> Document:
    return {"Version": "2012-10-17", "Statement": list(statements)}


def allow(actions: list[str], resources: str | list[str], condition: dict[str, Any] | None = None) -> Statement:
    return {"Effect": "Allow", "Action": actions, "Resource": resources} | ({"Condition": condition} if condition else {})


def trust(service: str) -> str:
    """The trust policy of a role that an AWS service takes on."""
    return json.dumps(document({"Effect": "Allow", "Principal": {"Service": service}, "Action": "sts:AssumeRole"}))


def tls_only(bucket: str) -> Document:
    """Of a bucket by ARN: no request without TLS."""
    return document(
        {
            "Effect": "Deny",
            "Principal": "*",
            "Action": "s3:*",
            "Resource": [bucket, f"{bucket}/*"],
            "Condition": {"Bool": {"aws:SecureTransport": "false"}},
        }
    )


def lustre_key(account: Account, bucket: str, system: str) -> Document:
    """Of the checkpoints' key: the account's own policies decide, and a Lustre file system, by id, may use it on the bucket, by ARN.

    FSx's role for that is made with the link to the bucket and no policy may name it before, so a condition does. The context is
    the bucket's ARN as the bucket has a bucket key: https://docs.aws.amazon.com/fsx/latest/LustreGuide/s3-server-side-encryption-support.html
    """
    role = account.iam(f"role/aws-service-role/s3.data-source.lustre.fsx.amazonaws.com/AWSServiceRoleForFSxS3Access_{system}")
    calls = ("Encrypt", "Decrypt", "ReEncrypt*", "GenerateDataKey*", "DescribeKey")
    through = {
        "ArnEquals": {"aws:PrincipalArn": role},
        "StringEquals": {
            "kms:CallerAccount": account.id,
            "kms:ViaService": f"s3.{account.region}.{partition(account.region).domain}",
        },
        "StringLike": {"kms:EncryptionContext:aws:s3:arn": bucket},
    }
    return document(
        allow(["kms:*"], "*") | {"Principal": {"AWS": account.iam("root")}},
        allow([f"kms:{call}" for call in calls], "*", through) | {"Principal": {"AWS": "*"}},
    )


def flow_logs(group: str) -> Document:
    """Of the flow logs' role: write to their log group, by ARN."""
    return document(allow([f"logs:{call}" for call in WRITE_LOGS], [group, f"{group}:*"]))


def checkpoints(bucket: str, key: str | None) -> Document:
    """Of the nodes: read and write checkpoints; versions that were replaced stay out of their reach. `key`: None where S3's own is used."""
    return document(
        # The last for flotilla push, which asks who can read what it sends.
        allow(["s3:ListBucket", "s3:ListBucketMultipartUploads", "s3:GetBucketLocation", "s3:GetBucketPolicyStatus"], bucket),
        allow(["s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload", "s3:ListMultipartUploadParts"], f"{bucket}/*"),
        *([allow(["kms:Decrypt", "kms:GenerateDataKey"], key)] if key else []),
    )


def images(account: Account) -> Document:
    """Of the nodes: pull container images of the account's registry."""
    return document(
        allow(["ecr:GetAuthorizationToken"], "*"),
        allow([f"ecr:{call}" for call in PULL], account.arn("ecr", "repository/*")),
    )


def log_group(stack: str) -> str:
    return f"/flotilla/{stack}"


def monitoring(account: Account, stack: str) -> Document:
    """Of the nodes: metrics in our namespace, logs in the stack's group."""
    group = account.arn("logs", f"log-group:{log_group(stack)}")
    return document(
        allow(["cloudwatch:PutMetricData"], "*", {"StringEquals": {"cloudwatch:namespace": NAMESPACE}}),
        allow([f"logs:{call}" for call in WRITE_LOGS], [group, f"{group}:*"]),
    )


def spot_role(account: Account) -> Statement:
    """Make the role with which EC2 launches the first spot machine of an account.

    https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/service-linked-roles-spot-instance-requests.html
    """
    service = "spot.amazonaws.com"
    role = account.iam(f"role/aws-service-role/{service}/*")
    return allow(["iam:CreateServiceLinkedRole"], role, {"StringEquals": {"iam:AWSServiceName": service}})


DESCRIBE = [
    f"ec2:Describe{what}"
    for what in (
        "AvailabilityZones",
        "CapacityReservations",
        "Images",
        "InstanceAttribute",
        "InstanceTypes",
        "Instances",
        "RouteTables",
        "SecurityGroups",
        "Subnets",
        "Volumes",
        "Vpcs",
    )
]
LAUNCHED = ("instance", "volume", "network-interface", "spot-instances-request")  # what a launch creates
GIVEN = ("subnet", "security-group", "placement-group", "capacity-reservation", "launch-template")  # what it uses


def dstack_server(account: Account, role: str, profile: str, shared: tuple[str, ...] = ()) -> Document:
    """Of whoever runs the dstack server: launch instances with the nodes' role, by ARN, and end those that it launched.

    It may not create or change security groups: the network declares the one that it looks for. `shared` are ARNs of what another
    account shares, of which subnets and reservations are meant here.
    """

    def ec2(kinds: tuple[str, ...]) -> list[str]:
        return [account.arn("ec2", f"{kind}/*") for kind in kinds]

    ours = {"StringEquals": {"aws:ResourceTag/owner": "dstack"}}
    image = f"arn:{account.partition}:ec2:{account.region}::image/*"
    return document(
        allow([*DESCRIBE, "servicequotas:GetServiceQuota", "servicequotas:ListServiceQuotas"], "*"),
        allow(
            ["ec2:RunInstances"],
            [*ec2(LAUNCHED), *ec2(GIVEN), image, *(arn for arn in shared if re.search(":(subnet|capacity-reservation)/", arn))],
        ),
        allow(["ec2:CreateTags"], ec2(LAUNCHED), {"StringEquals": {"ec2:CreateAction": ["RunInstances", "CreateVolume"]}}),
        allow(["ec2:TerminateInstances"], ec2(("instance",)), ours),
        allow(["ec2:CancelSpotInstanceRequests"], ec2(("spot-instances-request",))),
        allow(["ec2:CreateVolume"], ec2(("volume",)), {"StringEquals": {"aws:RequestTag/owner": "dstack"}}),
        allow(["ec2:AttachVolume", "ec2:DetachVolume"], ec2(("instance", "volume")), ours),
        allow(["ec2:DeleteVolume"], ec2(("volume",)), ours),
        allow(["ec2:CreatePlacementGroup", "ec2:DeletePlacementGroup"], ec2(("placement-group",))),
        spot_role(account),
        allow(["iam:GetInstanceProfile"], profile),
        allow(["iam:GetRole"], role),
        allow(["iam:PassRole"], role, {"StringEquals": {"iam:PassedToService": "ec2.amazonaws.com"}}),
    )


# https://docs.aws.amazon.com/systems-manager/latest/userguide/getting-started-create-iam-instance-profile.html
SSM_AGENT = [
    "ssm:UpdateInstanceInformation",
    *(f"ssmmessages:{verb}{what}Channel" for verb in ("Create", "Open") for what in ("Control", "Data")),
]


def ssm_agent() -> Document:
    """Of a bastion that is reached by SSM alone. The agent's calls name no resource."""
    return document(allow(SSM_AGENT, "*"))


def server_token(parameter: str) -> Document:
    """Of the control node: read the one parameter, by ARN, that holds its server's token; AWS's own key for parameters decrypts it."""
    return document(allow(["ssm:GetParameter"], parameter))


def snapshots(account: Account, volume: str) -> Document:
    """Of the service that makes snapshots of the volume of a name, and deletes its old ones.

    https://docs.aws.amazon.com/ebs/latest/userguide/dlm-access-control.html
    """
    kept = f"arn:{account.partition}:ec2:{account.region}::snapshot/*"
    return document(
        allow(["ec2:DescribeInstances", "ec2:DescribeSnapshots", "ec2:DescribeVolumes"], "*"),
        allow(["ec2:CreateSnapshot"], account.arn("ec2", "volume/*"), {"StringEquals": {"aws:ResourceTag/Name": volume}}),
        allow(["ec2:CreateSnapshot", "ec2:CreateTags"], kept),
        allow(["ec2:DeleteSnapshot"], kept, {"StringEquals": {"aws:ResourceTag/Name": volume}}),
    )
