from typing import Any, cast

from trainer import actors


def environment(share: dict[str, float]) -> dict[str, str]:
    return actors.options(cast("Any", None), 0, share, 2, "policy-0")["runtime_env"]["env_vars"]


def test_an_actor_without_gpus_sees_none_and_one_with_gpus_sees_what_ray_gives_it():
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        assert environment({"CPU": 1})[name] == ""
        assert name not in environment({"CPU": 1, "GPU": 0.5})


def test_an_actors_gpu_is_the_first_that_it_sees():
    assert environment({"GPU": 1})["LOCAL_RANK"] == "0"
