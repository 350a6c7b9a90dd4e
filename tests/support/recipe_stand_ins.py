"""Programs in place of what a recipe runs: each records what it was given, saves as the real one, and fails once it has resumed."""

from __future__ import annotations

from pathlib import Path

from cluster_tasks.recipes import trl, verl

VERL = """\
import json, os, socket, sys
from pathlib import Path
folder = next(word.partition("=")[2] for word in sys.argv if word.startswith("trainer.default_local_dir="))
if "--cfg" in sys.argv:
    print("Could not override 'no.such'.") if "no.such=1" in sys.argv else None
    sys.exit("no.such=1" in sys.argv)
ours = ("PYTHONUNBUFFERED", "RAY_ADDRESS")
saved = Path(folder) / "global_step_1"
said = {"argv": sys.argv[1:], "cwd": sorted(os.listdir()), "env": {name: os.environ.get(name) for name in ours}, "resumed": saved.exists()}
(Path(folder) / "said.json").write_text(json.dumps(said | {"node": socket.gethostname()}))
saved.mkdir(exist_ok=True)
print("TRAINED", flush=True)
sys.exit(7 if said["resumed"] else 0)
"""
SFT = """\
import json, os, socket, sys
from pathlib import Path
given = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
folder, rank = Path(given["--output_dir"]), os.environ["RANK"]
said = {"given": given, "world": os.environ["WORLD_SIZE"], "node": socket.gethostname(), "data": os.listdir(given["--dataset_name"])}
(folder / f"said-{rank}.json").write_text(json.dumps(said))
if rank == "0":
    (folder / "checkpoint-1").mkdir(exist_ok=True)
    (folder / "checkpoint-1/trainer_state.json").touch()
print("TRAINED", flush=True)
sys.exit("--resume_from_checkpoint" in given)
"""
# The hub: says who has fetched, and answers when the test lets it.
DATASETS = """\
import os, socket, time
from pathlib import Path
def load_dataset(source, name=None, revision=None):
    shared, deadline = Path(os.environ["FLOTILLA_RUNS"]), time.monotonic() + 600
    with (shared / "fetched").open("a") as fetched:
        fetched.write(f"{socket.gethostname()}\\n")
    while not (shared / "answer").exists():
        if time.monotonic() > deadline:
            raise TimeoutError("nobody has let it answer")
        time.sleep(0.1)
    return dict.fromkeys(("train", "test"), [{"question": "2+2?", "answer": "#### 4"}])
"""


def verl_in(folder: Path) -> None:
    _package(folder, "verl/trainer/main_ppo.py", VERL, verl.PACKAGES[0])


def trl_in(folder: Path) -> None:
    _package(folder, "trl/scripts/sft.py", SFT, trl.PACKAGES[0])


def hub_in(folder: Path) -> None:
    (folder / "datasets.py").write_text(DATASETS)


def _package(folder: Path, module: str, text: str, requirement: str) -> None:
    """With the version that the recipe pins."""
    file = folder / module
    file.parent.mkdir(parents=True)
    for package in (file.parent, file.parent.parent):
        (package / "__init__.py").touch()
    file.write_text(text)
    name, _, version = requirement.partition("==")
    name = name.partition("[")[0]
    distribution = folder / f"{name}-{version}.dist-info"
    distribution.mkdir()
    (distribution / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
