"""What an IAM document may say in a stack: the part of the rule narrow_rights (policy_rules.py) that reads them.

Each shape that our own stacks need is listed, and nothing else passes. The standard library alone, as the pack has an environment
of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

# Calls that take no narrower resource than *, or exist once for an account: https://docs.aws.amazon.com/service-authorization/
ACCOUNT_WIDE = (
    *("cloudwatch:PutMetricData", "ec2:Describe*", "ec2:GetEbsEncryptionByDefault", "ec2:GetInstanceMetadataDefaults"),
    *("ec2:EnableEbsEncryptionByDefault", "ec2:ModifyInstanceMetadataDefaults"),
    *("cloudwatch:DescribeAlarms", "dlm:CreateLifecyclePolicy", "dlm:GetLifecyclePolicies", "ssm:DescribeParameters"),
    *("ecr:GetAuthorizationToken", "kms:CreateKey", "logs:DescribeLogGroups"),
    *("servicequotas:GetServiceQuota", "servicequotas:ListServiceQuotas", "ssm:UpdateInstanceInformation", "ssmmessages:*Channel"),
)
READS = r"(Describe|Get|List|View)[A-Za-z*]*"
WILDCARDS = ("s3:*Bucket*", "s3:*Configuration", "s3:*Multipart*", "s3:*Object")  # others begin with what is read
SERVICES = ("ec2.amazonaws.com", "dlm.amazonaws.com", "vpc-flow-logs.amazonaws.com")  # that take on a role
ISSUER = "token.actions.githubusercontent.com"
SUBJECT = r"repo:[\w.-]+/[\w.-]+:[\w:./-]+"  # one repository's jobs, and which of them
FEDERATED = r"arn:aws[\w-]*:iam::\d{12}:oidc-provider/[\w.-]+"
ROOT = r"arn:aws[\w-]*:iam::\d{12}:root"  # an account's own policies decide
# FSx's role for a bucket is made with the file system, so that no policy can name it but in a condition.
LUSTRE = r"arn:aws[\w-]*:iam::\d{12}:role/aws-service-role/s3\.data-source\.lustre\.fsx\.amazonaws\.com/[\w-]+"
ARN = re.compile(r"arn:aws[a-z-]*:(?P<service>[a-z0-9-]+):(?P<region>[a-z0-9-]*):(?P<account>\d{12}|):(?P<what>.+)")
# One by its id, of whichever account shares it.
RESERVATION = r"arn:aws[a-z-]*:ec2:[a-z0-9-]+:\*:capacity-reservation/cr-[0-9a-f]+"
PASS, GIVE = "iam:PassRole", ("iam:AttachRolePolicy", "iam:CreateRole", "iam:PutRolePolicy", "iam:PutRolePermissionsBoundary")
Statement = Mapping[str, Any]


def trusting(statement: Statement) -> Iterator[str]:
    """Who takes on a role: one of AWS's services, or named jobs of a repository on GitHub."""
    principal, condition = _principal(statement), statement.get("Condition") or {}
    if _denies(statement) or (principal.keys() == {"Service"} and set(principal["Service"]) <= set(SERVICES)):
        return
    if principal.keys() == {"Federated"} and all(re.fullmatch(FEDERATED, one) for one in principal["Federated"]):
        exact = condition.get("StringEquals") or {}
        subjects = several(exact.get(f"{ISSUER}:sub"))
        if subjects and exact.get(f"{ISSUER}:aud") == "sts.amazonaws.com" and all(re.fullmatch(SUBJECT, one) for one in subjects):
            return
        yield "trusts jobs of GitHub without saying whose and which"
    else:
        yield f"trusts {_shown(principal)}"


def sharing(statement: Statement) -> Iterator[str]:
    """Who a key's own policy lets in: the account's policies, and a Lustre file system by the exact ARN of its role."""
    principal = _principal(statement)
    if _denies(statement) or (principal.keys() == {"AWS"} and all(re.fullmatch(ROOT, one) for one in principal["AWS"])):
        return
    tests = statement.get("Condition") or {}
    roles = several((tests.get("ArnEquals") or {}).get("aws:PrincipalArn"))
    if principal != {"AWS": ["*"]} or not roles or not all(re.fullmatch(LUSTRE, role) for role in roles):
        yield f"trusts {_shown(principal)}"


def refuses_plain_requests(statement: Statement) -> bool:
    """A bucket's: nobody, without TLS."""
    everybody = _principal(statement) == {"AWS": ["*"]} and several(statement.get("Action")) == ["s3:*"]
    return _denies(statement) and everybody and statement.get("Condition") == {"Bool": {"aws:SecureTransport": "false"}}


def wide(statement: Statement) -> Iterator[str]:
    """What a role's policy gives: named calls on resources of one account."""
    if _denies(statement):
        return
    if "NotAction" in statement or "NotResource" in statement:
        yield "allows all but what it names"
    resources, condition = several(statement.get("Resource")), statement.get("Condition") or {}
    for action in several(statement.get("Action")):
        service, _, call = action.partition(":")
        if re.search("[*?]", service) or not call.strip("*?"):
            yield f"allows {action}"
        elif re.search("[*?]", call) and action not in (*WILDCARDS, *ACCOUNT_WIDE) and not re.fullmatch(READS, call):
            yield f"allows {action}, which is more than one call"
        elif "*" in resources and not any(fnmatchcase(action, known) for known in ACCOUNT_WIDE):
            yield f"allows {action} on all resources"
        else:
            yield from _raising(action, resources, condition)
    for resource in resources:
        if resource != "*" and (wrong := _unbound(resource, condition)):
            yield f"allows calls on {resource}, {wrong}"


def _raising(action: str, resources: list[str], condition: Mapping[str, Any]) -> Iterator[str]:
    """Calls by which somebody would get more than he has."""
    exact = condition.get("StringEquals") or {}
    if action.lower() == PASS.lower() and not exact.get("iam:PassedToService"):
        yield f"allows {action} to any service"
    ours = [resource for resource in resources if ":role/aws-service-role/" not in resource]
    if ours and action.lower() in {call.lower() for call in GIVE} and not exact.get("iam:PermissionsBoundary"):
        yield f"allows {action} without a boundary"
    itself = [resource for resource in resources if ":oidc-provider/" in resource]
    if itself and not re.fullmatch(f"iam:({READS}|(Tag|Untag)[A-Za-z]+)", action):
        yield f"allows {action} on who is trusted"


def _unbound(resource: str, condition: Mapping[str, Any]) -> str | None:
    """Why an ARN is too wide; None where it is not."""
    if re.fullmatch(RESERVATION, resource):
        return None
    if not (found := ARN.fullmatch(resource)):
        return "which names no service, region and account"
    service, region, account, what = found.group("service", "region", "account", "what")
    named = re.split("[*?]", what)[0]
    if service == "iam":
        own = re.match(r"(role|policy|instance-profile)/(flotilla[/-]|aws-service-role/[a-z])|oidc-provider/", named)
        return None if account and own else "which is not the stack's"
    if not account and (len(named) < 3 or (not region and service != "s3")):
        return "which is everybody's"
    if service == "kms" and named in ("", "key/") and not condition:
        return "which is every key"
    return None


def statements(document: Mapping[str, Any]) -> list[Statement]:
    found = document.get("Statement", [])
    return [found] if isinstance(found, Mapping) else list(found)


def several(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else list(value or [])


def _denies(statement: Statement) -> bool:
    return statement.get("Effect") == "Deny"


def _principal(statement: Statement) -> dict[str, list[str]]:
    """In one form: "*" is {"AWS": "*"}; NotPrincipal is everybody but a few."""
    if "NotPrincipal" in statement:
        return {"NotPrincipal": []}
    given = statement.get("Principal")
    return {"AWS": ["*"]} if given in ("*", ["*"]) else {kind: several(who) for kind, who in (given or {}).items()}


def _shown(principal: Mapping[str, list[str]]) -> str:
    if "NotPrincipal" in principal or "*" in principal.get("AWS", []):
        return "everybody"
    return ", ".join(one for who in principal.values() for one in who) or "nobody by name"
