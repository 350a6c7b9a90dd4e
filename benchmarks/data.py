"""How long a start takes with 20,000 chat prompts: tokenized, and then in a fresh process with the ids of the first start.

Reading the file, the chat template and the ids; neither Python's imports nor loading the tokenizer, which are those of any start. The
tokenizer is a byte-level BPE of 8,000 tokens that is trained on the prompts' words.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.report import Ratio, Report

PROMPTS, WORDS, VOCABULARY, ROUNDS = 20_000, 150, 8000, 3
LIMIT = 1.0  # seconds of a start that finds the ids
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
START = """
import sys, time
from transformers import AutoTokenizer
from trainer.configs.data import DataConfig
from trainer.data.prompts import load_prompts
tokenizer = AutoTokenizer.from_pretrained(sys.argv[2])
config = DataConfig(path=sys.argv[1], system="Answer in one line.")
began = time.perf_counter()
prompts = load_prompts(config, tokenizer).prompts
print(time.perf_counter() - began, len(prompts), sum(len(prompt.token_ids) for prompt in prompts))
"""


def run() -> Report:
    seconds: dict[str, list[float]] = {"tokenized": [], "cached": []}
    counts = set()
    with tempfile.TemporaryDirectory() as folder:
        rows, tokenizer = _prepare(Path(folder))
        for number in range(ROUNDS):
            for values in seconds.values():
                took, *count = _start(rows, tokenizer, Path(folder) / f"runs-{number}")
                values.append(took)
                counts.add(tuple(count))
    [(prompts, tokens)] = counts  # the ids of a file are as many as those of the tokenizer
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return Report(
        "data",
        [
            Ratio(f"seconds of a start with the ids of {PROMPTS} prompts in a file / {LIMIT:g} s", medians["cached"] / LIMIT, 1.0),
            Ratio("the same / a start that tokenizes them", medians["cached"] / medians["tokenized"], 1.0),
        ],
        facts={"seconds": "  ".join(f"{name} {value:.2f}" for name, value in medians.items()), "tokens": f"{tokens:g} of {prompts:g}"},
        samples=dict(seconds),
    )


def _start(rows: Path, tokenizer: Path, runs: Path) -> list[float]:
    """Seconds, prompts and tokens, of a process of its own."""
    command = [sys.executable, "-c", START, str(rows), str(tokenizer)]
    done = subprocess.run(command, env={**os.environ, "FLOTILLA_RUNS": str(runs)}, capture_output=True, text=True, check=True, timeout=600)
    return [float(word) for word in done.stdout.split()[-3:]]


def _prepare(folder: Path) -> tuple[Path, Path]:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    rng = random.Random(0)
    words = ["".join(rng.choices("etaoinshrdlucmfw", k=rng.randint(2, 9))) for _ in range(20_000)]
    texts = [" ".join(rng.choices(words, k=WORDS)) for _ in range(PROMPTS)]
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": [{"role": "user", "content": text}], "answer": "1"}) + "\n" for text in texts))
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    bpe.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    special = ["<|im_start|>", "<|im_end|>", "<|pad|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(texts[:1000], trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=special, initial_alphabet=alphabet))  # type: ignore[call-arg]
    fast = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|pad|>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder / "tokenizer")
    return rows, folder / "tokenizer"
