"""`python -m cluster_tasks.recipes.job.gsm8k verl|chat FOLDER`: openai/gsm8k as train.parquet and test.parquet.

verl: the columns that verl's own preparation of GSM8K makes. chat: prompt, completion and answer, for TRL.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

REPOSITORY = "openai/gsm8k"
INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'


def final(answer: str) -> str:
    """The number behind the last ####."""
    return answer.rpartition("#### ")[2].strip().replace(",", "")


def verl_row(example: dict[str, str], split: str, index: int) -> dict[str, Any]:
    return {
        "data_source": REPOSITORY,
        "prompt": [{"role": "user", "content": f"{example['question']} {INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": final(example["answer"])},
        "extra_info": {"split": split, "index": index, "answer": example["answer"], "question": example["question"]},
    }


def chat_row(example: dict[str, str], split: str, index: int) -> dict[str, Any]:
    return {
        "prompt": [{"role": "user", "content": f"{example['question']} {INSTRUCTION}"}],
        "completion": [{"role": "assistant", "content": example["answer"]}],
        "answer": final(example["answer"]),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Makes GSM8K as a trainer reads it.")
    parser.add_argument("style", choices=("verl", "chat"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--source", default=REPOSITORY, help="folder or repository of a dataset with question and answer")
    parser.add_argument("--revision", help="of a repository: commit, tag or branch")
    options: Any = parser.parse_args()
    from datasets import load_dataset
    from pyarrow import Table, parquet

    row = {"verl": verl_row, "chat": chat_row}[options.style]
    try:
        splits = load_dataset(options.source, name="main" if options.source == REPOSITORY else None, revision=options.revision)
    except Exception as error:  # of the hub's client, of the network, of the file format: its libraries have no common one
        why = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        print(f"error: dataset {options.source}: {why}", file=sys.stderr)
        return 2
    options.folder.mkdir(parents=True, exist_ok=True)
    for split in ("train", "test"):
        rows = [row(dict(example), split, index) for index, example in enumerate(splits[split])]
        parquet.write_table(Table.from_pylist(rows), options.folder / f"{split}.parquet")
        print(f"{split}: {len(rows)} rows", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
