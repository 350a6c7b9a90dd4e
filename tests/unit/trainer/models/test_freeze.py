"""Parameters that are left as they are, one rank in this process."""

from __future__ import annotations

import re
from functools import partial

import pytest
import torch
from safetensors.torch import load_file
from support.one_rank import BATCHES, started

from trainer import export, models
from trainer.checkpoints.folders import Checkpoints
from trainer.cli.yaml_io import dump
from trainer.configs.sections import ModelConfig
from trainer.errors import ConfigError
from trainer.offline.loop import optimizer_step

CPU = torch.device("cpu")
FROZEN = ["mlp.up_proj", "layers.0"]

pytestmark = pytest.mark.usefixtures("one_rank", "small_buckets")


@pytest.mark.parametrize(("dtype", "stage"), [("float32", 0), ("bfloat16", 1), ("bfloat16", 2), ("bfloat16", 3)])
def test_the_others_learn_and_a_restart_changes_nothing(tiny_model, tmp_path, dtype, stage):
    start = partial(started, tiny_model, {"freeze": FROZEN}, dtype=dtype, stage=stage)
    worker = start()
    whole = [optimizer_step(worker, batch) for batch in BATCHES]
    first = start()
    before = [optimizer_step(first, batch) for batch in BATCHES[:4]]
    run = tmp_path / "run"
    checkpoints = Checkpoints(run / "checkpoints")
    with checkpoints.writing(4, {"model": first.fingerprint()}) as folder:
        first.save_shard(folder)
        assert first.saved(60)
    first.export(tmp_path / "four")
    again = start()
    again.load_shard(run / "checkpoints/step_4")
    assert before + [optimizer_step(again, batch) for batch in BATCHES[4:]] == whole
    assert {parameter.name for parameter in worker.parameters()} == set(load_file(tiny_model / "model.safetensors")), "all are sent"
    worker.export(tmp_path / "model")
    exported, original = (load_file(folder / "model.safetensors") for folder in (tmp_path / "model", tiny_model))
    kept = {name for name in original if torch.equal(exported[name].float(), original[name].to(exported[name].dtype).float())}
    assert kept == {name for name in original if ".layers.0." in name or ".mlp.up_proj." in name}
    (run / "run.yaml").write_text(dump({"model": {"path": str(tiny_model), "dtype": dtype, "freeze": FROZEN}}))
    export.export(run, export.chosen(run, None, best=False), tmp_path / "from-checkpoint")
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("from-checkpoint", "four"))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_checkpoint_of_a_part_is_refused_on_other_weights_of_the_rest(tiny_model, tmp_path):
    config = ModelConfig(path=str(tiny_model), dtype="float32")
    lm = models.load_lm(config, 0, CPU)
    with torch.no_grad():
        lm.model.layers[0].self_attn.q_proj.weight.mul_(1.5)
    models.export(lm, lm.state_dict(), models.load_tokenizer(config), tmp_path / "other")
    mine, same, its = (started(path, {"freeze": FROZEN}).fingerprint() for path in (tiny_model, tiny_model, tmp_path / "other"))
    assert mine == same != its


@pytest.mark.parametrize("load", [lambda config: models.load_lm(config, 0, CPU), models.without_weights])
@pytest.mark.parametrize(
    ("parts", "said"),
    [
        (["up_prj"], "model.freeze: up_prj: no parameter of the model has that in its name; did you mean up_proj?"),
        (["layers.7"], "model.freeze: layers.7: no parameter of the model has that in its name; "),
        (["xyzzy"], "model.freeze: xyzzy: no parameter of the model has that in its name; their names are made of model, embed_tokens"),
        (["model"], "model.freeze=['model']: all parameters are frozen; leave some to train"),
    ],
)
def test_names_that_no_parameter_has_are_refused(tiny_model, load, parts, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        load(ModelConfig(path=str(tiny_model), freeze=parts))
