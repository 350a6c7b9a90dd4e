"""Everything that the cloud stacks register, against the input types of the providers' SDKs, which are made from the providers' schemas."""

from __future__ import annotations

import collections.abc
import functools
import inspect
import json
import types
import typing
from collections.abc import Iterator
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import Any

import pulumi
import pytest
from support import gcp_plans

from infra.preview import Plan
from stacks import load
from stacks.places import clouds

ROOT = Path(__file__).parents[2]
STACKS = [name for name in load.names(ROOT) if load.load(name, ROOT).cloud in clouds()]


def faults(token: str, inputs: dict[str, Any]) -> list[str]:
    """What does not fit the inputs' types of a resource such as aws:ec2/vpc:Vpc: unknown, missing, of another type, no known value."""
    return [*_object("", arguments(token), inputs)]


@functools.cache
def arguments(token: str) -> type:
    """The class of a resource's inputs. Raises KeyError for a type that the SDK does not have."""
    package, _, name = token.split(":")
    if package == "pulumi":  # pulumi:providers:aws
        return import_module(f"pulumi_{name}").ProviderArgs
    where, cls = _modules(package)[token]
    return getattr(import_module(where), f"{cls}InitArgs", None) or getattr(import_module(where), f"{cls}Args")


@functools.cache
def _modules(package: str) -> dict[str, tuple[str, str]]:
    """`{token: (module, class)}`, from what the SDK registers of itself."""
    source = inspect.getsource(import_module(f"pulumi_{package}"))
    registered = json.loads(source.partition('resource_modules="""')[2].partition('"""')[0])
    return {token: (entry["fqn"], name) for entry in registered for token, name in entry["classes"].items()}


@functools.cache
def _properties(cls: type) -> dict[str, tuple[Any, bool]]:
    """`{name in the schema: (type, required)}` of a class of inputs."""
    init = cls.__init__
    hints = typing.get_type_hints(init, vars(inspect.getmodule(cls)))
    names = pulumi._types.input_type_py_to_pulumi_names(cls)
    parameters = {name: parameter for name, parameter in inspect.signature(init).parameters.items() if name not in ("self", "__self__")}
    return {names.get(name, name): (hints[name], parameter.default is parameter.empty) for name, parameter in parameters.items()}


def _object(at: str, cls: type, value: dict[str, Any]) -> Iterator[str]:
    properties = _properties(cls)
    for key, item in value.items():
        if key not in properties:
            yield f"{at}.{key}: unknown to {cls.__name__}"
        elif item is not None:
            yield from _match(f"{at}.{key}", properties[key][0], item)
    for key, (_, required) in properties.items():
        if required and value.get(key) is None:
            yield f"{at}.{key}: required by {cls.__name__}"


def _match(at: str, kind: Any, value: Any) -> list[str]:
    """Empty where the value fits the type; else the complaint of the alternative that fits best."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return _alternatives(at, inner, value)
    if origin is collections.abc.Sequence and isinstance(value, list):
        return [fault for index, item in enumerate(value) for fault in _match(f"{at}[{index}]", inner[0], item)]
    if origin is collections.abc.Mapping and isinstance(value, dict):
        return [fault for key, item in value.items() for fault in _match(f"{at}.{key}", inner[1], item)]
    if pulumi._types.is_input_type(kind) and isinstance(value, dict):
        return [*_object(at, kind, value)]
    if origin is None and not pulumi._types.is_input_type(kind) and _scalar(kind, value):
        return []
    return [f"{at}: {value!r} is no {(origin or kind).__name__}"]


def _alternatives(at: str, kinds: tuple[Any, ...], value: Any) -> list[str]:
    enums = [kind for kind in kinds if inspect.isclass(kind) and issubclass(kind, Enum)]
    # A provider lets other values of an open enumeration pass, and the cloud refuses them.
    if enums and isinstance(value, str):
        known = [member.value for kind in enums for member in kind]
        return [] if value in known else [f"{at}: {value!r} is not among {', '.join(known)}"]
    usable = [kind for kind in kinds if not _resolved_later(kind)]
    return min((_match(at, kind, value) for kind in usable), key=len)


def _resolved_later(kind: Any) -> bool:
    """The arms of pulumi.Input that no recorded value has, and the dictionary's type, which says the same as the class."""
    if typing.get_origin(kind) in (pulumi.Output, collections.abc.Awaitable) or kind is type(None) or typing.is_typeddict(kind):
        return True
    return inspect.isclass(kind) and kind.__module__.endswith(".outputs")


def _scalar(kind: Any, value: Any) -> bool:
    if inspect.isclass(kind) and issubclass(kind, Enum):
        return value in [member.value for member in kind]
    if kind is Any:
        return True
    if kind in (int, float):  # the engine's numbers are all floating
        return isinstance(value, int | float) and not isinstance(value, bool) and (kind is float or float(value).is_integer())
    if inspect.isclass(kind) and issubclass(kind, pulumi.Resource):
        return isinstance(value, str)
    return isinstance(value, kind)


@pytest.mark.parametrize("name", STACKS)
def test_every_input_of_every_resource_fits_the_providers_types(name, planned):
    _all_fit(planned(name))


@gcp_plans.every()
def test_so_do_those_of_other_settings_on_gcp(name, gcp_plan):
    _all_fit(gcp_plan(name))


def _all_fit(plan: Plan) -> None:
    made = (*clouds(), "pulumi:providers")
    resources = [resource for resource in plan.resources if not resource.component and resource.type.startswith(made)]
    assert len(resources) > 15
    found = [
        f"{resource.type} {resource.name} {fault}"
        for resource in resources
        for fault in faults(resource.type, _decoded(resource.type, resource.inputs))
    ]
    assert not found, "\n".join(found)


def _decoded(token: str, inputs: dict[str, Any]) -> dict[str, Any]:
    """A provider gets its lists, maps and booleans as JSON."""
    if not token.startswith("pulumi:"):
        return inputs
    return {key: json.loads(value) if value[:1] in "[{" or value in ("true", "false") else value for key, value in inputs.items()}


VPC, TEMPLATE, RULE = (
    "aws:ec2/vpc:Vpc",
    "aws:ec2/launchTemplate:LaunchTemplate",
    "aws:vpc/securityGroupIngressRule:SecurityGroupIngressRule",
)


@pytest.mark.parametrize(
    ("token", "inputs", "fault"),
    [
        (VPC, {"cidrBlok": "10.0.0.0/16"}, ".cidrBlok: unknown to VpcArgs"),
        (VPC, {"enableDnsSupport": "yes"}, ".enableDnsSupport: 'yes' is no bool"),
        (VPC, {"tags": {"a": 1}}, ".tags.a: 1 is no str"),
        (RULE, {"ipProtocol": "tcp"}, ".securityGroupId: required by SecurityGroupIngressRuleArgs"),
        (RULE, {"ipProtocol": "tcp", "securityGroupId": "sg-1", "fromPort": 1.5}, ".fromPort: 1.5 is no int"),
        (TEMPLATE, {"networkInterfaces": {}}, ".networkInterfaces: {} is no Sequence"),
        (
            TEMPLATE,
            {"networkInterfaces": [{"cardIndex": 0}]},
            ".networkInterfaces[0].cardIndex: unknown to LaunchTemplateNetworkInterfaceArgs",
        ),
        (TEMPLATE, {"metadataOptions": "required"}, ".metadataOptions: 'required' is no LaunchTemplateMetadataOptionsArgs"),
        ("aws:ec2/instance:Instance", {"instanceType": "p9.huge"}, ".instanceType: 'p9.huge' is not among "),
        ("aws:ec2/placementGroup:PlacementGroup", {"strategy": "clustr"}, ".strategy: 'clustr' is not among spread, cluster"),
        ("pulumi:providers:aws", {"default_tags": {}}, ".default_tags: unknown to ProviderArgs"),
    ],
)
def test_a_mistake_is_found(token, inputs, fault):
    [found] = faults(token, inputs)
    assert found.startswith(fault)


def test_a_type_that_the_sdk_lacks_is_found():
    with pytest.raises(KeyError):
        faults("aws:ec2/vpcs:Vpcs", {})
