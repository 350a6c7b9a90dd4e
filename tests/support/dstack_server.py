"""A real dstack server for tests, started as a person starts one: no network, prices of a few AWS machines, AWS played by moto."""

from __future__ import annotations

import csv
import io
import socket
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import boto3
import pytest
from dstack.api.server import APIClient
from gpuhunt._internal.catalog import OFFLINE_PROVIDERS
from gpuhunt._internal.storage import CATALOG_V2_FIELDS

from cluster_tasks.node.ports import free_port
from fleets.server import commands as server
from fleets.server.process import Server, token

ANSWER_SECONDS = 300  # on a busy machine
REGIONS = ("us-east-1", "us-east-2")
MACHINES = [  # name, CPUs, memory, GPUs, their name, their memory, price on demand
    ("g6.8xlarge", 32, 128, 1, "L4", 24, 2.0),
    ("g6.12xlarge", 48, 192, 4, "L4", 24, 4.6),
    ("p5.48xlarge", 192, 2048, 8, "H100", 80, 55.0),
    ("m5.large", 2, 8, 0, "", 0, 0.1),
]


@dataclass(frozen=True)
class Running:
    """A server that answers."""

    folder: Path
    environment: dict[str, str]  # by which AWS is moto
    home: Path  # with the SSH key that the example stacks name
    url: str
    vpcs: dict[str, str]  # by region
    api: APIClient

    @property
    def token(self) -> str:
        return token(self.folder)

    def project(self, name: str) -> str:
        """A project of its own for a test."""
        self.api.projects.create(name)
        return name

    def aws(self, region: str = REGIONS[0]) -> dict[str, object]:
        """A backend as the stacks render it."""
        vpc = {region: self.vpcs[region]}
        return {"type": "aws", "creds": {"type": "default"}, "regions": [region], "vpc_ids": vpc, "default_vpcs": False, "public_ips": True}


@contextmanager
def running(folder: Path, secret: str | None = None) -> Iterator[Running]:
    """A server with its data below `folder`, and an AWS with one network in each region; `secret` is its admin's token."""
    home = folder / "home"
    home.mkdir()
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(home / "key")], check=True)
    (home / ".ssh").mkdir()
    (home / "key").rename(home / ".ssh/flotilla")
    (home / "key.pub").rename(home / ".ssh/flotilla.pub")
    with played_aws(folder / "aws.log") as url:
        with pytest.MonkeyPatch.context() as patch:  # for the server and what is made for it, not for the tests
            settings = {"AWS_ENDPOINT_URL": url, "AWS_EC2_METADATA_DISABLED": "true", "HOME": str(home)}
            settings |= dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), "testing")
            settings |= {"GPUHUNT_CATALOG_URL": catalogue(folder)}
            for name, value in settings.items():
                patch.setenv(name, value)
            for name in ("GPUHUNT_CATALOG_DIR", "AWS_PROFILE", "AWS_SESSION_TOKEN", "DSTACK_SERVER_ADMIN_TOKEN"):
                patch.delenv(name, raising=False)
            if secret:
                patch.setenv("DSTACK_SERVER_ADMIN_TOKEN", secret)
            vpcs = {region: network(region) for region in REGIONS}
            assert server.up(folder / "server", None, free_port(), ANSWER_SECONDS) == 0
        started = Server.running(folder / "server")
        assert started
        try:
            yield Running(folder / "server", settings, home, started.url, vpcs, APIClient(started.url, token(folder / "server")))
        finally:
            server.down(folder / "server", force=True)


@contextmanager
def played_aws(log: Path) -> Iterator[str]:
    """URL of a moto in a process of its own: vLLM looks into every module of its process, and cannot bear those of Flask."""
    port = free_port()
    with log.open("wb") as output:
        process = subprocess.Popen([sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], stdout=output, stderr=output)
    try:
        deadline = time.monotonic() + ANSWER_SECONDS
        while not answers(port):
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < deadline, f"moto did not answer on port {port} within {ANSWER_SECONDS} s, see {log}"
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)


def answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def network(region: str) -> str:
    """Id of the default VPC, given a way to the internet, as dstack wants it of subnets with public addresses."""
    ec2 = boto3.client("ec2", region_name=region)
    vpc = next(vpc["VpcId"] for vpc in ec2.describe_vpcs()["Vpcs"] if vpc["IsDefault"])
    gateway = ec2.create_internet_gateway()["InternetGateway"]["InternetGatewayId"]
    ec2.attach_internet_gateway(InternetGatewayId=gateway, VpcId=vpc)
    table = ec2.describe_route_tables(Filters=[{"Name": "vpc-id", "Values": [vpc]}])["RouteTables"][0]["RouteTableId"]
    ec2.create_route(RouteTableId=table, DestinationCidrBlock="0.0.0.0/0", GatewayId=gateway)
    for subnet in ec2.describe_subnets()["Subnets"]:
        ec2.associate_route_table(RouteTableId=table, SubnetId=subnet["SubnetId"])
    return vpc


def catalogue(folder: Path) -> str:
    """URL of prices as gpuhunt publishes them: those of MACHINES on AWS, none of others."""
    place = folder / "catalogue"
    for provider in OFFLINE_PROVIDERS:
        lines = io.StringIO()
        table = csv.DictWriter(lines, CATALOG_V2_FIELDS, restval="")
        table.writeheader()
        for name, cpus, memory, gpus, gpu, gpu_memory, price in MACHINES if provider == "aws" else []:
            offer = {"instance_name": name, "cpu": cpus, "memory": memory, "gpu_count": gpus, "gpu_name": gpu, "gpu_memory": gpu_memory}
            offer |= {"gpu_vendor": "nvidia" if gpus else "", "cpu_arch": "x86"}
            for region in REGIONS:
                table.writerow(offer | {"location": region, "price": price, "spot": False})
                table.writerow(offer | {"location": region, "price": price / 2, "spot": True})
        (place / provider / "1").mkdir(parents=True)
        (place / provider / "version").write_text("1")
        with zipfile.ZipFile(place / provider / "1/catalog.zip", "w") as archive:
            archive.writestr(f"{provider}.csv", lines.getvalue())
    return f"file://{place}"
