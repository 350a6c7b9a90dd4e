"""Settings of data: where rows come from, and how they become prompts."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from trainer.configs.base import Section

FILES = (".jsonl", ".jsonl.gz", ".json", ".parquet", ".arrow", ".feather")  # formats of files, by their ends


class DataConfig(Section):
    path: str = Field(
        description="A file (.jsonl, .jsonl.gz, .json, .parquet, .arrow, .feather), a folder or pattern of them, organization/name of the "
        "Hugging Face hub, or package.module:function that yields rows."
    )
    args: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments of the function.")
    split: str | None = Field(default=None, description="Split of a hub dataset. Default: train, or the only one.")
    subset: str | None = Field(default=None, description="Subset (configuration) of a hub dataset, where it has several.")
    revision: str | None = Field(default=None, description="Branch, tag or commit of a hub dataset. Default: main.")
    prompt: str = Field(default="prompt", description="Column of the prompt: text, or a list of chat messages.")
    chat: Literal["auto", "never"] = Field(
        default="auto",
        description="auto puts text into the tokenizer's chat template, where there is one, as the user's message; never leaves it alone.",
    )
    system: str | None = Field(default=None, description="First message of each conversation that has none of its own.")
    template: dict[str, Any] = Field(
        default_factory=dict, description="Arguments of the chat template, such as {enable_thinking: false} or tools."
    )
    answer: str = Field(default="answer", description="Column of the answer: what SFT learns, what rewards compare with.")
    max_prompt_tokens: int = Field(default=1024, ge=1, description="Longest prompt.")
    overlong: Literal["drop", "error"] = Field(default="drop", description="What happens to longer prompts; dropped ones are counted.")
    shuffle: bool = Field(default=True, description="A new order in every epoch, drawn from run.seed.")

    def function(self) -> bool:
        return ":" in self.path and not self.path.endswith(FILES)

    def may_be_hub(self) -> bool:
        """Hub names are `organization/name`; anything with another form is a function or a path of this machine."""
        local = self.path.startswith((".", "/", "~")) or self.path.count("/") != 1 or self.path.endswith(("/", *FILES))
        return not (local or self.function() or set(self.path) & set("*?["))
