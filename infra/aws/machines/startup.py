"""What a node boots: its image, and ready.sh with what is particular to the stack in front."""

from __future__ import annotations

import base64
import json
import shlex
from collections.abc import Sequence
from pathlib import Path

from infra.aws import policies
from infra.shell import function, local_disks
from stacks.places.aws import partition
from stacks.places.machine_types import Machine

# AWS's name for its newest image with NVIDIA's driver, Docker, the container toolkit and EFA:
# https://docs.aws.amazon.com/dlami/latest/devguide/aws-deep-learning-base-gpu-ami-ubuntu-22-04.html
GPU_IMAGE = "/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-22.04/latest/ami-id"
CPU_IMAGE = "/aws/service/canonical/ubuntu/server/22.04/stable/current/amd64/hvm/ebs-gp3/ami-id"
READY = Path(__file__).with_name("ready.sh")


def image_parameter(machine: Machine) -> str:
    """The parameter of SSM that holds the id of the newest image for a machine."""
    return GPU_IMAGE if machine.gpu else CPU_IMAGE


def script(user: str, mount: Sequence[str], folder: str, machine: Machine, monitor: Sequence[str] = ()) -> str:
    """User data: what an instance runs once, in base64. Shell lines `mount` the checkpoints at `folder`; others start a `monitor`."""
    lines = ["#!/bin/bash", f"user={user}", f"checkpoints={shlex.quote(folder) if mount else ''}"]
    lines += [*function("mount_checkpoints", mount), *function("start_monitoring", monitor)]
    return base64.b64encode(("\n".join(lines) + f"\n{local_disks(machine)}{READY.read_text()}").encode()).decode()


def monitoring(stack: str, region: str, folder: str) -> list[str]:
    """CloudWatch's agent, which the GPU image has: CPU, memory, disks, network and GPUs every minute, and the system's log.

    https://docs.aws.amazon.com/AmazonCloudWatch/latest/monitoring/CloudWatch-Agent-Configuration-File-Details.html
    """
    logs = {"/var/log/syslog": "syslog", "/var/log/cloud-init-output.log": "startup", "/root/.dstack/shim.log": "dstack"}
    config = {
        "agent": {"metrics_collection_interval": 60},
        "metrics": {
            "namespace": policies.NAMESPACE,
            "append_dimensions": {"InstanceId": "${aws:InstanceId}"},
            "metrics_collected": {
                "cpu": {"measurement": ["usage_active", "usage_iowait"], "totalcpu": True},
                "mem": {"measurement": ["used_percent"]},
                "disk": {"measurement": ["used_percent"], "resources": ["/", "/var/lib/docker", folder]},
                "net": {"measurement": ["bytes_sent", "bytes_recv"]},
                "nvidia_gpu": {"measurement": ["utilization_gpu", "memory_used", "temperature_gpu", "power_draw"]},
            },
        },
        "logs": {
            "logs_collected": {
                "files": {
                    "collect_list": [
                        {"file_path": file, "log_group_name": policies.log_group(stack), "log_stream_name": f"{{instance_id}}/{name}"}
                        for file, name in logs.items()
                    ]
                }
            }
        },
    }
    domain = partition(region).domain
    package = f"https://amazoncloudwatch-agent-{region}.s3.{region}.{domain}/ubuntu/amd64/latest/amazon-cloudwatch-agent.deb"
    agent = "/opt/aws/amazon-cloudwatch-agent"
    return [
        f"[ -x {agent}/bin/amazon-cloudwatch-agent-ctl ] || {{ curl -fsSLo /tmp/agent.deb {package} && dpkg -i /tmp/agent.deb; }}",
        f"echo {shlex.quote(json.dumps(config))} >{agent}/etc/flotilla.json",
        f"{agent}/bin/amazon-cloudwatch-agent-ctl -a fetch-config -m ec2 -s -c file:{agent}/etc/flotilla.json",
    ]
