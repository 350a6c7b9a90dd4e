"""dstack's backends as places to train: what each can do, what it wants in a stack file, and where its credentials come from.

What a backend can do is dstack's word (dstack/_internal/core/backends/features.py); tests/contract/test_dstack_backends.py compares
this table with it, and each name with dstack's model of its configuration.
https://dstack.ai/docs/concepts/backends and https://dstack.ai/docs/concepts/fleets#cluster-placement
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from stacks.settings.fields import Model, OwnPath, Unknown, setting_error
from stacks.written import simplified

# Where a credential would stand in dstack's own file.
SECRET = ("creds", "api_key", "api_token", "client_secret", "secret_key", "access_key", "private_key", "kubeconfig")


@dataclass(frozen=True)
class Backend:
    """One of dstack's backends."""

    name: str  # as dstack's `type`
    keys: Mapping[str, str]  # variables with the credentials, by dstack's name of each; none: a file, or the cloud's own default chain
    kind: str = "api_key"  # dstack's `creds.type`
    cluster: str = ""  # the network between nodes of one cluster; empty where dstack starts single nodes alone
    machines: bool = True  # whole machines, which fleets hold; else containers, which come and go with runs
    volumes: bool = False  # dstack's network volumes
    spot: bool = False  # by the sources of gpuhunt's providers, from which dstack has its offers
    wants: tuple[str, ...] = ()  # settings without which dstack refuses it
    file: Literal["", "filename", "file"] = ""  # dstack's name of the credentials' file, where it reads one
    file_kind: str = ""  # dstack's `creds.type` with a file, where it is another
    default_file: str = ""  # of it, where the stack says nothing
    regions: str = "regions"  # dstack's name of its list of regions
    catalogue: str = ""  # its name in gpuhunt's; empty where dstack asks the cloud itself
    make: str = "server"  # target of `make install-...` that brings what dstack needs for it

    @property
    def makes_volumes(self) -> bool:
        """Whether a volume can be had by its size; of Lium's dstack wants the id of one that is there."""
        return self.volumes and self.name != "lium"

    @property
    def mounts(self) -> bool:
        """Whether a task may mount a bucket: FUSE wants a privileged container."""
        return self.machines or self.name == "kubernetes"

    @property
    def folders(self) -> bool:
        """Whether a task may have a folder of its machine."""
        return self.machines or self.name == "kubernetes"


def _key(name: str, variable: str, **more: Any) -> Backend:
    return Backend(name, {"api_key": variable}, **more)


VPC = "the cloud's network, TCP"
BACKENDS = {
    backend.name: backend
    for backend in (
        _key("amddevcloud", "AMD_DEVCLOUD_API_KEY"),
        Backend("aws", {}, "default", "EFA on the types that have it", volumes=True, spot=True, catalogue="aws", make="aws"),
        Backend("azure", {}, "default", VPC, spot=True, wants=("tenant_id", "subscription_id"), catalogue="azure", make="clouds"),
        _key("cloudrift", "CLOUDRIFT_API_KEY", catalogue="cloudrift"),
        Backend(
            "crusoe",
            {"access_key": "CRUSOE_ACCESS_KEY_ID", "secret_key": "CRUSOE_SECRET_KEY"},
            "access_key",
            "InfiniBand on the types that have it",
            wants=("project_id",),
        ),
        _key("digitalocean", "DIGITALOCEAN_ACCESS_TOKEN"),
        Backend(
            "gcp",
            {},
            "default",
            "GPUDirect on the types that have it",
            volumes=True,
            spot=True,
            wants=("project_id",),
            file="filename",
            file_kind="service_account",
            catalogue="gcp",
            make="gcp",
        ),
        _key("hotaisle", "HOTAISLE_API_KEY", wants=("team_handle",)),
        _key("jarvislabs", "JL_API_KEY", cluster=VPC),
        Backend(
            "kubernetes",
            {},
            "",
            "the cluster's own; RDMA where its nodes offer it",
            machines=False,
            volumes=True,
            file="filename",
            default_file="~/.kube/config",
            regions="contexts",
            make="clouds",
        ),
        _key("lambda", "LAMBDA_API_KEY", catalogue="lambdalabs"),
        _key("lium", "LIUM_API_KEY", machines=False, volumes=True, spot=True),
        Backend(
            "nebius",
            {},
            "service_account",
            "InfiniBand on the types that have it",
            spot=True,
            file="filename",
            default_file="~/.nebius/credentials.json",
            catalogue="nebius",
            make="clouds",
        ),
        Backend("oci", {}, "default", VPC, spot=True, file="file", default_file="~/.oci/config", catalogue="oci", make="clouds"),
        _key("runpod", "RUNPOD_API_KEY", cluster="Instant Clusters", machines=False, volumes=True, catalogue="runpod"),
        Backend("seeweb", {"api_token": "SEEWEB_API_TOKEN"}, "api_token", VPC),
        _key("vastai", "VAST_API_KEY", machines=False, spot=True),
        Backend(
            "verda",
            {"client_id": "VERDA_CLIENT_ID", "client_secret": "VERDA_CLIENT_SECRET"},
            spot=True,
            catalogue="verda",
            make="clouds",
        ),
        _key("vultr", "VULTR_API_KEY", cluster=VPC),
    )
}
# What dstack knows besides, and why no stack is for it.
OTHERS = {
    "remote": "is dstack's name for machines over SSH: flotilla:cloud ssh",
    "slurm": "has a place of its own: flotilla:cloud slurm",
    "daytona": "has sandboxes for agents; no place to train",
    "datacrunch": "is called verda now",
    "tensordock": "was given up by dstack",
    "cudo": "was given up by dstack",
    "dstack": "is dstack's own marketplace, which its hosted server configures by itself",
}


class BackendEntry(Model):
    """A backend that may launch nodes; further keys are dstack's own: https://dstack.ai/docs/reference/server/config.yml"""

    model_config = ConfigDict(extra="allow", frozen=True)

    type: str = Field(description="dstack's name of the backend, such as runpod, lambda or kubernetes.")
    credentials: OwnPath | None = Field(
        default=None, description="Credentials file on the dstack server's machine, for backends that read one, such as a kubeconfig."
    )

    @property
    def known(self) -> Backend:
        """Raises Unknown where dstack has no such backend."""
        if self.type not in BACKENDS:
            raise Unknown("type")
        return BACKENDS[self.type]

    @property
    def regions(self) -> tuple[str, ...]:
        """Those that it is limited to; of Kubernetes the contexts, each a cluster. None: all of them."""
        listed = (self.model_extra or {}).get(self.known.regions) or ()
        if not isinstance(listed, list | tuple):  # `own_errors` says so
            raise Unknown(self.known.regions)
        return tuple(each if isinstance(each, str) else each["name"] for each in listed)

    def own_errors(self) -> Iterator[PydanticCustomError]:
        if self.type not in BACKENDS:
            yield setting_error(unknown(self.type), "type")
            return
        given = self.model_extra or {}
        if secrets := [key for key in given if key in SECRET]:
            yield setting_error(f"no credentials in a stack file; {source(self.known)}", secrets[0])
            return
        if self.credentials is not None and not self.known.file:
            yield setting_error(f"dstack reads no file for {self.type}; {source(self.known)}", "credentials")
        missing = [key for key in self.known.wants if not given.get(key)]
        for key in missing:
            yield setting_error(f"is missing; {self.type} does not work without it", key)
        if not missing:
            yield from self._dstacks_word()

    def _dstacks_word(self) -> Iterator[PydanticCustomError]:
        """Nothing where dstack is not installed, as on a machine that only submits jobs."""
        try:
            from stacks.dstack_api import AnyBackendFileConfigWithCreds, BackendConfigWithCreds
        except ModuleNotFoundError:
            return
        model = next(arm for arm in get_args(AnyBackendFileConfigWithCreds) if self.type in get_args(arm.model_fields["type"].annotation))
        settings = [key for key in model.model_fields if key not in ("type", "creds", "kubeconfig")]
        try:
            BackendConfigWithCreds.model_validate(self.config(filled=True))
        except ValidationError as error:
            for details in _innermost(error.errors()):
                # Without the names of dstack's own classes, of which a value may have been any.
                at = [part for part in details["loc"] if part != self.type and (isinstance(part, int) or part.islower())]
                if details["type"] == "extra_forbidden" and len(at) == 1:
                    near = get_close_matches(str(at[0]), settings, n=1)
                    guess = f"; did you mean {near[0]}?" if near else ""
                    yield setting_error(f"is not a setting of dstack's backend {self.type}{guess} (allowed: {', '.join(settings)})", *at)
                else:
                    yield setting_error(f"{details['input']!r}, but dstack says: {details['msg']}", *at)

    def config(self, filled: bool = False) -> dict[str, Any]:
        """As the dstack server's configuration has it. A secret is `${VARIABLE}`, which is filled in where the server starts.

        `filled`: with stand-ins for what a file holds, as dstack's models want it.
        """
        known, own = self.known, dict(self.model_extra or {})
        file = str(self.credentials) if self.credentials else known.default_file
        if known.name == "kubernetes":
            return {"type": known.name, **own, "kubeconfig": {"filename": file, **({"data": "-"} if filled else {})}}
        creds: dict[str, Any] = {"type": known.kind} | {key: f"${{{variable}}}" for key, variable in known.keys.items()}
        if known.file and file:
            held = {"gcp": ("data",), "nebius": ("service_account_id", "public_key_id", "private_key_content")}.get(known.name, ())
            creds |= {"type": known.file_kind or known.kind, known.file: file} | (dict.fromkeys(held, "-") if filled else {})
        return {"type": known.name, **own, "creds": creds}


def _innermost(errors: list[ErrorDetails]) -> list[ErrorDetails]:
    """One for each setting of an entry: the most exact, where a value may be of several kinds and is none."""
    return list({details["loc"][:2]: details for details in sorted(errors, key=lambda details: len(details["loc"]))}.values())


def _named(value: Any) -> Any:
    """A name alone is the whole entry of most backends. What is dstack's own, its models read."""
    return {"type": value} if isinstance(value, str) else simplified(value)


Entry = Annotated[BackendEntry, BeforeValidator(_named)]


def unknown(name: str) -> str:
    if name in OTHERS:
        return f"{name!r} {OTHERS[name]}"
    near = get_close_matches(name.lower(), BACKENDS, n=1)
    guess = f"; did you mean {near[0]}?" if near else ""
    return f"{name!r} is not one of dstack's backends{guess} (allowed: {', '.join(BACKENDS)})"


def source(known: Backend) -> str:
    """Where the credentials of a backend come from, for people."""
    if known.keys:
        return f"the dstack server gets them from {' and '.join(known.keys.values())} of its environment"
    if known.name == "kubernetes":
        return f"the dstack server reads them from the kubeconfig {known.default_file}, or the one that `credentials` names"
    if known.default_file:
        return f"the dstack server reads them from {known.default_file}, or the file that `credentials` names"
    own = {"aws": "AWS", "gcp": "Google Cloud", "azure": "Azure"}[known.name]
    return f"the dstack server finds them as every program of {own} does, in its environment or its machine's identity"
