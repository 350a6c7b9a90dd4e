"""Weights in 4 bits on a real GPU are those that a CPU makes of the same model, and leave it in turns."""

from __future__ import annotations

import pytest
import torch

from trainer import models
from trainer.configs.sections import ModelConfig
from trainer.models import quantize
from trainer.ranks import offload

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")]
GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_a_gpu_computes_with_is_what_a_cpu_has_written_for_rollout_engines(wide_model, tmp_path, dtype):
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    config = ModelConfig.model_validate({"path": str(wide_model), "dtype": dtype, "lora": {"quantize": "nf4"}})
    written = models.load_lm(config, 0, CPU)
    table = {name: quantize.whole(p) for name, p in written.named_parameters()}
    models.export(written, table, models.load_tokenizer(config), tmp_path / "initial")
    lm = models.load_lm(config.model_copy(update={"path": str(tmp_path / "initial")}), 0, GPU)
    for name, p in lm.named_parameters():
        assert torch.equal(quantize.whole(p).cpu(), table[name]), name


def test_turns_take_weights_and_scales_off_the_gpu_and_change_no_number(wide_model):
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    model = {"path": str(wide_model), "dtype": "bfloat16", "lora": {"rank": 4, "quantize": "nf4"}}
    lm = models.load_lm(ModelConfig.model_validate(model), 0, GPU, train=True)
    ids = torch.tensor([[3, 4, 5, 6, 7]], device=GPU)
    before, there = lm(input_ids=ids).logits.detach().cpu(), torch.cuda.memory_allocated()
    of_model = sum(p.nbytes + (p.quant_state.absmax.nbytes if hasattr(p, "quant_state") else 0) for p in lm.parameters())
    offload.move(lm, CPU)
    left = torch.cuda.memory_allocated()  # cuBLAS's workspace
    offload.move(lm, GPU)
    assert there - left >= of_model
    assert torch.equal(lm(input_ids=ids).logits.detach().cpu(), before)
