"""What the preview takes for granted of GCP, which it does not ask: numbers, addresses, names."""

from __future__ import annotations

import re
from typing import Any

from infra.gcp import names

PROJECT_NUMBER = "123456789012"
API = "https://www.googleapis.com/compute/v1"

# What is paid for by the hour or month beside machines, by type; https://cloud.google.com/pricing/list
BILLED = {
    "gcp:compute/routerNat:RouterNat": lambda inputs: "Cloud NAT",
    "gcp:filestore/instance:Instance": lambda inputs: f"Filestore of {inputs['fileShares']['capacityGb']:g} GB",
    "gcp:compute/disk:Disk": lambda inputs: f"{inputs['type']} of {inputs['size']:g} GB",
    "gcp:storage/bucket:Bucket": lambda inputs: "what is in the bucket",
    "gcp:kms/cryptoKey:CryptoKey": lambda inputs: "key",
}


def created(kind: str, name: str, inputs: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Id and outputs of a resource that would be created."""
    named = inputs.get("name") or name
    id_ = f"{kind.rpartition(':')[2].lower()}s/{named}"  # GCP's own begin with project and region
    return id_, inputs | {"name": named, "selfLink": f"{API}/{id_}"} | _computed(kind, named, inputs)


def _computed(kind: str, name: str, inputs: dict[str, Any]) -> dict[str, Any]:
    """What GCP adds to the inputs, where the program reads it."""
    project = inputs.get("project")
    pool = f"projects/{PROJECT_NUMBER}/locations/global/workloadIdentityPools/{inputs.get('workloadIdentityPoolId')}"
    email = names.email(str(inputs.get("accountId")), project or "")
    known = {
        "Account": {"email": email, "member": f"serviceAccount:{email}", "name": f"projects/{project}/serviceAccounts/{email}"},
        "IAMCustomRole": {"name": f"projects/{project}/roles/{inputs.get('roleId')}"},
        "WorkloadIdentityPool": {"name": pool},
        "WorkloadIdentityPoolProvider": {"name": f"{pool}/providers/{inputs.get('workloadIdentityPoolProviderId')}"},
        "Address": {"address": "198.51.100.10"},
        "InstanceTemplate": {"selfLinkUnique": f"{API}/instancetemplates/{name}?uniqueId=1"},
        "InstanceFromTemplate": {"networkInterfaces": [{"networkIp": _address(name)}]},
        "InstanceGroupManager": {"instanceGroup": f"{API}/instanceGroups/{name}"},
    }
    if kind == "gcp:filestore/instance:Instance":
        return {"networks": [inputs["networks"][0] | {"ipAddresses": ["10.64.255.2"]}]}
    return known.get(kind.rpartition(":")[2], {})


def _address(name: str) -> str:
    number = int(found[1]) if (found := re.search(r"-(\d+)$", name)) else 0
    return f"10.64.{number // 200}.{10 + number % 200}"


def answer(token: str, arguments: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """The result of an invoke, and what to say of it. Raises LookupError for one that the program should not make."""
    match token.rpartition(":")[2]:
        case "getProject":
            return {"number": PROJECT_NUMBER, "projectId": arguments["projectId"]}, f"the project's number is {PROJECT_NUMBER}"
        case "getProjectServiceAccount":
            email = f"service-{PROJECT_NUMBER}@gs-project-accounts.iam.gserviceaccount.com"
            return {"emailAddress": email, "member": f"serviceAccount:{email}"}, f"GCS acts as {email}"
        case "getSubnetwork":
            path = f"projects/{arguments['project']}/regions/{arguments['region']}/subnetworks/{arguments['name']}"
            found = {"id": path, "ipCidrRange": "10.0.0.0/20"}
            return arguments | found, f"{arguments['name']} is 10.0.0.0/20"
        case "getInstance" if "filestore" in token:
            found = {"networks": [{"ipAddresses": ["10.0.16.2"]}], "fileShares": [{"name": "vol1"}]}
            return arguments | found, f"{arguments['name']} is mounted as 10.0.16.2:/vol1"
        case "getInstanceGroup":
            return arguments | {"instances": []}, "flex-start has granted no machine yet"
    raise LookupError(f"the preview has no answer to {token}")
