"""Names and addresses that GCP or dstack prescribe; all others are Pulumi's own."""

from __future__ import annotations

import hashlib
import re

NODE_TAG = "dstack-runner-instance"  # the network tag that dstack gives its machines; ours carry it too
IAP = "35.235.240.0/20"  # https://docs.cloud.google.com/iap/docs/using-tcp-forwarding
PROBES = ("35.191.0.0/16", "130.211.0.0/22")  # of health checks: https://docs.cloud.google.com/load-balancing/docs/health-check-concepts
LONGEST = 63  # characters of a Compute Engine resource's name


def ssh_rule(project: str, vpc: str) -> str:
    """The name under which dstack inserts its SSH firewall rule into a network; it accepts a rule that is there already.

    As dstack's `get_firewall_rule_name`: the network's complete path where that fits, else its name, else a cut name with a hash.
    """
    prefix, network = "dstack-ssh-in", f"projects/{project}/global/networks/{vpc}"
    for tail in (network.replace("/", "-"), vpc):
        if len(name := f"{prefix}-{tail}") <= LONGEST:
            return name
    suffix = "-" + hashlib.sha256(network.encode()).hexdigest()[:8]
    return f"{prefix}-{vpc}"[: LONGEST - len(suffix)] + suffix


def network_profile(zone: str) -> str:
    """Of a network that carries RDMA over Converged Ethernet in a zone."""
    return f"{zone}-vpc-roce"


def state_bucket(project: str) -> str:
    """Of Pulumi's state, for all stacks of a project; infra/gcp/bootstrap.py makes it."""
    domain, _, own = project.rpartition(":")
    return _fitted(f"flotilla-state-{own}" + (f"-{domain.replace('.', '-')}" if domain else ""), 63)


def state_key(project: str, region: str) -> str:
    """Full name of the key for the secrets in that state."""
    return f"projects/{project}/locations/{region}/keyRings/flotilla/cryptoKeys/state"


def account(name: str) -> str:
    """Id of a service account: 6 to 30 characters."""
    return _fitted(name, 30)


def email(id_: str, project: str) -> str:
    """Of a service account by its id; a domain's own projects, such as example.com:project, turn round."""
    domain, _, own = project.rpartition(":")
    return f"{id_}@{own}{f'.{domain}' if domain else ''}.iam.gserviceaccount.com"


def pool(stack: str) -> str:
    """Id of a workload identity pool: 4 to 32 characters, and `gcp-` in front is Google's own."""
    return _fitted(f"github-{stack}", 32)


def role(name: str) -> str:
    """Id of a custom role: 3 to 64 letters, digits and _."""
    return re.sub(r"\W", "_", name)


def _fitted(name: str, longest: int) -> str:
    """A name that is too long keeps its ends: what the middle was is in a hash, so that two stacks do not share one."""
    if len(name) <= longest:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:6]
    head, _, tail = name.rpartition("-")
    return f"{head[: longest - len(tail) - len(digest) - 2].rstrip('-')}-{digest}-{tail}"[:longest]
