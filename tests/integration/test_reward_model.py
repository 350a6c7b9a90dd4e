"""A model with random weights as the reward, on a real Ray cluster."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from support.configs import settings
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForSequenceClassification, GPT2Config, PreTrainedTokenizerFast

from lab.local import command
from trainer import train_ppo
from trainer.configs.reward import RewardConfig
from trainer.episodes import Episode, Prompt, Turn
from trainer.errors import ConfigError
from trainer.metrics import read
from trainer.rewards.scorer import Scorer

pytestmark = [pytest.mark.wide, pytest.mark.usefixtures("cluster")]

CHARACTERS = "0123456789= :su"
CHAT = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }} {% endfor %}"


def model(folder: Path, labels: int = 1, template: str | None = None) -> str:
    vocabulary = {token: i for i, token in enumerate(["<eos>", *CHARACTERS])}
    characters = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    characters.pre_tokenizer = pre_tokenizers.Split("", "isolated")  # type: ignore[assignment]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=characters, eos_token="<eos>")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    size = GPT2Config(vocab_size=len(vocabulary), n_embd=16, n_layer=2, n_head=2, n_positions=64)
    size.num_labels = labels
    AutoModelForSequenceClassification.from_config(size).save_pretrained(folder)
    return str(folder)


def worth(folder: str, text: str) -> float:
    """By one forward pass without padding."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    with torch.inference_mode():
        scorer = AutoModelForSequenceClassification.from_pretrained(folder)
        return float(scorer(torch.tensor([tokenizer(text)["input_ids"]])).logits[0, 0])


def answers(*texts: str, prompt: Any = "s21=") -> list[Episode]:
    return [Episode(Prompt(i, [1], {"question": prompt}), i, [Turn([2], [0.0], "stop")], text) for i, text in enumerate(texts)]


def scorer(folder: str, **changes: Any) -> Scorer:
    args = {"model": folder, "gpus": 0, "batch_size": 2, "prompt": "question", **changes.pop("args", {})}
    return Scorer(RewardConfig(function="reward_model", args=args, **changes))


def running() -> list[psutil.Process]:
    """The actors' processes; Ray's are below this one."""
    return [p for p in psutil.Process().children(recursive=True) if any("ray::RewardModel" in word for word in command(p))]


@pytest.mark.slow
def test_answers_of_several_lengths_get_what_the_model_says_to_each_alone(tmp_path):
    plain, chat = model(tmp_path / "plain"), model(tmp_path / "chat", template=CHAT)
    with scorer(plain) as rewards:
        assert rewards.score(answers("12", "1", "0123456789")) == pytest.approx(
            [worth(plain, f"s21={t}") for t in ("12", "1", "0123456789")]
        )
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "21="}]
    with scorer(chat) as rewards:
        assert rewards.score(answers("12", "1")) == pytest.approx([worth(chat, f"u:s21= :{t} ") for t in ("12", "1")])
        assert rewards.score(answers("12", prompt=messages)) == pytest.approx([worth(chat, "s:s u:21= :12 ")])


def test_a_model_that_dies_is_started_again_and_an_answer_that_is_too_long_fails_alone(tmp_path, capsys):
    folder = model(tmp_path / "model")
    with scorer(folder, args={"max_tokens": 8}, retries=1, on_error="zero") as rewards:
        first = rewards.score(answers("12", "0123456789", "1"))
        assert first == pytest.approx([worth(folder, "s21=12"), 0, worth(folder, "s21=1")])
        assert "14 tokens, more than max_tokens=8" in capsys.readouterr().out
        [actor] = running()
        actor.kill()
        actor.wait(30)
        assert rewards.score(answers("12", "1")) == pytest.approx([first[0], first[2]])
        assert [again.pid for again in running()] != [actor.pid]


@pytest.mark.parametrize(
    ("labels", "args", "said"),
    [
        (2, {}, r"its model .*/model does not load: ValueError: it has 2 outputs, a reward model has 1"),
        (1, {"prompt": "prompt"}, r"its argument prompt='prompt' is not a column of row 0"),
        (
            1,
            {"gpus": 1, "start_seconds": 3},
            r"was not up within 3 s \(start_seconds\): it asks for 1 CPU and 1 GPU .*, and \d+ and 0 are free",
        ),
    ],
)
def test_a_model_that_cannot_score_is_one_error(tmp_path, labels, args, said):
    with scorer(model(tmp_path / "model", labels), args=args) as rewards, pytest.raises(ConfigError, match=said):
        rewards.score(answers("12"))


def test_a_run_learns_from_it(tiny_model, tmp_path):
    reward = {"function": "reward_model", "args": {"model": model(tmp_path / "model"), "gpus": 0}}
    assert train_ppo.train(settings(tiny_model, reward=reward, trainer={"steps": 2}), tmp_path / "run") == 0
    rows = read(tmp_path / "run")
    assert rows[1]["reward_std"] > 0 and rows[1]["reward"] != rows[2]["reward"]
    deadline = time.monotonic() + 60
    while running():
        assert time.monotonic() < deadline, "it ends with the run"
        time.sleep(0.1)
