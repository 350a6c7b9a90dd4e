"""Site + Stack -> the files of build/<stack>/ and the stack's outputs.

`rendered` is pure. `Publication` makes its files an output of the stack, from which any machine writes the same ones (`flotilla
render`), with the node agent and, as a secret, the cluster's token.
"""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pulumi
import yaml

from cluster_tasks import build_folder, ray, slurm
from cluster_tasks.environment import CHECKPOINTS
from cluster_tasks.identity import ADDRESS, STACK, TOKEN
from cluster_tasks.node.identity import token_variable
from fleets import backend, fleet, volume
from infra.cluster_token import Token
from stacks.load import StackError
from stacks.places import cloud_of, place_of
from stacks.rules import warnings
from stacks.schema import Stack
from stacks.site import Site


class Publication(pulumi.ComponentResource):
    """The folder build/<stack>/ and what to type next."""

    def __init__(self, stack: Stack, site: Site | pulumi.Output[Site], opts: pulumi.ResourceOptions | None = None):
        """A cloud's site is an Output: what it holds is known only after `up`, the names of the files before."""
        super().__init__("flotilla:publish:Publication", stack.name, None, opts)
        folder = f"build/{stack.name}"
        self.files = pulumi.Output.from_input(site).apply(lambda site: rendered(stack, site) | ray.node_agent())
        self.token = Token(TOKEN, f"{folder}/{TOKEN}", opts=pulumi.ResourceOptions(parent=self)).token
        following = pulumi.Output.from_input(site).apply(partial(next_commands, stack))
        warned = warnings(stack)
        for warning in warned:
            pulumi.warn(warning, self)
        self.outputs = {
            "folder": folder,
            "dashboard": address(stack),
            "next": following,
            "rendered": self.files.apply(digests),  # a plan shows by it which file changes
            "files": pulumi.Output.secret(self.files),  # no secret is in them; they would fill the screen
            "token": self.token,
        }
        if cloud_of(stack):
            self.outputs["cloud"] = pulumi.Output.from_input(site).apply(lambda site: site.outputs)
        if warned:
            self.outputs["warnings"] = warned
        self.register_outputs(self.outputs)

    def leave(self, folder: Path) -> None:
        """Writes the files on this machine, and the token beside them."""
        pulumi.Output.all(self.files, self.token).apply(lambda made: build_folder.write(folder, made[0], made[1]))


def uses_dstack(stack: Stack) -> bool:
    """Whether dstack's definitions are rendered. Beside a batch scheduler only where a server is named: sbatch needs none."""
    return not place_of(stack).batch or stack.dstack is not None


def digests(files: Mapping[str, str]) -> dict[str, str]:
    """The first twelve digits of each file's SHA-256; the node agent's modules as one."""
    agent = {name: text for name, text in files.items() if name.startswith(f"{ray.NODE_AGENT.name}/")}
    texts = {name: text for name, text in files.items() if name not in agent} | {ray.NODE_AGENT.name: repr(sorted(agent.items()))}
    return {name: hashlib.sha256(text.encode()).hexdigest()[:12] for name, text in texts.items()}


def rendered(stack: Stack, site: Site) -> dict[str, str]:
    """The text of each file by its name. The token is none of them: it is made where it is used. Raises StackError."""
    try:
        definitions = _definitions(stack, site)
    except ValueError as error:  # a renderer's word on settings that do not go together
        raise StackError(f"stacks/Pulumi.{stack.name}.yaml: {error}") from None
    texts = slurm.scripts(stack, site) if place_of(stack).batch else {}
    texts |= {name: _header(stack, about) + to_yaml(content) for name, (about, content) in definitions.items()}
    if site.ssh_config:
        about = f"The way to the nodes, which dstack takes after: flotilla server login {stack.name}"
        texts["ssh_config"] = _header(stack, about) + site.ssh_config
    return texts | {"env.sh": environment(stack, site)}


def _definitions(stack: Stack, site: Site) -> dict[str, tuple[str, dict[str, Any]]]:
    """`{file name: (what it is for, content)}`. No machine is asked of dstack where every node is a process of this one."""
    here, files, disk = f"build/{stack.name}", {}, volume.volume(stack, site)
    if place_of(stack).remote and uses_dstack(stack):
        files["server-config.yml"] = ("Configuration of the dstack server: ~/.dstack/server/config.yml", backend.server_config(stack, site))
        for machines in stack.dstack_fleets():
            name = f"{machines.name}.fleet.dstack.yml"
            if site.pending(machines):
                files[name] = (f"Empty until the cloud grants the machines; then again: {_up(stack)}", {})
            else:
                files[name] = (f"The machines: dstack apply -f {here}/{name}", fleet.fleet(stack, site, machines))
        if disk is not None:
            name = f"{disk['name']}.volume.dstack.yml"
            files[name] = (f"The checkpoints' volume: dstack apply -f {here}/{name}", disk)
    start = f"dstack apply -f {here}/ray-cluster.dstack.yml" if place_of(stack).remote else f"flotilla up {stack.name}"
    if uses_dstack(stack):
        files["ray-cluster.dstack.yml"] = (f"The Ray cluster: {start}", ray.ray_cluster(stack, site))
        for elastic in stack.elastic_fleets():
            name = f"{elastic.name}{ray.ROLLOUT}"
            files[name] = (
                f"A node of fleet {elastic.name}: flotilla scale {stack.name} {elastic.name}=N",
                ray.rollout_node(stack, site, elastic),
            )
    if stack.task.job and uses_dstack(stack):
        name = "ray-job.dstack.yml"
        files[name] = (f"One job on a cluster of its own: dstack apply -f {here}/{name}", ray.ray_job(stack, site, stack.task.job))
    files["runtime-env.yaml"] = (
        f"What jobs need: ray job submit --runtime-env {here}/runtime-env.yaml --working-dir . -- ...",
        ray.runtime_env(stack, site),
    )
    return files


def next_commands(stack: Stack, site: Site) -> list[str]:
    """What a person types to come from the rendered files to a running job, in order, in the project's folder."""
    here = f"build/{stack.name}"
    gpus = [site.equipped(fleet).gpu for fleet in stack.cluster_fleets()]
    job = ray.demo_job(on_gpus=any(gpu and gpu.count for gpu in gpus))
    env, submit = f". {here}/env.sh", f"ray job submit --runtime-env {here}/runtime-env.yaml --working-dir . -- {job}"
    if place_of(stack).batch:
        return [f"sbatch {here}/ray-ppo.sbatch"]
    if not place_of(stack).remote:
        return [f"flotilla up {stack.name}", f"flotilla submit {stack.name} -- {job}"]
    if any(site.pending(fleet) for fleet in stack.fleets):
        return [_up(stack)]  # again, when the cloud has granted the machines
    driven = stack.dstack is not None and stack.dstack.drive  # then `pulumi up` has made these, and knows the server
    definitions = [name for name in _definitions(stack, site) if name.endswith((".fleet.dstack.yml", ".volume.dstack.yml"))]
    machines = [] if driven else [f"dstack apply -y -f {here}/{name}" for name in definitions]
    project = []
    if stack.control_node:
        project = [f"flotilla server {verb} {stack.name}" for verb in ("forward", "login")]
    elif stack.dstack and not driven:
        project = [f"dstack project add --name {stack.dstack.project} --url {stack.dstack.server} --token ..."]
    return [*site.prerequisites, *project, env, *machines, f"dstack apply -y -f {here}/ray-cluster.dstack.yml", submit]


def _up(stack: Stack) -> str:
    return f"pulumi up --stack {stack.name} --yes"


def address(stack: Stack) -> str:
    """Where dashboard and job API answer on the machine of the person who attaches."""
    return f"http://localhost:{stack.task.dashboard_port}"


def environment(stack: Stack, site: Site) -> str:
    """A file to source: the stack's name, its cluster's address, and the token to show to that cluster."""
    head = "# shellcheck shell=bash\n"
    head += f"# Made from stacks/Pulumi.{stack.name}.yaml. In the project's folder:  . build/{stack.name}/env.sh\n"
    head += f"export {STACK}={stack.name}\nexport RAY_ADDRESS={address(stack)}\n"
    head += f"export DSTACK_PROJECT={stack.dstack.project}\n" if stack.dstack else ""
    place = place_of(stack)
    here = "" if place.remote else HERE.format(address=ADDRESS, checkpoints=CHECKPOINTS.strip("/"))
    if place.batch:
        here = SHARED.format(path=shlex.quote(str(stack.checkpoints.path)))
    return head + TOKEN_ENVIRONMENT.format(folder=f"build/{stack.name}", token=TOKEN, here=here, variable=token_variable(stack.name))


# `local up` may have found its port taken; it writes where its dashboard is, not into env.sh, which is Pulumi's.
HERE = """\
[ ! -f "$flotilla_folder/{address}" ] || RAY_ADDRESS=$(cat -- "$flotilla_folder/{address}") # of the cluster that is up
export FLOTILLA_RUNS="$flotilla_folder/volumes/{checkpoints}" # where its jobs write runs; what is trained in this shell lies beside them
"""
SHARED = """\
[ ! -d {path} ] || export FLOTILLA_RUNS={path} # where its jobs write runs
"""
# bash names the sourced file in BASH_SOURCE, zsh in $0; a plain sh in neither, where the project's folder has to be the current one.
TOKEN_ENVIRONMENT = """\
flotilla_folder=$(CDPATH='' cd -- "$(dirname -- "${{BASH_SOURCE:-$0}}")" 2>/dev/null && pwd)
[ -f "$flotilla_folder/{token}" ] || flotilla_folder=$PWD/{folder}
{here}export RAY_AUTH_MODE=token
export RAY_AUTH_TOKEN_PATH="$flotilla_folder/{token}" # `ray job` reads it here
RAY_AUTH_TOKEN=$(cat -- "$RAY_AUTH_TOKEN_PATH") && export RAY_AUTH_TOKEN
export {variable}="$RAY_AUTH_TOKEN" # `dstack apply` takes it from the environment
unset flotilla_folder
if [ "${{http_proxy-}}${{https_proxy-}}${{all_proxy-}}${{HTTP_PROXY-}}${{HTTPS_PROXY-}}${{ALL_PROXY-}}" ]; then # not for this machine
  no_proxy=${{no_proxy:-${{NO_PROXY-}}}} NO_PROXY=${{NO_PROXY:-${{no_proxy-}}}}
  case ",$no_proxy," in ",*," | *,localhost,*) ;; *) no_proxy=${{no_proxy:+$no_proxy,}}localhost,127.0.0.1 ;; esac
  case ",$NO_PROXY," in ",*," | *,localhost,*) ;; *) NO_PROXY=${{NO_PROXY:+$NO_PROXY,}}localhost,127.0.0.1 ;; esac
  export no_proxy NO_PROXY
fi
"""


def _header(stack: Stack, about: str) -> str:
    return f"# {about}\n# Made from stacks/Pulumi.{stack.name}.yaml; edit that, not this.\n"


class _Dumper(yaml.SafeDumper):
    """As a person writes it: block text for several lines, lists of a few words on one line, others below their key, no anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        return super().increase_indent(flow, False)


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


def _list(dumper: yaml.SafeDumper, items: list[Any]) -> yaml.SequenceNode:
    words = all(isinstance(item, int) or (isinstance(item, str) and item.replace("-", "").isalnum()) for item in items)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", items, flow_style=words and len(str(items)) < 60)


_Dumper.add_representer(str, _text)
_Dumper.add_representer(list, _list)


def to_yaml(content: dict[str, Any]) -> str:
    """Readable YAML with the keys in the order given."""
    return yaml.dump(content, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=140)
