"""A pool of sandboxes on each node of a fleet (stacks/schema.py); trainer/environments/sandboxes/ is who asks for them."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import Field
from pydantic_core import PydanticCustomError

from stacks.settings.fields import Count, Model, Positive, setting_error

WARM = 4


class Sandboxes(Model):
    """Room for sandboxes, which episodes of all nodes use."""

    number: Count = Field(ge=1, le=4096, description="Most sandboxes at a time on each node.")
    warm: Count | None = Field(
        default=None,
        ge=0,
        description="Sandboxes that each node keeps ready for the next episodes. Default: 4, or number where that is less.",
    )
    memory_mb: Positive | None = Field(
        default=None,
        description="Memory in MiB of all sandboxes of a node together, each counted with its memory_mb and disk_mb. Default: no limit.",
    )

    def own_errors(self) -> Iterator[PydanticCustomError]:
        if self.warm is not None and self.warm > self.number:
            yield setting_error(f"{self.warm} sandboxes ready, but there are {self.number} at most (number)", "warm")

    @property
    def told(self) -> dict[str, int]:
        """What the node agent is given."""
        warm = min(WARM, self.number) if self.warm is None else self.warm
        return {"number": self.number, "warm": warm, "memory_mb": self.memory_mb or 0}
