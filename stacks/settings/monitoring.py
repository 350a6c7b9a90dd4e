"""Metrics, dashboards and alerts of a cluster; cluster_tasks/node/monitoring/ runs them beside Ray on the head."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from stacks.settings.fields import Count, Duration, Model, Port, Quantity, form, setting_error
from stacks.settings.service import OWN_PORTS, taken

Variable = Annotated[str, form(r"^[A-Za-z_][A-Za-z0-9_]*$", "the name of an environment variable, such as ALERT_URL, not the URL itself")]
Percent = Annotated[Count, Field(ge=1, le=100, json_schema_extra={"allowed": "an integer between 1 and 100"})]
SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


def seconds(duration: str) -> int:
    return int(duration[:-1]) * SECONDS[duration[-1]]


class Alerts(Model):
    """Alerts and the webhook that receives them."""

    webhook: Variable | None = Field(
        default=None, description="Variable of your shell with the URL to which alerts are posted; no file contains the URL."
    )
    idle_gpu: Duration = Field(default="30m", description="Alert when a GPU stays below idle_percent for this long.")
    idle_percent: Percent = Field(default=5, description="GPU use, in percent, below which a GPU counts as idle.")
    silent_trainer: Duration = Field(default="30m", description="Alert when a trainer finishes no step for this long.")
    full_disk: Percent = Field(default=90, description="Alert when a node's disk is fuller than this, in percent.")
    repeat: Duration = Field(default="4h", description="Post a lasting alert again after this long.")

    def own_errors(self) -> Iterator[PydanticCustomError]:
        for key in ("idle_gpu", "silent_trainer", "repeat"):
            if seconds(getattr(self, key)) < 60:
                yield setting_error(f"{getattr(self, key)!r} is below 1m; metrics come every 15 s", key)


class Monitoring(Model):
    """Prometheus and Grafana beside Ray's dashboard, and what machines cost."""

    enabled: bool = Field(default=False, description="Run Prometheus and, if installed, Grafana on the head.")
    prometheus_port: Port = Field(default=9090, description="Port of Prometheus, on the head and on this machine.")
    grafana_port: Port = Field(default=3001, description="Port of Grafana, on the head and on this machine.")
    retention: Duration = Field(default="15d", description="How long Prometheus keeps metrics, while the cluster lives.")
    exporters: tuple[Port, ...] = Field(
        default=(), description="Ports scraped for /metrics on every node: 9400 for NVIDIA's DCGM exporter, 5000 for AMD's."
    )
    alerts: Alerts = Alerts()
    price: Quantity | None = Field(default=None, description="USD per hour and node, if no cloud's price list has it.")
    cloud: bool = Field(default=False, description="Metrics and logs of the nodes that Pulumi launches, kept by the cloud.")

    @model_validator(mode="before")
    @classmethod
    def _no_boolean(cls, value: Any) -> Any:
        if isinstance(value, bool) or value in ("true", "false"):
            raise PydanticCustomError("stack", "{text}", {"text": f"{str(value).lower()} is now {{cloud: {str(value).lower()}}}"})
        return value

    def own_errors(self) -> Iterator[PydanticCustomError]:
        for key in ("prometheus_port", "grafana_port"):
            if taken(getattr(self, key)):
                yield setting_error(f"{getattr(self, key)} {OWN_PORTS}, such as {type(self).model_fields[key].default}", key)
        if self.prometheus_port == self.grafana_port:
            yield setting_error(f"{self.grafana_port} is prometheus_port too", "grafana_port")
        for index, port in enumerate(self.exporters):
            if port in (self.prometheus_port, self.grafana_port) or port in self.exporters[:index]:
                yield setting_error(f"{port} is listed twice, or is the port of Prometheus or Grafana", "exporters", index)
        if not self.enabled and (key := next((key for key in ("retention", "exporters", "alerts") if self.says(key)), None)):
            yield setting_error("belongs to enabled: true, which is not set", key)

    @property
    def ports(self) -> tuple[int, ...]:
        """That are forwarded beside the dashboard's."""
        return (self.prometheus_port, self.grafana_port) if self.enabled else ()

    @property
    def variables(self) -> tuple[str, ...]:
        """Of the shell, that the head needs."""
        return (self.alerts.webhook,) if self.enabled and self.alerts.webhook else ()
