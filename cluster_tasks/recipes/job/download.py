"""`python -m cluster_tasks.recipes.job.download REPOSITORY FOLDER [--dataset]`: a repository of Hugging Face, as a plain folder."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

DUPLICATES: list[str] = ["*.pth", "original/*", "*.gguf", "*.h5", "*.msgpack", "onnx/*"]  # of a model: its weights in other formats


def main() -> int:
    parser = argparse.ArgumentParser(description="Downloads a repository of Hugging Face into a folder.")
    parser.add_argument("repository", help="such as Qwen/Qwen2.5-7B-Instruct")
    parser.add_argument("folder")
    parser.add_argument("--dataset", action="store_true")
    parser.add_argument("--revision", help="commit, tag or branch")
    options: Any = parser.parse_args()
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    kind, left_out = ("dataset", None) if options.dataset else ("model", DUPLICATES)
    named = f"{options.repository}@{options.revision}" if options.revision else options.repository
    try:
        snapshot_download(options.repository, revision=options.revision, repo_type=kind, local_dir=options.folder, ignore_patterns=left_out)
    except (HfHubHTTPError, OSError, ValueError) as error:
        why = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        print(f"error: {kind} {named} from {os.environ.get('HF_ENDPOINT', 'https://huggingface.co')}: {why}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
