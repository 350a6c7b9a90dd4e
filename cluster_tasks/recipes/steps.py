"""Steps that several trainers share: a model, a data set, and GSM8K."""

from __future__ import annotations

import re
from collections.abc import Mapping

from cluster_tasks.recipes.recipe import Place, RecipeError, Step

JOB = "cluster_tasks.recipes.job"  # what is shipped with every run
REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?(@[\w./-]+)?", re.ASCII)
GSM8K = "openai/gsm8k"
GSM8K_KEY = "gsm8k"
# Commits of what recipes fetch where a person names none. docs/other-trainers/README.md lists what is not pinned.
REVISIONS = {
    "Qwen/Qwen2.5-0.5B-Instruct": "7ae557604adf67be50417f59c2c2f167def9a775",
    "Qwen/Qwen2.5-1.5B": "8faed761d45a263340a0528343f099c05c9a4323",
    "Qwen/Qwen2.5-3B": "3aab1f1954e9cc14eb9509a215f9e5ca08227a9b",
    "Qwen/Qwen2.5-7B": "d149729398750b98c0af14eb82c78cfe92750796",
    "Qwen/Qwen2.5-7B-Instruct": "a09a35458c702b33eeacc393d103063234e8bc28",
    "Qwen/Qwen3-32B": "9216db5781bf21249d130ec9da846c4624c16137",
    "meta-llama/Llama-3.1-70B-Instruct": "1605565b47bb9346c5515c34102e054115b4f98b",
    "OpenRLHF/Llama-3-8b-sft-mixture": "03334dc4a796d9d72850ead46956c33da22e6d7b",
    "intfloat/e5-base-v2": "1c644c92ad3ba1efdad3f1451a637716616a20e8",
    GSM8K: "e53f048856ff4f594e959d75785d2c2d37b678ee",
}


def is_path(name: str) -> bool:
    """Whether it is a path of the nodes; else it is a repository of Hugging Face. Raises RecipeError where it can be neither."""
    if not name.startswith("/") and not REPOSITORY.fullmatch(name):
        text = "such as Qwen/Qwen2.5-7B or Qwen/Qwen2.5-7B@REVISION, and no absolute path of the nodes"
        raise RecipeError(f"{name!r} is no repository of Hugging Face, {text}")
    return name.startswith("/")


def pinned(name: str) -> tuple[str, str]:
    """Repository and revision of REPOSITORY[@REVISION]; "" where nobody names one."""
    repository, _, revision = name.partition("@")
    return repository, revision or REVISIONS.get(repository, "")


def folder(name: str) -> str:
    """Of a repository; each revision has its own."""
    repository, revision = pinned(name)
    return repository.replace("/", "--") + (f"@{revision.replace('/', '--')[:12]}" if revision else "")


def download(name: str) -> tuple[str, ...]:
    repository, revision = pinned(name)
    return ("python", "-m", f"{JOB}.download", repository, "{part}", *(["--revision", revision] if revision else []))


def there(key: str, path: str) -> Step:
    """Has to be on shared storage already."""
    return Step(key, (), path)


def model(place: Place, name: str, key: str = "model") -> tuple[str, tuple[Step, ...]]:
    """The folder of a model, and what brings it there, or says that it is missing."""
    if is_path(name):
        return name, (there(key, name),)
    path = place.model(folder(name))
    return path, (Step(f"model {name}", download(name), path, timeout=7200),)


def dataset(place: Place, name: str, key: str) -> tuple[str, tuple[Step, ...]]:
    """The same of a data set."""
    if is_path(name):
        return name, (there(key, name),)
    path = place.data(folder(name))
    return path, (Step(f"data {name}", (*download(name), "--dataset"), path, timeout=7200),)


def gsm8k(place: Place, style: str, overrides: Mapping[str, str]) -> tuple[str, tuple[Step, ...]]:
    """The folder of train.parquet and test.parquet as a trainer reads them: `verl` or `chat`."""
    name = overrides.get(GSM8K_KEY, GSM8K)
    own, source = is_path(name), pinned(name)
    path = place.data(f"gsm8k-{style}" + (f"-{folder(name).strip('-')}" if GSM8K_KEY in overrides else ""))
    words = ("--source", name) if own else ("--source", source[0], *(["--revision", source[1]] if source[1] else []))
    made = Step(f"data {name}", ("python", "-m", f"{JOB}.gsm8k", style, "{part}", *words), path)
    return path, (*([there(GSM8K_KEY, name)] if own else []), made)


def trainers(overrides: Mapping[str, str]) -> dict[str, str]:
    """The overrides without the key of GSM8K, which is ours."""
    return {key: value for key, value in overrides.items() if key != GSM8K_KEY}
