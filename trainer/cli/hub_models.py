"""Whether models of the hub can be read from here, asked first: transformers tries for most of a minute. No torch."""

from __future__ import annotations

from pathlib import Path

from trainer.cli.paths import is_hub_name
from trainer.configs.sections import Config

SECONDS = 10.0  # for the hub to answer


def check(config: Config) -> list[str]:
    """A line for each setting that names a model which is neither a folder, nor in the cache, nor one of the hub."""
    of_model = {"model.tokenizer": config.model.tokenizer, "model.path": config.model.path}
    asked = of_model | {other.setting: other.model.path for other in config.other_models()}
    lines = {f"{setting}={name}": missing(name) for setting, name in asked.items() if name}
    return [f"{named}: {why}" for named, why in lines.items() if why]


def missing(name: str) -> str:
    """Why a hub name cannot be had; nothing where it can, or is none."""
    if not is_hub_name(name):
        return ""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import RepositoryNotFoundError

    if [*(Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}").glob("snapshots/*/*")]:
        return ""
    why = "HF_HUB_OFFLINE is set"
    if not constants.HF_HUB_OFFLINE:
        try:
            HfApi(endpoint=constants.ENDPOINT).model_info(name, timeout=SECONDS)
        except RepositoryNotFoundError:
            return "neither a folder here nor a model of the hub that you may read; check the name, or set HF_TOKEN"
        except Exception as error:  # no network, a proxy, a hub that is down: each has a class of its own
            why = f"the hub cannot be reached ({type(error).__name__})"
        else:
            return ""
    fetched = f"fetch it where there is a network with python -m cluster_tasks.cache {name}"
    return f"no such folder here, {why} and the cache has no copy; give a folder, or {fetched}"
