"""Where Ray comes from: the image, or the lock that is installed in it when a node starts."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from cluster_tasks.ray import NODE_AGENT, node_agent, ray_cluster
from cluster_tasks.software import efa_image
from infra.ssh import build as ssh
from stacks.load import StackError, parse
from stacks.schema import Stack

HOSTS = {"user": "ubuntu", "identity_file": "~/.ssh/key", "hosts": [{"hostname": "a"}, {"hostname": "b"}]}
GPU = {"name": "H100", "count": 8}
LOCK = "../../requirements/gpu.txt:requirements.txt"
# Programs of an image; uv makes what pip would.
UV = """
case $1 in
venv) mkdir -p "${@: -1}/bin" && cp /bin/true "${@: -1}/bin/python3" ;;
pip) echo "$*" && cp /bin/true "${5%/*}/ray" ;;
esac
"""
# Makes a .venv whose pip brings Ray.
PYTHON = """
[ "$1" = -c ] && exit 0
mkdir -p "$3/bin"
printf '#!/bin/bash\\necho "$*" && cp /bin/true "${0%%/*}/ray"\\n' >"$3/bin/python"
chmod +x "$3/bin/python"
"""
BROKEN_UV = 'case $1 in venv) true ;; pip) echo "no route to host" >&2; false ;; esac'


def stack(fabric: str | None = None, gpu: dict[str, Any] = GPU, **task: Any) -> Stack:
    fleet = {"name": "gpus", "gpu": gpu, "ssh": HOSTS} | ({"fabric": fabric} if fabric else {})
    return parse("lab", {"flotilla:cloud": "ssh", "flotilla:fleets": [fleet], "flotilla:task": task})


def task(given: Stack) -> dict[str, Any]:
    return ray_cluster(given, ssh.build(given))


# What is rendered


def test_hosts_of_ones_own_with_efa_get_dstacks_image_with_it():
    rendered = task(stack("efa"))
    assert rendered["image"] == efa_image()
    assert "python" not in rendered, "dstack takes one or the other"
    assert rendered["files"] == [NODE_AGENT.name, LOCK]
    assert task(stack("infiniband"))["python"] == "3.11"


def test_an_image_that_has_no_ray_gets_the_requirements():
    rendered = task(stack(image="me/base:1", image_has_ray=False))
    assert rendered["image"] == "me/base:1"
    assert rendered["files"] == [NODE_AGENT.name, LOCK]
    assert rendered["commands"][0] == ". node/software.sh me/base:1"


def test_an_image_is_taken_to_contain_ray():
    rendered = task(stack(image="me/ray:1"))
    assert rendered["files"] == [NODE_AGENT.name]
    assert rendered["commands"][0] == ". node/software.sh me/ray:1 ray"


def test_the_script_is_published_with_the_agent():
    assert node_agent()["node/software.sh"] == (NODE_AGENT / "software.sh").read_text()


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"image_has_ray": False}, r"flotilla:task\.image_has_ray: false belongs to image, which is not set"),
        ({"image": "me/base:1", "image_has_ray": "maybe"}, r"flotilla:task\.image_has_ray: 'maybe' is not"),
        ({"image": "me/base", "image_has_ray": False}, r"flotilla:task\.image: 'me/base' is not pinned"),
        ({"image_has_rays": False}, r"flotilla:task\.image_has_rays: unknown key; did you mean image_has_ray\?"),
    ],
)
def test_a_wrong_setting_is_one_line(settings: dict[str, Any], error: str):
    with pytest.raises(StackError, match=error) as caught:
        stack(**settings)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("settings", "said"), [({}, "image is missing"), ({"image": "me/base:1", "image_has_ray": False}, "image_has_ray is false")]
)
def test_amd_gpus_need_an_image_with_ray(settings: dict[str, Any], said: str):
    with pytest.raises(ValueError, match=rf"flotilla:task\.{said}; neither dstack's own image nor the locked requirements have ROCm"):
        task(stack(gpu={"name": "MI300X", "count": 8, "vendor": "amd"}, **settings))
    assert task(stack(gpu={"name": "MI300X", "count": 8, "vendor": "amd"}, image="me/rocm:1"))["image"] == "me/rocm:1"


# What the script does in an image


def start(tmp_path: Path, words: str, **programs: str) -> subprocess.CompletedProcess[str]:
    """As dstack joins the task's commands, in an image that has these programs, and of others what they need themselves."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("mkdir", "cp", "chmod"):
        (folder / name).symlink_to(f"/usr/bin/{name}")
    for name, body in programs.items():
        (folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / name).chmod(0o755)
    (tmp_path / "node").mkdir()
    shutil.copy(NODE_AGENT / "software.sh", tmp_path / "node")
    line = f". node/software.sh {words} && echo the agent starts with $(command -v ray)"
    environment = {"PATH": str(folder), "HOME": str(tmp_path)}
    return subprocess.run(
        ["/bin/bash", "-c", line], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize("words", ["me/ray:1 ray", "me/ray:1"])
def test_an_image_with_ray_starts_at_once(tmp_path: Path, words: str):
    done = start(tmp_path, words, python3="true", ray="true")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"the agent starts with {tmp_path}/bin/ray\n"


@pytest.mark.parametrize(
    ("programs", "missing"), [({}, "python3 ray"), ({"python3": "true", "uv": UV}, "ray"), ({"ray": "true"}, "python3")]
)
def test_an_image_without_what_it_is_said_to_contain_is_one_error(tmp_path: Path, programs: dict[str, str], missing: str):
    done = start(tmp_path, "me/ray:1 ray", **programs)
    assert (done.returncode, done.stdout) == (2, "")
    [line] = done.stderr.splitlines()
    assert line.startswith(f"node: image me/ray:1 has no {missing} on PATH, but is said to contain Ray; build it in")
    assert "or set flotilla:task.image_has_ray: false" in line


def test_the_lock_is_installed_by_uv_where_there_is_no_ray(tmp_path: Path):
    done = start(tmp_path, "me/base:1", uv=UV)
    assert done.returncode == 0, done.stderr
    venv = tmp_path / "node/.venv"
    assert done.stdout.splitlines() == [
        f"pip install --quiet --python {venv}/bin/python --requirement requirements.txt",
        f"the agent starts with {venv}/bin/ray",
    ]


def test_the_lock_is_installed_by_pip_where_there_is_no_uv(tmp_path: Path):
    done = start(tmp_path, "me/base:1", python3=PYTHON)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "-m pip install --quiet --requirement requirements.txt",
        f"the agent starts with {tmp_path}/node/.venv/bin/ray",
    ]


def test_an_old_python_and_no_uv_is_one_error(tmp_path: Path):
    done = start(tmp_path, "me/base:1", python3="exit 1")
    assert (done.returncode, done.stdout) == (2, "")
    [line] = done.stderr.splitlines()
    assert line.startswith("node: image me/base:1 has no Ray, and neither uv nor a Python 3.11 to 3.13 with venv to install it")


def test_an_installation_that_fails_names_the_image(tmp_path: Path):
    done = start(tmp_path, "me/base:1", uv=BROKEN_UV)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[0] == "no route to host"
    assert done.stderr.splitlines()[1].startswith("node: image me/base:1: the locked requirements could not be installed, see above")
