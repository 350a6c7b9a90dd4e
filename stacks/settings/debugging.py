"""What is recorded of a job that hangs; cluster_tasks/environment.py makes variables of it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from stacks.settings.fields import Model


class Debug(Model):
    """What NCCL and RCCL record and print."""

    flight_recorder: bool = Field(
        default=False, description="Keep the last collectives of every rank, written under the checkpoints when one does not end in time."
    )
    nccl: Literal["WARN", "INFO"] | None = Field(default=None, description="Log level of NCCL and RCCL in the job's output; INFO is long.")
