"""The network between GPUs, of machines that you own; of a cloud's it follows from the machine type. cluster_tasks/fabric.py uses it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from stacks.settings.fields import Count, Model, Positive, form, setting_error

Hca = Annotated[str, form(r"^[A-Za-z][\w.-]*(:\d+)?$", "the name of an RDMA device as `ibstat -l` prints it, such as mlx5_0")]
Byte = Annotated[Count, Field(ge=0, le=255, json_schema_extra={"allowed": "an integer between 0 and 255"})]


class Fabric(Model):
    """What carries NCCL's or RCCL's data. The kind alone may be given in its place."""

    kind: Literal["infiniband", "roce", "ethernet", "efa"] = Field(description="Protocol of the cards and switches.")
    hcas: tuple[Hca, ...] = Field(default=(), description="RDMA devices that the GPUs use. Default: all active ones.")
    gid_index: Byte | None = Field(default=None, description="roce: row of the GID table. Default: NCCL finds it.")
    traffic_class: Byte | None = Field(default=None, description="roce: the class that the switches keep lossless.")
    bandwidth: Positive | None = Field(default=None, description="Gbit/s of all devices of a node together; the checks expect 0.4 of it.")

    @model_validator(mode="before")
    @classmethod
    def _a_kind_alone(cls, value: Any) -> Any:
        return {"kind": value} if isinstance(value, str) else value

    def own_errors(self) -> Iterator[PydanticCustomError]:
        for key, kinds in (("hcas", ("infiniband", "roce")), ("gid_index", ("roce",)), ("traffic_class", ("roce",))):
            if self.says(key) and self.kind not in kinds:
                yield setting_error(f"belongs to kind: {' or '.join(kinds)}, but kind is {self.kind}", key)
        if len(set(self.hcas)) < len(self.hcas):
            yield setting_error("a device is listed twice", "hcas")
