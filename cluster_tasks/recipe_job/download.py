"""`python -m cluster_tasks.recipe_job.download REPOSITORY FOLDER [--dataset]`: a repository of Hugging Face, as a plain folder."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path
from typing import Any

DUPLICATES = ("*.pth", "original/*", "*.gguf", "*.h5", "*.msgpack", "onnx/*")  # the same weights in other formats


def main() -> int:
    parser = argparse.ArgumentParser(description="Downloads a repository of Hugging Face into a folder.")
    parser.add_argument("repository", help="such as Qwen/Qwen2.5-7B-Instruct, or a folder that is there already")
    parser.add_argument("folder")
    parser.add_argument("--dataset", action="store_true")
    options: Any = parser.parse_args()
    if Path(options.repository).is_dir():
        shutil.copytree(options.repository, options.folder)
        return 0
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    kind = "dataset" if options.dataset else "model"
    try:
        snapshot_download(options.repository, repo_type=kind, local_dir=options.folder, ignore_patterns=list(DUPLICATES))
    except (HfHubHTTPError, OSError, ValueError) as error:
        why = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        print(f"error: {kind} {options.repository} from {os.environ.get('HF_ENDPOINT', 'https://huggingface.co')}: {why}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
