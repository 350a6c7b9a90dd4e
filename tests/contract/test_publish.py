"""The rendered files against those who read them: dstack's parsers, the shell, YAML."""

from __future__ import annotations

import re
import shutil
import stat
import subprocess
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster_tasks import build_folder
from cluster_tasks.identity import make_token
from cluster_tasks.ray import NODE_AGENT, PAGE, SANDBOXES
from infra import cluster_token, publish
from stacks import load
from stacks.dstack_api import parse_apply_configuration
from stacks.load import StackError
from stacks.places import clouds, place_of
from stacks.schema import Stack
from stacks.site import Site

ROOT = Path(__file__).parents[2]
STACKS = [name for name in load.names(ROOT) if load.load(name, ROOT).cloud not in clouds()]  # a cloud's site is known after `up` alone
ON_DSTACK = [name for name in STACKS if name != "slurm"]


def built(name: str) -> tuple[Stack, Site]:
    stack = load.load(name, ROOT)
    return stack, import_module(f"{place_of(stack).program}.build").build(stack)


@pytest.mark.parametrize("name", ON_DSTACK)
def test_dstack_takes_every_definition(name):
    texts = publish.rendered(*built(name))
    definitions = {file: yaml.safe_load(text) for file, text in texts.items() if file.endswith(".dstack.yml")}
    assert "ray-cluster.dstack.yml" in definitions
    for file, definition in definitions.items():
        assert parse_apply_configuration(definition).type == definition["type"], file


def test_on_premises_there_is_a_file_for_each_step():
    assert list(publish.rendered(*built("onprem"))) == [
        "server-config.yml",
        "gpus.fleet.dstack.yml",
        "ray-cluster.dstack.yml",
        "runtime-env.yaml",
        "env.sh",
    ]


@pytest.mark.parametrize("name", load.names(ROOT))
def test_a_plan_has_the_files_by_their_names_and_the_complete_node_agent(name, planned):
    made = planned(name).files
    sources = [path for path in NODE_AGENT.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    agent = {f"node/{file.relative_to(NODE_AGENT)}": file.read_text() for file in sources}
    page = [path for path in PAGE.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    agent |= {f"node/page/{file.relative_to(PAGE)}": file.read_text() for file in page}
    agent |= {f"node/sandboxes/{file.name}": file.read_text() for file in SANDBOXES.glob("*.py")}
    assert made.items() >= agent.items()
    if name in STACKS:
        assert made.keys() == publish.rendered(*built(name)).keys() | agent.keys()


def test_this_machine_needs_no_fleet():
    texts = publish.rendered(*built("local"))
    assert list(texts) == ["ray-cluster.dstack.yml", "runtime-env.yaml", "env.sh"]


@pytest.mark.parametrize("name", STACKS)
def test_rendering_is_pure(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    stack, site = built(name)
    assert publish.rendered(stack, site) == publish.rendered(stack, site)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", STACKS)
def test_the_next_commands_name_files_that_are_rendered(name):
    stack, site = built(name)
    words = [word for command in publish.next_commands(stack, site) for word in command.split()]
    mentioned = {word.removeprefix(f"build/{name}/") for word in words if word.startswith("build/")}
    assert mentioned or not place_of(stack).remote
    assert mentioned <= publish.rendered(stack, site).keys()


def test_a_changed_port_reaches_environment_and_outputs():
    stack, site = built("local")
    moved = stack.model_copy(update={"task": stack.task.model_copy(update={"dashboard_port": 9000})})
    assert publish.address(moved) == "http://localhost:9000"
    assert "export RAY_ADDRESS=http://localhost:9000\n" in publish.rendered(moved, site)["env.sh"]


def test_a_dstack_server_of_the_stack_reaches_commands_environment_and_server_config():
    stack, site = built("onprem")
    named = Stack.model_validate(stack.model_dump() | {"dstack": {"server": "https://dstack.example.com", "project": "team"}})
    assert publish.next_commands(named, site)[0] == "dstack project add --name team --url https://dstack.example.com --token ..."
    texts = publish.rendered(named, site)
    assert "export DSTACK_PROJECT=team\n" in texts["env.sh"]  # `dstack apply` reads it
    assert yaml.safe_load(texts["server-config.yml"])["projects"][0]["name"] == "team"


def test_a_renderers_refusal_names_the_stack_file():
    stack, site = built("local")
    network = {"kind": "network", "volume": "ckpt", "size": "10GB"}
    wanting = Stack.model_validate(stack.model_dump() | {"checkpoints": network})
    with pytest.raises(StackError, match=r"^stacks/Pulumi.local.yaml: flotilla:checkpoints.kind"):
        publish.rendered(wanting, site)


YAML = {
    "script": "set -e\necho one\n",
    "last line without end": "a\nb",
    "indented first": "  a\nb\n",
    "trailing space": "a \nb\n",
    "words": ["a", "b-c", 1],
    "pairs": ["A=1", "B"],
    "empty": [],
    "version": "3.11",
    "number as text": "0123",
    "off": "no",
    "nested": {"list": [{"name": "x", "list": ["y"]}], "none": None},
    "umlaut": "Größe",
}


def test_yaml_reads_back_as_it_was():
    assert yaml.safe_load(publish.to_yaml(YAML)) == YAML


def test_yaml_reads_as_a_person_would_write_it():
    shared = ["a"]
    text = publish.to_yaml({"script": "one\ntwo\n", "words": shared, "again": shared, "pairs": ["A=1", "B=2"]})
    assert text == "script: |\n  one\n  two\nwords: [a]\nagain: [a]\npairs:\n  - A=1\n  - B=2\n"


@pytest.mark.parametrize(("shell", "elsewhere"), [("bash", False), ("bash", True), ("zsh", True), ("sh", False)])
def test_env_sh_shows_ray_its_token(tmp_path, shell, elsewhere):
    """bash and zsh find the folder from anywhere; a plain sh cannot know it, and takes the project's folder."""
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    folder = tmp_path / "build/onprem"
    folder.mkdir(parents=True)
    (folder / "env.sh").write_text(publish.rendered(*built("onprem"))["env.sh"])
    (folder / "ray.token").write_text("abc")
    show = 'printf "%s\\n" "$RAY_ADDRESS" "$RAY_AUTH_MODE" "$RAY_AUTH_TOKEN_PATH" "$FLOTILLA_TOKEN_ONPREM" "${flotilla_folder-unset}"'
    cwd, file = (Path("/"), folder / "env.sh") if elsewhere else (tmp_path, Path("build/onprem/env.sh"))
    out = subprocess.run([shell, "-c", f". {file}; {show}"], cwd=cwd, capture_output=True, text=True, timeout=120, check=True)
    assert out.stdout.splitlines() == ["http://localhost:8265", "token", f"{folder}/ray.token", "abc", "unset"]
    assert not out.stderr


def test_env_sh_names_the_stack_and_follows_a_local_cluster_to_another_port(tmp_path):
    folder = tmp_path / "build/local"
    folder.mkdir(parents=True)
    (folder / "env.sh").write_text(publish.rendered(*built("local"))["env.sh"])
    (folder / "ray.token").write_text("abc")

    def sourced() -> list[str]:
        show = '. build/local/env.sh && printf "%s\n" "$FLOTILLA_STACK" "$RAY_ADDRESS" "$RAY_AUTH_TOKEN"'
        return subprocess.run(["sh", "-c", show], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True).stdout.split()

    assert sourced() == ["local", "http://localhost:8265", "abc"]
    (folder / "address").write_text("http://127.0.0.1:8267\n")
    assert sourced() == ["local", "http://127.0.0.1:8267", "abc"]


# The token's provider, called as the engine calls it.


@pytest.fixture
def project(tmp_path, monkeypatch):
    (tmp_path / "Pulumi.yaml").write_text("name: test\n")
    (tmp_path / "infra").mkdir()
    monkeypatch.chdir(tmp_path / "infra")  # as the engine does
    return tmp_path


TOKEN: dict[str, Any] = {"path": "build/test/ray.token", "token": None}


def created() -> dict[str, Any]:
    """The token as the state holds it."""
    outputs = cluster_token.TokenProvider().create(TOKEN).outs
    assert outputs is not None
    return outputs


def test_a_token_is_made_once_and_does_not_depend_on_what_lies_on_a_machine(project):
    provider, file, made = cluster_token.TokenProvider(), project / TOKEN["path"], created()
    assert re.fullmatch("[0-9a-f]{64}", made["token"])
    assert (file.read_text(), stat.S_IMODE(file.stat().st_mode)) == (made["token"], 0o600)
    file.unlink()  # as in another clone
    assert provider.diff(TOKEN["path"], made, TOKEN).changes is False
    assert provider.read(TOKEN["path"], made).outs == made


def test_a_token_that_a_preview_has_made_is_taken_over(project):
    token = make_token(project / TOKEN["path"])
    assert created()["token"] == token


def test_a_state_without_its_token_gets_that_of_the_file(project):
    former = {"path": TOKEN["path"]}
    token = make_token(project / TOKEN["path"])
    assert cluster_token.TokenProvider().diff("x", former, TOKEN).changes is True
    assert cluster_token.TokenProvider().update("x", former, TOKEN).outs == {"path": TOKEN["path"], "token": token}


def test_the_end_of_a_token_takes_away_what_was_written_beside_it(project):
    made = created()
    build_folder.write(project / "build/test", {"env.sh": "", "node/a.py": ""}, made["token"])
    cluster_token.TokenProvider().delete(TOKEN["path"], made)
    assert not (project / "build/test").exists()


def test_digests_show_which_file_changes():
    before = publish.digests({"env.sh": "a", "node/x.py": "1", "node/y.py": "2"})
    assert before.keys() == {"env.sh", "node"}
    after = publish.digests({"env.sh": "a", "node/x.py": "1", "node/y.py": "3"})
    assert after["env.sh"] == before["env.sh"] and after["node"] != before["node"]
