"""Tools by which a policy that chats uses its sandbox: bash, read and edit, as coding agents have them, and view for one that sees."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from trainer.environments.sandboxes.episode import EpisodeSandbox

PATH = {"type": "string", "description": "Path of the file; relative ones begin at the working directory of the shell."}
MOST_LINES = 2000


@dataclass(frozen=True)
class SandboxTool:
    description: str
    parameters: dict[str, Any]
    call: Callable[[EpisodeSandbox, dict[str, Any]], Awaitable[Any]]  # a text, or the content of a message with pictures
    sees: bool = False  # for models that see


async def _bash(sandbox: EpisodeSandbox, arguments: dict[str, Any]) -> str:
    result = await sandbox.exec(str(arguments["command"]))
    failed = f"[exit code {result.code}]" if result.code and not result.timed_out else ""
    return "\n".join(part for part in (result.output, failed) if part)


async def _read(sandbox: EpisodeSandbox, arguments: dict[str, Any]) -> str:
    lines = (await sandbox.text(str(arguments["path"]))).splitlines()
    first, last = int(arguments.get("first", 1)), int(arguments.get("last", len(lines)))
    if not 1 <= first <= max(1, len(lines)):
        raise ValueError(f"first: {first}; the file has {len(lines)} lines")
    last = min(last, first + MOST_LINES - 1)
    return "\n".join(f"{number:6}\t{line}" for number, line in enumerate(lines[first - 1 : last], first))


async def _edit(sandbox: EpisodeSandbox, arguments: dict[str, Any]) -> str:
    path, old, new = (str(arguments[name]) for name in ("path", "old", "new"))
    if not old:
        await sandbox.write(path, new)
        return f"{path}: written"
    text = (await sandbox.read(path)).decode()
    if (count := text.count(old)) != 1:
        raise ValueError(f"old: found {count} times in {path}; it must be there once")
    await sandbox.write(path, text.replace(old, new))
    return f"{path}: changed"


async def _view(sandbox: EpisodeSandbox, arguments: dict[str, Any]) -> list[Any]:
    return [{"type": "image", "image": await sandbox.read(str(arguments["path"]))}]


def _object(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required}


TEXT, NUMBER = {"type": "string"}, {"type": "integer"}
TOOLS: dict[str, SandboxTool] = {
    "bash": SandboxTool(
        "Run a command in the shell. Files, working directory and exported variables stay from one call to the next.",
        _object(["command"], command=TEXT),
        _bash,
    ),
    "read": SandboxTool("Read a file, with numbers of its lines.", _object(["path"], path=PATH, first=NUMBER, last=NUMBER), _read),
    "edit": SandboxTool(
        "Replace a text that is in the file once. With old empty, write the whole file.",
        _object(["path", "old", "new"], path=PATH, old=TEXT, new=TEXT),
        _edit,
    ),
    "view": SandboxTool("Look at a picture, such as a PNG or JPEG file.", _object(["path"], path=PATH), _view, sees=True),
}
