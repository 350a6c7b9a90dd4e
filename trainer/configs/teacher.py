"""Settings of distillation: a model that the policy learns from on its own answers."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from trainer.configs.base import Only, Section

WITH_TEACHER = Only("teacher.path", why="without a path there is no teacher")


class TeacherConfig(Section):
    path: str | None = Field(
        default=None,
        description="Folder or hub name of a teacher with the policy's tokenizer; run:NAME is the model that run NAME exported.",
    )
    beta: Annotated[float, WITH_TEACHER] = Field(
        default=1.0,
        ge=0,
        le=1,
        description="Divergence from the teacher: 1 is reverse KL, 0 forward KL, values between are Jensen-Shannon.",
    )
    coef: Annotated[float, WITH_TEACHER] = Field(default=1.0, gt=0, description="Weight of the divergence in the loss.")
