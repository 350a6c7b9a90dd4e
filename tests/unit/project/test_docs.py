"""What the pages say exists: links, make targets, modules and their flags, files, settings, complete stacks, error messages."""

from __future__ import annotations

import ast
import re
import shlex
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster_tasks.recipes import recipes
from stacks.load import parse as parse_stack
from stacks.schema import Stack
from trainer import cli
from trainer.cli import help as config_help
from trainer.configs.ppo import PpoConfig
from trainer.configs.preferences import DpoConfig, RmConfig
from trainer.configs.sections import Config
from trainer.configs.sft import SftConfig
from trainer.errors import ConfigError

ROOT = Path(__file__).parents[3]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
PACKAGES = ("stacks", "infra", "fleets", "cluster_tasks", "trainer", "retrieval", "serving", "sweeps", "benchmarks")
TRAINERS: dict[str, type[Config]] = {
    "trainer.train_ppo": PpoConfig,
    "trainer.train_sft": SftConfig,
    "trainer.train_rm": RmConfig,
    "trainer.train_dpo": DpoConfig,
}
SECTIONS = tuple(PpoConfig.model_fields)
FOREIGN = [ROOT / "docs" / f"from-{name}.md" for name in ("openrlhf", "verl", "trl")]  # tables, whose last column is ours
FORMS = [ROOT / "CHANGELOG.md", *ROOT.glob("docs/*settings.md"), *ROOT.glob("docs/decisions/0*.md")]  # pages with a form of their own
# Other trainers' versions are those of their recipes.
OTHERS = {re.sub(r"\[.*\]", "", package) for recipe in recipes().values() for package in recipe.packages}
RENDERED = {
    *(file.name for file in (ROOT / "tests/contract/golden").rglob("*")),
    "ray.token",  # made where the others are rendered
}
REPOSITORY_PATH = re.compile(r"^(?:\.ci|docs|requirements|tests|(?:" + "|".join(PACKAGES) + r"))/[\w./-]+$")


def named(pages: list[Path]):
    return pytest.mark.parametrize("page", pages, ids=lambda page: str(page.relative_to(ROOT)))


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def spans(text: str) -> list[str]:
    """Inline code, one or two backticks."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return [two or single for two, single in re.findall(r"``\s?(.+?)\s?``|`([^`\n]+)`", prose)]


def code(page: Path) -> list[str]:
    """Everything that a reader may type or look up: lines of plain blocks, and inline code."""
    return [line for block in blocks(page, "") for line in block.splitlines()] + spans(page.read_text())


def own(page: Path) -> str:
    """The page, of tables with other systems' keys the last column alone."""
    if page not in FOREIGN:
        return page.read_text()
    return re.sub(r"^\|.*\| (.+) \|$", r"\1", page.read_text(), flags=re.MULTILINE)


@cache
def literals(file: Path) -> tuple[str, ...]:
    """The texts in a source, those of f-strings cut where values are put in; of a shell script, its lines."""
    if file.suffix != ".py":
        return tuple(file.read_text().splitlines())
    constants = (node.value for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Constant))
    return tuple(value for value in constants if isinstance(value, str))


@cache
def makefile() -> tuple[set[str], set[str]]:
    """Targets that may be asked for, and variables that recipes read."""
    text = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", text, re.MULTILINE))
    return targets, set(re.findall(r"^([A-Z]+) \?=", text, re.MULTILINE))


@named(PAGES)
def test_every_relative_link_leads_to_a_file_and_a_heading(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), f"{page.name} links to {target}, which does not exist"
        headings = re.findall(r"^#+ (.+)$", file.read_text(), re.MULTILINE) if anchor else []
        slugs = [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]
        slugs += re.findall(r'<a id="([\w.]+)">', file.read_text()) if anchor else []
        assert not anchor or anchor in slugs, f"{page.name} links to {target}; the headings of {file.name} are {slugs}"


@cache
def links(page: Path) -> set[Path]:
    """Pages of ours that a page links to, itself left out."""
    targets = (target.partition("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()))
    return {file for target in targets if (file := (page.parent / target).resolve()) in PAGES} - {page}


@named(PAGES)
def test_every_page_is_two_clicks_from_the_readme_and_links_on(page):
    near = links(ROOT / "README.md")
    reached = {ROOT / "README.md", *near, *(page for first in near for page in links(first))}
    assert page in reached, f"link to {page.relative_to(ROOT)} from docs/README.md"
    assert links(page) or page in FOREIGN, f"{page.relative_to(ROOT)} links to no other page"


@named([page for page in PAGES if page not in FOREIGN and page not in FORMS])
def test_every_page_begins_with_its_purpose_and_ends_with_links_on(page):
    title, purpose, *_, last = (part for part in page.read_text().strip().split("\n\n"))
    assert title.startswith("# ") and not purpose.startswith(("#", "|", "```"))
    assert "](" in last, "end with: Next: ..."


@named(PAGES)
def test_every_make_target_and_variable_is_in_the_makefile(page):
    targets, variables = makefile()
    for line in code(page):
        for target, settings in re.findall(r"(?:^|\s)make ([a-z][a-z-]*)((?: [A-Z]+=\S+)*)", line):
            assert target in targets, f"{page.name}: make {target}; the Makefile has {sorted(targets)}"
            unknown = set(re.findall(r"([A-Z]+)=", settings)) - variables
            assert not unknown, f"{page.name}: make {target} {settings}: the Makefile does not read {unknown}"


@named(PAGES)
def test_every_module_is_there_and_knows_the_flags_shown(page):
    for line in code(page):
        for command in re.findall(r"python3? -m [^|;&<]+|torchrun [^|;&<]+", line):
            words = shlex.split(command.replace("'", "").partition(" -- ")[0])  # behind -- stands a command of its own
            module, *arguments = words[words.index("-m") + 1 :]
            if module.split(".")[0] not in PACKAGES:
                continue
            spec = find_spec(module)
            assert spec and spec.origin, f"{page.name}: python -m {module}: no such module"
            parser = ROOT / "trainer/cli/__init__.py" if module in TRAINERS else Path(spec.origin)
            if parser.name == "__init__.py":
                parser = next(parser.parent.glob("command*.py"), parser)
            for flag in (word.partition("=")[0] for word in arguments if word.startswith("--")):
                assert flag in (*literals(parser), "--help"), f"{page.name}: {command}: {parser.name} knows no {flag}"


@named(PAGES)
def test_every_file_of_the_repository_that_is_named_exists(page):
    for word in {word.strip(",;:") for line in code(page) for word in line.split()}:
        if REPOSITORY_PATH.match(word) and ".venv" not in Path(word).parts:  # environments are made, not kept
            assert (ROOT / word).exists(), f"{page.name} names {word}, which does not exist"
        if rendered := re.match(r"build/(?:local|onprem|(?:aws|gcp)-(?:dev|prod))/([\w.-]+\.(?:yml|yaml|sh|token|py))$", word):
            assert rendered[1] in RENDERED, f"{page.name} names {word}, which no stack renders"


@named(PAGES)
def test_versions_shown_are_those_of_the_project(page):
    for requirement in re.findall(r"[\w-]+(?:\[[\w,]+\])?==[\w.]+", page.read_text()):
        name, _, version = re.sub(r"\[.*\]", "", requirement).partition("==")
        project = f'"{name}=={version}"' in (ROOT / "pyproject.toml").read_text()
        assert project or f"{name}=={version}" in OTHERS, f"{page.name} shows {requirement}"


# Settings


@pytest.fixture
def prepared(tmp_path, monkeypatch):
    """A folder to type commands in: the pages' own settings and data, and the model that the demo's warm start exports."""
    for name, page in (("run.yaml", "training/README.md"), ("mine/run.yaml", "local.md")):
        text = next(block for block in blocks(ROOT / "docs" / page, "yaml") if "data:" in block)
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
        (tmp_path / yaml.safe_load(text)["data"]["path"]).touch()
    (tmp_path / "runs/demo-sft/model").mkdir(parents=True)
    (tmp_path / "runs/demo-sft/model/config.json").touch()
    (tmp_path / "trainer").symlink_to(ROOT / "trainer")
    monkeypatch.setenv("FLOTILLA_RUNS", str(tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)


def commands(page: Path) -> list[tuple[str, list[str]]]:
    """Each trainer that is started, with its arguments up to the next command; without those that only say `...`."""
    found = []
    for line in code(page):
        for module, rest in re.findall(r"-m (trainer\.train_\w+)((?: (?!&&|\|)(?:'[^']*'|[^\s'`]+))*)", line):
            arguments = shlex.split(rest)
            if arguments and "..." not in arguments and not {"--help", "--print-config"} & set(arguments):
                found.append((module, arguments))
    return found


@named(PAGES)
@pytest.mark.usefixtures("prepared")
def test_every_training_command_is_accepted(page):
    for module, arguments in commands(page):
        cli.parse(arguments, prog=f"python -m {module}", model=TRAINERS[module])


@named(PAGES)
@pytest.mark.usefixtures("prepared")
def test_every_override_in_the_text_is_accepted(page):
    setting = re.compile(rf"(?:{'|'.join(SECTIONS)})(?:\.[a-z_]+)+=\S+")
    for span in spans(own(page)):
        words = span.split()
        if words and all(setting.fullmatch(word) for word in words):
            cli.parse(["--config", "run.yaml", *words], prog="docs", model=PpoConfig)


@cache
def trainers_settings() -> set[str]:
    return {key for model in TRAINERS.values() for key in config_help.settings(model)} | {"algorithm.kl", "environment.sandbox"}


@named(PAGES)
def test_every_setting_that_is_named_exists(page):
    known = trainers_settings()
    free = tuple(f"{key}." for key in ("model.init", "data.args", "data.template", "environment.args", "reward.args", "rollout.options"))
    names = [span.partition("=")[0] for span in spans(own(page))]
    for name in names:
        if re.fullmatch(rf"(?:{'|'.join(SECTIONS)})(?:\.[a-z_]+)+", name) and not name.startswith(free):
            if name == "run.yaml" or (ROOT / f"{name.replace('.', '/')}.py").exists():  # a file; a module such as trainer.train_ppo
                continue
            assert name in known, f"{page.name} names {name}, which is no setting"


@named(PAGES)
def test_every_complete_stack_parses(page):
    for block in blocks(page, "yaml"):
        settings = (yaml.safe_load(block) or {}).get("config", {})
        if "flotilla:fleets" in settings:
            assert isinstance(parse_stack("docs", settings), Stack)


@cache
def stack_schema() -> dict[str, Any]:
    return Stack.model_json_schema()


def test_the_stack_on_the_first_screen_is_the_shipped_file_without_optional_keys():
    def within(part, whole) -> bool:
        if isinstance(part, dict):
            return isinstance(whole, dict) and all(key in whole and within(value, whole[key]) for key, value in part.items())
        if isinstance(part, list):
            return len(part) == len(whole) and all(map(within, part, whole))
        return str(part) == str(whole)  # numbers may be quoted

    [block] = [block for block in blocks(ROOT / "README.md", "yaml") if "flotilla:fleets" in block]
    name = re.findall(r"stacks/Pulumi\.\w+\.yaml", block)[0]
    assert within(yaml.safe_load(block), yaml.safe_load((ROOT / name).read_text()))
    lines = [line for line in block.splitlines() if not line.startswith("#")]
    assert f"| {len(lines)} above; " in (ROOT / "README.md").read_text()


@named(PAGES)
def test_every_stack_key_that_is_named_exists(page):
    for key in {*re.findall(r"flotilla:([a-z_]+(?:\[\d*\])?(?:\.[a-z_]+(?:\[\d*\])?)*)", page.read_text())}:
        node = model = stack_schema()
        for part in re.findall(r"[a-z_]+", key):
            node = next((choice for choice in node.get("anyOf", []) if choice.get("type") != "null"), node)
            node = node.get("items", node)
            node = model["$defs"][node["$ref"].rpartition("/")[2]] if "$ref" in node else node
            assert part in node.get("properties", {}), f"{page.name}: flotilla:{key}: no {part}"
            node = node["properties"][part]


# Errors


def quoted_messages() -> list[str]:
    """The first column of the tables; what others print is written there without being code alone."""
    rows = re.findall(r"^\| (``?.+?``?) \| ", (ROOT / "docs/troubleshooting.md").read_text(), re.MULTILINE)
    return [spans(row)[0].replace("warning: ", "") for row in rows]


@cache
def printed() -> str:
    """The texts in all sources, one after the other."""
    sources = [*(file for package in PACKAGES for file in (ROOT / package).rglob("*.py") if ".venv" not in file.parts), ROOT / ".ci/setup"]
    sources += (ROOT / "cluster_tasks/node").glob("*.sh")
    return "\0".join(text for file in sources for text in literals(file))


def missing_pieces(message: str) -> list[str]:
    """Parts between the ellipses that no source prints."""
    return [piece for piece in (part.strip() for part in message.split("…")) if len(piece) > 1 and piece not in printed()]


@pytest.mark.parametrize("message", quoted_messages())
def test_every_error_that_troubleshooting_quotes_is_one_that_we_print(message):
    assert not missing_pieces(message), "troubleshooting.md quotes a message that no source prints"


def test_these_checks_see_mistakes():
    assert missing_pieces("unknown key…; did you mean … or a parrot?") == ["or a parrot?"]
    assert spans("a `b` and ``c `d` e`` ```") == ["b", "c `d` e"]
    with pytest.raises(ConfigError, match=r"did you mean trainer\.steps"):
        cli.parse(["trainer.stepz=5"], prog="docs", model=PpoConfig)
    assert len(quoted_messages()) > 40
    assert any(commands(page) for page in PAGES)
