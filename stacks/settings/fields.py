"""The forms that a setting's text or number may have: names, sizes, durations; stacks/schema.py puts them together."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core import PydanticCustomError

from stacks.written import Location, Plain


class Unknown(Exception):
    """A rule reads a setting that has an error of its own. Nothing can be said of what depends on it."""


class Model(BaseModel):
    """Settings: nothing unknown among them, nothing changed after they are read."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    def says(self, key: str) -> bool:
        """Whether a setting is known to differ from its default."""
        return key in self.__dict__ and getattr(self, key) != type(self).model_fields[key].get_default(call_default_factory=True)

    def own_errors(self) -> Iterator[PydanticCustomError]:
        """Errors in settings that are each of the right type, in this section alone."""
        yield from ()

    if not TYPE_CHECKING:

        def __getattr__(self, key: str) -> Any:
            """Only where a section was read in part (stacks/sections.py); others have all of their settings."""
            if key in type(self).model_fields:
                raise Unknown(key)
            return super().__getattr__(key)


def setting_error(text: str, *at: str | int) -> PydanticCustomError:
    """A check's word on the setting at `at`, counted from the model that is checked; stacks/load.py adds the rest of the way."""
    return PydanticCustomError("stack", "{text}", {"text": text, "at": at})


def located(error: PydanticCustomError) -> tuple[Location, str]:
    """Where a `setting_error` is, and what it says."""
    return (error.context or {})["at"], error.message()


def known(errors: Iterator[PydanticCustomError]) -> Iterator[PydanticCustomError]:
    """A rule's errors, up to where it reads a setting that is Unknown."""
    with suppress(Unknown):
        yield from errors


def form(pattern: str, allowed: str) -> Any:
    """Text of a form; `allowed` is what an error says of it."""
    return Field(pattern=pattern, json_schema_extra={"allowed": allowed})


def _number(value: Any) -> Any:
    try:
        read = value.meant if isinstance(value, Plain) else value
    except ValueError as error:
        raise setting_error(str(error)) from None
    if isinstance(read, bool):  # else pydantic reads true as 1
        raise PydanticCustomError("bool", "a boolean is not a number")
    return read


def _as_text(value: Any) -> Any:
    """From the engine numbers and booleans come where a shell reads text."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, int | float) else value


def _ids(user: str) -> str:
    """Docker's range of user and group ids."""
    for part in user.split(":"):
        if part.isdecimal() and int(part) >= 2**31:
            raise setting_error(f"{user!r} has {part}, which is not the id of a user or group (allowed: 0 to {2**31 - 1}, or a name)")
    return user


class Span(int):
    """How many nodes an elastic fleet may have, such as 0..8: as a number the most; `least` is the fewest."""

    least: int

    @classmethod
    def of(cls, low: int, high: int) -> Span:
        span = cls(high)
        span.least = low
        return span

    def __str__(self) -> str:
        return f"{self.least}..{int(self)}"


def _span(value: Any, handler: ValidatorFunctionWrapHandler) -> int:
    """A range as dstack writes it; any other value is an integer's."""
    if isinstance(value, Span) or not (found := isinstance(value, str) and re.fullmatch(r"(\d+)\.\.(\d+)", value)):
        return value if isinstance(value, Span) else handler(value)
    low, high = int(found[1]), int(found[2])
    if low > high:
        raise setting_error(f"{value!r} ends below its start")
    if high == 0:
        raise setting_error(f"{value!r} has room for no node; end it with 1 or more, or leave the fleet out")
    return Span.of(low, high)


def gigabytes(size: str) -> float:
    return float(size[:-2]) * {"MB": 1 / 1024, "GB": 1, "TB": 1024}[size[-2:]]


def host(name: str) -> str:
    """An address, or a name of DNS or of an SSH configuration."""
    if found := re.fullmatch(r"\[(.*)\](:\d+)?|([^:]*):\d+", name):
        raise setting_error(f"{name!r} is more than a host name or address; write {found[1] or found[3]}, and a port as `port`")
    if ":" in name or re.fullmatch(r"([^.]*\.)*\d+", name):
        try:
            ip_address(name)
        except ValueError:
            raise setting_error(f"{name!r} is neither an address nor a host name") from None
    elif ".." in name:
        raise setting_error(f"{name!r} is not a host name: nothing is between two of its dots")
    return name


def same_host(name: str) -> str:
    """A spelling by which two names of one host are equal."""
    return str(ip_address(name)) if ":" in name else name.lower()


def bracketed(name: str) -> str:
    """A host before a colon and a port."""
    return f"[{name}]" if ":" in name else name


def _ordered(sizes: str) -> str:
    low, _, high = sizes.partition("..")
    if high and gigabytes(low) > gigabytes(high):
        raise setting_error(f"{sizes!r} ends below its start")
    return sizes


def _one_key(value: Any) -> Any:
    """Without the line's end, which a block of YAML and files of Windows have; what is no line is told without showing it."""
    if not isinstance(value, str):
        return value
    key = value.strip()
    if "PRIVATE KEY" in key:
        raise setting_error("is a private key, which belongs in no stack file; copy the one line of the .pub file")
    if len(lines := key.splitlines()) > 1:
        wrapped = "one key, cut into lines" if lines[1].strip().count(" ") == 0 else "of which one is taken"
        raise setting_error(f"has {len(lines)} lines, {wrapped}; copy the one line of the .pub file")
    return key


def _complete(key: str) -> str:
    """The second word of a public key is base64 of its kind and its numbers, each with its length in front."""
    kind, data, *_ = key.split(" ")
    try:
        rest = base64.b64decode(data, validate=True)
    except binascii.Error:
        rest = b""
    parts = []
    while len(rest) > 3 and len(rest) >= (end := 4 + int.from_bytes(rest[:4])):
        parts.append(rest[4:end])
        rest = rest[end:]
    numbers = 2 if kind == "ssh-ed25519" else 3
    if rest or len(parts) != numbers or parts[0] != kind.encode() or (kind == "ssh-ed25519" and len(parts[1]) != 32):
        raise setting_error(f"is not a complete {kind} key; copy the one line of the .pub file")
    return key


def _own_path(value: Any) -> Any:
    """Of a file of whoever reads the stack file. Their home is ~ to all programs that are given it, $HOME to shells alone."""
    if not isinstance(value, str):
        return value
    if not value.strip():
        raise setting_error(f"{value!r} is not a path")
    path = re.sub(r"^\$(HOME|\{HOME\})(?=/|$)", "~", value)
    if "$" in path:
        raise setting_error(f"{value!r} has a variable other than $HOME in front, and nothing replaces it; write the path")
    return path


def without_variable(path: Any) -> Any:
    """Of a path on nodes, where no shell reads it."""
    if isinstance(path, str) and re.search(r"\$[A-Za-z_{(]", path):
        raise setting_error(f"{path!r} has a variable, and nothing replaces it on nodes; write the path")
    if isinstance(path, str) and path.startswith("~"):
        raise setting_error(f"{path!r} begins with ~, and a node's home is not yours; write the absolute path")
    return path


def _line(value: Any) -> Any:
    """A block of one line has its end, too."""
    return value.rstrip("\r\n") if isinstance(value, str) else value


Count = Annotated[int, BeforeValidator(_number)]
Positive = Annotated[int, Field(ge=1), BeforeValidator(_number)]
NodeCount = Annotated[
    int,
    Field(ge=1, json_schema_extra={"allowed": "an integer >= 1, or a range such as 0..8 for role: rollout"}),
    BeforeValidator(_number),
    WrapValidator(_span),
]
Port = Annotated[int, Field(ge=1, le=65535), BeforeValidator(_number)]
Quantity = Annotated[float, BeforeValidator(_number), Field(gt=0, allow_inf_nan=False, json_schema_extra={"allowed": "a number > 0"})]
Text = Annotated[str, BeforeValidator(_as_text)]
# dstack's rule for resource names; its server refuses others, its parser does not.
Name = Annotated[str, form(r"^[a-z][a-z0-9-]{1,40}$", "a name of 2 to 41 characters: a-z first, then a-z, 0-9 and -")]
Hostname = Annotated[
    str,
    form(r"^[A-Za-z0-9:\[]([A-Za-z0-9._:\[\]-]*[A-Za-z0-9:\]])?$", "a host name or address, without user and port"),
    AfterValidator(host),
]
User = Annotated[str, form(r"^[a-z_][a-z0-9_-]*$", "the name of a Unix user")]
# Directories of people have more than Unix does: jane.doe, JDoe, 1234abc, jane@corp.example. ssh takes what is before the last @.
Login = Annotated[str, form(r"^[A-Za-z0-9_]([A-Za-z0-9_.@+-]*[A-Za-z0-9_$])?$", "the name of a Unix user, without host and blanks")]
Size = Annotated[str, form(r"^\d+(\.\d+)?(MB|GB|TB)$", "a size such as 80GB")]
Sizes = Annotated[
    str,
    form(r"^\d+(\.\d+)?(MB|GB|TB)(\.\.(\d+(\.\d+)?(MB|GB|TB))?)?$", "a size such as 512GB, 64GB.. or 64GB..128GB"),
    AfterValidator(_ordered),
]
BucketName = Annotated[str, form(r"^[a-z0-9][a-z0-9._-]{1,61}[a-z0-9]$", "the name of a bucket, without s3:// or gs://")]
Duration = Annotated[str, form(r"^[1-9]\d*[smhdw]$", "a duration such as 30m, 72h or 14d")]
BurnIn = Annotated[str, form(r"^([1-9]\d{0,2}s|([1-9]|[12]\d|30)m)$", "a duration from 1s to 30m")]
# dstack's server keeps the metrics of a run for an hour and refuses to look further back, its parser does not.
MetricsWindow = Annotated[str, form(r"^([5-9]m|[1-5]\dm|60m|1h)$", "a duration from 5m to 1h, for which dstack's server keeps metrics")]
Url = Annotated[str, form(r"^https?://[^\s/]+\S*$", "an http or https URL")]
ContainerUser = Annotated[
    str,
    BeforeValidator(_as_text),
    form(r"^[a-z0-9_][a-z0-9_-]*(:[a-z0-9_][a-z0-9_-]*)?$", "a user or user:group, by name or number"),
    AfterValidator(_ids),
]
ProjectPath = Annotated[str, form(r"^\w[\w.-]*(/\w[\w.-]*)*$", "a path in the project's folder, such as trainer or run.yaml")]
Cron = Annotated[str, form(r"^\S+( \S+){4}$", 'five fields of cron in quotes, such as "0 3 * * *"')]
Mount = Annotated[
    str,
    form(r"^(/[^:\s]*|[a-z][a-z0-9-]{1,40}):/[^:\s]+$", "a mount such as /folder/of/host:/data, or name-of-dstack-volume:/data"),
    BeforeValidator(without_variable),
]
Zone = Annotated[str, form(r"^[a-z]+(-[a-z]+)+-?\d+(-[a-z]+-\d+|-ai\d+)?-?[a-z]$", "a zone such as us-east-1a or us-central1-a")]
Region = Annotated[str, form(r"^[a-z][a-z0-9-]*$", "a region such as us-east-1 or us-central1")]
ProjectId = Annotated[
    str,
    form(
        r"^([a-z0-9-]+(\.[a-z0-9-]+)+:[a-z][a-z0-9-]{0,28}[a-z0-9]|[a-z][a-z0-9-]{4,28}[a-z0-9])$",  # a domain's own are older
        "a project id: 6 to 30 characters, a-z first, then a-z, 0-9 and -",
    ),
]
Email = Annotated[str, form(r"^[^@\s,;]+@[^@\s,;]+\.[^@\s,;.]+$", "a mail address")]
PublicKey = Annotated[
    str,
    form(r"^(ssh-(ed25519|rsa)|ecdsa-sha2-nistp\d+) [A-Za-z0-9+/]+=* ?[^\n]*$", "a public key, such as ssh-ed25519 AAAA..."),
    BeforeValidator(_one_key),
    AfterValidator(_complete),
]
OwnPath = Annotated[Path, BeforeValidator(_own_path)]
NodePath = Annotated[Path, BeforeValidator(without_variable)]
Line = Annotated[str, BeforeValidator(_as_text), BeforeValidator(_line)]
Repository = Annotated[str, form(r"^[A-Za-z0-9-]+/[A-Za-z0-9._-]+$", "a GitHub repository such as owner/name")]
# What tags and labels of all clouds take.
TAG_KEY = re.compile(r"[a-z][a-z0-9_-]{0,62}")
TagValue = Annotated[str, BeforeValidator(_as_text), form(r"^[a-z0-9_-]{0,63}$", "up to 63 characters of a-z, 0-9, _ and -")]
IdleDuration = Annotated[str, form(r"^([1-9]\d*[smhdw]|off)$", "a duration such as 30m, or off")]
