"""Settings of data: where rows come from, and how they become prompts."""

from __future__ import annotations

import os
from datetime import date
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from trainer.configs.base import Section

EvalName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_-]*$")]
FILES = (".jsonl", ".jsonl.gz", ".json", ".parquet", ".arrow", ".feather")  # formats of files, by their ends


class RowsConfig(Section):
    path: str | None = Field(default=None, description="As data.path.")
    args: dict[str, Any] | None = Field(default=None, description="As data.args.")
    split: str | None = Field(default=None, description="As data.split.")
    subset: str | None = Field(default=None, description="As data.subset.")
    revision: str | None = Field(default=None, description="As data.revision.")
    prompt: str | None = Field(default=None, description="As data.prompt.")
    answer: str | None = Field(default=None, description="As data.answer.")

    def of(self, data: DataConfig) -> DataConfig:
        """What is not set is as in `data`, but args, split, subset and revision where this set has a path of its own."""
        own = {key: value for key, value in self if key in RowsConfig.model_fields and value is not None}
        if self.path is not None:
            of_path = {"mix": {}, "args": {}, "split": None, "subset": None, "revision": None}
            own = of_path | own | {"path": os.path.expanduser(self.path)}  # noqa: PTH111
        return data.model_copy(update=own)


class EvalConfig(RowsConfig):
    rows: int | None = Field(default=None, ge=1, description="Use only this many first rows.")

    def is_of_data(self) -> bool:
        """Whether nothing tells its rows from those of `data`."""
        return all(getattr(self, key) is None for key in ("path", "args", "split", "subset", "revision"))


class SourceConfig(RowsConfig):
    path: str = Field(description="As data.path.")  # pyright: ignore[reportIncompatibleVariableOverride, reportGeneralTypeIssues]
    weight: float = Field(default=1.0, gt=0, description="Share of each batch: this weight over the sum of all weights.")


class DataConfig(Section):
    path: str = Field(
        description="A file (.jsonl, .jsonl.gz, .json, .parquet, .arrow, .feather), a folder or pattern of them, organization/name of the "
        "Hugging Face hub, or package.module:function that yields rows."
    )
    mix: dict[EvalName, SourceConfig] = Field(
        default_factory=dict,
        description="Replaces path: several named sources, sampled by weight: {NAME: {path: a.jsonl, weight: 2}}. "
        "A source inherits prompt and answer from data.",
    )
    args: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments of the function.")
    split: str | None = Field(default=None, description="Split of a hub dataset. Default: train, or the only one.")
    subset: str | None = Field(default=None, description="Subset (configuration) of a hub dataset.")
    revision: str | None = Field(default=None, description="Branch, tag or commit of a hub dataset. Default: main.")
    prompt: str = Field(default="prompt", description="Column of the prompt: text, or a list of chat messages.")
    chat: Literal["auto", "never"] = Field(
        default="auto",
        description="auto puts text into the tokenizer's chat template, if it has one, as the user's message; never passes text unchanged.",
    )
    system: str | None = Field(default=None, description="System message of conversations that have none.")
    template: dict[str, Any] = Field(
        default_factory=dict, description="Arguments of the chat template, such as {enable_thinking: false} or tools."
    )
    day: date | None = Field(
        default=None, description="Date for chat templates that print today's. Default: the day of the run's first start."
    )
    answer: str = Field(default="answer", description="Column of the answer, which SFT learns and rewards compare with.")
    images: str | None = Field(
        default="images",
        description="Column of a row's pictures, for models that see; null reads none. <image> in the prompt is the place of one.",
    )
    images_folder: str | None = Field(default=None, description="Folder that paths of pictures are in. Default: that of data.path.")
    max_images: int = Field(default=16, ge=1, description="Most pictures of a prompt, with those that an environment adds to it.")
    max_pixels: int | None = Field(default=None, ge=1, description="Most pixels of a picture. Default: what the model's processor sets.")
    oversized: Literal["resize", "error"] = Field(default="resize", description="Whether larger pictures are made smaller or an error.")
    max_prompt_tokens: int = Field(default=1024, ge=1, description="Longest prompt, with the tokens of its pictures.")
    overlong: Literal["drop", "error"] = Field(default="drop", description="Whether longer prompts are dropped (and counted) or an error.")
    shuffle: bool = Field(default=True, description="Shuffle every epoch, by run.seed.")

    @model_validator(mode="before")
    @classmethod
    def _mix_has_paths_of_its_own(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("mix"):
            return {**values, "path": values.get("path") or ""}  # null takes back a recipe's
        return values

    def sources(self) -> dict[str, DataConfig]:
        """Where rows come from, by the name in `mix`; without one these settings themselves, under ""."""
        return {name: each.of(self) for name, each in self.mix.items()} or {"": self}

    def columns(self, *, answers: bool = True) -> dict[str, str]:
        """Those that a row must have, by the setting that names them."""
        return {"data.prompt": self.prompt} | ({"data.answer": self.answer} if answers else {})

    def function(self) -> bool:
        return ":" in self.path and not (set(self.path) & set("/\\*?[") or self.path.endswith(FILES) or Path(self.path).exists())

    def may_be_hub(self) -> bool:
        """Hub names are `organization/name`; anything with another form is a function or a path of this machine."""
        local = self.path.startswith((".", "/", "~")) or self.path.count("/") != 1 or self.path.endswith(("/", *FILES)) or ":" in self.path
        return not (local or self.function() or set(self.path) & set("*?["))

    def in_vain(self) -> dict[str, list[str]]:
        """Settings that are set and not read with this path, by the reason."""
        of_hub = ["split", "subset", "revision"] if not self.may_be_hub() else []
        unread = {
            "not read; files and datasets take no arguments, package.module:function does": ["args"] if not self.function() else [],
            "not read; of a dataset organization/name of the hub only": of_hub,
        }
        named = {why: [key for key in keys if getattr(self, key)] for why, keys in unread.items()}
        return {why: keys for why, keys in named.items() if keys}
