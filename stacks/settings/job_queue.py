"""How jobs share a cluster; cluster_tasks/node/job_queue/ is the queue."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import Field
from pydantic_core import PydanticCustomError

from stacks.settings.fields import Duration, Model, Quantity, setting_error
from stacks.settings.monitoring import seconds

LONGEST_NAME = 64


class Share(Model):
    """One owner's part of the cluster."""

    weight: Quantity = Field(default=1, description="Share of the GPUs, against other owners whose jobs need them.")
    quota: Quantity | None = Field(default=None, description="Most GPUs that the owner's jobs take together.")


class Queue(Model):
    """The queue of `flotilla submit --queue`, which every cluster has."""

    min_run: Duration = Field(default="10m", description="A job that the queue has started runs for at least this long.")
    owners: dict[str, Share] = Field(
        default_factory=dict, description="Weight and quota of each owner, by user name. Default: weight 1, no quota."
    )

    def own_errors(self) -> Iterator[PydanticCustomError]:
        for name in self.owners:
            if not name.strip() or len(name) > LONGEST_NAME or not name.isprintable():
                yield setting_error(f"{name!r} is not a user name of 1 to {LONGEST_NAME} characters", "owners", name)

    @property
    def told(self) -> dict[str, object]:
        """What the head's agent is given: seconds, weights and quotas."""
        owners = {name: {"weight": share.weight, "quota": share.quota} for name, share in self.owners.items()}
        return {"min_run": seconds(self.min_run), "owners": owners}
