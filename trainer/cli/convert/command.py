"""run.yaml from a command or script of verl, OpenRLHF or TRL. What could not be said in settings of ours is listed."""

from __future__ import annotations

import argparse
import shlex
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml

from trainer.cli import parse, yaml_io
from trainer.cli.convert import openrlhf, trl, verl
from trainer.cli.convert.given import Given, Made
from trainer.cli.convert.shell import Script
from trainer.errors import ConfigError

EXAMPLES = """examples:
  flotilla convert verl run_qwen3-8b.sh
  flotilla convert verl --rows 7473 -- python3 -m verl.trainer.main_ppo data.train_batch_size=1024 ...
  flotilla convert openrlhf train_ppo.sh --output ppo.yaml
  flotilla convert trl grpo.py"""
CONFIGS = {
    "train_ppo": "trainer.configs.ppo:PpoConfig",
    "train_sft": "trainer.configs.sft:SftConfig",
    "train_rm": "trainer.configs.preferences:RmConfig",
    "train_dpo": "trainer.configs.preferences:DpoConfig",
}
FROM = ("verl", "openrlhf", "trl")


def main(argv: list[str]) -> None:
    words, after, command = argv, [], []
    if "--" in argv:
        words, command = argv[: argv.index("--")], argv[argv.index("--") + 1 :]
        after = ["command"]
    parser = argparse.ArgumentParser(
        prog="flotilla convert",
        usage=f"flotilla convert {'|'.join(FROM)} SCRIPT [flags]\n       flotilla convert {'|'.join(FROM)} [flags] -- COMMAND",
        description="Write run.yaml from another trainer's command, and list what it leaves out.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("trainer", choices=FROM, metavar="|".join(FROM), help="whose command it is")
    parser.add_argument("script", nargs="?", metavar="SCRIPT", help="a shell script; of TRL a Python script or its YAML too")
    parser.add_argument("--output", default="run.yaml", metavar="FILE", help="file to write, - for the terminal (default: run.yaml)")
    parser.add_argument("--force", action="store_true", help="replace FILE")
    parser.add_argument(
        "--rows", type=int, metavar="N", help="rows of the data, to compute steps from epochs; counted where it is a file here"
    )
    args = parser.parse_args(words)
    if bool(args.script) == bool(after):
        parser.error("give a SCRIPT, or a COMMAND after --")
    output = None if args.output == "-" else Path(args.output)
    if output and output.exists() and not args.force:
        raise ConfigError(f"--output={output}: exists; give another name, or --force to replace it")
    made = read(args.trainer, Path(args.script) if args.script else None, command, args.rows)
    source = args.script or shlex.join(command)[:60]
    text = f"# From {args.trainer}: {source}\n" + yaml.dump(made.sections(), Dumper=yaml_io.Dumper, sort_keys=False, width=140)
    if output:
        output.write_text(text)
    else:
        print(text, end="")
    report(made, args.output if output else "run.yaml", refused(made))


def read(trainer: str, script: Path | None, command: list[str], rows: int | None) -> Made:
    """Raises ConfigError for a script that cannot be read, or has no command of that trainer."""
    if trainer == "trl" and script and script.suffix in (".yaml", ".yml"):
        raise ConfigError(f"{script}: which trainer reads it? Write: flotilla convert trl -- trl grpo --config {script}")
    if script and not script.is_file():
        raise ConfigError(f"{script}: no such file; a command is given after --")
    if trainer == "trl":
        return trl.convert(script, command, rows)
    kind = {"verl": verl, "openrlhf": openrlhf}[trainer]

    def wanted(words: list[str]) -> bool:
        return any(word in kind.ENTRY or word.endswith(tuple(f"/{entry}" for entry in kind.ENTRY)) for word in words)

    found = Script(script.read_text() if script else shlex.join(command), wanted)
    if not found.command:
        where = str(script) if script else "the command"
        raise ConfigError(f"{where}: {trainer} is not started in it; expected {' or '.join(kind.ENTRY[:2])} with its settings")
    given = overrides(found.command) if trainer == "verl" else openrlhf.flags(found.command)
    made = kind.convert(given, rows)
    made.checks += [f"${name}: not set in the script; replace it in the file" for name in sorted(found.unknown)]
    return made


def overrides(words: list[str]) -> Given:
    """Hydra's key=value, with its + and ++."""
    pairs = [word.lstrip("+").partition("=") for word in words if "=" in word and not word.startswith("-")]
    return Given({key: value for key, _, value in pairs if key.replace(".", "").replace("_", "").isalnum()})


def refused(made: Made) -> list[str]:
    """What a start would say of the settings alone."""
    module, _, name = CONFIGS[made.entry].partition(":")
    words = [f"{key}={yaml_text(value)}" for key, value in made.settings.items()]
    try:
        parse(words, prog=f"python -m trainer.{made.entry}", model=getattr(import_module(module), name))
    except ConfigError as error:
        return [line.removeprefix("command line: ") for line in str(error).splitlines()]
    return []


def yaml_text(value: Any) -> str:
    return yaml.dump(value, Dumper=yaml_io.Dumper, default_flow_style=True, width=10**6).removesuffix("\n").removesuffix("\n...")


def report(made: Made, output: str, wrong: list[str]) -> None:
    """To stderr, so that the settings may go through a pipe."""
    sections = {
        "fix before a start": wrong,
        "look at": made.checks,
        "left out": [f"{setting}: {why}" for setting, why in made.left_out],
        "not needed here": [f"{setting}: {why}".removesuffix(": ") for setting, why in made.not_needed],
    }
    for title, lines in sections.items():
        if lines:
            print(f"{title}:", *(f"  {line}" for line in lines), sep="\n", file=sys.stderr)
    verb = made.entry.removeprefix("train_")
    print(f"{output} has {len(made.settings)} settings: flotilla train {verb} --config {output} --print-config", file=sys.stderr)
