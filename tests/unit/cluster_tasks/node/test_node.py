"""The node agent without Ray: settings, and how it ends. With Ray it is tested in tests/integration/test_local_cluster.py."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_network
from pathlib import Path

import pytest

from cluster_tasks.node import waiting
from cluster_tasks.node.agent import main
from cluster_tasks.node.dashboard import Dashboard, missing, ray_token
from cluster_tasks.node.errors import NOT_READY, RAY_FAILED, Failure, Stopped
from cluster_tasks.node.job import Job
from cluster_tasks.node.network import interfaces, own_addresses, resolve
from cluster_tasks.node.ports import free_port
from cluster_tasks.node.ray import ray_command
from cluster_tasks.node.settings import Settings, read_settings
from cluster_tasks.ray import NODE_AGENT

Capture = pytest.CaptureFixture[str]
DSTACK = {"DSTACK_NODE_RANK": "1", "DSTACK_NODES_IPS": "10.0.0.5\n10.0.0.6\n10.0.0.7", "DSTACK_GPUS_PER_NODE": "8"}
BIN = str(Path(sys.executable).parent)


def agent(*flags: str, **env: str) -> subprocess.Popen[str]:
    """The agent as a process of its own, knowing of no scheduler but `env`."""
    command = [sys.executable, str(NODE_AGENT), *flags]
    return subprocess.Popen(
        command, env={"PATH": f"{BIN}:/usr/bin:/bin", **env}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def test_its_folder_runs_by_itself_wherever_it_lies(tmp_path: Path) -> None:
    folder = tmp_path / "build/any/node"
    shutil.copytree(NODE_AGENT, folder, ignore=shutil.ignore_patterns("__pycache__"))
    root = NODE_AGENT.parents[1]
    for words, cwd in ((["node"], folder.parent), ([str(folder)], tmp_path), (["-m", "cluster_tasks.node"], root)):
        done = subprocess.run([sys.executable, *words], cwd=cwd, env={}, capture_output=True, text=True, timeout=300, check=False)
        assert (done.returncode, done.stdout) == (2, ""), done.stderr
        assert done.stderr == "node: which node is this? Give --rank and --addresses, or run under dstack or Slurm\n"


def test_none_of_its_modules_hides_one_of_the_standard_library() -> None:
    assert not {file.stem for file in NODE_AGENT.glob("*.py")} & sys.stdlib_module_names


def test_dstack_says_which_node_this_is() -> None:
    settings = read_settings([], DSTACK)
    assert (settings.rank, settings.addresses, settings.gpus) == (1, ["10.0.0.5", "10.0.0.6", "10.0.0.7"], 8)


def test_flags_come_before_the_scheduler_and_those_on_the_line_before_those_in_the_environment() -> None:
    env = DSTACK | {"FLOTILLA_NODE_ARGS": "--port 7000 --dashboard-port 9000"}
    settings = read_settings(["--rank", "0", "--addresses", "127.0.0.2", "--port", "7001"], env)
    assert (settings.rank, settings.addresses, settings.port, settings.dashboard_port) == (0, ["127.0.0.2"], 7001, 9000)


def test_slurm_says_which_node_this_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scontrol = tmp_path / "scontrol"
    scontrol.write_text('#!/bin/sh\n[ "$*" = "show hostnames n[1-2]" ] && echo localhost && echo 127.0.0.9\n')
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    settings = read_settings(
        ["--network", "127.0.0.0/8"],
        {"SLURM_JOB_NODELIST": "n[1-2]", "SLURMD_NODENAME": "127.0.0.9", "SLURM_GPUS_ON_NODE": "4", "SLURM_GPUS_PER_NODE": "h100:4"},
    )
    assert (settings.rank, settings.addresses, settings.gpus) == (1, ["127.0.0.1", "127.0.0.9"], 4)


def test_a_host_outside_of_the_network_is_named() -> None:
    with pytest.raises(ValueError, match=r"127\.0\.0\.9 has no address in --network 10\.0\.0\.0/8"):
        resolve("127.0.0.9", ip_network("10.0.0.0/8"))
    with pytest.raises(ValueError, match=r"10\.0\.0\.6 of rank 1 is not in --network 192\.168\.0\.0/16"):
        read_settings(["--network", "192.168.0.0/16"], DSTACK)


@pytest.mark.parametrize("text", ["8,x", "8,,8", "-1", ""])
def test_gpus_by_node_that_are_no_numbers_are_refused_with_an_example(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        read_settings([f"--node-gpus={text}"], DSTACK)
    assert ended.value.code == 2
    assert f"--node-gpus: {text!r} is no number, or several with commas, such as 0,8,8" in capsys.readouterr().err


def test_a_host_that_knows_itself_by_a_loopback_address_is_known_by_its_own_in_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    own = {"127.0.0.1": "lo", "172.17.0.1": "docker0", "10.1.0.7": "eth0"}
    monkeypatch.setattr("cluster_tasks.node.network.own_addresses", lambda: own)
    assert resolve("127.0.1.1", ip_network("10.1.0.0/16")) == "10.1.0.7"
    with pytest.raises(ValueError, match=r"host 127\.0\.1\.1 has no address that other nodes reach; give --network"):
        resolve("127.0.1.1", None)


def test_gloo_and_nccl_are_told_the_interface_that_has_the_nodes_address() -> None:
    own = own_addresses()
    assert own["127.0.0.1"] in [name for _, name in socket.if_nameindex()]
    lo = own["127.0.0.1"]
    assert interfaces("127.0.0.3") == {"GLOO_SOCKET_IFNAME": lo, "NCCL_SOCKET_IFNAME": f"={lo}"}
    for address, name in own.items():
        assert interfaces(address)["GLOO_SOCKET_IFNAME"] == name
    assert interfaces("198.51.100.77") == {}  # of another machine


def test_ray_gets_the_interface_and_a_persons_own_choice_comes_first(tmp_path: Path) -> None:
    ray = tmp_path / "ray"
    ray.write_text('#!/bin/sh\necho "gloo $GLOO_SOCKET_IFNAME nccl $NCCL_SOCKET_IFNAME"; exit 3\n')
    ray.chmod(0o755)
    ports = ["--port", str(free_port()), "--dashboard-port", str(free_port())]
    head = agent("--rank", "0", "--addresses", "127.0.0.2", *ports, PATH=f"{tmp_path}:/usr/bin:/bin", NCCL_SOCKET_IFNAME="ib0")
    output, _ = head.communicate(timeout=120)
    assert f"gloo {own_addresses()['127.0.0.1']} nccl ib0" in output


@pytest.mark.parametrize(
    ("flags", "env", "message"),
    [
        ([], {}, "which node is this"),
        (["--rank", "3", "--addresses", "10.0.0.1"], {}, "rank 3 is out of range"),
        (["--resources", "v100=8"], DSTACK, "is not JSON"),
        ([], DSTACK | {"RAY_AUTH_MODE": "token", "HOME": "/nonexistent", "RAY_AUTH_TOKEN_PATH": "/nonexistent"}, "RAY_AUTH_MODE is token"),
    ],
)
def test_a_wrong_setting_is_one_line_and_exit_code_2(flags: list[str], env: dict[str, str], message: str) -> None:
    done = agent(*flags, **env)
    output, _ = done.communicate(timeout=120)
    assert done.returncode == 2
    assert message in output
    assert len(output.splitlines()) == 1


def test_head_and_worker_get_their_own_ray_command() -> None:
    settings = read_settings(["--num-cpus", "4", "--resources", '{"v100": 8}'], DSTACK | {"DSTACK_NODE_RANK": "0"})
    head = ray_command(settings)
    assert {"--head", "--node-ip-address=10.0.0.5", "--dashboard-host=127.0.0.1", "--port=6379", "--num-cpus=4"} <= set(head)
    worker = ray_command(read_settings([], DSTACK))
    assert {"--address=10.0.0.5:6379", "--node-ip-address=10.0.0.6"} <= set(worker)
    assert not {"--head", "--dashboard-host=127.0.0.1"} & set(worker)
    assert '--resources={"v100": 8}' in head
    for command in (head, worker):
        assert "--block" in command
        assert not [flag for flag in command if flag.startswith("--num-gpus")]  # Ray counts them, and the head compares


def test_a_scheduler_that_gives_no_gpus_is_believed() -> None:
    assert "--num-gpus=0" in ray_command(read_settings([], DSTACK | {"DSTACK_GPUS_PER_NODE": "0"}))


def test_ray_gets_the_nvlink_domain_beside_other_labels(tmp_path: Path) -> None:
    domain = "2fd1c1b6-27c5-4b1b-9bd0-1c4f4d8a6e7f.3"
    settings = read_settings([], DSTACK)
    assert f"--labels=ray.io/gpu-domain={domain}" in ray_command(settings, domain)
    assert not [flag for flag in ray_command(settings) if flag.startswith("--labels")]
    elastic = read_settings(["--join", "ray", "--fleet", "a"], {"FLOTILLA_RUNS": str(tmp_path)})
    elastic.rank, elastic.addresses = 1, ["127.0.0.2", "127.0.0.1"]
    assert f"--labels=flotilla.role=rollout,flotilla.fleet=a,ray.io/gpu-domain={domain}" in ray_command(elastic, domain)


def test_what_is_missing_is_said_by_node_and_by_gpu() -> None:
    addresses = ["10.0.0.5", "10.0.0.6"]
    assert missing(addresses, 8, {"10.0.0.5": {"GPU": 8}}) == ["10.0.0.6"]
    assert missing(addresses, 8, {"10.0.0.5": {"GPU": 8}, "10.0.0.6": {"GPU": 7}}) == ["10.0.0.6 with 7 of 8 GPUs"]
    assert missing(addresses, None, {"10.0.0.5": {}, "10.0.0.6": {}}) == []


def test_the_token_is_looked_for_where_ray_looks(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("from-file\n")
    on = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(tmp_path / "token")}
    assert ray_token(on | {"RAY_AUTH_TOKEN": "direct"}) == "direct"
    assert ray_token(on) == "from-file"
    sourced = on | {"RAY_AUTH_TOKEN": "of the env.sh that was sourced last", "FLOTILLA_TOKEN_AWS_DEV": "own"}
    assert ray_token(sourced, "aws-dev") == "own"
    assert ray_token(on | {"RAY_AUTH_MODE": "disabled"}) is None
    with pytest.raises(ValueError, match="RAY_AUTH_MODE is token"):
        ray_token(on | {"RAY_AUTH_TOKEN_PATH": str(tmp_path / "none")})


class TwoNodes(BaseHTTPRequestHandler):
    """Answers as Ray's does for two nodes, one of them dead, to who shows the token."""

    def do_GET(self) -> None:
        if self.headers["Authorization"] != "Bearer secret":
            self.send_error(401)
            return
        nodes = [{"node_ip": "10.0.0.5", "state": "ALIVE", "resources_total": {"CPU": 2}}, {"node_ip": "10.0.0.6", "state": "DEAD"}]
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"data": {"result": {"result": nodes}}}).encode())

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture
def dashboard() -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), TwoNodes)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_port
    server.shutdown()


def test_the_dashboard_is_asked_with_the_token_and_never_through_a_proxy(dashboard: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    env = DSTACK | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "secret"}
    assert read_settings(["--dashboard-port", str(dashboard)], env).dashboard.alive_nodes() == {"10.0.0.5": {"CPU": 2}}
    assert read_settings(["--dashboard-port", str(dashboard)], DSTACK).dashboard.alive_nodes() is None


def test_a_worker_says_what_it_waits_for_and_ends_with_76_when_the_head_does_not_come() -> None:
    port = free_port()
    worker = agent("--rank", "1", "--addresses", "127.0.0.1,127.0.0.3", "--port", str(port), "--join-timeout", "1")
    output, _ = worker.communicate(timeout=120)
    assert worker.returncode == NOT_READY
    assert f"waiting for the head at 127.0.0.1:{port}" in output
    assert "not within 1 s (--join-timeout)" in output
    assert all(line.startswith("[node 1 ") for line in output.splitlines())


def test_every_line_says_which_node_wrote_it(tmp_path: Path) -> None:
    ray = tmp_path / "ray"
    ray.write_text("#!/bin/sh\necho one; echo two; exit 3\n")
    ray.chmod(0o755)
    ports = ["--port", str(free_port()), "--dashboard-port", str(free_port())]
    head = agent("--rank", "0", "--addresses", "127.0.0.2", *ports, PATH=f"{tmp_path}:/usr/bin:/bin")
    output, _ = head.communicate(timeout=120)
    assert head.returncode == RAY_FAILED
    assert [line.split("] ")[1] for line in output.splitlines()][-3:] == ["Ray ended on this node with code 3:", "one", "two"]
    assert all(line.startswith("[node 0 ") for line in output.splitlines())


@pytest.mark.parametrize(("flags", "code"), [([], 0), (["--job", "true"], 128 + signal.SIGTERM)])
def test_a_signal_ends_a_wait_at_once(flags: list[str], code: int) -> None:
    worker = agent("--rank", "1", "--addresses", "127.0.0.1,127.0.0.3", "--port", str(free_port()), *flags)
    assert worker.stdout is not None
    assert "waiting" in worker.stdout.readline()  # its signal handlers stand
    worker.send_signal(signal.SIGTERM)
    output, _ = worker.communicate(timeout=120)
    assert worker.returncode == code
    assert "SIGTERM: stopped" in output


def test_a_port_in_use_on_the_head_is_named_with_its_setting() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        head = agent("--rank", "0", "--addresses", "127.0.0.2", "--port", str(free_port()), "--dashboard-port", str(port))
        output, _ = head.communicate(timeout=120)
    assert head.returncode == 2
    assert f"port {port} is in use on this node; choose another with --dashboard-port" in output


RAY_WITH_A_SLOW_SUBMIT = """#!{python}
import http.server, json, pathlib, sys, time
flags = dict(argument.split("=", 1) for argument in sys.argv if argument.startswith("--") and "=" in argument)
class Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path.startswith("/api/jobs/job"):
            return self.send_error(404)
        nodes = [{{"node_ip": "127.0.0.2", "state": "ALIVE", "resources_total": {{}}}}]
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps([] if "jobs" in self.path else {{"data": {{"result": {{"result": nodes}}}}}}).encode())
if sys.argv[1] == "start":
    http.server.HTTPServer(("127.0.0.1", int(flags["--dashboard-port"])), Answers).serve_forever()
pathlib.Path({mark!r}).touch()
time.sleep(60)
"""


def test_a_signal_is_heard_while_a_job_is_being_submitted(tmp_path: Path) -> None:
    ray, mark = tmp_path / "ray", tmp_path / "submitting"
    ray.write_text(RAY_WITH_A_SLOW_SUBMIT.format(python=sys.executable, mark=str(mark)))
    ray.chmod(0o755)
    ports = ["--port", str(free_port()), "--dashboard-port", str(free_port())]
    head = agent("--rank", "0", "--addresses", "127.0.0.2", *ports, "--job", "true", PATH=f"{tmp_path}:/usr/bin:/bin")
    deadline = time.monotonic() + 120
    while not mark.exists():
        assert time.monotonic() < deadline, "the job is not being submitted"
        time.sleep(0.05)
    head.send_signal(signal.SIGTERM)
    output, _ = head.communicate(timeout=120)
    assert head.returncode == 128 + signal.SIGTERM, output
    assert "SIGTERM: stopped" in output


def test_a_job_that_is_never_accepted_is_told_with_its_deadline() -> None:
    class Unknown(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(404)

        def log_message(self, format: str, *args: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Unknown) as server, subprocess.Popen(["sleep", "60"]) as client:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        dashboard = Dashboard(f"http://127.0.0.1:{server.server_port}", None)
        assert Job("job", client, time.monotonic() + 60).exit_code(dashboard) is None
        with pytest.raises(Failure, match=r"not accepted within 300 s") as late:
            Job("job", client, time.monotonic() - 1).exit_code(dashboard)
        assert late.value.code == NOT_READY
        client.kill()
        client.wait(60)
        with pytest.raises(Failure, match=r"not accepted; the lines above say why") as refused:
            Job("job", client, time.monotonic() + 60).exit_code(dashboard)
        assert refused.value.code == 2
        server.shutdown()


def test_a_scontrol_that_hangs_is_named_with_its_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scontrol = tmp_path / "scontrol"
    scontrol.write_text("#!/bin/sh\nexec sleep 60\n")
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr("cluster_tasks.node.settings.SCONTROL_SECONDS", 0.2)
    with pytest.raises(
        ValueError, match=r"^the job's nodes n\[1-2\] are not known: scontrol show hostnames: did not answer within 0\.2 s$"
    ):
        read_settings([], {"SLURM_JOB_NODELIST": "n[1-2]", "SLURMD_NODENAME": "n2"})


def names_of(monkeypatch: pytest.MonkeyPatch, *answers: OSError | str) -> None:
    """What the name service says, one after the other; the last again and again."""
    left = list(answers)

    def ask(*_: object, **__: object) -> list[tuple[object, ...]]:
        answer = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(answer, OSError):
            raise answer
        return [(2, 1, 6, "", (answer, 0))]

    monkeypatch.setattr(socket, "getaddrinfo", ask)
    monkeypatch.setattr("cluster_tasks.node.settings.ASK_AGAIN_SECONDS", 0.01)


SLURM = {"SLURM_JOB_NODELIST": "n[1-2]", "FLOTILLA_NODES": "n1,n2", "SLURMD_NODENAME": "n1"}
LATER = socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
NEVER = socket.gaierror(socket.EAI_NONAME, "Name or service not known")


@pytest.mark.parametrize("times", [1, 5])
def test_a_name_service_that_does_not_answer_is_asked_again(times: int, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    names_of(monkeypatch, *[LATER] * times, "10.0.0.7")
    assert read_settings([], SLURM).addresses == ["10.0.0.7", "10.0.0.7"]
    [said] = capsys.readouterr().err.splitlines()
    assert "host n1 does not resolve to an address" in said and "trying again for 600 s" in said


def test_one_that_stays_away_is_worth_another_try_of_the_job(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    names_of(monkeypatch, LATER)
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    assert main(["--join-timeout", "0"]) == NOT_READY
    assert "not within 0 s (--join-timeout)" in capsys.readouterr().err


def test_a_name_that_nobody_knows_is_a_mistake_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    names_of(monkeypatch, NEVER)
    with pytest.raises(ValueError, match="host n1 does not resolve"):
        read_settings([], SLURM)


def test_a_signal_ends_the_wait_for_names(monkeypatch: pytest.MonkeyPatch) -> None:
    names_of(monkeypatch, LATER)
    monkeypatch.setattr(waiting, "signals", [signal.SIGTERM])
    with pytest.raises(Stopped):
        read_settings([], SLURM)


def test_who_only_asks_which_node_it_is_has_the_settings_that_this_takes():
    """As `flotilla check` under srun."""
    assert Settings(rank=0).join_timeout == read_settings(["--rank", "0", "--addresses", "127.0.0.1"], {}).join_timeout
