"""The settings that a cloud adds to a stack: network, capacity, access, budget, deployment; stacks/schema.py puts them together.

Clouds share these words. What only one of them has is refused on the others by stacks/rules.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from ipaddress import IPv4Network
from typing import Literal

from pydantic import Field
from pydantic_core import PydanticCustomError

from stacks.settings.fields import Count, Email, Model, OwnPath, PublicKey, Quantity, Repository, User, Zone, known, setting_error

DOCKER = IPv4Network("172.17.0.0/16")  # of the bridge that Docker makes on every node


class Network(Model):
    """The private network of the nodes, or an existing one."""

    cidr: IPv4Network = Field(default=IPv4Network("10.64.0.0/16"), description="Address range of the network, divided into subnets.")
    zones: tuple[Zone, ...] = Field(default=(), description="Zones to use. Default: all of the region that offer the machines.")
    nat: Literal["one", "per-zone"] = Field(default="one", description="NAT gateways: one for all zones, or one in each.")
    flow_logs: bool = Field(default=False, description="Record accepted and refused connections.")
    vpc: str | None = Field(default=None, description="Existing network to use instead of a new one, by id or name.")
    subnets: tuple[str, ...] = Field(default=(), description="Private subnets of the existing network, by id or name.")
    host_rules: bool = Field(
        default=False, description="Also create firewall rules and grants in the host project of a Shared VPC, with your rights there."
    )

    def own_errors(self) -> Iterator[PydanticCustomError]:
        yield from known(self._addresses())
        yield from known(self._existing())

    def _addresses(self) -> Iterator[PydanticCustomError]:
        if not self.cidr.is_private:
            yield setting_error(f"{self.cidr} is not private; take a part of 10.0.0.0/8, 172.16.0.0/12 or 192.168.0.0/16", "cidr")
        if self.cidr.overlaps(DOCKER):
            yield setting_error(f"{self.cidr} overlaps {DOCKER}, which Docker uses on every node", "cidr")
        if len(set(self.zones)) < len(self.zones):
            yield setting_error("a zone is listed twice", "zones")
        for index, subnet in enumerate(self.subnets):
            if subnet in self.subnets[:index]:
                yield setting_error(f"{subnet!r} is listed twice", "subnets", index)

    def _existing(self) -> Iterator[PydanticCustomError]:
        for key in ("cidr", "nat", "flow_logs"):
            if self.vpc and self.says(key):
                yield setting_error(f"belongs to a new network, but vpc names the existing {self.vpc!r}", key)
        if self.vpc and not self.subnets:
            yield setting_error(f"is missing; list the private subnets of {self.vpc!r} that nodes may use", "subnets")
        if self.subnets and not self.vpc:
            yield setting_error("belongs to an existing network, but vpc is not set", "subnets")


class Capacity(Model):
    """Purchase of the fleet's machines, in exactly one way."""

    kind: Literal["on-demand", "spot", "reservation", "block", "flex-start"] = Field(
        default="on-demand", description="block: a capacity block. flex-start: a queue for GPUs."
    )
    id: str | None = Field(default=None, description="Id of the reservation or capacity block.")
    policy: str | None = Field(
        default=None,
        description="Name of the reservation's compact placement policy or placement group, if it has one.",
    )

    def own_errors(self) -> Iterator[PydanticCustomError]:
        reserved = self.kind in ("reservation", "block")
        if reserved and not self.id:
            yield setting_error(f"is missing; kind: {self.kind} needs the id of the capacity that you hold", "id")
        if self.id and not reserved:
            yield setting_error(f"belongs to kind: reservation or block, but kind is {self.kind}; a fleet is bought in one way", "id")
        if self.policy and self.kind != "reservation":
            yield setting_error(
                f"belongs to kind: reservation, but kind is {self.kind}; `placement` makes a policy of the fleet's own", "policy"
            )


class Access(Model):
    """How nodes that Pulumi launches are reached by SSH; they have private addresses alone."""

    user: User = Field(default="ubuntu", description="User name on the nodes.")
    identity_file: OwnPath = Field(description="Private key, without passphrase, of the person who runs dstack.")
    public_key: PublicKey = Field(description="Public key, as in the .pub file.")
    via: Literal["bastion", "tunnel", "direct"] = Field(
        default="bastion",
        description="bastion: a small machine with a public address. tunnel: SSM or IAP. direct: dstack's server is in the network.",
    )
    allow: tuple[IPv4Network, ...] = Field(default=(), description="Addresses that may reach the bastion.")
    port: Count = Field(default=2222, ge=1024, le=65535, description="Local port of the tunnel.")

    def own_errors(self) -> Iterator[PydanticCustomError]:
        if self.via == "bastion" and not self.allow:
            yield setting_error(
                "is missing; name the networks that may reach the bastion, such as 203.0.113.7/32, or take via: tunnel", "allow"
            )
        if self.allow and self.via != "bastion":
            yield setting_error(f"belongs to via: bastion, but via is {self.via}", "allow")
        for index, network in enumerate(self.allow):
            if network.prefixlen < 8:
                yield setting_error(f"{network} lets nearly everybody in; name the networks that you connect from", "allow", index)


class Budget(Model):
    """What a month may cost, and who gets mail; it stops nothing."""

    monthly: Quantity = Field(description="Limit on the month's cost.")
    currency: Literal["USD", "EUR", "GBP", "JPY", "CHF", "AUD", "CAD", "INR"] = Field(default="USD", description="Currency of the limit.")
    emails: tuple[Email, ...] = Field(min_length=1, description="Mail recipients.")
    thresholds: tuple[Quantity, ...] = Field(
        default=(50, 80, 100), min_length=1, description="Percentages of the limit at which mail is sent."
    )
    billing_account: str | None = Field(default=None, description="The account that pays, such as 012345-6789AB-CDEF01.")

    def own_errors(self) -> Iterator[PydanticCustomError]:
        if len(set(self.thresholds)) < len(self.thresholds):
            yield setting_error("a threshold is listed twice", "thresholds")
        for index, email in enumerate(self.emails):
            if email.lower() in [other.lower() for other in self.emails[:index]]:
                yield setting_error(f"{email!r} is listed twice", "emails", index)


class Ci(Model):
    """Who may deploy this stack from continuous integration, without long-lived keys."""

    github: Repository = Field(description="Repository, such as owner/name; its environment of flotilla:environment's name may deploy.")
    provider: str | None = Field(
        default=None, description="Existing OIDC provider (its ARN) or workload identity pool. Default: a new one."
    )
