"""Conversations with pictures: their tokens are nobody's, and the answers' are learned; templates that want parts get them."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image
from support.sighted import processor, sighted, tokenizer_of

from trainer.chat.processor import attach, processor_of
from trainer.configs.data import DataConfig
from trainer.configs.sft import SftDataConfig
from trainer.data.conversations import load_conversations
from trainer.data.prompts import load_prompts
from trainer.errors import ConfigError

ROLES = "{% for m in messages %}{{ 'e' if m.role == 'user' else 'm' }}"
BODY = "{% for p in m.content %}{{ PLACE if p.type == 'image' else p.text }}{% endfor %}"
END = "<eos>{% endfor %}{% if add_generation_prompt %}m{% endif %}"
TALKS: list[dict[str, object]] = []


def rows() -> list[dict[str, object]]:
    return TALKS


@pytest.fixture(params=["qwen2_5_vl", "idefics3", "gemma3"])
def tokenizer(request: pytest.FixtureRequest):
    found = tokenizer_of(request.param)
    own = processor(request.param, found)
    attach(found, own)
    seen = processor_of(found)
    assert seen
    found.chat_template = ROLES + BODY.replace("PLACE", repr(seen.mark)) + END
    TALKS[:] = []
    return found


def part(shade: int, size: tuple[int, int] = (32, 32)) -> dict[str, object]:
    return {"type": "image", "image": Image.new("RGB", size, (shade, 9, 9))}


def test_only_the_assistants_words_are_learned(tokenizer):
    asked = [{"role": "user", "content": [part(1), {"type": "text", "text": "count="}]}, {"role": "assistant", "content": "12"}]
    again = [{"role": "user", "content": [{"type": "text", "text": "lo"}, part(2, (64, 32))]}, {"role": "assistant", "content": "3"}]
    TALKS.append({"messages": [*asked, *again]})
    config = SftDataConfig(path=f"{__name__}:rows", messages="messages")
    [prompt] = load_conversations(config, tokenizer).prompts
    ids, mask = [*prompt.token_ids, *prompt.row["response_ids"]], [0.0] * len(prompt.token_ids) + prompt.row["mask"]
    assert len(prompt.pictures) == 2
    learned = [tokenizer.decode([i]) for i, known in zip(ids, mask, strict=True) if known]
    assert learned == ["1", "2", "<eos>", "3", "<eos>"]


def test_a_prompt_of_messages_is_what_the_processor_makes_of_the_template(tokenizer):
    seen = processor_of(tokenizer)
    assert seen
    TALKS.append({"prompt": [{"role": "user", "content": [part(1), {"type": "text", "text": "count="}]}], "answer": "1"})
    [prompt] = load_prompts(DataConfig(path=f"{__name__}:rows"), tokenizer).prompts
    [picture] = prompt.pictures
    own = seen.own(text=[f"e{seen.mark}count=<eos>m"], images=[[picture.image()]])["input_ids"][0]
    assert prompt.token_ids == list(own)
    assert prompt.row["prompt"][0]["content"][0] == picture.described()


def test_words_that_write_tokens_of_pictures_are_refused(tokenizer):
    seen = processor_of(tokenizer)
    assert seen
    TALKS.append({"prompt": [{"role": "user", "content": f"lo{seen.place}"}], "answer": "1"})
    with pytest.raises(ConfigError, match=r"row 0: 0 pictures, and 1 places for them"):
        load_prompts(DataConfig(path=f"{__name__}:rows"), tokenizer)


def test_an_assistants_picture_is_refused(tokenizer):
    TALKS.append({"messages": [{"role": "user", "content": "lo"}, {"role": "assistant", "content": [part(1)]}]})
    with pytest.raises(ConfigError, match="message 1 is the assistant's and has a picture"):
        load_conversations(SftDataConfig(path=f"{__name__}:rows", messages="messages"), tokenizer)


def test_a_folder_without_a_processor_is_read_as_a_text_model(tmp_path: Path):
    from trainer.chat.tokenizer import load_tokenizer
    from trainer.configs.sections import ModelConfig

    path = sighted("gemma3", tmp_path / "model")
    for name in ("processor_config.json", "preprocessor_config.json"):
        (path / name).unlink(missing_ok=True)
    assert processor_of(load_tokenizer(ModelConfig(path=str(path)))) is None
