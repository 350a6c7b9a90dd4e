"""What is looked at before a run's processes start."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.configs import here, settings

from trainer.errors import ConfigError
from trainer.online import processes


@pytest.mark.parametrize("kind", ["mamba", "qwen3_next"])
def test_a_recurrent_model_is_refused_with_the_engine_that_keeps_no_states(tmp_path: Path, kind: str):
    init = {"model_type": kind, "hidden_size": 16, "num_hidden_layers": 1}
    config = here(settings(tmp_path, model={"path": None, "init": init, "tokenizer": "characters:0123456789s="}))
    words = rf"rollout\.engine=hf: {kind} has recurrent layers, whose states this engine does not keep; use vllm"
    with pytest.raises(ConfigError, match=words), processes.start(config, tmp_path / "run"):
        pass
