"""A run's processes as Ray actors: placed on reserved bundles, called together, waited for with a deadline and a reason."""

from __future__ import annotations

import gc
import logging
import os
import secrets
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakValueDictionary

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from trainer.cluster import heartbeat, nsight, placement, spans
from trainer.cluster.reservation import Reservation, reserve
from trainer.cluster.start_signals import end_by_sigterm
from trainer.configs.ppo import PpoConfig
from trainer.errors import ConfigError, RunError

SHOWN = 8  # of the processes that an error names
END_SECONDS = 15  # within which Ray ends a process; one that is stopped gets SIGKILL after five
LONGEST = 44  # characters of a folder in which Ray's sockets have paths that the kernel takes
BESIDE = "beside"  # the concurrency group of calls that are answered while another one is at work


@contextmanager
def on_ray(config: PpoConfig, engines_alone: bool = False) -> Iterator[OnRay]:
    """Connect to Ray (the cluster of the job, or one of this machine's own) and reserve what the run asks for; all ends on leaving.

    Raises ConfigError when the cluster has fewer resources than asked, TimeoutError when they stay busy.
    """
    ours = not ray.is_initialized()
    if ours:
        connect()
    reserved = None
    gc.collect()  # a traceback of an earlier run in this process may have handles, for which Ray takes the names of its actors for taken
    before = set(ray.util.list_named_actors())
    try:
        wanted = placement.fit(config, ray.nodes(), engines_alone)
        nsys = "nsys" in config.log.trace.parts
        if nsys:
            nsight.require(ray.nodes())
        reserved = reserve(wanted, config.placement)
        yield OnRay(wanted, reserved, nsys=nsys)
    finally:
        if ours:
            ray.shutdown()
        elif reserved is not None:
            reserved.release()
            _until_gone(before)
            heartbeat.forget()


def _until_gone(others: set[str]) -> None:
    """Until Ray has ended the processes of a run, whose names the next start in this one, after a divergence, takes again."""
    deadline = time.monotonic() + END_SECONDS
    with suppress(RayError, RuntimeError):
        while set(ray.util.list_named_actors()) - others and time.monotonic() < deadline:
            time.sleep(0.05)


class OnRay:
    """Implements `launcher.Launcher`."""

    errors: ClassVar[tuple[type[Exception], ...]] = (RunError, RayError)

    def __init__(self, plan: placement.Placement, reserved: Reservation, *, nsys: bool = False):
        self.plan, self.reserved, self.nsys = plan, reserved, nsys
        self.recorded: MutableMapping[str, Any] = WeakValueDictionary()
        self.spans: str | None = spans.prefix_of(ray.get_runtime_context().get_job_id())
        self.looks = heartbeat.Watch(deadlocks=False)

    def start(
        self,
        kind: type,
        *args: Any,
        share: placement.Bundle,
        threads: int,
        name: str | None = None,
        where: int | str | None = None,
        beside: tuple[str, ...] = (),
    ) -> Any:
        for method in beside:
            ray.method(concurrency_group=BESIDE)(getattr(kind, method))
        remote: Any = ray.remote
        made = remote(concurrency_groups={BESIDE: 1})(kind) if beside else remote(kind)
        profiled = self.nsys and bool(share.get("GPU"))
        actor = made.options(**options(self._place(where), share, threads, name, nsys=profiled)).remote(*args)
        spans.register(self.recorded, kind, name, actor)
        return actor

    def _place(self, where: int | str | None) -> Any:
        if isinstance(where, int):
            return self.reserved.bundle(where)
        return NodeAffinitySchedulingStrategy(where, soft=False) if where else "SPREAD"

    def ask(self, function: Callable[..., Any], *args: Any, share: placement.Bundle, where: int) -> Any:
        once: Any = ray.remote(max_calls=1)(function)  # the process ends with the call, or what CUDA has taken would stay
        place = self.reserved.bundle(where)
        return once.options(num_cpus=0, num_gpus=share.get("GPU", 0), scheduling_strategy=place).remote(*args)

    def watch(self, actor: Any, limit: float, silence: float | None = None) -> None:
        actor.beat.remote(limit, silence)

    def doing(self) -> dict[str, str]:
        names = {actor._actor_id.hex(): name for name, actor in [*self.recorded.items()]}
        return {names[actor]: part for actor, part in self.looks.parts(names).items()}

    def wait(self, refs: Any, seconds: float, what: str) -> Any:
        with spans.span(f"wait for {what.partition(' (')[0]}"):
            return wait(refs, seconds, what)

    def get(self, ref: Any) -> Any:
        try:
            return ray.get(ref)
        except RayTaskError as error:
            if isinstance(error.cause, ConfigError | RunError):
                raise error.cause from error
            raise

    def done(self, refs: list[Any], seconds: float = 0.0, count: int | None = None) -> tuple[list[Any], list[Any]]:
        return ray.wait(refs, num_returns=count or len(refs), timeout=seconds, fetch_local=False)

    def died(self, ref: Any) -> bool:
        return died(ref)

    def is_death(self, error: Exception) -> bool:
        return isinstance(error, RayActorError)

    def end(self, actor: Any) -> None:
        ray.kill(actor)

    def end_silent(self, refs: list[Any], watch: heartbeat.Watch) -> list[str]:
        return end_silent(refs, watch)

    def end_late(self, ref: Any, why: str) -> str:
        return end(ref, ref.task_id().actor_id().hex(), why)


def wait(refs: Any, seconds: float, what: str) -> Any:
    """`ray.get` with a deadline that also ends actors whose heartbeat (heartbeat.py) stopped for trainer.silence (a rollout engine for
    rollout.silence), and all that are waited for where none of them does anything for that long. Threads beside the main one,
    such as that which writes checkpoints, leave the latter to it: a rank may wait for a rollout engine that only the main thread knows
    to be stopped.

    Raises RunError naming `what`, and which process on which node, when one died or was silent, or the deadline passed; errors of a
    person's own code and settings come through as they were raised.
    """
    deadline, watch = time.monotonic() + seconds, heartbeat.Watch(deadlocks=threading.current_thread() is threading.main_thread())
    try:
        while True:
            try:
                return ray.get(refs, timeout=max(0.0, min(heartbeat.EVERY, deadline - time.monotonic())))
            except GetTimeoutError as error:
                late = _late(refs)
                if time.monotonic() >= deadline:
                    raise RunError(f"{what} did not end within {seconds:g} s{waited_for(_places(late), os.environ)}") from error
                if ended := end_silent(list(late.values()), watch):
                    raise RunError(f"{what}: {'; '.join(ended)}") from error
    except RayTaskError as error:
        if isinstance(error.cause, ConfigError | RunError):
            raise error.cause from error
        raise
    except RayError as error:  # the actor, its owner or its node died, or an object was lost with it
        actor = getattr(error, "actor_id", None)
        who = process(actor) if actor else "a process"
        raise RunError(f"{what}: {who} died: {str(error).strip().splitlines()[0]}{_log(who)}") from error


def end_silent(refs: list[Any], watch: heartbeat.Watch) -> list[str]:
    """End those that owe answers to these calls and are silent; call it every heartbeat.EVERY seconds. Returns what to say of each."""
    late = _late(refs)
    return [end(late[actor], actor, why) for actor, why in watch.look(late).items()]


def _late(refs: Any) -> dict[str, Any]:
    """Calls that have not ended, by the actor that they were made to."""
    refs = refs if isinstance(refs, list) else [refs]
    _, pending = ray.wait(refs, num_returns=len(refs), timeout=0, fetch_local=False)
    return {ref.task_id().actor_id().hex(): ref for ref in pending}


def _places(late: Mapping[str, Any]) -> list[str]:
    """Those that have not answered, with where their main threads are."""
    beats = {actor: heartbeat.last(actor) for actor in late}
    return [process(actor) + (f" at {beat.at}" if beat and beat.at else "") for actor, beat in beats.items()]


def end(ref: Any, actor: str, why: str) -> str:
    """End a process that does not go on, so that it keeps neither its devices nor those who wait for it. Returns what to say of it.

    Its stack goes to stderr.
    """
    who, beat = process(actor), heartbeat.last(actor)
    known = _known(actor)
    here = known and known["Address"]["IPAddress"] == ray.util.get_node_ip_address()
    state = f", its state is {heartbeat.state(known['Pid'])}" if known and here else ""
    if known and known["Name"]:
        ray.kill(ray.get_actor(known["Name"]))
        ray.wait([ref], timeout=END_SECONDS, fetch_local=False)  # Ray says so before the process has ended
        deadline = time.monotonic() + END_SECONDS
        while here and heartbeat.state(known["Pid"])[:1] not in ("", "Z") and time.monotonic() < deadline:
            time.sleep(0.1)
    if beat and beat.stack:
        print(f"{who} {why}; its main thread was last at\n{beat.stack}", file=sys.stderr, flush=True)
    at = f", it was last at {beat.at}" if beat else ""
    return f"{who} {why}{state}{at}{_log(who)}"


def _known(actor: str) -> Any:
    """What Ray knows of an actor; None where it does not answer."""
    try:
        return ray._private.state.actors(actor)  # type: ignore[attr-defined]
    except (RayError, RuntimeError):  # the deadline is still worth saying
        return None


def process(actor: str) -> str:
    """An actor by role and rank, where it is, and the pid that its log is named by."""
    known = _known(actor)
    if not known:
        return f"actor {actor}"
    name = known["Name"] or known["ActorClassName"]
    node = known["Address"]["IPAddress"]
    return f"{name} (node {node}, pid {known['Pid']})" if node else f"{name} (not started yet)"


def waited_for(late: list[str], env: Mapping[str, str]) -> str:
    """Who has not answered, and where to look."""
    some = ", ".join(late[:SHOWN]) + (f" and {len(late) - SHOWN} more" if len(late) > SHOWN else "")
    waiting = f", waiting for {some}{_log(some)}" if late else ""
    dump = env.get("TORCH_FR_DUMP_TEMP_FILE")
    where = f"dumps of collectives are below {Path(dump).parent}" if dump else "for dumps of collectives set flotilla:debug.flight_recorder"
    return f"{waiting}; {where}"


def _log(who: str) -> str:
    return "; log: worker-*-PID.out and .err in Ray's folder logs on that node" if "pid" in who else ""


def died(ref: Any) -> bool:
    """Whether a call that has ended, or has not begun, was made to a process that is gone."""
    try:
        ray.get(ref, timeout=0)
    except RayActorError:
        return True
    except (GetTimeoutError, RayTaskError):
        return False
    return False


def options(where: Any, share: dict[str, float], threads: int, name: str | None, *, nsys: bool = False) -> dict[str, Any]:
    """Options of an actor with `share` of what is there: a bundle, a node. With `nsys` it runs under Nsight Systems.

    Ray restarts none: `worker_groups.py` restarts rollout engines, or a run resumes.
    """
    share = dict(share)
    variables = {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false", "LOCAL_RANK": "0"}
    if not share.get("GPU"):  # Ray leaves all GPUs of the node visible to actors that asked for none; ROCm reads HIP_ before CUDA_
        variables |= {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    return {
        "name": name,
        "num_cpus": share.pop("CPU", 0),
        "num_gpus": share.pop("GPU", 0),
        "resources": share,
        "max_restarts": 0,
        "scheduling_strategy": where,
        "runtime_env": {"env_vars": variables} | ({"nsight": nsight.options(name or "process")} if nsys else {}),
    }


def connect() -> None:
    """To the cluster of the job, or to one of this machine's own. Raises ConfigError when $RAY_ADDRESS leads nowhere."""
    address = os.environ.get("RAY_ADDRESS", "")
    if address.startswith(("http://", "https://")):
        raise ConfigError(
            f"RAY_ADDRESS={address}: that is where jobs are submitted: ray job submit --working-dir . -- python -m trainer.train_ppo ...; "
            "unset RAY_ADDRESS to train on this machine only"
        )
    # The first error of a call to many processes is reported; without this Ray logs those of the others, tracebacks and all.
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    settings: dict[str, Any] = {}
    if not address and not placement.own_ray_runs():
        own_token()
        # It advises against the token that was just made.
        logging.getLogger("ray._private.authentication.authentication_token_setup").setLevel(logging.ERROR)
        settings = {"address": "local"} | ({} if os.environ.get("RAY_TMPDIR") else {"_temp_dir": own_folder()})
    try:
        ray.init(logging_level=logging.WARNING, **settings)
    except Exception as error:  # also another version of Ray or Python than the cluster's
        if type(error) is not Exception and not isinstance(error, ConnectionError | ValueError | RuntimeError | TimeoutError):
            raise  # a bare one is of a node that did not start in time
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(f"RAY_ADDRESS={address or '(not set)'}: no connection to a Ray cluster: {reason}") from error
    if threading.current_thread() is threading.main_thread():
        end_by_sigterm()


def own_token() -> None:
    """A Ray that this process starts asks for a token of this run's own: Ray would leave one in the home, for every user to read."""
    if {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys():
        return
    left = Path.home() / ".ray/auth_token"
    if left.is_file():
        with suppress(PermissionError):  # another's, as in a container with somebody's home
            left.chmod(0o600)
    else:
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


def own_folder() -> str:
    """For what Ray writes, in a folder closed to other users: Ray opens its own to all of them, and who writes there runs code as us."""
    name = f"flotilla-{os.getuid()}-run"
    base = Path(tempfile.gettempdir())
    folder = (base if len(os.fsencode(base / name / "ray")) <= LONGEST else Path("/tmp")) / name
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():  # another user has prepared it
            folder = Path(tempfile.mkdtemp(prefix="flotilla-", dir=folder.parent))
        folder.chmod(0o700)
    return str(folder / "ray")
