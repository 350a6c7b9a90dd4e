import pytest
import torch

from trainer.cluster.actors import free_port
from trainer.configs.sections import OptimConfig, TrainerConfig
from trainer.ranks.engine import Engine, environment, init_distributed


def test_deepspeed_is_told_the_device_that_the_placement_chose():
    second = environment(5, 8, "10.0.0.1", 29500, torch.device("cuda", 1))
    assert (second["LOCAL_RANK"], second["RANK"], second["DS_ACCELERATOR"]) == ("1", "5", "cuda")
    on_cpu = environment(5, 8, "10.0.0.1", 29500, torch.device("cpu"))
    assert (on_cpu["LOCAL_RANK"], on_cpu["DS_ACCELERATOR"]) == ("0", "cpu")


@pytest.mark.usefixtures("one_rank", "small_buckets")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bfloat16_gradients_are_summed_in_float32(stage):
    """Summed in bfloat16 the norm is off by percents; float64 sums of the same gradients say what it is."""
    init_distributed(0, 1, "127.0.0.1", free_port(), 60, torch.device("cpu"))
    torch.manual_seed(0)
    inputs = [torch.randn(1, 64).to(torch.bfloat16) for _ in range(320)]
    model = torch.nn.Linear(64, 64, bias=False).to(torch.bfloat16)
    engine = Engine(model, OptimConfig(grad_clip=1e9), TrainerConfig(zero_stage=stage), 1, torch.device("cpu"))
    for i, x in enumerate(inputs):
        engine.backward(engine(x).float().mean(), last=i == len(inputs) - 1)
    of_a_row = torch.stack([x.double() for x in inputs]).sum(0) / 64
    assert engine.step()["grad_norm"] == pytest.approx(float(of_a_row.norm()) * 8, rel=1e-4)


@pytest.mark.usefixtures("one_rank", "small_buckets")
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_bfloat16_model_that_does_not_learn_needs_no_optimizer(stage):
    init_distributed(0, 1, "127.0.0.1", free_port(), 60, torch.device("cpu"))
    model = torch.nn.Linear(4, 4, bias=False).to(torch.bfloat16)
    engine = Engine(model, None, TrainerConfig(zero_stage=stage), 1, torch.device("cpu"))
    assert engine(torch.ones(1, 4, dtype=torch.bfloat16)).shape == (1, 4)


@pytest.mark.usefixtures("one_rank", "small_buckets")
@pytest.mark.parametrize(("stage", "dtype"), [(0, torch.float32), (1, torch.bfloat16), (3, torch.float32)])
def test_a_step_waits_until_the_checkpoint_before_it_is_copied(tmp_path, stage, dtype):
    """It has the weights, and the optimizer's numbers, of the moment in which it was called for."""
    init_distributed(0, 1, "127.0.0.1", free_port(), 60, torch.device("cpu"))
    model = torch.nn.Linear(64, 64, bias=False).to(dtype)
    trainer = TrainerConfig(zero_stage=stage, timeout=1)
    engine = Engine(model, OptimConfig(lr=0.1), trainer, 3, torch.device("cpu"))

    def learn() -> torch.Tensor:
        engine.backward(engine(torch.ones(1, 64, dtype=dtype)).float().sum(), last=True)
        engine.step()
        return engine.weights(["weight"])[0].clone()

    saved = learn()
    begin, *writes = engine.save_state(tmp_path)
    with pytest.raises(TimeoutError, match=r"not copied to memory within 1 s \(trainer\.timeout\)"):
        learn()
    engine.model.zero_grad()
    begin()
    after = learn()
    assert not torch.equal(after, saved)
    for write in writes:
        write()
    engine.load_state(tmp_path)
    assert torch.equal(engine.weights(["weight"])[0], saved)
    assert torch.equal(learn(), after)


@pytest.mark.usefixtures("one_rank", "small_buckets")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_states_that_leave_the_device_between_steps_change_no_number(stage, dtype):
    init_distributed(0, 1, "127.0.0.1", free_port(), 60, torch.device("cpu"))
    kind = getattr(torch, dtype)

    def trained(*, away: bool) -> torch.Tensor:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 32)).to(kind)
        engine = Engine(model, OptimConfig(lr=0.1), TrainerConfig(zero_stage=stage), 3, torch.device("cpu"))
        for _ in range(3):
            engine.backward(engine(torch.ones(1, 32, dtype=kind)).float().square().sum(), last=True)
            engine.step()
            for call in (engine.offload, engine.offload, engine.reload, engine.reload) if away else ():
                call()
        return engine.weights(["1.weight"])[0].clone()

    assert torch.equal(trained(away=True), trained(away=False))
