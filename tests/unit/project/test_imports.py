"""Who may import whom, read from the sources: nothing is run."""

from __future__ import annotations

import ast
import sys
from functools import cache
from importlib.machinery import FrozenImporter
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PACKAGES = ("stacks", "infra", "fleets", "cluster_tasks", "trainer", "retrieval", "serving", "sweeps", "lab", "benchmarks", "cli")
FILES = [file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py")) if ".venv" not in file.parts]
# Which of our modules a package may import beside its own; a name stands for all below it.
ALLOWED = {
    "stacks": (),
    "trainer": (),
    "retrieval": ("trainer",),
    "serving": ("trainer", "cluster_tasks.node", "cluster_tasks.recipes.job"),
    "sweeps": ("trainer", "cluster_tasks.node", "cluster_tasks.recipes.job"),
    "fleets": ("stacks",),
    "cluster_tasks": ("stacks",),
    "infra": ("stacks", "fleets", "cluster_tasks"),
    "lab": ("stacks", "fleets", "cluster_tasks", "infra"),
    "benchmarks": ("stacks", "fleets", "cluster_tasks", "infra", "trainer", "retrieval", "serving", "sweeps", "lab"),
    "cli": ("stacks", "cluster_tasks"),  # the others' commands by name alone
}
NODE_AGENT = "cluster_tasks/node"  # copied to every node alone, so it imports the standard library, and itself by relative names
PAGE = "trainer/page"  # copied to the head, beside the node agent
SANDBOX_HOST = "trainer/environments/sandboxes/host"  # runs by its path, with an interpreter that may have no packages
COPIED = (NODE_AGENT, PAGE, SANDBOX_HOST)
DSTACK_API = "stacks/dstack_api.py"  # where all who need it may import it
# Tests that run dstack's own backends, to compare what they would do with what is rendered for them.
RUNS_DSTACK = ("tests/contract/test_aws_dstack.py", "tests/contract/test_gcp_dstack.py")
SDKS = {"pulumi_aws", "pulumi_gcp", "boto3", "botocore", "google"}
NO_TORCH = (
    "trainer/configs/sections.py",
    "trainer/configs/ppo.py",
    "trainer/configs/sft.py",
    "trainer/cli/__init__.py",
    "trainer/runs/__init__.py",
)


@cache
def statements(text: str) -> list[ast.Import | ast.ImportFrom]:
    """All imports in a source, each of which several tests look at."""
    return [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import | ast.ImportFrom)]


def imports(file: Path) -> set[str]:
    """Full names of all modules that a file imports, at the top and inside functions; `from a import b` counts as a.b."""
    found: set[str] = set()
    for node in statements(file.read_text()):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        else:
            beside = 0 < node.level <= len(file.relative_to(ROOT).parts) - 2 and any(
                file.is_relative_to(ROOT / copied) for copied in COPIED
            )
            assert beside or not node.level, f"{shown(file)}:{node.lineno}: relative import; Pulumi runs infra/ without a package"
            found |= {f"{node.module}.{alias.name}" for alias in node.names} if not beside else set()
    return found


def shown(file: Path) -> str:
    return str(file.relative_to(ROOT))


def below(module: str, names: tuple[str, ...]) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in names)


@pytest.mark.parametrize("file", FILES, ids=shown)
def test_a_package_imports_only_those_of_ours_that_it_may(file):
    package = file.relative_to(ROOT).parts[0]
    foreign = {module for module in imports(file) if below(module, PACKAGES) and not below(module, (package, *ALLOWED[package]))}
    assert not foreign, f"{shown(file)} imports {sorted(foreign)}; {package} may import {ALLOWED[package] or 'none of ours'}"


@pytest.mark.parametrize("file", FILES, ids=shown)
def test_only_infra_imports_pulumi(file):
    clouds = {module for module in imports(file) if module.split(".")[0].startswith("pulumi")}
    assert not clouds or (file.is_relative_to(ROOT / "infra")), f"{shown(file)} imports {sorted(clouds)}"


@cache
def graph(root: Path, packages: tuple[str, ...]) -> dict[str, set[str]]:
    """Which of our modules each one imports anywhere: at its top, inside functions, or for the type checker alone."""
    files = modules(root, packages)
    found: dict[str, set[str]] = {}
    for name, file in files.items():
        wanted: set[str] = set()
        for node in statements(file.read_text()):
            if isinstance(node, ast.Import):
                wanted |= {alias.name for alias in node.names}
            else:
                folder = ".".join(file.relative_to(root).parts[: -node.level or None]) if node.level else ""
                origin = ".".join(filter(None, (folder, node.module)))
                wanted |= {whole if (whole := f"{origin}.{alias.name}") in files else origin for alias in node.names}
        found[name] = {other for other in wanted if other in files and other != name}
    return found


def modules(root: Path, packages: tuple[str, ...]) -> dict[str, Path]:
    """The file of each module by its full name."""
    files = [file for package in packages for file in sorted((root / package).rglob("*.py")) if ".venv" not in file.parts]
    return {".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): file for file in files}


def cycles(arrows: dict[str, set[str]]) -> list[list[str]]:
    """Groups of nodes each of which reaches the others."""
    reach = {start: reached(start, arrows) for start in arrows}
    groups = {tuple(sorted(other for other in reach[start] if start in reach[other])) for start in arrows if start in reach[start]}
    return [list(group) for group in sorted(groups)]


def reached(start: str, arrows: dict[str, set[str]]) -> set[str]:
    found: set[str] = set()
    ahead = [*arrows[start]]
    while ahead:
        if (node := ahead.pop()) not in found:
            found.add(node)
            ahead += arrows[node]
    return found


def folders(arrows: dict[str, set[str]], depth: int) -> dict[str, set[str]]:
    """The same graph between the folders of that depth; what stands above them is a node by itself."""
    shorten = {name: ".".join(name.split(".")[:depth]) for name in arrows}
    return {
        short: {shorten[other] for name in arrows if shorten[name] == short for other in arrows[name]} - {short}
        for short in shorten.values()
    }


def test_no_module_imports_itself_by_way_of_others():
    assert not cycles(graph(ROOT, PACKAGES))


def test_no_package_imports_itself_by_way_of_others():
    assert not cycles(folders(graph(ROOT, PACKAGES), depth=1))


@pytest.mark.parametrize("depth", [2, 3])
def test_no_folder_imports_itself_by_way_of_others(depth):
    """A folder's own __init__ is a part of it, so what imports its parent's imports no circle."""
    assert not cycles(folders(graph(ROOT, PACKAGES), depth))


def floors(arrows: dict[str, set[str]]) -> int:
    """How many folders stand on one another at most. There is no circle."""
    height = cache(lambda node: 1 + max(map(height, arrows[node]), default=0))
    return max(map(height, arrows))


@pytest.mark.parametrize(
    ("package", "most"),
    [("trainer", {"rooms": 35, "arrows": 180, "floors": 10}), ("stacks", {"rooms": 14, "arrows": 30, "floors": 7})],
)
def test_a_package_stays_a_house_that_a_reader_can_walk_through(package, most):
    """At most so many modules and folders at its top, arrows between them, and floors: what is new has a room, or moves one."""
    arrows = folders({name: found for name, found in graph(ROOT, (package,)).items() if name != package}, depth=2)
    found = {"rooms": len(arrows), "arrows": sum(map(len, arrows.values())), "floors": floors(arrows)}
    assert {name: number for name, number in found.items() if number > most[name]} == {}


def test_cycles_are_seen_through_functions_type_checking_and_relative_imports(tmp_path):
    package = tmp_path / "sample"
    package.mkdir()
    (package / "a.py").write_text("def f():\n    from sample.b import g\n")
    (package / "b.py").write_text("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from . import c\n")
    (package / "c.py").write_text("import sample.a\n")
    (package / "d.py").write_text("from sample import a\n")
    assert cycles(graph(tmp_path, ("sample",))) == [["sample.a", "sample.b", "sample.c"]]


@pytest.mark.parametrize("cloud", ["aws", "gcp"])
@pytest.mark.parametrize("name", ["site", "machines.startup", "machines.mounts", "preview_answers"])
def test_what_renders_for_a_cloud_loads_no_sdk(cloud, name):
    """A preflight, a preview's answers, a test of arithmetic: none of them waits two seconds for an SDK."""
    start, files = f"infra.{cloud}.{name}", modules(ROOT, PACKAGES)
    loaded = {start, *reached(start, graph(ROOT, PACKAGES)), "infra", f"infra.{cloud}", f"infra.{cloud}.machines"}
    assert not [name for name in sorted(loaded) if {module.split(".")[0] for module in imports(files[name])} & SDKS]


@pytest.mark.parametrize("file", [file for file in FILES if file.is_relative_to(ROOT / NODE_AGENT)], ids=shown)
def test_the_node_agent_needs_nothing_but_python_and_itself(file):
    own = {"torch"} if file.name == "burn_in.py" else set()  # which the agent runs, and does not import
    assert {module.split(".")[0] for module in imports(file)} <= sys.stdlib_module_names | own


@pytest.mark.parametrize("file", [file for file in FILES if file.is_relative_to(ROOT / SANDBOX_HOST)], ids=shown)
def test_what_runs_sandboxes_needs_nothing_but_python_and_itself(file):
    assert {module.split(".")[0] for module in imports(file)} <= sys.stdlib_module_names


@pytest.mark.parametrize("file", [file for file in FILES if file.is_relative_to(ROOT / PAGE)], ids=shown)
def test_the_page_of_runs_needs_what_ray_brings_and_itself(file):
    assert {module.split(".")[0] for module in imports(file)} <= sys.stdlib_module_names | {"yaml", "aiohttp"}


def test_one_module_imports_dstacks_internals():
    files = [*FILES, *(file for file in sorted((ROOT / "tests").rglob("*.py")) if "host" not in file.parts)]
    found = {shown(file) for file in files if any(below(module, ("dstack._internal",)) for module in imports(file))}
    assert found == {DSTACK_API, *RUNS_DSTACK}, "take it from stacks.dstack_api"


@pytest.mark.parametrize("file", [file for file in FILES if file.parent.name == "policy" or file.name.startswith("policy_r")], ids=shown)
def test_the_policy_pack_needs_nothing_but_python_and_pulumis_own(file):
    """Its environment has none of our packages' dependencies, and engines run it there."""
    foreign = {module for module in imports(file) if module.split(".")[0] not in sys.stdlib_module_names | {"pulumi_policy"}}
    assert not {module for module in foreign if not below(module, ("infra.policy", "infra.aws.policy_rights"))}


@pytest.mark.parametrize("name", NO_TORCH)
def test_configuration_is_read_without_torch_and_ray(name):
    assert not {module.split(".")[0] for module in imports(ROOT / name)} & {"torch", "ray", "transformers", "deepspeed", "vllm"}


def test_no_file_of_infra_hides_another_module():
    """Pulumi puts infra/ itself first on the path, so infra/types.py or infra/dstack/ would be imported in place of the real one."""
    loaded_before = {"site"}  # by the interpreter itself, before the path is set
    names = {path.stem for path in (ROOT / "infra").iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    hidden = names & (sys.stdlib_module_names | set(packages_distributions())) - set(PACKAGES) - loaded_before
    assert not hidden, f"infra has {sorted(hidden)}"


@pytest.mark.parametrize("file", FILES, ids=shown)
def test_no_module_is_named_like_one_of_the_standard_library(file):
    """`python` in its folder, or a Ray job whose working directory that is, would import it in place of the real one."""
    name = file.parent.name if file.stem == "__init__" else file.stem
    frozen = FrozenImporter.find_spec(name)  # in the interpreter itself, which finds those first
    assert frozen or name not in sys.stdlib_module_names - {"__main__"}


def test_the_rules_see_imports_inside_functions_and_refuse_relative_ones(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    file = tmp_path / "sample.py"
    file.write_text("def f():\n    from infra import cluster_token\n    import ray.util\n")
    assert imports(file) == {"infra.cluster_token", "ray.util"}
    file.write_text("from . import files\n")
    with pytest.raises(AssertionError, match=r"sample.py:1: relative import"):
        imports(file)


@pytest.mark.parametrize("file", sorted((ROOT / "tests").rglob("*.py")), ids=shown)
def test_no_test_brings_flask_into_the_process_in_which_others_start_vllm(file):
    """vLLM looks at every object of every loaded module, and Flask's proxies raise when they are looked at."""
    assert not {module for module in imports(file) if below(module, ("moto.server", "flask", "werkzeug"))}
