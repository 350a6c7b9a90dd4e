"""DeepSpeed's states leave a real GPU and come back."""

from __future__ import annotations

import gc

import pytest
import torch

from trainer.cluster.actors import free_port
from trainer.configs.sections import OptimConfig, TrainerConfig
from trainer.ranks.engine import Engine, init_distributed

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")]
GPU = torch.device("cuda", 0)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(("stage", "dtype"), [(0, torch.float32), (2, torch.bfloat16), (3, torch.bfloat16)])
def test_states_that_are_away_free_the_gpu_and_change_no_number(stage, dtype):
    init_distributed(0, 1, "127.0.0.1", free_port(), 60, GPU)

    def trained(*, away: bool) -> torch.Tensor:
        torch.manual_seed(0)
        gc.collect()
        others = torch.cuda.memory_allocated()  # what DeepSpeed keeps of engines of the runs before, in this process
        model = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048) for _ in range(16))).to(GPU, dtype)
        engine = Engine(model, OptimConfig(lr=1e-3), TrainerConfig(zero_stage=stage), 3, GPU)
        for _ in range(3):
            engine.backward(engine(torch.ones(1, 2048, dtype=dtype, device=GPU)).float().square().sum(), last=True)
            engine.step()
            if away:
                before = torch.cuda.memory_allocated() - others
                engine.offload()
                assert torch.cuda.memory_allocated() - others < 0.2 * before
                engine.reload()
        return engine.weights(["3.weight"])[0].cpu()

    away, here = trained(away=True), trained(away=False)
    torch.testing.assert_close(away, here)
