import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.sighted import sighted
from transformers import AutoModelForCausalLM, GenerationConfig

from trainer import models
from trainer.configs.sections import ModelConfig
from trainer.data.packing import Sequence, pack, scatter
from trainer.errors import ConfigError
from trainer.models import heads

SEQUENCES = [Sequence([3, 4, 5], [6, 7, 1]), Sequence([5, 5], [9, 8, 7, 6, 1]), Sequence([3], [4])]


def scored(model: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    batches = pack(SEQUENCES, 64, pad_id=0)
    outputs = [model(batch) for batch in batches]
    return scatter([o[0] for o in outputs], batches), scatter([o[1] for o in outputs], batches)


def test_log_probabilities_and_entropy_are_those_of_the_plain_model(tiny_model):
    lm = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    logprobs_N, entropies_N = scored(heads.PolicyModel(lm, temperature=0.7))
    expected, entropies = [], []
    for s in SEQUENCES:
        ids = torch.tensor([[*s.prompt_ids, *s.response_ids]])
        logp = torch.log_softmax(lm(input_ids=ids).logits[0, len(s.prompt_ids) - 1 : -1] / 0.7, -1)
        expected.append(logp.gather(1, torch.tensor(s.response_ids)[:, None])[:, 0])
        entropies.append(torch.distributions.Categorical(logits=logp).entropy())
    torch.testing.assert_close(logprobs_N, torch.cat(expected), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropies_N, torch.cat(entropies), atol=1e-5, rtol=1e-5)


def test_chunks_of_logits_change_neither_values_nor_gradients(tiny_model, monkeypatch):
    lm = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    policy = heads.PolicyModel(lm)
    whole, _ = scored(policy)
    whole.sum().backward()
    gradient = lm.lm_head.weight.grad.clone()
    lm.zero_grad()
    monkeypatch.setattr(heads, "CHUNK_ELEMENTS", 2 * lm.config.vocab_size)
    chunked, _ = scored(policy)
    chunked.sum().backward()
    torch.testing.assert_close(chunked, whole)
    torch.testing.assert_close(lm.lm_head.weight.grad, gradient, atol=1e-5, rtol=1e-5)


def test_entropy_is_learnt_only_when_asked(tiny_model):
    lm = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    assert not scored(heads.PolicyModel(lm))[1].requires_grad
    assert scored(heads.PolicyModel(lm, learn_entropy=True))[1].requires_grad


def test_a_value_model_starts_without_an_opinion(tiny_model):
    lm = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    (values,) = heads.ValueModel(lm)(pack(SEQUENCES, 64, pad_id=0)[0])
    assert values.shape == (9,)
    assert values.eq(0).all()
    assert values.requires_grad


def test_random_weights_depend_on_the_seed_alone():
    config = ModelConfig(
        init={
            "model_type": "qwen2",
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "intermediate_size": 16,
        },
        tokenizer="characters:ab",
        dtype="float32",
    )
    first, again, other = (models.load_lm(config, seed, torch.device("cpu")) for seed in (1, 1, 2))
    assert torch.equal(first.lm_head.weight, again.lm_head.weight)
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)
    assert models.fingerprint(models.shapes(first)) == models.fingerprint(models.shapes(other))


def test_a_character_tokenizer_gives_back_what_it_was_given():
    tokenizer = models.character_tokenizer("0123456789s=")
    ids: Any = tokenizer("s20=")["input_ids"]
    assert len(ids) == 4
    assert tokenizer.decode(ids + [tokenizer.eos_token_id], skip_special_tokens=True) == "s20="  # noqa: RUF005


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (ModelConfig(path="/nowhere/at/all"), ["model.path", "/nowhere/at/all"]),
        (ModelConfig(init={"model_type": "qwen9"}, tokenizer="characters:ab"), ["model.init", "qwen9"]),
        (ModelConfig(init={"model_type": "qwen2", "hiden_size": 3}, tokenizer="characters:ab"), ["model.init.hiden_size", "hidden_size?"]),
        (ModelConfig(init={"hidden_size": 3}, tokenizer="characters:ab"), ["model.init", "model_type"]),
        (ModelConfig(init={"model_type": "qwen2"}), ["model.tokenizer"]),
    ],
)
def test_models_that_cannot_be_made_name_the_setting(config, words):
    with pytest.raises(ConfigError) as error:
        models.load_lm(config, 0, torch.device("cpu"))
    assert all(word in str(error.value) for word in words)


def test_an_export_is_whole_or_not_there(tiny_model, tmp_path):
    config = ModelConfig(path=str(tiny_model), dtype="float32")
    lm, tokenizer = models.load_lm(config, 0, torch.device("cpu")), models.load_tokenizer(config)
    models.export(lm, lm.state_dict(), tokenizer, tmp_path / "model")
    before = (tmp_path / "model" / "model.safetensors").read_bytes()

    class Full:
        chat_template, eos_token_id = None, 1

        def save_pretrained(self, folder: Path) -> None:
            raise OSError(28, "No space left on device")

    with torch.no_grad():
        lm.model.embed_tokens.weight.add_(1)
    with pytest.raises(OSError, match="No space"):
        models.export(lm, lm.state_dict(), Full(), tmp_path / "model")  # type: ignore[arg-type]
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == before
    models.export(lm, lm.state_dict(), tokenizer, tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def made(model_type: str, **settings: Any) -> Any:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = ModelConfig(init={"model_type": model_type, **sizes, **settings}, tokenizer="characters:0123456789s=", dtype="float32")
    return models.load_lm(config, 0, torch.device("cpu"), train=True)


@pytest.mark.parametrize("model_type", ["llama", "granite", "gpt_neox"])
def test_heads_are_found_whatever_they_are_called(model_type):
    lm = made(model_type) if model_type != "gpt_neox" else _gpt_neox()
    logprobs_N, _ = scored(heads.PolicyModel(lm))
    logits = lm(input_ids=torch.tensor([SEQUENCES[2].prompt_ids])).logits[0, -1]
    torch.testing.assert_close(logprobs_N[-1], torch.log_softmax(logits, -1)[SEQUENCES[2].response_ids[0]], atol=1e-5, rtol=1e-5)
    assert heads.ValueModel(lm)(pack(SEQUENCES, 64, pad_id=0)[0])[0].eq(0).all()


def _gpt_neox() -> Any:
    init = {"model_type": "gpt_neox", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return models.load_lm(ModelConfig(init=init, tokenizer="characters:0123456789s=", dtype="float32"), 0, torch.device("cpu"))


def test_a_model_in_training_has_no_dropout():
    """Llama drops in attention's function, GPT-2 in modules."""
    gpt2 = {"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2, "resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5}
    config = ModelConfig(init=gpt2, tokenizer="characters:0123456789s=", dtype="float32")
    for lm in (models.load_lm(config, 0, torch.device("cpu"), train=True), made("llama", attention_dropout=0.5)):
        assert lm.training
        policy = heads.PolicyModel(lm)
        first, again = scored(policy)[0], scored(policy)[0]
        assert torch.equal(first, again)
        torch.testing.assert_close(first, scored(policy.eval())[0])


def test_a_tower_in_training_leaves_out_no_layer(tmp_path):
    """Its stochastic depth is in neither a function nor a module of torch's."""
    lm = models.load_lm(ModelConfig(path=str(sighted("qianfan_ocr", tmp_path)), dtype="float32"), 0, torch.device("cpu"), train=True)
    pixels = torch.randn(2, 3, 32, 32)
    first, again = (lm.model.get_image_features(pixels).pooler_output for _ in range(2))
    assert lm.training and all(torch.equal(one, other) for one, other in zip(first, again, strict=True))


def with_generation(model: Path, folder: Path, settings: dict[str, Any]) -> ModelConfig:
    shutil.copytree(model, folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 1, **settings}))
    return ModelConfig(path=str(folder), dtype="float32")


def test_an_exported_model_stops_where_its_chat_template_ends_a_turn(tiny_model, tmp_path):
    lm = models.load_lm(ModelConfig(path=str(tiny_model), dtype="float32"), 0, torch.device("cpu"))
    tokenizer = models.load_tokenizer(ModelConfig(path=str(tiny_model)))
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}<bos>{% endfor %}"
    lm.generation_config.eos_token_id = 5  # that the model lists itself
    models.export(lm, lm.state_dict(), tokenizer, tmp_path / "out")
    assert GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id == [1, 2, 5]


@pytest.mark.parametrize("load", [models.without_weights, lambda config: models.load_lm(config, 0, torch.device("cpu"))])
def test_a_temperature_without_sampling_is_exported_as_sampling(tiny_model, tmp_path, load):
    config = with_generation(tiny_model, tmp_path / "model", {"temperature": 0.6, "top_p": 0.95, "top_k": 20})
    weights = models.load_lm(config, 0, torch.device("cpu")).state_dict()
    models.export(load(config), weights, models.load_tokenizer(config), tmp_path / "out")
    saved = json.loads((tmp_path / "out/generation_config.json").read_text())
    assert (saved["do_sample"], saved["temperature"], saved["top_p"], saved["top_k"]) == (True, 0.6, 0.95, 20)


@pytest.mark.parametrize("settings", [{"early_stopping": True}, {"pad_token_id": -1}])
@pytest.mark.parametrize("load", [models.without_weights, lambda config: models.load_lm(config, 0, torch.device("cpu"))])
def test_settings_of_generation_that_could_not_be_saved_are_refused_at_the_start(tiny_model, tmp_path, load, settings):
    config = with_generation(tiny_model, tmp_path / "model", settings)
    with pytest.raises(ConfigError, match=rf"generation_config\.json is not one that transformers saves: (?s:.)*{next(iter(settings))}"):
        load(config)


def test_a_folder_without_some_of_the_weights_is_refused(tiny_model, tmp_path):
    """transformers would draw them at random, with a warning."""
    shutil.copytree(tiny_model, tmp_path / "model")
    [file] = (tmp_path / "model").glob("*.safetensors")
    tensors = load_file(file)
    some = next(name for name in tensors if "o_proj" in name)
    save_file({name: tensor for name, tensor in tensors.items() if name != some}, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=rf"^model\.path: .*: its files lack 1 weights of Qwen2ForCausalLM \({some}\); they are"):
        models.load_lm(ModelConfig(path=str(tmp_path / "model"), dtype="float32"), 0, torch.device("cpu"))
