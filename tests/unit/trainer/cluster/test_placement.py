import pytest
import torch

from trainer.cluster import placement
from trainer.configs.ppo import PpoConfig
from trainer.errors import ConfigError
from trainer.online.roles import roles_of


def config(**sections: dict) -> PpoConfig:
    base = {"model": {"path": "m"}, "data": {"path": "a:b"}, "trainer": {"prompts_per_step": 64}}
    return PpoConfig.model_validate(base | sections)


def test_ranks_and_rollout_engines_get_bundles_of_their_own():
    plan = placement.plan(config(placement={"ranks": 2, "cpus_per_rank": 4}, rollout={"engines": 3, "tensor_parallel": 2}))
    assert plan.ranks == ({"CPU": 4, "GPU": 1},) * 2
    assert plan.engines == ({"CPU": 1, "GPU": 2},) * 3
    assert [plan.engine_bundle(i) for i in range(3)] == [2, 3, 4]


def test_no_gpus_are_asked_for_where_ranks_train_on_cpus():
    plan = placement.plan(config(placement={"gpus_per_rank": 0}))
    assert plan.bundles == ({"CPU": 1}, {"CPU": 1})


def test_colocated_rollout_engines_live_in_the_ranks_bundles():
    settings = {"colocate": True, "ranks": 2, "gpus_per_rank": 0, "rank_resources": {"big": 1}, "engine_resources": {"big": 0.5, "l4": 1}}
    plan = placement.plan(config(placement=settings, rollout={"engines": 2}))
    assert plan.bundles == ({"CPU": 2, "big": 1.5, "l4": 1},) * 2
    assert [plan.engine_bundle(i) for i in range(2)] == [0, 1]


def test_a_colocated_rollout_engine_and_a_rank_have_halves_of_one_gpu():
    settings = config(placement={"colocate": True, "ranks": 2}, rollout={"engines": 2}, trainer={"zero_stage": 2})
    assert [bundle["GPU"] for bundle in placement.plan(settings).bundles] == [1, 1]
    assert placement.rank_share(settings)["GPU"] == placement.engine_share(settings)["GPU"] == 0.5
    assert placement.sync_backend(settings) == "ipc"  # NCCL takes one process per GPU
    assert placement.sync_backend(config(placement={"colocate": True, "gpus_per_rank": 0})) == "gloo"


@pytest.mark.parametrize("roles", [1, 2, 3])
def test_the_roles_of_a_rank_find_room_in_its_bundle_as_ray_counts(roles):
    settings = config(placement={"cpus_per_rank": 2, "rank_resources": {"h100": 1}})
    share = placement.rank_share(settings, roles)
    for name, amount in placement.plan(settings).ranks[0].items():
        assert roles * round(share[name] * placement.RAY_UNITS) <= round(amount * placement.RAY_UNITS)
        assert share[name] == pytest.approx(amount / roles, abs=2e-4)


def test_custom_resources_pin_roles_to_kinds_of_nodes():
    plan = placement.plan(config(placement={"rank_resources": {"h100": 1}, "engine_resources": {"l4": 1}}))
    assert plan.ranks[0]["h100"] == 1
    assert plan.engines[0]["l4"] == 1


@pytest.mark.parametrize("colocate", [False, True])
def test_a_role_on_other_nodes_has_bundles_of_its_own(colocate):
    place = {"ranks": 2, "gpus_per_rank": 0, "rank_resources": {"h100": 1}, "reference_resources": {"v100": 1}, "colocate": colocate}
    plan = placement.plan(config(placement=place, algorithm={"kl": {"coef": 0.1}}))
    assert plan.own == {"reference": ({"CPU": 1, "v100": 1},) * 2}
    assert plan.bundles[plan.rank_bundle("reference", 1)] == {"CPU": 1, "v100": 1}
    assert plan.rank_bundle("reference", 0) == (2 if colocate else 3)
    assert [plan.rank_bundle("critic", index) for index in range(2)] == [0, 1]


def test_two_roles_on_other_nodes_do_not_share_bundles():
    plan = placement.Placement(({"CPU": 1},), ({"CPU": 3},), {"judge": ({"v100": 1},), "reference": ({"CPU": 2},)})
    assert [plan.bundles[plan.rank_bundle(role, 0)] for role in ("judge", "reference", "policy")] == [{"v100": 1}, {"CPU": 2}, {"CPU": 1}]


def test_a_reference_model_may_have_other_gpus_than_the_ranks():
    place = {"reference_resources": {"v100": 1}, "gpus_per_reference": 0.5}
    settings = config(placement=place, algorithm={"kl": {"coef": 0.1}})
    assert {role.name: (role.gpus, role.bundle, role.gpus_setting) for role in roles_of(settings)} == {
        "policy": (1, None, "placement.gpus_per_rank"),
        "reference": (0.5, {"CPU": 1, "GPU": 0.5, "v100": 1}, "placement.gpus_per_reference"),
    }
    with pytest.raises(ConfigError, match=r"\(1 reference ranks, 1 ranks, 1 rollout engines\), .* lower placement\.reference_resources"):
        placement.check(placement.plan(settings), [{"CPU": 8, "GPU": 8}], settings.placement)


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ([{"CPU": 32, "GPU": 2}] * 2, ["9 GPU", "has 4", "placement.ranks, placement.gpus_per_rank"]),
        ([{"CPU": 2, "GPU": 16}], ["9 CPU", "has 2", "placement.cpus_per_rank"]),
        ([{"CPU": 32, "GPU": 8}] * 2, None),
    ],
)
def test_a_cluster_that_is_too_small_is_told_with_both_numbers(nodes, expected):
    settings = config(placement={"ranks": 8})
    plan = placement.plan(settings)
    if expected is None:
        placement.check(plan, nodes, settings.placement)
        return
    with pytest.raises(ConfigError) as error:
        placement.check(plan, nodes, settings.placement)
    assert all(text in str(error.value) for text in expected)


def test_a_missing_custom_resource_names_its_setting():
    settings = config(placement={"rank_resources": {"v100": 1}})
    with pytest.raises(ConfigError, match=r"1 v100.*has 0.*placement\.rank_resources"):
        placement.check(placement.plan(settings), [{"CPU": 8, "GPU": 8}], settings.placement)


def test_a_process_must_fit_one_node():
    settings = config(rollout={"engines": 1, "tensor_parallel": 2})
    with pytest.raises(ConfigError, match=r"1 CPU, 2 GPU on one node, the nodes have 8 CPU, 1 GPU; .*gpus_per_engine"):
        placement.check(placement.plan(settings), [{"CPU": 8, "GPU": 1}] * 3, settings.placement)


def listed(domain: str | None, cpus: float = 1, role: str = "") -> dict:
    """A node, as Ray lists it."""
    labels = {placement.DOMAIN: domain} if domain else {}
    return {"Alive": True, "Labels": labels | ({placement.ROLE: role} if role else {}), "Resources": {"CPU": cpus}}


def over_nodes(**rollout: object) -> PpoConfig:
    """Two engines of two nodes each, on CPUs, and one rank."""
    split = {"engines": 2, "tensor_parallel": 2, "nodes_per_engine": 2}
    return config(placement={"gpus_per_rank": 0, "cpus_per_engine": 1}, rollout=split | rollout)


def test_the_nodes_of_an_engine_are_reserved_in_one_domain_where_there_are_domains():
    wanted = placement.fit(over_nodes(), [listed("a"), listed("a"), listed(None), listed("b", 2)])
    assert [*wanted.together()] == [([1, 2], True), ([3, 4], True), ([0], False)]
    alone = placement.fit(over_nodes(), [listed("a"), listed("a"), listed("b", 2)], engines_alone=True)
    assert [*alone.together()] == [([0, 1], True), ([2, 3], True)]
    everything = [([0, 1, 2, 3, 4], False)]
    assert [*placement.fit(over_nodes(), [listed(None)] * 5).together()] == everything, "no node is in one"
    assert [*placement.fit(over_nodes(one_domain=False), [listed(None, 5), listed("a")]).together()] == everything
    one_node = config(placement={"gpus_per_rank": 0}, rollout={"tensor_parallel": 2})
    assert [*placement.fit(one_node, [listed("a"), listed("b")]).together()] == [([0, 1], False)]


@pytest.mark.parametrize(
    "nodes",
    [
        [listed("a"), listed("a"), listed("b"), listed("c"), listed(None)],
        [listed("a"), listed("a"), listed("b"), listed("b", role="rollout"), listed("c"), listed(None)],
    ],
)
def test_engines_that_find_no_domain_are_refused_with_what_the_domains_have(nodes):
    with pytest.raises(ConfigError) as error:
        placement.fit(over_nodes(), nodes)
    assert str(error.value) == (
        "rollout.nodes_per_engine=2: 1 of 2 rollout engines find as many in one NVLink domain (ray.io/gpu-domain); with 1 CPU there "
        "are 2 in a, 1 in b, 1 in c; lower rollout.engines or nodes_per_engine, or let them use slower links with rollout.one_domain=false"
    )


def test_the_device_is_the_placements_though_the_machine_has_others(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    assert placement.device_of(0, "placement.gpus_per_rank") == torch.device("cpu")
    assert placement.device_of(1, "placement.gpus_per_rank") == torch.device("cuda", 0)
    monkeypatch.setenv("LOCAL_RANK", "3")  # of torchrun
    assert placement.device_of(0.5, "placement.gpus_per_rank") == torch.device("cuda", 3)


def test_a_missing_gpu_names_the_setting(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ConfigError, match=r"placement\.gpus_per_rank=1: process 2 .* torch sees 2; 0 uses CPUs"):
        placement.device_of(1, "placement.gpus_per_rank")


@pytest.mark.parametrize(
    ("settings", "backend"),
    [
        ({}, "nccl"),
        ({"gpus_per_rank": 0}, "gloo"),
        ({"gpus_per_engine": 0}, "gloo"),
        ({"gpus_per_rank": 0, "gpus_per_engine": 1}, "gloo"),
        ({"gpus_per_rank": 0.5, "gpus_per_engine": 0.5}, "gloo"),  # perhaps of the same GPU, where NCCL takes one member only
    ],
)
def test_weights_go_over_nccl_only_between_whole_gpus(settings, backend):
    assert placement.sync_backend(config(placement=settings)) == backend


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"resources": {"sandbox": 1}, "workers": 4}, None),
        ({"cpus": 4}, None),
        (
            {"resources": {"sandbx": 1}},
            r"environment\.resources\.sandbx=1: each process .* no node has more than 0; lower it, or add nodes",
        ),
        ({"resources": {"sandbox": 5}}, r"environment\.resources\.sandbox=5: .* no node has more than 4"),
        ({"cpus": 9}, r"environment\.cpus=9: each process that plays episodes takes that much CPU of its node, no node has more than 8"),
        (
            {"resources": {"sandbox": 2}, "workers": 3},
            r"environment\.workers=3: environment\.resources\.sandbox=2 of each makes 6 sandbox, the cluster has 4",
        ),
    ],
)
def test_processes_that_play_episodes_find_room_or_the_setting_is_named(given, said):
    environment = config(environment={"function": "guess", **given}).environment
    nodes = [{"CPU": 8.0, "GPU": 1.0}, {"CPU": 4.0, "sandbox": 4.0}]
    if said is None:
        return placement.check_environment(environment, nodes)
    with pytest.raises(ConfigError, match=said):
        placement.check_environment(environment, nodes)
