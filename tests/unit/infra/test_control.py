"""What a control node boots, and the way of SSH through it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path
from typing import Any

import boto3
import pytest
import yaml
from support.dstack_server import played_aws

from fleets.server import control as login
from fleets.server.process import ServerError
from infra import control
from infra.aws import control as aws
from infra.aws.site import Outputs, backend, ssh_config
from infra.gcp import control as gcp
from stacks import dstack_api
from stacks.host.forward import NoForward
from stacks.schema import Stack
from stacks.site import Site

STACK = Stack.model_validate(
    {
        "name": "lab",
        "cloud": "aws",
        "region": "us-east-1",
        "fleets": [{"name": "gpus", "machine": "g6.8xlarge", "nodes": 2}],
        "dstack": {"host": "cloud"},
    }
)
ROOT = Path(__file__).parents[3]
NETWORK = IPv4Network("10.65.0.0/16")


@pytest.fixture
def aws_server(tmp_path: Path) -> Iterator[str]:
    """URL of moto."""
    with played_aws(tmp_path / "aws.log") as url:
        yield url


def boots() -> str:
    site = Site(backends=(backend(STACK, Outputs("vpc-0", "nodes", "bucket", [])),))
    return aws.startup(STACK, site, "vol-0abc", "arn:aws:ssm:us-east-1:123456789012:parameter/flotilla/lab/server-token")


ELSEWHERE = {
    "cloud": "gcp",
    "project": "mine-1",
    "region": "us-central1",
    "fleets": [{"name": "gpus", "machine": "g2-standard-8", "nodes": 2}],
}
GCP = Stack.model_validate(STACK.model_dump() | ELSEWHERE)


@pytest.mark.parametrize("text", [boots(), gcp.startup(GCP, Site(), "projects/mine-1/secrets/token")], ids=["aws", "gcp"])
def test_shellcheck_finds_nothing(text: str, tmp_path: Path) -> None:
    if not shutil.which("shellcheck"):
        pytest.skip("shellcheck is not installed; `make test-hosts` installs it as root")
    (tmp_path / "user-data").write_text(text)
    found = subprocess.run(["shellcheck", tmp_path / "user-data"], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout


def test_user_data_fits_into_what_ec2_takes() -> None:
    assert len(boots().encode()) < 16 * 1024


def test_the_server_is_that_of_the_lock_and_its_configuration_that_of_the_stack() -> None:
    assert "dstack==0.22.5" in control.pins("server", "aws") and "boto3==1.44.5" in control.pins("server", "aws")
    assert not [pin for pin in control.pins("server", "aws") if "win" in pin or ";" in pin]
    begin = boots().partition("data_disk()")[0]
    said = subprocess.run(["bash", "-c", f'{begin}\nprintf %s "$config"'], capture_output=True, text=True, check=True).stdout
    [project] = yaml.safe_load(said)["projects"]
    assert (project["name"], project["backends"][0]["creds"]) == ("main", {"type": "default"})


def test_the_server_gets_the_token_of_the_parameter_and_no_file_has_it(tmp_path: Path, aws_server: str) -> None:
    """The launcher as it is written on the node, against moto; `dstack` shows what it was started with."""
    text = boots().replace("/opt/flotilla", str(tmp_path / "opt")).replace("/usr/local/bin", str(tmp_path))
    (tmp_path / "opt/bin").mkdir(parents=True)
    (tmp_path / "opt/bin/python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (tmp_path / "opt/bin/python").chmod(0o755)
    (tmp_path / "opt/bin/dstack").write_text('#!/bin/sh\necho "$DSTACK_SERVER_ADMIN_TOKEN $*"\n')
    (tmp_path / "opt/bin/dstack").chmod(0o755)
    begin, _, rest = text.partition("\nconfigure_server() {")
    launcher = "cat >" + rest.partition("  cat >")[2].partition("  cat >")[0]
    subprocess.run(["bash", "-c", f"{begin}\n{launcher}"], check=True, timeout=120)
    keys = {"AWS_ENDPOINT_URL": aws_server, "AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing"}
    client = boto3.client("ssm", "us-east-1", endpoint_url=aws_server, aws_access_key_id="testing", aws_secret_access_key="testing")
    client.put_parameter(Name="/flotilla/lab/server-token", Value="the-token", Type="SecureString")
    started = subprocess.run(
        ["bash", tmp_path / "flotilla-server"],
        env={"PATH": "/usr/bin:/bin"} | keys,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert started.stdout == "the-token server --host 127.0.0.1 --port 3000\n", started.stderr
    assert "the-token" not in (tmp_path / "flotilla-server").read_text()


def test_a_server_that_has_not_answered_three_times_in_a_row_is_started_again(tmp_path: Path) -> None:
    """The health check as it is written on the node; curl and systemctl note that they were asked."""
    rest = boots().partition("  cat >/usr/local/bin/flotilla-health <<HEALTH\n")[2].partition("\nHEALTH\n")[0]
    wrote = subprocess.run(["bash", "-c", f"port=3000\ncat <<HEALTH\n{rest}\nHEALTH"], capture_output=True, text=True, check=True).stdout
    (tmp_path / "health").write_text(wrote.replace("/run/", f"{tmp_path}/"))
    for name, code in (("curl", f"test -e {tmp_path}/answers"), ("systemctl", f'echo "$@" >>{tmp_path}/restarts')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{code}\n")
        (tmp_path / name).chmod(0o755)

    def asked(times: int) -> int:
        """How often it was started again, after so many more checks."""
        for _ in range(times):
            subprocess.run(["bash", tmp_path / "health"], env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, check=True, timeout=120)
        return len((tmp_path / "restarts").read_text().splitlines()) if (tmp_path / "restarts").exists() else 0

    assert asked(2) == 0
    (tmp_path / "answers").touch()
    assert asked(1) == 0
    (tmp_path / "answers").unlink()
    assert asked(2) == 0
    assert asked(1) == 1
    assert asked(2) == 1
    assert (tmp_path / "restarts").read_text() == "restart flotilla-server\n"


# The data disk


def mounted(tmp_path: Path, disk: Path) -> tuple[list[str], str]:
    """What becomes of a disk, and what is said; devices, fstab and the folder are files here, blkid is the real one."""
    stubs, done = tmp_path / "bin", tmp_path / "done"
    stubs.mkdir()
    for name, code in {"mountpoint": 1, "mkfs.ext4": 0, "mount": 0}.items():
        (stubs / name).write_text(f'#!/bin/sh\necho {name} "$@" >>{done}\nexit {code}\n')
        (stubs / name).chmod(0o755)
    text = control.SCRIPT.read_text().partition("\nretry() {")[0]
    text = text.replace("/etc/fstab", f"{tmp_path}/fstab").replace("/var/lib/flotilla", f"{tmp_path}/data").replace("[ -b", "[ -e")
    line = f"data_disk() {{ echo {disk}; }}\n{text}\nmount_data"
    path = {"PATH": f"{stubs}:/usr/sbin:/usr/bin:/sbin:/bin"}
    ended = subprocess.run(["bash", "-c", line], env=path, check=False, capture_output=True, text=True, timeout=120)
    return [line.partition(" ")[0] for line in done.read_text().splitlines()], ended.stderr


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """8 MB of nothing."""
    with (tmp_path / "disk").open("wb") as file:
        file.truncate(8 << 20)
    return tmp_path / "disk"


def formatted(disk: Path) -> None:
    subprocess.run(["mkfs.ext4", "-q", "-F", disk], env={"PATH": "/usr/sbin:/sbin:/usr/bin:/bin"}, check=True, timeout=120)


def test_a_new_disk_is_formatted(tmp_path: Path, disk: Path) -> None:
    assert mounted(tmp_path, disk)[0] == ["mountpoint", "mkfs.ext4", "mount"]


def test_a_disk_that_an_old_node_has_used_is_mounted_as_it_is(tmp_path: Path, disk: Path) -> None:
    formatted(disk)
    assert mounted(tmp_path, disk)[0] == ["mountpoint", "mount"]


def test_a_damaged_disk_is_never_formatted(tmp_path: Path, disk: Path) -> None:
    formatted(disk)
    with disk.open("r+b") as file:
        file.seek(1080)  # of ext4's magic number
        file.write(b"\0\0")
    did, said = mounted(tmp_path, disk)
    assert did == ["mountpoint"]
    assert "is not empty, and has no file system that can be read; nothing was written to it" in said


def test_first_boot_outlasts_a_package_index_that_is_away(tmp_path: Path) -> None:
    text = "retry() {" + control.SCRIPT.read_text().partition("\nretry() {")[2].partition("\n}\n")[0] + "\n}\n"
    (tmp_path / "sleep").write_text(f"#!/bin/sh\necho $1 >>{tmp_path}/slept\n")
    (tmp_path / "try").write_text(f"#!/bin/sh\necho >>{tmp_path}/tries\n[ $(wc -l <{tmp_path}/tries) -gt $1 ]\n")
    for name in ("sleep", "try"):
        (tmp_path / name).chmod(0o755)
    run = ["bash", "-c", f"set -euo pipefail\n{text}\nretry try $0"]
    path = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    assert subprocess.run([*run, "3"], env=path, check=False, timeout=120).returncode == 0
    assert (tmp_path / "slept").read_text().split() == ["15"] * 3
    assert subprocess.run([*run, "1000"], env=path, check=False, timeout=120).returncode == 1


# SSH


@pytest.mark.parametrize("network", ["10.65.0.0/16", "10.0.0.0/8", "192.168.4.0/22", "172.20.0.0/15", "10.1.2.128/25"])
def test_patterns_are_of_the_network_and_of_nothing_else(network: str) -> None:
    from fnmatch import fnmatchcase

    wanted = IPv4Network(network)
    patterns = control.within(wanted).split(",")
    inside = [wanted.network_address, wanted.network_address + 77, wanted.broadcast_address]
    outside = [wanted.network_address - 1, wanted.broadcast_address + 1, IPv4Address("127.0.0.1")]
    found = {str(address): any(fnmatchcase(str(address), pattern) for pattern in patterns) for address in (*inside, *outside)}
    assert found == {str(address): True for address in inside} | {str(address): False for address in outside}


def effective(config: Path, host: str) -> dict[str, str]:
    """What ssh makes of a host's settings."""
    done = subprocess.run(["ssh", "-G", "-F", str(config), host], capture_output=True, text=True, check=True)
    return dict(line.split(" ", 1) for line in done.stdout.splitlines() if " " in line)


def test_ssh_to_nodes_jumps_through_the_control_node_and_to_other_hosts_it_does_not(tmp_path: Path) -> None:
    (tmp_path / "build").mkdir()
    (tmp_path / "build/ssh_config").write_text(ssh_config(STACK, str(NETWORK), "i-0abc"))
    login.let_through(tmp_path / "build/ssh_config", tmp_path / "ssh")
    config = tmp_path / "ssh/config"
    with config.open("a") as more:  # as `dstack attach` does
        more.write("Host ray-host\n  HostName 10.65.3.4\n  User ubuntu\nHost ray\n  HostName localhost\n  ProxyJump ray-host\n")
        more.write("Host other-host\n  HostName 10.66.3.4\n")
    assert effective(config, "ray-host")["proxyjump"] == "flotilla-lab"
    assert effective(config, "ray")["proxyjump"] == "ray-host"
    assert "proxyjump" not in effective(config, "other-host")
    way = effective(config, "flotilla-lab")
    assert way["user"] == "jump" and "AWS-StartSSHSession" in way["proxycommand"] and "proxyjump" not in way
    login.let_through(tmp_path / "build/ssh_config", tmp_path / "ssh")
    assert config.read_text().count("Include") == 1


def test_of_two_stacks_in_one_range_the_last_login_is_the_way(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "ssh_config").write_text(ssh_config(STACK.model_copy(update={"name": name}), str(NETWORK), f"i-{name}"))
    for name in ("one", "two", "one"):
        login.let_through(tmp_path / name / "ssh_config", tmp_path / "ssh")
        assert effective(tmp_path / "ssh/config", "10.65.3.4")["proxyjump"] == f"flotilla-{name}"


def test_a_way_that_was_not_rendered_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match=r"build/aws-dev/ssh_config does not exist; first: flotilla render aws-dev"):
        login.let_through(tmp_path / "build/aws-dev/ssh_config", tmp_path / "ssh")


def test_dstack_keeps_the_way_when_it_adds_and_removes_hosts(tmp_path: Path) -> None:
    (tmp_path / "ssh_config").write_text("")
    login.let_through(tmp_path / "ssh_config", tmp_path / "ssh")
    config = tmp_path / "ssh/config"
    options: dict[str, Any] = {"HostName": "10.65.0.1"}
    dstack_api.update_ssh_config(config, "ray", options)
    dstack_api.update_ssh_config(config, "ray", {})
    assert config.read_text() == f'Include "{tmp_path}/ssh_config"\n'


# Login


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with the stack aws-dev on a control node, and a `pulumi` that knows its token."""
    for folder in ("stacks", "bin"):
        (tmp_path / folder).mkdir()
    shutil.copy(ROOT / "Pulumi.yaml", tmp_path)
    content = yaml.safe_load((ROOT / "stacks/Pulumi.aws-dev.yaml").read_text())
    content["config"]["flotilla:dstack"] = {"host": "cloud", "server": "http://127.0.0.1:3999"}
    (tmp_path / "stacks/Pulumi.aws-dev.yaml").write_text(yaml.safe_dump(content))
    (tmp_path / "bin/pulumi").write_text('#!/bin/sh\ncase "$*" in *server_token*) echo the-token ;; *) exit 1 ;; esac\n')
    (tmp_path / "bin/pulumi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    return tmp_path


def test_a_login_forwards_the_port_and_says_what_it_cannot_run(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(NoForward, match=r"the control node is not reached: .*aws: not found"):
        login.login("aws-dev", project, 60)
    assert capsys.readouterr().out.startswith("$ aws ssm start-session --region us-east-1 --target ")


def test_a_login_before_the_stack_is_up_says_so(project: Path) -> None:
    (project / "bin/pulumi").write_text("#!/bin/sh\necho 'error: no stack named aws-dev found' >&2\nexit 255\n")
    with pytest.raises(ServerError, match="no stack named aws-dev found; first: pulumi up --stack aws-dev"):
        login.login("aws-dev", project, 0.1)


def test_a_login_without_pulumi_says_where_the_token_is(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(project / "nothing"))
    with pytest.raises(ServerError, match="the token is in the stack's state, and there is no `pulumi` to read it"):
        login.login("aws-dev", project, 0.1)


def test_a_login_on_a_stack_without_control_node_names_the_setting() -> None:
    with pytest.raises(ServerError, match=r"stack onprem has no control node \(flotilla:dstack.host\)"):
        login.login("onprem", ROOT, 0.1)
