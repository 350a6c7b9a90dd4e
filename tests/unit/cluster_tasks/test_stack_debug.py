"""flotilla:debug: what the stack file may say, the variables that it becomes, and the folders that PyTorch does not make."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cluster_tasks import ray, slurm
from cluster_tasks.environment import of_cluster
from cluster_tasks.node.checks import make_dump_folders
from stacks import load
from stacks.load import StackError
from stacks.schema import Stack
from stacks.site import Site

ROOT = Path(__file__).parents[3]
FILES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
ON = {"flight_recorder": True, "nccl": "INFO"}


def stack(debug: Any, name: str = "onprem", **env: str) -> Stack:
    raw = load.settings(name, ROOT) | {"flotilla:debug": debug}
    raw["flotilla:task"] = (raw.get("flotilla:task") or {}) | {"env": env}
    return load.parse(name, raw)


@pytest.mark.parametrize(
    ("debug", "error"),
    [
        ("on", ": 'on' is not a map of settings"),
        ({"flight_recorder": "maybe"}, ".flight_recorder: 'maybe' is not true or false"),
        ({"nccl": "TRACE"}, ".nccl: 'TRACE' is not one of WARN, INFO"),
        ({"flight_recoder": True}, ".flight_recoder: unknown key; did you mean flight_recorder?"),
    ],
)
def test_a_mistake_is_one_line(debug: Any, error: str) -> None:
    with pytest.raises(StackError) as found:
        stack(debug)
    assert str(found.value).startswith(f"stacks/Pulumi.onprem.yaml: flotilla:debug{error}"), found.value
    assert len(str(found.value).splitlines()) == 1


def told(made: Stack) -> dict[str, str | None]:
    return {name: setting.value for name, setting in of_cluster(made, made.cluster_fleets()).items()}


def test_nodes_record_only_where_it_is_asked_for() -> None:
    without, env = told(stack({})), told(stack(ON))
    assert {name: value for name, value in env.items() if name not in without} == {
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        **dict.fromkeys(FILES, "/checkpoints/flight-recorder/nccl_trace_rank_"),
        "NCCL_DEBUG": "INFO",
    }


def test_the_stack_files_own_environment_wins() -> None:
    assert told(stack(ON, NCCL_DEBUG="VERSION"))["NCCL_DEBUG"] == "VERSION"


def test_it_reaches_what_dstack_and_slurm_run() -> None:
    assert "TORCH_FR_BUFFER_SIZE=2000" in ray.ray_cluster(stack(ON), Site())["env"]
    made = stack(ON, "slurm")
    assert f"{made.checkpoints.path}/flight-recorder/nccl_trace_rank_" in slurm.scripts(made, Site())["ray-cluster.sbatch"]


def test_the_installed_pytorch_knows_the_variables() -> None:
    torch = pytest.importorskip("torch")
    library = (Path(torch.__file__).parent / "lib/libtorch_cpu.so").read_bytes()
    for name in ("TORCH_FR_BUFFER_SIZE", *FILES):
        assert name.encode() in library, name


def test_the_agent_makes_the_folder_and_warns_where_it_cannot(tmp_path: Path) -> None:
    place = tmp_path / "runs/flight-recorder"
    assert make_dump_folders(dict.fromkeys(FILES, f"{place}/nccl_trace_rank_")) == []
    assert place.is_dir()
    (tmp_path / "file").touch()
    [warning] = make_dump_folders(dict.fromkeys(FILES, f"{tmp_path}/file/below/nccl_trace_rank_"))
    assert f"{tmp_path}/file/below cannot be made" in warning
    assert make_dump_folders({}) == []


def test_ranks_of_two_roles_write_files_of_their_own(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from trainer.ranks.engine import record_apart

    found = set()
    for role in ("policy", "critic"):
        env = {FILES[0]: f"{tmp_path}/fr/nccl_trace_rank_"}
        record_apart(role, env)
        found.add(env[FILES[0]])
    assert found == {f"{tmp_path}/fr/{role}/nccl_trace_rank_" for role in ("policy", "critic")}
    assert all(Path(file).parent.is_dir() for file in found), "PyTorch does not make it"
