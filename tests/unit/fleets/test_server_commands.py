"""What a person is told of the dstack server that runs here. With a real one: tests/integration/dstack."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fleets.server.commands import backends_of, say_refused
from fleets.server.process import ServerError

CONFIG = "projects: [{name: main, backends: [{type: aws}, {type: gcp}]}, {name: other, backends: [{type: aws}]}, {name: bare}]"


def api(there: dict[str, list[str]]) -> Any:
    """Whose projects have these backends."""
    projects = {
        name: SimpleNamespace(project_name=name, backends=[SimpleNamespace(name=each) for each in has]) for name, has in there.items()
    }
    return SimpleNamespace(projects=SimpleNamespace(list=lambda: [*projects.values()], get=projects.__getitem__))


@pytest.mark.parametrize(
    ("there", "refused", "code"),
    [
        ({"main": ["aws", "gcp"], "other": ["aws"], "bare": []}, [], 0),
        ({"main": ["aws"], "other": ["aws"], "bare": ["gcp"]}, [("gcp", "main")], 1),
        ({"main": ["aws", "gcp", "oci"], "other": []}, [("aws", "other")], 1),
        ({}, [("aws", "main"), ("gcp", "main"), ("aws", "other")], 1),
    ],
)
def test_a_backend_that_the_server_did_not_take_is_said_and_is_exit_code_1(
    there: dict[str, list[str]], refused: list[tuple[str, str]], code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server: Any = SimpleNamespace(folder=tmp_path, said_of=lambda word: f"why {word.strip()}")
    assert say_refused(api(there), CONFIG, server) == code
    lines = [f"refused     backend {backend} of project {project}: why backend {backend}" for backend, project in refused]
    assert capsys.readouterr().out.splitlines() == lines


@pytest.mark.parametrize("text", ["[", "", "projects: 1", "projects: [{name: a, backends: [aws]}]", "projects: [{backends: []}, 2]"])
def test_a_file_that_is_no_configuration_of_a_server_is_one_line(text: str, tmp_path: Path) -> None:
    with pytest.raises(ServerError, match="is no configuration of a dstack server") as error:
        backends_of(text, tmp_path / "config.yml")
    assert len(str(error.value).splitlines()) == 1
