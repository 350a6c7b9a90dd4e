"""The container image of flotilla:task, and what flotilla:task.env may name (stacks/schema.py)."""

from __future__ import annotations

import re
from collections.abc import Iterator

from pydantic import Field
from pydantic_core import PydanticCustomError

from stacks.settings.fields import Model, setting_error

ENVIRONMENT_NAME = re.compile(r"^[A-Za-z_][A-Za-z0-9_]*$")
PINNED = re.compile(r"^[^\s@]*[^\s@:/]:(?!latest$)[A-Za-z0-9_][\w.-]*$|@sha256:[0-9a-f]{64}$|^/\S+\.(sif|sqsh)$")
# A name that says so, with a value as long as one, and forms of keys that their makers document.
SECRET_NAME = re.compile(r"(^|_)(TOKEN|SECRET|PASSWORD|PASSWD|API_KEY|ACCESS_KEY|PRIVATE_KEY|SECRET_KEY|CREDENTIALS)$", re.IGNORECASE)
SECRET_VALUE = re.compile(r"[\w+=.:-]{8,}")
SECRET = re.compile(
    r"(hf_|ghp_|gho_|ghs_|github_pat_|glpat-|xox[abprs]-|wandb_v1_)\w{10,}|sk-[\w-]{16,}|(AKIA|ASIA)[A-Z0-9]{16}|AIza[\w-]{30,}"
    r"|eyJ[\w-]{8,4096}\.[\w-]{8,4096}\.|-----BEGIN [A-Z ]*PRIVATE KEY|(?<![a-z])[a-z]+://[^/\s:@]*:[^/\s:@]+@"
)
LONGEST = 128 * 1024  # of a variable: MAX_ARG_STRLEN of execve(2)


class Image(Model):
    """What nodes run in."""

    image: str | None = Field(default=None, description="Container image, pinned by tag or digest. Default: dstack's own.")
    image_has_ray: bool = Field(
        default=True,
        description="Whether the image contains Ray and the jobs' requirements; if false, nodes install the locked requirements at start.",
    )

    def own_errors(self) -> Iterator[PydanticCustomError]:
        if self.image is not None and (found := re.match(r"[a-z+]+://", self.image)):
            yield setting_error(f"{self.image!r} is not the name of an image; leave {found[0]} out", "image")
        elif self.image is not None and re.search(r"^~|\$", self.image):
            yield setting_error(
                f"{self.image!r} is not the name of an image, nor a file's full path; nothing replaces ~ and $ in it", "image"
            )
        elif self.image is not None and not PINNED.search(self.image):
            yield setting_error(f"{self.image!r} is not pinned; end it with a tag other than latest, or with a digest @sha256:...", "image")
        if self.image is None and not self.image_has_ray:
            text = "false belongs to image, which is not set; dstack's own gets the locked requirements without it"
            yield setting_error(text, "image_has_ray")


def variable_errors(name: str, value: str | None) -> Iterator[PydanticCustomError]:
    """Of flotilla:task.env."""
    if not ENVIRONMENT_NAME.match(name) or name.startswith("DSTACK_"):
        yield setting_error("is not a variable name: letters, digits and _, no digit first; DSTACK_... are dstack's", "env", name)
    if name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
        yield setting_error("is set for you: the token comes from the shell that sourced env.sh, never from a file in git", "env", name)
    if value is None:
        return
    if SECRET.search(value) or (SECRET_NAME.search(name) and SECRET_VALUE.fullmatch(value)):
        text = "looks like a secret, and whoever has the repository reads this file; write null and export it where you apply"
        yield setting_error(text, "env", name)
    if "\n" in value.rstrip("\n"):
        yield setting_error("has more than one line, which dstack does not take", "env", name)
    elif "\n" in value:
        yield setting_error("ends with a line's end, which dstack does not take; write |- instead of |", "env", name)
    if "\0" in value:
        yield setting_error("has the character 0, which no variable can hold", "env", name)
    if (size := len(f"{name}={value}".encode(errors="replace")) + 1) > LONGEST:
        yield setting_error(f"is {size} bytes with its name, and Linux takes {LONGEST} at most; put it into a file", "env", name)
