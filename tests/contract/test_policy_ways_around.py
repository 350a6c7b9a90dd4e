"""Ways around the rules of the policy pack that somebody tried, and what stands beside each and passes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from infra.gcp.deploy import named
from infra.policy import rules
from infra.policy.shared import Resource

STACK = "aws-dev"
ROLE, ROLE_POLICY = "aws:iam/role:Role", "aws:iam/rolePolicy:RolePolicy"
ATTACHMENT, BUCKET_POLICY = "aws:iam/rolePolicyAttachment:RolePolicyAttachment", "aws:s3/bucketPolicy:BucketPolicy"
KEY, KEY_POLICY = "aws:kms/key:Key", "aws:kms/keyPolicy:KeyPolicy"
INSTANCE, TEMPLATE = "aws:ec2/instance:Instance", "aws:ec2/launchTemplate:LaunchTemplate"
INGRESS, EIP, BUCKET = "aws:vpc/securityGroupIngressRule:SecurityGroupIngressRule", "aws:ec2/eip:Eip", "aws:s3/bucket:Bucket"
OIDC = "aws:iam/openIdConnectProvider:OpenIdConnectProvider"
GRANT, ACCOUNT_GRANT = "gcp:projects/iAMMember:IAMMember", "gcp:serviceaccount/iAMMember:IAMMember"
CUSTOM, POOL = "gcp:projects/iAMCustomRole:IAMCustomRole", "gcp:iam/workloadIdentityPoolProvider:WorkloadIdentityPoolProvider"
FIREWALL, ADDRESS, MACHINE = "gcp:compute/firewall:Firewall", "gcp:compute/address:Address", "gcp:compute/instance:Instance"
HUB = "token.actions.githubusercontent.com"
ADMIN = "arn:aws:iam::aws:policy/AdministratorAccess"
OWN = "arn:aws:iam::123456789012:role/flotilla/aws-dev/x"
SAFE = {"rootBlockDevice": {"encrypted": True}, "metadataOptions": {"httpTokens": "required"}}
TEMPLATED = {"launchTemplate": {"id": "lt-1"}}
SSH = {"fromPort": 22, "toPort": 22, "ipProtocol": "tcp", "cidrIpv4": "0.0.0.0/0"}
OPEN = {"networkInterfaces": [{"accessConfigs": [{}]}]}
NODES = "serviceAccount:nodes@p.iam.gserviceaccount.com"
GITHUB_POOL = {
    "attributeMapping": {"google.subject": "assertion.sub"},
    "attributeCondition": "assertion.repository == 'me/mine'",
    "oidc": {"issuerUri": f"https://{HUB}"},
}


def document(**statement: object) -> str:
    return json.dumps({"Version": "2012-10-17", "Statement": [{"Effect": "Allow"} | statement]})


def gives(action: object, resource: object = "arn:aws:s3:::mine/*", **more: object) -> dict[str, Any]:
    return {"policy": document(Action=action, Resource=resource, **more)}


def trusts(**statement: object) -> dict[str, Any]:
    return {"assumeRolePolicy": document(Action="sts:AssumeRole", **statement)}


def jobs(*subjects: str, test: str = "StringEquals", **more: str) -> dict[str, Any]:
    condition = {test: {f"{HUB}:aud": "sts.amazonaws.com", f"{HUB}:sub": [*subjects]} | more}
    return trusts(Principal={"Federated": f"arn:aws:iam::123456789012:oidc-provider/{HUB}"}, Condition=condition)


def shares(**statement: object) -> dict[str, Any]:
    return {"policy": document(**{"Action": "kms:*", "Resource": "*"} | statement)}


def found(kind: str, props: dict[str, Any], name: str = "mine", stack: str = STACK) -> list[str]:
    class Unread(Exception): ...

    return [wrong for rule in rules.RULES for wrong in rules.violations(rule, Resource(kind, name, props, stack), Unread)]


LUSTRE = "arn:aws:iam::123456789012:role/aws-service-role/s3.data-source.lustre.fsx.amazonaws.com/AWSServiceRoleForFSxS3Access_fs-1"
TLS = {"Effect": "Deny", "Principal": "*", "Action": "s3:*", "Resource": "*", "Condition": {"Bool": {"aws:SecureTransport": "false"}}}


@pytest.mark.parametrize(
    "kind",
    [
        *("aws:iam/user:User", "aws:iam/accessKey:AccessKey", "aws:iam/userPolicyAttachment:UserPolicyAttachment"),
        *("aws:iam/groupPolicyAttachment:GroupPolicyAttachment", "aws:iam/policyAttachment:PolicyAttachment"),
        *("aws:iam/rolePoliciesExclusive:RolePoliciesExclusive", "aws:iam/userLoginProfile:UserLoginProfile"),
        *("aws:s3/bucketAcl:BucketAcl", "aws:s3/bucketAclV2:BucketAclV2", "aws:s3/bucketObject:BucketObject"),
        *("aws:s3/bucketObjectv2:BucketObjectv2", "aws:s3/bucketV2:BucketV2", "aws:s3/accessPoint:AccessPoint"),
        *(
            "aws:ec2/eipAssociation:EipAssociation",
            "aws:ec2/spotInstanceRequest:SpotInstanceRequest",
            "aws:ec2/spotFleetRequest:SpotFleetRequest",
        ),
        *("aws:ec2/launchConfiguration:LaunchConfiguration", "aws:ec2/securityGroupRule:SecurityGroupRule"),
        *("aws:lb/loadBalancer:LoadBalancer", "aws:lambda/functionUrl:FunctionUrl", "aws:ec2/vpcPeeringConnection:VpcPeeringConnection"),
        *(
            "aws:ec2/defaultSubnet:DefaultSubnet",
            "aws:kms/grant:Grant",
            "aws:rds/instance:Instance",
            "aws:ec2/networkInterface:NetworkInterface",
        ),
        *("gcp:projects/iAMPolicy:IAMPolicy", "gcp:projects/iAMBinding:IAMBinding", "gcp:storage/bucketIAMPolicy:BucketIAMPolicy"),
        *(
            "gcp:storage/bucketACL:BucketACL",
            "gcp:storage/bucketAccessControl:BucketAccessControl",
            "gcp:organizations/iAMMember:IAMMember",
        ),
        *("gcp:storage/defaultObjectACL:DefaultObjectACL", "gcp:serviceaccount/key:Key", "gcp:storage/objectACL:ObjectACL"),
        *("gcp:compute/regionInstanceTemplate:RegionInstanceTemplate", "gcp:compute/forwardingRule:ForwardingRule"),
        *("gcp:compute/networkFirewallPolicyRule:NetworkFirewallPolicyRule", "gcp:compute/globalAddress:GlobalAddress"),
        *("aws-native:iam:User", "google-native:iam/v1:Key", "command:local:Command", "azure-native:compute:VirtualMachine"),
        *("pulumi:providers:azure-native", "pulumi:providers:command"),
    ],
)
def test_a_kind_that_no_stack_makes_is_refused_whatever_it_says(kind):
    assert [
        wrong
        for wrong in found(kind, {})
        if wrong.startswith("is of a kind") or wrong.startswith("is a provider") or wrong.startswith("is of a provider")
    ]


@pytest.mark.parametrize(
    "kind", ["pulumi:pulumi:Stack", "pulumi:providers:pulumi", "pulumi-python:dynamic/flotilla:Token", "flotilla:aws:Fleets"]
)
def test_what_the_engine_and_the_program_have_of_their_own_passes(kind):
    assert not found(kind, {})


AWS = [
    (ATTACHMENT, {"policyArn": ADMIN}, f"attaches {ADMIN}, which is not the stack's"),
    (ATTACHMENT, {"policyArn": "arn:aws:iam::123456789012:policy/flotilla-aws-prod-x"}, "which is not the stack's"),
    (ATTACHMENT, {"policyArn": "arn:aws:iam::123456789012:policy/PowerUsers"}, "which is not the stack's"),
    (ROLE, {"managedPolicyArns": [ADMIN]}, f"attaches {ADMIN}, which is not the stack's"),
    (ROLE, {"inlinePolicies": [{"name": "x", "policy": document(Action="*", Resource="*")}]}, "allows *"),
    (ROLE, {"inlinePolicies": [{"name": "x", "policy": document(Action="s3:**", Resource=OWN)}]}, "allows s3:**"),
    (ROLE, trusts(Principal="*"), "trusts everybody"),
    (ROLE, trusts(Principal=["*"]), "trusts everybody"),
    (ROLE, trusts(Principal={"AWS": ["*"]}), "trusts everybody"),
    (ROLE, trusts(Principal={"AWS": "*", "Service": "ec2.amazonaws.com"}), "trusts everybody"),
    (ROLE, trusts(Principal={"AWS": "*"}, Condition={"StringLike": {"aws:PrincipalArn": "*"}}), "trusts everybody"),
    (ROLE, trusts(Principal={"AWS": "*"}, Condition={"ArnEquals": {"aws:PrincipalArn": LUSTRE}}), "trusts everybody"),
    (ROLE, trusts(NotPrincipal={"AWS": "arn:aws:iam::123456789012:root"}), "trusts everybody"),
    (ROLE, trusts(Principal={"AWS": "arn:aws:iam::999999999999:root"}), "trusts arn:aws:iam::999999999999:root"),
    (ROLE, trusts(Principal={"AWS": "999999999999"}), "trusts 999999999999"),
    (ROLE, trusts(Principal={"Service": ["ec2.amazonaws.com", "lambda.amazonaws.com"]}), "trusts ec2.amazonaws.com, lambda.amazonaws.com"),
    (ROLE, trusts(Principal={"Federated": "cognito-identity.amazonaws.com"}), "trusts cognito-identity.amazonaws.com"),
    (ROLE, jobs("repo:*"), "trusts jobs of GitHub without saying whose and which"),
    (ROLE, jobs("repo:me/mine:*"), "trusts jobs of GitHub without saying whose and which"),
    (ROLE, jobs("repo:me/*:environment:dev"), "trusts jobs of GitHub without saying whose and which"),
    (ROLE, jobs("repo:me/mine:environment:dev", "*"), "trusts jobs of GitHub without saying whose and which"),
    (ROLE, jobs("repo:me/mine:environment:dev", test="StringLike"), "trusts jobs of GitHub without saying whose and which"),
    (ROLE, jobs("repo:me/mine:environment:dev", test="ForAllValues:StringEquals"), "trusts jobs of GitHub without saying whose and which"),
    (ROLE, jobs(), "trusts jobs of GitHub without saying whose and which"),
    (OIDC, {"url": "https://evil.example.com", "clientIdLists": ["sts.amazonaws.com"]}, "trusts https://evil.example.com"),
    (BUCKET_POLICY, {"policy": document(Action="s3:GetObject", Principal={"AWS": ["*"]}, Resource="*")}, "lets somebody in"),
    (BUCKET_POLICY, {"policy": document(Action="s3:*", NotPrincipal={"AWS": OWN}, Resource="*")}, "lets somebody in"),
    (BUCKET_POLICY, {"policy": document(**TLS | {"Effect": "Allow"})}, "does not refuse requests without TLS"),
    (BUCKET_POLICY, {"policy": document(**TLS | {"Action": "s3:GetObject"})}, "does not refuse requests without TLS"),
    (KEY_POLICY, shares(Principal={"AWS": ["*"]}), "trusts everybody"),
    (KEY_POLICY, shares(Principal={"AWS": "*"}, Condition={"ArnLike": {"aws:PrincipalArn": "*"}}), "trusts everybody"),
    (KEY_POLICY, shares(Principal={"AWS": "*"}, Condition={"ArnEquals": {"aws:PrincipalArn": f"{LUSTRE}*"}}), "trusts everybody"),
    (KEY, shares(Principal="*"), "trusts everybody"),
    (ROLE_POLICY, gives("s3:**"), "allows s3:**"),
    (ROLE_POLICY, gives("s3:?*"), "allows s3:?*"),
    (ROLE_POLICY, gives("**:*"), "allows **:*"),
    (ROLE_POLICY, gives("?3:GetObject"), "allows ?3:GetObject"),
    (ROLE_POLICY, gives("iam:*Role*", "arn:aws:iam::*:*"), "allows iam:*Role*, which is more than one call"),
    (ROLE_POLICY, gives("iam:CreateUser", "arn:aws:iam::*:*"), "which names no service, region and account"),
    (ROLE_POLICY, gives("iam:CreateUser", "arn:aws:iam::123456789012:user/x"), "which is not the stack's"),
    (ROLE_POLICY, gives("iam:UpdateAssumeRolePolicy", "arn:aws:iam::123456789012:role/*"), "which is not the stack's"),
    (ROLE_POLICY, gives("sts:AssumeRole", "arn:aws:iam::999999999999:role/admin"), "which is not the stack's"),
    (ROLE_POLICY, gives("s3:GetObject", "arn:aws:*:::*"), "which names no service, region and account"),
    (ROLE_POLICY, gives("s3:GetObject", "arn:aws:s3:::*"), "which is everybody's"),
    (ROLE_POLICY, gives("s3:GetObject", "arn:*"), "which names no service, region and account"),
    (ROLE_POLICY, gives("s3:GetObject", "**"), "which names no service, region and account"),
    (ROLE_POLICY, gives("kms:Decrypt", "arn:aws:kms:us-east-1:123456789012:key/*"), "which is every key"),
    (
        ROLE_POLICY,
        gives("ec2:RunInstances", "arn:aws:ec2:us-east-1:*:capacity-reservation/*"),
        "which names no service, region and account",
    ),
    (ROLE_POLICY, gives("iam:PassRole", OWN), "allows iam:PassRole to any service"),
    (ROLE_POLICY, gives("iam:CreateRole", OWN), "allows iam:CreateRole without a boundary"),
    (ROLE_POLICY, gives("iam:UpdateOpenIDConnectProviderThumbprint", f"arn:aws:iam::123456789012:oidc-provider/{HUB}"), "who is trusted"),
    (BUCKET, {"acl": "public-read"}, "has acl of its own"),
    (BUCKET, {"website": {"indexDocument": "x"}}, "has website of its own"),
    ("aws:s3/bucketOwnershipControls:BucketOwnershipControls", {"rule": {"objectOwnership": "ObjectWriter"}}, "access lists"),
    (EIP, {"networkInterface": "eni-1"}, "is the public address of a machine"),
    (INSTANCE, SAFE | {"ipv6AddressCount": 1}, "gets a public address"),
    ("aws:ec2/subnet:Subnet", {"assignIpv6AddressOnCreation": True}, "gives every machine in it a public address"),
    (INSTANCE, TEMPLATED | {"ebsBlockDevices": [{"deviceName": "/dev/sdb"}]}, "has a disk /dev/sdb that is not encrypted"),
    (INSTANCE, TEMPLATED | {"rootBlockDevice": {"volumeSize": 9}}, "has a root disk that is not encrypted"),
    (INSTANCE, TEMPLATED | {"metadataOptions": {"httpTokens": "optional"}}, "(IMDSv1)"),
    (INGRESS, {"cidrIpv6": "::/8"}, "lets ::/8 in"),
    (INGRESS, {"cidrIpv6": "2000::/3"}, "lets 2000::/3 in"),
    (INGRESS, {"cidrIpv4": "0.0.0.0/8"}, "lets 0.0.0.0/8 in"),
    (INGRESS, {"cidrIpv4": "10.0.0.0/0"}, "lets 10.0.0.0/0 in"),
    (INGRESS, {"prefixListId": "pl-1"}, "lets in whoever pl-1 lists"),
]
GCP = [
    (GRANT, {"role": "roles/iam.securityAdmin"}, "gives roles/iam.securityAdmin"),
    (GRANT, {"role": "roles/iam.serviceAccountTokenCreator"}, "gives roles/iam.serviceAccountTokenCreator"),
    (GRANT, {"role": "roles/resourcemanager.organizationAdmin"}, "gives roles/resourcemanager.organizationAdmin"),
    (GRANT, {"role": "roles/iam.serviceAccountUser"}, "gives roles/iam.serviceAccountUser"),
    (GRANT, {"role": "roles/storage.admin"}, "gives roles/storage.admin"),
    (GRANT, {"role": "roles/iam.serviceAccountAdmin"}, "gives roles/iam.serviceAccountAdmin"),
    (GRANT, {"role": "roles/iam.roleAdmin"}, "gives roles/iam.roleAdmin"),
    (GRANT, {"role": "roles/compute.admin"}, "gives roles/compute.admin"),
    (GRANT, {"role": "roles/compute.admin", "condition": {"expression": named("x")}}, "gives roles/compute.admin"),  # to whom it is not
    (GRANT, {"role": "roles/resourcemanager.projectIamAdmin"}, "gives roles/resourcemanager.projectIamAdmin"),
    (GRANT, {"role": "roles/resourcemanager.projectIamAdmin", "condition": {"expression": "true"}}, "gives roles/resource"),
    (GRANT, {"role": "roles/storage.objectUser"}, "gives roles/storage.objectUser"),
    (
        GRANT,
        {"role": "roles/storage.objectUser", "condition": {"expression": "resource.name.startsWith('')"}},
        "gives roles/storage.objectUser",
    ),
    (GRANT, {"role": "projects/p/roles/admin"}, "gives projects/p/roles/admin"),
    (ACCOUNT_GRANT, {"role": "roles/iam.serviceAccountTokenCreator"}, "gives roles/iam.serviceAccountTokenCreator"),
    (GRANT, {"role": "roles/viewer", "member": "allAuthenticatedUsers"}, "gives rights to allAuthenticatedUsers"),
    (GRANT, {"role": "roles/viewer", "member": "domain:example.com"}, "gives rights to domain:example.com"),
    (GRANT, {"role": "roles/viewer", "member": "user:me@example.com"}, "gives rights to user:me@example.com"),
    (
        ACCOUNT_GRANT,
        {"member": "principalSet://iam.googleapis.com/projects/1/locations/global/workloadIdentityPools/github/*"},
        "gives rights to principalSet://",
    ),
    (CUSTOM, {"permissions": ["resourcemanager.projects.setIamPolicy"]}, "gives resourcemanager.projects.setIamPolicy"),
    (CUSTOM, {"permissions": ["compute.instances.setIamPolicy"]}, "gives compute.instances.setIamPolicy"),
    (CUSTOM, {"permissions": ["iam.serviceAccounts.getAccessToken"]}, "gives iam.serviceAccounts.getAccessToken"),
    (POOL, GITHUB_POOL | {"attributeCondition": None}, "trusts every repository"),
    (POOL, GITHUB_POOL | {"attributeCondition": "true"}, "trusts every repository"),
    (POOL, GITHUB_POOL | {"attributeCondition": "assertion.repository == 'me/mine' || true"}, "trusts every repository"),
    (POOL, GITHUB_POOL | {"oidc": {"issuerUri": "https://evil.example.com"}}, "trusts others than GitHub's jobs"),
    (POOL, GITHUB_POOL | {"attributeMapping": {"google.subject": "'x'"}}, "trusts others than GitHub's jobs"),
    (FIREWALL, {"allows": [{}], "sourceRanges": ["0.0.0.0/8"]}, "lets 0.0.0.0/8 in"),
    (FIREWALL, {"allows": [{}], "sourceRanges": ["::/8"]}, "lets ::/8 in"),
    (FIREWALL, {"allows": [{}], "direction": None}, "names no source"),
    (ADDRESS, {}, "is a public address"),
    ("gcp:compute/instanceFromTemplate:InstanceFromTemplate", OPEN, "gets a public address"),
]


@pytest.mark.parametrize(("kind", "props", "wrong"), [*AWS, *GCP])
def test_a_way_around_is_closed(kind, props, wrong):
    assert any(wrong in line for line in found(kind, props)), found(kind, props)


NAMED = [  # a resource that would pass under just one name, of just this shape
    (INGRESS, f"flotilla-{STACK}-ssh", SSH, [("name", "evil-ssh"), ("toPort", 65535), ("ipProtocol", "-1"), ("fromPort", 0)]),
    (EIP, f"flotilla-{STACK}-bastion", {"instance": "i-1"}, [("name", "gpu-bastion"), ("networkInterface", "eni-1")]),
    (
        INSTANCE,
        f"flotilla-{STACK}-bastion",
        SAFE | {"instanceType": "t4g.nano"},
        [("instanceType", "p5.48xlarge"), ("instanceType", "t3.2xlarge")],
    ),
    (
        MACHINE,
        f"flotilla-{STACK}-bastion",
        OPEN | {"machineType": "e2-micro"},
        [("name", "big-bastion"), ("machineType", "a3-highgpu-8g"), ("guestAccelerators", [{}]), ("serviceAccount", {"email": "x"})],
    ),
    (ADDRESS, f"flotilla-{STACK}-bastion", {}, [("name", "my-bastion")]),
]


@pytest.mark.parametrize(("kind", "name", "props", "other"), [(*row[:3], other) for row in NAMED for other in row[3]])
def test_an_exception_is_of_one_name_and_one_shape(kind, name, props, other):
    key, value = other
    assert not found(kind, props, name)
    assert found(kind, props, name, "another")[:1] != [] or kind == INSTANCE
    assert found(kind, props, value) if key == "name" else found(kind, props | {key: value}, name)


@pytest.mark.parametrize(
    ("kind", "props"),
    [
        (ATTACHMENT, {"policyArn": f"arn:aws-us-gov:iam::123456789012:policy/flotilla/{STACK}/flotilla-{STACK}-dstack-server-1a2b3c4"}),
        (ROLE, trusts(Principal={"Service": "ec2.amazonaws.com"})),
        (ROLE, jobs("repo:me/mine:pull_request", "repo:me/mine:ref:refs/heads/main")),
        (KEY_POLICY, shares(Principal={"AWS": "arn:aws:iam::123456789012:root"})),
        (KEY_POLICY, shares(Principal={"AWS": "*"}, Condition={"ArnEquals": {"aws:PrincipalArn": LUSTRE}})),
        (BUCKET_POLICY, {"policy": document(**TLS)}),
        (ROLE_POLICY, gives("iam:PassRole", OWN, Condition={"StringEquals": {"iam:PassedToService": "ec2.amazonaws.com"}})),
        (INSTANCE, TEMPLATED),
        (INSTANCE, TEMPLATED | {"ebsBlockDevices": [{"encrypted": True}]}),
        (INGRESS, {"cidrIpv6": "fd00::/8", "cidrIpv4": "10.0.0.0/8"}),
        (FIREWALL, {"direction": "EGRESS", "allows": [{}]}),
        (ADDRESS, {"addressType": "INTERNAL"}),
        (POOL, GITHUB_POOL),
        (GRANT, {"role": "roles/logging.logWriter", "member": NODES}),
    ],
)
def test_what_our_own_stacks_say_passes(kind, props):
    assert not found(kind, props)
