"""Rows of a dataset of the Hugging Face hub, or of its copy in the cache. No torch.

The files come as `python -m cluster_tasks.cache --dataset` fetches them, so that what it left in the cache is found without a network.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from typing import Any

from trainer.configs.data import DataConfig
from trainer.errors import ConfigError


def rows(config: DataConfig) -> Iterator[tuple[str, dict[str, Any]]]:
    """Raises ConfigError for a name, revision, subset or split that is not there, naming those that are."""
    try:
        from datasets import get_dataset_config_names
        from datasets.utils.logging import disable_progress_bar
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"data.path: {config.path}: no such file or folder here, and datasets of the hub need datasets (pip install datasets)"
        ) from error
    disable_progress_bar()
    folder = _snapshot(config.path, config.revision)
    subsets = get_dataset_config_names(folder)
    subset = _choose("subset", config, config.subset, subsets, "default")
    splits = _splits(folder, subset, config)
    split = _choose("split", config, config.split, [*splits], "train")
    for number, row in enumerate(splits[split]):
        yield f"{config.path} ({split}): row {number}", row


@cache
def _snapshot(name: str, revision: str | None) -> str:
    """The folder with its files. The run asks after preflight has: once is enough."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    asked = f"data.revision: {name} has no {revision!r}" if revision else f"data.path: {name}"
    try:
        return snapshot_download(name, repo_type="dataset", revision=revision)
    except RevisionNotFoundError as error:
        refs = _revisions(name)
        raise ConfigError(f"data.revision: {name} has no {revision!r}; it has {', '.join(refs)}") from error
    except RepositoryNotFoundError as error:
        raise ConfigError(
            f"data.path: {name}: neither a file or folder here nor a dataset of the hub that you may read; check the name, or set HF_TOKEN"
        ) from error
    except Exception as error:  # no network, a proxy, offline and not in the cache: each has a class of its own
        offline = "HF_HUB_OFFLINE is set and" if os.environ.get("HF_HUB_OFFLINE") else "the hub cannot be reached and"
        raise ConfigError(
            f"{asked}: no such file or folder here, {offline} the cache has no copy ({type(error).__name__}); fetch it where there is "
            f"a network with python -m cluster_tasks.cache --dataset {name}, or give a file"
        ) from error


def _revisions(name: str) -> list[str]:
    from huggingface_hub import HfApi

    refs = HfApi().list_repo_refs(name, repo_type="dataset")
    return [ref.name for ref in (*refs.branches, *refs.tags)]


def _splits(folder: str, subset: str, config: DataConfig) -> dict[str, Any]:
    from datasets import load_dataset

    try:
        return load_dataset(folder, subset)  # type: ignore[return-value]
    except Exception as error:  # whatever its files make the readers of many formats raise
        raise ConfigError(f"data.path: {config.path}: datasets cannot read it: {error}; write its rows to a file") from error


def _choose(key: str, config: DataConfig, asked: str | None, there: list[str], usual: str) -> str:
    names = ", ".join(there)
    if asked is not None and asked not in there:
        raise ConfigError(f"data.{key}: {config.path} has no {asked!r}; it has {names}")
    if asked is None and usual not in there and len(there) > 1:
        raise ConfigError(f"data.{key}: {config.path} has several: {names}; set one")
    return asked or (usual if usual in there else there[0])
