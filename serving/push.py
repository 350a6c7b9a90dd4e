"""`flotilla push run:NAME[@STEP] TARGET`: a run's model with its card to a hub, S3 or GCS. Started again, it goes on where it was."""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from serving.models import Model, model_of
from serving.targets import FORMS, MANIFEST, File, Target, There, target_of
from trainer.cli import exits_cleanly, usage, yaml_io
from trainer.errors import ConfigError
from trainer.metrics import model_card

PROG = "flotilla push"
SECRET_FILES = re.compile(
    r"\.env(\..*)?|\.netrc|id_(rsa|dsa|ecdsa|ed25519)|.*\.(pem|key|p12|pfx|token)|credentials(\.json)?|\.git-credentials"
)
# As their makers write them: Hugging Face, AWS, GitHub, OpenAI and others' sk-, Slack, Google, private keys.
SECRET = re.compile(
    rb"hf_[A-Za-z0-9]{30,}|(?:AKIA|ASIA)[0-9A-Z]{16}|gh[pousr]_[A-Za-z0-9]{36,}|github_pat_\w{50,}|\bsk-[A-Za-z0-9_-]{32,}|xox[abprs]-[\w-]{20,}"
    rb"|AIza[\w-]{35}|-----BEGIN [A-Z ]*PRIVATE KEY-----"
)
TEXTS = (".md", ".json", ".jsonl", ".yaml", ".yml", ".txt", ".py", ".jinja", ".cfg", ".toml", ".ini", ".sh")
MOST_TEXT = 64 * 2**20  # bytes: of a tokenizer, too


def files_of(model: Model, card: Path) -> list[File]:
    """All of a model's folder, with a card of today in folder `card` in place of that of its export. Raises ConfigError for a hub's."""
    folder = Path(model.path)
    if not folder.is_dir():
        raise ConfigError(f"{model.path}: is a hub's model; give run:NAME[@STEP] or a folder")
    sources = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}
    sources = {path: source for path, source in sources.items() if not path.startswith((".cache/", MANIFEST))}
    if model.run is not None and model.step is not None and (settings := settings_of(model.run)):
        for name, content in model_card.files(model.run, settings, model.step).items():
            (card / name).write_bytes(content)
            sources[name] = card / name
    if found := next(secrets(sources), None):
        raise ConfigError(f"{found}; nothing was sent")
    return [File.of(path, source) for path, source in sources.items()]


def settings_of(run: Path) -> dict[str, Any]:
    file = run / "run.yaml"
    return (yaml_io.load(file.read_text()) or {}) if file.is_file() else {}


def secrets(sources: dict[str, Path]) -> Iterator[str]:
    """Where one seems to be, without it."""
    for path, source in sources.items():
        if SECRET_FILES.fullmatch(Path(path).name):
            yield f"{path}: has the name of a file with secrets; take it out of the model's folder"
        elif source.suffix in TEXTS and source.stat().st_size <= MOST_TEXT:
            for number, line in enumerate(source.read_bytes().splitlines(), 1):
                if match := SECRET.search(line):
                    yield f"{path}:{number}: looks like a secret ({match[0][:4].decode()}...); take it out of the run's settings or files"


def allow(target: Target, there: There | None, step: int | None, public: bool, yes: bool, force: bool) -> None:
    """Raises ConfigError where it would be public without a word, or goes over what is newer."""
    is_public = there.public if there else bool(target.new_is_public and public)
    if public and target.new_is_public is None:
        raise ConfigError(f"--public: {target.name}: who may read a bucket is the bucket's own setting; leave it out")
    if is_public and not (yes and (public or target.new_is_public is None)):
        flags = "--public --yes" if target.new_is_public else "--yes"
        raise ConfigError(f"{target.name}: anybody can read what lies there; to push all the same: {flags}")
    if there and there.public is None and not yes:
        raise ConfigError(f"{target.name}: whether anybody can read what lies there takes {there.unknown}; to push all the same: --yes")
    if public and there and not there.public:
        raise ConfigError(f"--public: {target.name} is private already; change that on the hub")
    if there is None or force or not there.files:
        return
    if there.manifest is None:
        raise ConfigError(f"{target.name}: has {len(there.files)} files that flotilla push did not write; another name, or --force")
    known = there.manifest.get("step")
    if step is None or known is None or known > step:
        which = "a model without a step" if step is None else f"step {step}"
        raise ConfigError(f"{target.name}: holds step {known} of {there.manifest.get('run')}, which {which} would replace; --force does it")


def push(model: Model, target: Target, public: bool, yes: bool, force: bool) -> str:
    """Where it lies then. Raises ConfigError."""
    with tempfile.TemporaryDirectory() as card:
        files = files_of(model, Path(card))
        allow(target, target.look(), model.step, public, yes, force)
        commit = (model_card.rows_of(model.run / model_card.STARTS) or [{}])[-1].get("commit") if model.run else None
        sums = {file.path: {"sha256": file.sha256, "size": file.size} for file in files}
        manifest = {"run": model.name, "step": model.step, "commit": commit, "complete": True, "files": sums}
        return target.write(files, manifest, public, lambda line: print(line, file=sys.stderr, flush=True))


def main(arguments: list[str], prog: str = PROG) -> int:
    """Raises ConfigError."""
    about = (
        "Push a run's model with its card to a hub, S3 or GCS: private unless told otherwise,\nand without sending what is there already."
    )
    examples = (f"{prog} run:demo hub:me/demo", f"{prog} run:demo@20 s3://bucket/models/demo", f"{prog} local run:demo hub:me/demo")
    parser = usage.parser(prog, about, *examples, usage="[STACK] MODEL TARGET [flags]")
    parser.add_argument("model", metavar="MODEL", help="run:NAME[@STEP] or a model's folder; before it a STACK whose run it is")
    parser.add_argument("target", metavar="TARGET", help=FORMS)
    parser.add_argument("--public", action="store_true", help="make a new repository public; needs --yes")
    parser.add_argument("--yes", action="store_true", help="push also where anybody can read it")
    parser.add_argument("--force", action="store_true", help="replace a newer version, or files of others")
    options = parser.parse_args(arguments)
    target = target_of(options.target)
    if options.public and not options.yes:
        raise ConfigError("--public: needs --yes, as anybody could read the model")
    model = model_of(options.model)
    place = push(model, target, options.public, options.yes, options.force)
    print(f"pushed: {model.name}{'' if model.step is None else f' step {model.step}'} to {place}")
    return 0


if __name__ == "__main__":
    with exits_cleanly():
        sys.exit(main(sys.argv[1:]))
