"""The one module that imports dstack's internals: what its public API (`dstack.api`) takes and returns, but does not export.

They come without a promise of stability, so this list is what to check when dstack is updated. A name is looked up when it is first
used: all of them together take seconds to import, and most programs need three.
"""

# ruff: noqa: F401

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the same names for the type checker
    from dstack._internal.cli.services.configurators.fleet import _resolve_ssh_key
    from dstack._internal.core.backends import features
    from dstack._internal.core.backends.gcp.features.tcpx import get_backend_specific_commands_tcpxo
    from dstack._internal.core.backends.models import AnyBackendFileConfigWithCreds, BackendConfigWithCreds
    from dstack._internal.core.backends.slurm.models import SlurmBackendFileConfigWithCreds
    from dstack._internal.core.errors import (
        BackendInvalidCredentialsError,
        ClientError,
        ConfigurationError,
        DstackError,
        ResourceExistsError,
        ResourceNotExistsError,
        ServerClientError,
        URLNotFoundError,
    )
    from dstack._internal.core.models.backends.base import BackendType
    from dstack._internal.core.models.common import ApplyAction
    from dstack._internal.core.models.configurations import TaskConfiguration, parse_apply_configuration
    from dstack._internal.core.models.envs import EnvSentinel
    from dstack._internal.core.models.fleets import Fleet, FleetConfiguration, FleetPlan, FleetSpec, FleetStatus
    from dstack._internal.core.models.instances import Instance, InstanceOfferWithAvailability, InstanceStatus
    from dstack._internal.core.models.profiles import Profile
    from dstack._internal.core.models.resources import ResourcesSpec
    from dstack._internal.core.models.runs import JobStatus, JobTerminationReason, Run, RunStatus
    from dstack._internal.core.models.volumes import Volume
    from dstack._internal.core.services.configs import ConfigManager
    from dstack._internal.core.services.diff import diff_models
    from dstack._internal.server.services.config import ServerConfig
    from dstack._internal.settings import (
        DSTACK_DOCKER_BASE_IMAGE,
        DSTACK_DOCKER_BASE_IMAGE_UBUNTU_VERSION,
        DSTACK_DOCKER_BASE_IMAGE_VERSION,
    )
    from dstack._internal.utils.files import create_file_archive
    from dstack._internal.utils.gpu import convert_nvidia_gpu_name
    from dstack._internal.utils.ssh import update_ssh_config

MODULES: dict[str, tuple[str, ...]] = {  # below dstack._internal
    "cli.services.configurators.fleet": ("_resolve_ssh_key",),
    "core.backends": ("features",),
    "core.backends.gcp.features.tcpx": ("get_backend_specific_commands_tcpxo",),
    "core.backends.models": ("AnyBackendFileConfigWithCreds", "BackendConfigWithCreds"),
    "core.backends.slurm.models": ("SlurmBackendFileConfigWithCreds",),
    "core.errors": (
        "BackendInvalidCredentialsError",
        "ClientError",
        "ConfigurationError",
        "DstackError",
        "ResourceExistsError",
        "ResourceNotExistsError",
        "ServerClientError",
        "URLNotFoundError",
    ),
    "core.models.backends.base": ("BackendType",),
    "core.models.common": ("ApplyAction",),
    "core.models.configurations": ("TaskConfiguration", "parse_apply_configuration"),
    "core.models.envs": ("EnvSentinel",),
    "core.models.fleets": ("Fleet", "FleetConfiguration", "FleetPlan", "FleetSpec", "FleetStatus"),
    "core.models.instances": ("Instance", "InstanceOfferWithAvailability", "InstanceStatus"),
    "core.models.profiles": ("Profile",),
    "core.models.resources": ("ResourcesSpec",),
    "core.models.runs": ("JobStatus", "JobTerminationReason", "Run", "RunStatus"),
    "core.models.volumes": ("Volume",),
    "core.services.configs": ("ConfigManager",),
    "core.services.diff": ("diff_models",),
    "server.services.config": ("ServerConfig",),
    "settings": ("DSTACK_DOCKER_BASE_IMAGE", "DSTACK_DOCKER_BASE_IMAGE_UBUNTU_VERSION", "DSTACK_DOCKER_BASE_IMAGE_VERSION"),
    "utils.files": ("create_file_archive",),
    "utils.ssh": ("update_ssh_config",),
    "utils.gpu": ("convert_nvidia_gpu_name",),
}
HOMES = {name: module for module, names in MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    """The name out of dstack's own module. Raises AttributeError for one that is not listed."""
    if name not in HOMES:
        raise AttributeError(f"{__name__} has no {name!r}; where dstack has it, list it there")
    home = import_module(f"dstack._internal.{HOMES[name]}")
    return getattr(home, name, None) or import_module(f"{home.__name__}.{name}")
