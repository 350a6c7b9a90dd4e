"""Task folders of Harbor (instruction.md, task.toml) and Terminal-Bench (task.yaml), as one type. Nothing is run."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from trainer.environments.sandboxes.images import Dockerfile
from trainer.environments.sandboxes.tasks import repositories
from trainer.errors import ConfigError

SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?b)?", re.IGNORECASE)
MEBIBYTES = {"": 1 / (1 << 20), "k": 1 / 1024, "m": 1, "g": 1024, "t": 1 << 20}
TESTS_SECONDS, AGENT_SECONDS, BUILD_SECONDS = 600.0, 900.0, 600.0
DOCKERFILE = ("FROM", "WORKDIR", "COPY", "ADD", "ENV", "RUN", "CMD", "ENTRYPOINT", "LABEL", "EXPOSE", "ARG", "USER", "SHELL")
DOCKERFILE += ("HEALTHCHECK", "MAINTAINER", "ONBUILD", "STOPSIGNAL", "VOLUME")
HEREDOC = re.compile(r"<<(-?)(['\"]?)(\w+)\2")


@dataclass(frozen=True)
class Task:
    folder: Path
    instruction: str
    tests: Path  # laid at /tests of the clean copy
    command: str  # that runs them there; exit code 0, or a reward in /logs/verifier/reward.txt
    solution: Path | None  # a program of the shell
    steps: tuple[tuple[str, str], ...]  # how its environment is made: instructions of a Dockerfile
    workdir: str
    image: str = ""
    tests_seconds: float = TESTS_SECONDS
    agent_seconds: float = AGENT_SECONDS
    limits: Mapping[str, Any] = field(default_factory=dict)  # settings of Spec
    dockerfile: Dockerfile | None = None  # of its environment, unless that names an image

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def context(self) -> Path:
        """Where COPY takes files from."""
        return self.folder / "environment" if (self.folder / "environment").is_dir() else self.folder


def task_folders(path: str | Path, repos: str = "") -> list[Path]:
    """`path` itself, or what is in it, or its rows written as folders. Raises ConfigError where there is no task."""
    root = Path(path)
    if root.is_file():
        return repositories.folders(root, repos)
    if not root.is_dir():
        raise ConfigError(f"{path}: no such folder of tasks")
    found = [root] if is_task(root) else sorted(each for each in root.iterdir() if is_task(each))
    if not found:
        raise ConfigError(f"{path}: no tasks; each is a folder with task.toml and instruction.md (Harbor), or task.yaml (Terminal-Bench)")
    return found


def is_task(folder: Path) -> bool:
    return (folder / "task.toml").is_file() or (folder / "task.yaml").is_file()


def read(folder: Path) -> Task:
    """Raises ConfigError that names the file and what is wrong with it."""
    return _harbor(folder) if (folder / "task.toml").is_file() else _terminal_bench(folder)


def _harbor(folder: Path) -> Task:
    file = folder / "task.toml"
    try:
        given = tomllib.loads(file.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: {error}") from None
    environment = _section(file, given, "environment")
    steps, workdir = _dockerfile(folder / "environment/Dockerfile")
    image = environment.get("docker_image", "")
    return Task(
        folder,
        _text(folder / "instruction.md"),
        _tests(folder, folder / "tests/test.sh"),
        "bash /tests/test.sh",
        _there(folder / "solution/solve.sh"),
        () if image else steps,
        workdir,
        f"{image}",
        _number(file, _section(file, given, "verifier"), "timeout_sec", TESTS_SECONDS),
        _number(file, _section(file, given, "agent"), "timeout_sec", AGENT_SECONDS),
        _limits(file, environment),
        None
        if image
        else _buildable(folder / "environment/Dockerfile", folder, _number(file, environment, "build_timeout_sec", BUILD_SECONDS)),
    )


def _terminal_bench(folder: Path) -> Task:
    file = folder / "task.yaml"
    try:
        given = yaml.safe_load(file.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: {' '.join(str(error).split())}") from None
    if not isinstance(given, dict) or not isinstance(given.get("instruction"), str) or not given["instruction"].strip():
        raise ConfigError(f"{file}: instruction: missing; a text is needed")
    steps, workdir = _dockerfile(folder / "Dockerfile")
    _tests(folder, folder / "run-tests.sh")
    if not (folder / "tests").is_dir():
        raise ConfigError(f"{folder}: no tests: tests/ is missing")
    return Task(
        folder,
        given["instruction"],
        folder / "tests",
        "TEST_DIR=/tests bash /tests/.run-tests.sh",
        _there(folder / "solution.sh"),
        steps,
        workdir,
        "",
        _number(file, given, "max_test_timeout_sec", TESTS_SECONDS),
        _number(file, given, "max_agent_timeout_sec", AGENT_SECONDS),
        dockerfile=_buildable(folder / "Dockerfile", folder, BUILD_SECONDS),
    )


def _section(file: Path, given: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = given.get(name, {})
    if not isinstance(found, Mapping):
        raise ConfigError(f"{file}: {name}: {found!r}; a table is needed")
    return found


def _number(file: Path, given: Mapping[str, Any], name: str, default: float) -> float:
    value = given.get(name, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
        raise ConfigError(f"{file}: {name}: {value!r}; a number > 0 is needed")
    return float(value)


def _limits(file: Path, environment: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if "cpus" in environment:
        found["cpu"] = _number(file, environment, "cpus", 1)
    for name, setting in (("memory", "memory_mb"), ("storage", "disk_mb")):
        if f"{name}_mb" in environment:
            found[setting] = int(_number(file, environment, f"{name}_mb", 1))
        elif name in environment:
            match = SIZE.fullmatch(f"{environment[name]}".strip())
            if not match or not float(match[1]):
                raise ConfigError(f"{file}: environment.{name}: {environment[name]!r}; a size such as 2G is needed")
            found[setting] = max(1, int(float(match[1]) * MEBIBYTES[match[2].lower()]))
    return found


def _text(file: Path) -> str:
    if not file.is_file() or not (text := file.read_text().strip()):
        raise ConfigError(f"{file}: missing or empty; it is what the policy is asked")
    return text


def _tests(folder: Path, script: Path) -> Path:
    if not script.is_file():
        raise ConfigError(f"{folder}: no tests: {script.relative_to(folder)} is missing")
    return script.parent


def _there(file: Path) -> Path | None:
    return file if file.is_file() else None


def _buildable(file: Path, task: Path, seconds: float) -> Dockerfile | None:
    return Dockerfile(file, file.parent, f"{task}", seconds) if file.is_file() else None


def _dockerfile(file: Path) -> tuple[tuple[tuple[str, str], ...], str]:
    """Its instructions, and the last WORKDIR. Raises ConfigError for one that is none."""
    if not file.is_file():
        return (), "/app"
    steps, workdir = [], "/app"
    for word, rest in _instructions(file.read_text().splitlines()):
        if word not in DOCKERFILE:
            raise ConfigError(f"{file}: {word}: not read here; known are {', '.join(DOCKERFILE)}")
        if word in ("COPY", "ADD") and len(shlex.split(rest.partition("\n")[0])) < 2:
            raise ConfigError(f"{file}: {word} {rest}: a source and a target are needed")
        workdir = rest if word == "WORKDIR" else workdir
        steps.append((word, rest))
    return tuple(steps), workdir if workdir.startswith("/") else f"/{workdir}"


def _instructions(lines: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Each with what follows: lines that go on after a backslash as one, here-documents as they are."""
    left = iter(lines)
    for line in left:
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        whole = line.strip()
        while whole.endswith("\\"):
            more = next((each for each in left if each.strip() and not each.lstrip().startswith("#")), "")
            whole = f"{whole[:-1]} {more.strip()}"
        word, _, rest = whole.partition(" ")
        if word.upper() in ("RUN", "COPY", "ADD"):
            for dash, _, end in HEREDOC.findall(rest):
                for each in left:
                    rest += f"\n{each}"
                    if (each.lstrip("\t") if dash else each) == end:
                        break
        yield word.upper(), rest.strip()
