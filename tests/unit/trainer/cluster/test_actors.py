import os
import stat
import tempfile
from pathlib import Path
from typing import Any, cast

import pytest

from trainer.cluster import on_ray, placement
from trainer.errors import ConfigError
from trainer.online import processes


def environment(share: dict[str, float]) -> dict[str, str]:
    return on_ray.options(cast("Any", None), share, 2, "policy-0")["runtime_env"]["env_vars"]


def test_an_actor_without_gpus_sees_none_and_one_with_gpus_sees_what_ray_gives_it():
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        assert environment({"CPU": 1})[name] == ""
        assert name not in environment({"CPU": 1, "GPU": 0.5})


def test_an_actors_gpu_is_the_first_that_it_sees():
    assert environment({"GPU": 1})["LOCAL_RANK"] == "0"


def test_a_deadline_says_who_was_waited_for_and_where_to_look():
    late = [f"policy-{rank} (node 10.0.0.{rank}, pid {rank})" for rank in range(10)]
    said = on_ray.waited_for(late, {"TORCH_FR_DUMP_TEMP_FILE": "/checkpoints/flight-recorder/nccl_trace_rank_"})
    assert said.startswith(", waiting for policy-0 (node 10.0.0.0, pid 0), policy-1 (node 10.0.0.1, pid 1), ")
    assert "policy-7 (node 10.0.0.7, pid 7) and 2 more; log: worker-*-PID.out" in said
    assert said.endswith("; dumps of collectives are below /checkpoints/flight-recorder")
    assert on_ray.waited_for(late, {}).endswith("; for dumps of collectives set flotilla:debug.flight_recorder")


def test_where_ray_does_not_answer_the_actor_is_named_by_its_id():
    assert on_ray.process("ff" * 16) == f"actor {'ff' * 16}"


def test_a_folder_that_ranks_do_not_see_is_refused_before_the_first_step(tmp_path):
    class Elsewhere:
        def call(self, method: str, path: Path) -> list[tuple[bool, str]]:
            return [(path.exists(), "here"), ((path.parent / "other" / path.name).exists(), "there")]

    with pytest.raises(ConfigError, match=r"not the same folder on every node; policy-1 on there"):
        processes._require_shared(tmp_path, {"policy": Elsewhere()})  # type: ignore[dict-item]
    assert not list(tmp_path.iterdir())


def test_the_address_of_the_job_server_is_told_from_that_of_a_cluster(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "http://localhost:8265")
    with pytest.raises(ConfigError, match=r"RAY_ADDRESS=http://localhost:8265: that is where jobs are submitted"):
        on_ray.connect()


@pytest.mark.parametrize(
    "error",
    [
        Exception("The current node timed out during startup. This\nmore"),
        ConnectionError("The current node timed out during startup. This"),
    ],
)
def test_a_node_of_ray_that_does_not_start_in_time_is_one_line(monkeypatch, error):
    def late(**_: object) -> None:
        raise error

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(on_ray.ray, "init", late)
    monkeypatch.setattr(on_ray, "own_token", lambda: None)
    with pytest.raises(ConfigError) as caught:
        on_ray.connect()
    assert str(caught.value) == "RAY_ADDRESS=(not set): no connection to a Ray cluster: The current node timed out during startup. This"


def test_another_error_of_ray_is_not_taken_for_that(monkeypatch):
    def broken(**_: object) -> None:
        raise KeyError("session")

    monkeypatch.setattr(on_ray.ray, "init", broken)
    monkeypatch.setattr(on_ray, "own_token", lambda: None)
    with pytest.raises(KeyError):
        on_ray.connect()


@pytest.mark.parametrize("umask", [0o022, 0o000])
def test_a_ray_of_the_runs_own_leaves_no_token_in_the_home(monkeypatch, tmp_path, umask):
    """Ray writes one there with the modes that the umask leaves."""
    for name in ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_TOKEN"):
        monkeypatch.setenv(name, "")  # what is set is taken back
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(placement, "RUNNING_RAY", tmp_path / "none")
    monkeypatch.setattr(on_ray.ray, "init", lambda **_: None)
    on_ray.connect()
    assert len(os.environ["RAY_AUTH_TOKEN"]) == 64 and not [*tmp_path.iterdir()]
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray/auth_token").touch(0o666 & ~umask)
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    on_ray.connect()
    assert "RAY_AUTH_TOKEN" not in os.environ and (tmp_path / ".ray/auth_token").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("name", ["RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", "RAY_ADDRESS"])
def test_a_token_that_somebody_chose_or_a_cluster_has_stays(monkeypatch, tmp_path, name):
    for each in ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_TOKEN"):
        monkeypatch.delenv(each, raising=False)
    monkeypatch.setenv(name, "10.0.0.1:6379")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(on_ray.ray, "init", lambda **_: None)
    on_ray.connect()
    assert "RAY_AUTH_TOKEN" not in os.environ


def theirs(folder: Path) -> None:
    folder.mkdir()
    os.chown(folder, 65534, 65534)


@pytest.mark.parametrize(
    ("plant", "taken"),
    [
        (lambda folder: None, True),
        (lambda folder: folder.mkdir(mode=0o777), True),  # our own, which is closed
        (lambda folder: folder.symlink_to(folder.parent), False),
        (os.mkfifo, False),
        pytest.param(theirs, False, marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's files")),
    ],
)
def test_ray_of_a_run_writes_into_a_folder_that_others_have_neither_made_nor_can_enter(plant, taken, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(on_ray, "LONGEST", 200)
    plant(guessed := tmp_path / f"flotilla-{os.getuid()}-run")
    ray = Path(on_ray.own_folder())
    assert ray.name == "ray" and (ray.parent == guessed) == taken
    assert stat.S_IMODE(ray.parent.stat().st_mode) == 0o700 and ray.parent.stat().st_uid == os.getuid() and not ray.parent.is_symlink()


def test_a_long_tmpdir_is_not_taken_for_rays_sockets(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", f"/{'x' * 60}")
    monkeypatch.setattr(on_ray.Path, "mkdir", lambda *_, **__: None)
    assert on_ray.own_folder() == f"/tmp/flotilla-{os.getuid()}-run/ray"


@pytest.mark.parametrize("owner", [os.getuid(), 65534])
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's files")
def test_a_cluster_that_another_user_announces_is_not_joined(owner, tmp_path, monkeypatch):
    """Anybody may write the file in which ray.init() looks; who is joined gets the run's code, and answers with pickles."""
    announced = tmp_path / "ray_current_cluster"
    announced.write_text("127.0.0.9:6379")
    os.chown(announced, owner, owner)
    asked: list[dict[str, str]] = []
    monkeypatch.setattr(placement, "RUNNING_RAY", announced)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(on_ray, "own_token", lambda: None)
    monkeypatch.setattr(on_ray.ray, "init", lambda logging_level, **settings: asked.append(settings))
    on_ray.connect()
    assert [settings.get("address") for settings in asked] == [None if owner == os.getuid() else "local"]
