"""The rendered files against those who read them: dstack's parsers, the shell, YAML."""

from __future__ import annotations

import shutil
import stat
import subprocess
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster_tasks.ray import NODE_AGENT
from infra import files, publish
from stacks import load
from stacks.dstack_api import parse_apply_configuration
from stacks.load import StackError
from stacks.places import clouds
from stacks.schema import Stack
from stacks.site import Site

ROOT = Path(__file__).parents[2]
STACKS = [name for name in load.names(ROOT) if load.load(name, ROOT).cloud not in clouds()]  # a cloud's site is known after `up` alone
ON_DSTACK = [name for name in STACKS if name != "slurm"]


def built(name: str) -> tuple[Stack, Site]:
    stack = load.load(name, ROOT)
    return stack, import_module(f"infra.{stack.cloud}.build").build(stack)


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


@pytest.mark.parametrize("name", STACKS)
def test_the_names_of_the_files_are_known_before_the_site_is(name):
    assert list(publish.rendered(*built(name))) == publish.file_names(built(name)[0])


@pytest.mark.parametrize("name", load.names(ROOT))
def test_a_plan_has_the_files_by_their_names(name, planned):
    registered = [resource.name for resource in planned(name).resources if resource.kind == "File"]
    assert sorted(registered) == sorted(publish.file_names(load.load(name, ROOT)))


def test_every_plan_has_the_whole_node_agent_as_one_resource(planned):
    modules = {file.name: file.read_text() for file in NODE_AGENT.glob("*.py")}
    for name in load.names(ROOT):
        [folder] = [resource for resource in planned(name).resources if resource.kind == "Folder"]
        assert (folder.name, folder.inputs["path"]) == ("node", f"build/{name}/node")
        assert folder.inputs["texts"] == {f"build/{name}/node/{file}": text for file, text in modules.items()}


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
    assert mentioned
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
    show = 'printf "%s\\n" "$RAY_ADDRESS" "$RAY_AUTH_MODE" "$RAY_AUTH_TOKEN_PATH" "$RAY_AUTH_TOKEN" "${flotilla_folder-unset}"'
    cwd, file = (Path("/"), folder / "env.sh") if elsewhere else (tmp_path, Path("build/onprem/env.sh"))
    out = subprocess.run([shell, "-c", f". {file}; {show}"], cwd=cwd, capture_output=True, text=True, timeout=30, check=True)
    assert out.stdout.splitlines() == ["http://localhost:8265", "token", f"{folder}/ray.token", "abc", "unset"]
    assert not out.stderr


def test_env_sh_names_the_stack_and_follows_a_local_cluster_to_another_port(tmp_path):
    folder = tmp_path / "build/local"
    folder.mkdir(parents=True)
    (folder / "env.sh").write_text(publish.rendered(*built("local"))["env.sh"])
    (folder / "ray.token").write_text("abc")

    def sourced() -> list[str]:
        show = '. build/local/env.sh && printf "%s\n" "$FLOTILLA_STACK" "$RAY_ADDRESS" "$RAY_AUTH_TOKEN"'
        return subprocess.run(["sh", "-c", show], cwd=tmp_path, capture_output=True, text=True, timeout=30, check=True).stdout.split()

    assert sourced() == ["local", "http://localhost:8265", "abc"]
    (folder / "address").write_text("http://127.0.0.1:8267\n")
    assert sourced() == ["local", "http://127.0.0.1:8267", "abc"]


# The providers, called as the engine calls them.


@pytest.fixture
def project(tmp_path, monkeypatch):
    (tmp_path / "Pulumi.yaml").write_text("name: test\n")
    (tmp_path / "infra").mkdir()
    monkeypatch.chdir(tmp_path / "infra")  # as the engine does
    return tmp_path


FILE: dict[str, Any] = {"path": "build/test/a.yml", "text": "a: 1\n"}
FOLDER: dict[str, Any] = {"path": "build/test/node", "texts": {"build/test/node/__init__.py": "", "build/test/node/a.py": "a = 1\n"}}
TOKEN: dict[str, Any] = {"path": "build/test/ray.token"}


def test_a_file_is_created_and_then_needs_nothing(project):
    made = files.FileProvider().create(FILE)
    assert made.outs == FILE
    assert (project / FILE["path"]).read_text() == "a: 1\n"
    assert files.FileProvider().diff(made.id, FILE, FILE).changes is False


@pytest.mark.parametrize("harm", [Path.unlink, lambda file: file.write_text("a: 2\n")], ids=["deleted", "edited"])
def test_a_file_that_was_harmed_is_written_again(project, harm):
    made = files.FileProvider().create(FILE)
    harm(project / FILE["path"])
    assert files.FileProvider().diff(made.id, FILE, FILE).changes is True
    files.FileProvider().update(made.id, FILE, FILE)
    assert (project / FILE["path"]).read_text() == "a: 1\n"


def test_a_refresh_sees_what_is_on_disk(project):
    made = files.FileProvider().create(FILE)
    (project / FILE["path"]).write_text("a: 2\n")
    assert files.FileProvider().read(made.id, FILE).outs == FILE | {"text": "a: 2\n"}
    (project / FILE["path"]).unlink()
    assert files.FileProvider().read(made.id, FILE).id == ""


def test_a_file_that_moves_is_replaced(project):
    moved = files.FileProvider().diff("x", FILE, FILE | {"path": "build/test/b.yml"})
    assert (moved.changes, moved.replaces) == (True, ["path"])


def test_a_destroyed_file_takes_its_folder_with_it_when_that_is_empty(project):
    files.FileProvider().create(FILE)
    kept = project / "build/test/kept"
    kept.touch()
    files.FileProvider().delete(FILE["path"], FILE)
    assert list((project / "build/test").iterdir()) == [kept]
    kept.unlink()
    files.FileProvider().create(FILE)
    files.FileProvider().delete(FILE["path"], FILE)
    files.FileProvider().delete(FILE["path"], FILE)  # gone already
    assert not (project / "build/test").exists()


def test_a_folder_holds_its_files_and_nothing_of_before(project):
    made = files.FolderProvider().create(FOLDER)
    assert made.outs == FOLDER
    assert {file.name: file.read_text() for file in (project / FOLDER["path"]).iterdir()} == {"__init__.py": "", "a.py": "a = 1\n"}
    assert files.FolderProvider().diff(made.id, FOLDER, FOLDER).changes is False
    later = FOLDER | {"texts": {"build/test/node/__init__.py": "", "build/test/node/b.py": "b = 1\n"}}
    assert files.FolderProvider().diff(made.id, FOLDER, later).changes is True
    files.FolderProvider().update(made.id, FOLDER, later)
    assert {file.name for file in (project / FOLDER["path"]).iterdir()} == {"__init__.py", "b.py"}
    files.FolderProvider().create(FOLDER)  # as the preview does, which knows of no before
    assert files.FolderProvider().read(made.id, FOLDER).outs == FOLDER


HARM = [
    lambda folder: (folder / "a.py").unlink(),
    lambda folder: (folder / "a.py").write_text("a = 2\n"),
    lambda folder: (folder / "stray.py").touch(),
    shutil.rmtree,
]


@pytest.mark.parametrize("harm", HARM, ids=["file deleted", "file edited", "file added", "folder deleted"])
def test_a_folder_that_was_harmed_is_repaired(project, harm):
    made = files.FolderProvider().create(FOLDER)
    harm(project / FOLDER["path"])
    assert files.FolderProvider().diff(made.id, FOLDER, FOLDER).changes is True
    files.FolderProvider().update(made.id, FOLDER, FOLDER)
    assert files.FolderProvider().read(made.id, FOLDER).outs == FOLDER


def test_a_destroyed_folder_is_gone_and_takes_the_one_around_it_when_that_is_empty(project):
    made = files.FolderProvider().create(FOLDER)
    files.FileProvider().create(FILE)
    (project / FOLDER["path"] / "__pycache__").mkdir()  # of who ran it there
    assert files.FolderProvider().diff(made.id, FOLDER, FOLDER).changes is False
    files.FolderProvider().delete(made.id, FOLDER)
    assert files.FolderProvider().read(made.id, FOLDER).id == ""
    assert [file.name for file in (project / "build/test").iterdir()] == ["a.yml"]
    files.FileProvider().delete(FILE["path"], FILE)
    made = files.FolderProvider().create(FOLDER)
    files.FolderProvider().delete(made.id, FOLDER)
    assert not list((project / "build").iterdir())


def test_a_token_is_made_once_and_is_its_owners_alone(project):
    made = files.TokenProvider().create(TOKEN)
    token = project / TOKEN["path"]
    first = token.read_text()
    assert len(first) == 64
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    assert made.outs == TOKEN  # the text is in no state
    assert first not in str(files.TokenProvider().read(made.id, TOKEN).outs)
    files.TokenProvider().create(TOKEN)
    assert token.read_text() == first


@pytest.mark.parametrize(
    "harm", [Path.unlink, lambda file: file.write_text(""), lambda file: file.chmod(0o644)], ids=["lost", "empty", "open"]
)
def test_a_token_that_was_harmed_is_made_good(project, harm):
    made, token = files.TokenProvider().create(TOKEN), project / TOKEN["path"]
    assert files.TokenProvider().diff(made.id, TOKEN, TOKEN).changes is False
    harm(token)
    assert files.TokenProvider().diff(made.id, TOKEN, TOKEN).changes is True
    files.TokenProvider().update(made.id, TOKEN, TOKEN)
    assert len(token.read_text()) == 64
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
