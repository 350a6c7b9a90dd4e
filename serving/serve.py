"""`python -m serving.serve MODEL... --name NAME`: models behind one OpenAI endpoint, as a job of the cluster, or with --here without one.

The endpoint is a switch on the head's loopback, which the front on the dashboard's port passes requests to; engines hold free GPUs of
the cluster. Asked to stop, it takes no new requests and ends when those at work have, or their time is over.

The token comes from VLLM_API_KEY, else it is made of the cluster's and --id, as `flotilla serve` makes it: nobody has to send it.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import logging
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import uvloop

from cluster_tasks.node.endpoint import ALLOWED, NAME, token_of
from cluster_tasks.node.ports import port_is_free
from cluster_tasks.recipes.job.process import MARGIN, stop_seconds
from serving.engine import Engine, Room, command, lacking, sized, waiting
from serving.guard import KEY
from serving.models import Load, Model, as_model, exports, load_of, model_of
from serving.switch import Backend, Switch
from trainer.cli import exits_cleanly, usage
from trainer.errors import ConfigError, RunError
from trainer.metrics import progress

LOOK = 1.0  # seconds
START_SECONDS = 1800.0
GPU_SECONDS = 600.0
AGAIN_SECONDS = 30.0
RESTARTS = 3
ROUTES = "FLOTILLA_ROUTES"  # folder in which the head's front finds where names lead to


class NoRoom(ConfigError):
    """Memory is missing, with the numbers; another engine may give some back."""


def say(text: str) -> None:
    print(f"serve: {text}", flush=True)


class Running:
    """An engine that has been started; `call` runs a method of it, wherever it is."""

    def __init__(self, load: Load, room: Room, call: Callable[..., Any], release: Callable[[], None]) -> None:
        self.load, self.room, self.call, self.release = load, room, call, release
        host = f"[{room.address}]" if ":" in room.address else room.address
        self.backend = Backend(f"http://{host}:{room.port}")

    async def end(self, seconds: float = MARGIN) -> None:
        with suppress(Exception):  # its node may be gone
            await self.call("stop", seconds)
        self.release()


class Service:
    """A name, its switch and its engine."""

    def __init__(self, options: argparse.Namespace, more: list[str], models: list[Model], token: str) -> None:
        self.options, self.more, self.models, self.token = options, more, models, token
        self.gpus: int = options.gpus or 0
        self.switch = Switch(token)
        self.stopped = asyncio.Event()
        folder = None if options.here else os.environ.get(ROUTES)
        self.routes = Path(folder) if folder else None
        self.port = 0
        self.later = 0.0  # when there may be room again
        self.refused: set[str] = set()  # exports whose engine did not start
        self.ending: set[asyncio.Task[None]] = set()
        self.file = None if options.here else progress.among_logs("serve")

    def show(self, state: str, load: Load | None = None, why: str = "") -> None:
        say(state + (f": {why}" if why else ""))
        if self.file is not None:
            names = [*load.names, *(name for name, _ in load.adapters)] if load else []
            known = {"name": self.options.name, "state": state, "models": names, "step": load and load.step, "why": why, "port": self.port}
            progress.write(self.file, known)

    async def serve(self) -> None:
        """Until it is asked to stop. Raises RunError, ConfigError."""
        with TemporaryDirectory(prefix="flotilla-serve-") as own:
            socket = f"{own}/switch" if self.routes and not self.options.port else None  # which strangers do not even reach
            async with AsyncExitStack() as stack:
                try:
                    self.port = await stack.enter_async_context(self.switch.listening(socket or (self.options.host, self.options.port)))
                except OSError as error:
                    raise ConfigError(f"--port {self.options.port}: {error.strerror or error}") from None
                await self._serve(socket or "")

    async def _serve(self, address: str) -> None:
        running = await self.started(load_of(self.models, self.options.name), GPU_SECONDS)
        await self.switch.move(running.backend)
        try:
            await self.alone()
            with self.routed(address):
                if not self.stopped.is_set():
                    self.show("ready", running.load)
                running = await self.watched(running)
        finally:
            self.switch.draining = True
            seconds = min(self.options.drain, max(stop_seconds() - MARGIN, MARGIN))
            self.show("draining", running.load, f"{running.backend.at_work} requests at work, at most {seconds:g} s")
            await self.switch.quiet(running.backend, seconds)
            await asyncio.gather(running.end(), *self.ending)

    async def alone(self) -> None:
        """Raises ConfigError where another job has the name; what one that was killed has left leads to nobody."""
        if self.routes is None:
            return
        try:
            known = json.loads((self.routes / self.options.name).read_text())
            _, writer = await asyncio.open_unix_connection(known["socket"])
        except (OSError, ValueError, KeyError):
            return
        writer.close()
        raise ConfigError(f"--name {self.options.name}: another job of this cluster serves it meanwhile")

    @contextmanager
    def routed(self, address: str) -> Iterator[None]:
        """The front on the dashboard's port leads to the switch meanwhile; it looks at the token too."""
        if self.routes is None:
            yield
            return
        file = self.routes / self.options.name
        draft = file.with_name(f".{file.name}.{os.getpid()}")
        draft.write_text(json.dumps({"socket": address, "sha256": hashlib.sha256(self.token.encode()).hexdigest(), "keeps": True}))
        draft.replace(file)
        try:
            yield
        finally:
            file.unlink(missing_ok=True)

    async def watched(self, running: Running) -> Running:
        """The engine of the moment: started again when it dies, replaced by that of a newer export. Raises RunError."""
        restarts = 0
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self.stopped.wait(), LOOK)
                return running
            if why := await self.dead(running):
                await self.switch.move(None)
                running.release()
                restarts += 1
                if restarts > RESTARTS:
                    raise RunError(f"the engine has ended {restarts} times: {why}")
                self.show("restarting", running.load, why)
                running = await self.started(running.load, GPU_SECONDS)
            elif (newer := self.newer(running.load)) is not None:
                old = running
                try:
                    running = await self.started(newer, GPU_SECONDS, beside=old)
                except NoRoom as error:
                    self.later = asyncio.get_running_loop().time() + AGAIN_SECONDS
                    self.show("ready", old.load, f"step {newer.step} waits: {error}")
                    continue
                except (RunError, ConfigError) as error:
                    self.refused.add(newer.path)
                    self.show("ready", old.load, f"step {newer.step} is not served: {error}")
                    continue
                if running is not old:
                    self.ending.add(asyncio.create_task(self.retired(old)))
            else:
                continue
            await self.switch.move(running.backend)
            self.show("ready", running.load)

    async def retired(self, old: Running) -> None:
        """Ends once its requests have."""
        if not await self.switch.quiet(old.backend, self.options.drain):
            say(f"{old.backend.at_work} requests to step {old.load.step} were at work for {self.options.drain:g} s more and are cut off")
        await old.end()

    async def dead(self, running: Running) -> str | None:
        try:
            return await running.call("ended")
        except Exception as error:  # Ray's, of a node that is gone
            return str(error).strip().splitlines()[0]

    def newer(self, load: Load) -> Load | None:
        """What --follow is to serve next; None where that is the case."""
        [first, *_] = self.models
        if not self.options.follow or first.run is None or asyncio.get_running_loop().time() < self.later:
            return None
        found = exports(first.run)
        if not found or found[-1][0] <= (load.step or 0) or str(found[-1][1].resolve()) in self.refused:
            return None
        return load_of([as_model(first.run, *found[-1])], self.options.name)

    async def started(self, load: Load, seconds: float, beside: Running | None = None) -> Running:
        """An engine that is healthy; the one `beside` it where that is to stay. Raises RunError, ConfigError, NoRoom."""
        running = await self.placed(load, seconds, beside)
        if running is None:
            assert beside
            return beside
        try:
            self.show("starting" if beside is None else "switching", load, f"{load.path} on {running.room.address}")
            if why := lacking(load, running.room, self.gpus):
                raise NoRoom(why)
            words = command(load, running.room, self.gpus, self.more)
            await running.call("start", words, self.token, not self.gpus)
            await self.healthy(running)
        except BaseException:
            await running.end()
            raise
        if self.stopped.is_set() and beside is not None:
            await running.end()
            return beside
        return running

    async def healthy(self, running: Running) -> None:
        assert self.switch.session
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.options.timeout
        while not self.stopped.is_set():
            if why := await self.dead(running):
                raise RunError(f"vLLM has not started: {why}")
            with suppress(OSError, asyncio.TimeoutError):  # aiohttp's errors of connections are OSErrors
                headers = {"Authorization": f"Bearer {self.token}"}
                async with self.switch.session.get(f"{running.backend.url}/health", headers=headers) as answer:
                    if answer.status == 200:
                        return
            if loop.time() > deadline:
                raise RunError(f"vLLM on {running.room.address} is not healthy within {self.options.timeout:g} s (--timeout)")
            await asyncio.sleep(LOOK / 4)

    async def placed(self, load: Load, seconds: float, beside: Running | None) -> Running | None:
        """A place for an engine, with its GPUs. Raises RunError where there is none in time."""
        if self.options.here:
            engine = Engine()

            async def here(method: str, *arguments: Any) -> Any:
                return getattr(engine, method)(*arguments)

            return Running(load, engine.room("127.0.0.1"), here, lambda: None)
        return await self.on_ray(load, seconds, beside)

    async def on_ray(self, load: Load, seconds: float, beside: Running | None) -> Running | None:
        import ray

        actor: Any = ray.remote(Engine).options(num_cpus=self.options.cpus, num_gpus=self.gpus).remote()
        room, said, begin = actor.room.remote(), "", asyncio.get_running_loop().time()

        async def call(method: str, *arguments: Any) -> Any:
            return await getattr(actor, method).remote(*arguments)

        while not ray.wait([room], timeout=0)[0]:
            line = waiting(ray.cluster_resources(), ray.available_resources(), self.gpus, self.options.cpus)
            waited = asyncio.get_running_loop().time() - begin
            if waited > 2 * LOOK and line != said:
                said = line
                self.show(*(("ready", beside.load, f"step {load.step}: {line}") if beside else ("waiting", load, line)))
            over = beside is None and waited > seconds
            if over or self.stopped.is_set() or (beside is not None and await self.dead(beside)):
                ray.kill(actor)
                if not over and beside is not None:
                    return None
                raise RunError(f"{line or 'no node has room'}: not within {seconds:g} s; stop a job, or give fewer --gpus")
            await asyncio.sleep(LOOK)
        return Running(load, await room, call, lambda: ray.kill(actor))


def arguments(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """What is this command's own, and flags for vLLM. Raises ConfigError."""
    parser = usage.parser(
        "python -m serving.serve", "Serve models by vLLM behind one OpenAI endpoint.", "python -m serving.serve run:demo --here"
    )
    parser.add_argument("models", metavar="MODEL", nargs="+", help="run:NAME[@STEP], folder or hub name; several: adapters of one base")
    parser.add_argument("--name", required=True, help="name of the endpoint, and of its model")
    parser.add_argument("--id", help="of this start, from which the token is made")
    parser.add_argument("--gpus", type=int, metavar="N", help="GPUs of one engine (1 where the cluster has some)")
    parser.add_argument("--cpus", type=float, default=1.0, metavar="N", help="CPUs that Ray keeps for it (1)")
    parser.add_argument("--follow", action="store_true", help="serve each newer export of the run")
    parser.add_argument("--here", action="store_true", help="on this machine, without Ray")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (127.0.0.1)")
    parser.add_argument("--port", type=int, default=0, help="port to listen on (a free one)")
    parser.add_argument("--drain", type=float, default=60.0, metavar="S", help="seconds that requests at work may take at the end (60)")
    parser.add_argument("--timeout", type=float, default=START_SECONDS, metavar="S", help=f"seconds for vLLM to start ({START_SECONDS:g})")
    cut = argv.index("--") if "--" in argv else len(argv)
    options = parser.parse_args(argv[:cut])
    if not re.fullmatch(NAME, options.name):
        raise ConfigError(f"--name {options.name}: must be {ALLOWED}")
    if options.gpus is not None and options.gpus < 0:
        raise ConfigError(f"--gpus {options.gpus} is not an integer >= 0")
    if not 0 <= options.port < 2**16:
        raise ConfigError(f"--port {options.port} is not a port (0 to 65535)")
    if options.port and not port_is_free(options.port, options.host):
        raise ConfigError(f"--port {options.port}: another program of this machine has it; leave it out for a free one")
    return options, argv[cut + 1 :]


async def perform(service: Service) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, service.stopped.set)
    await service.serve()


def main(argv: list[str]) -> int:
    """Exit code 0 after a stop that was asked for, 1 where the engine has failed. Raises ConfigError."""
    options, more = arguments(argv)
    models = [model_of(text) for text in options.models]
    if options.follow and (len(models) > 1 or models[0].run is None or "@" in options.models[0]):
        raise ConfigError(f"--follow: {' '.join(options.models)}: must be one run:NAME without a step")
    load_of(models, options.name)
    token = os.environ.get(KEY) or token_of(os.environ, options.name, options.id or "")
    if not token:
        raise ConfigError(f"{KEY} is not set, and there is no cluster whose token is known; every endpoint asks for a token")
    if not options.here:
        import ray

        ray.init(logging_level=logging.WARNING)
        options.gpus = sized(options.gpus, ray.nodes())
    try:
        service = Service(options, more, models, token)
        uvloop.run(perform(service))  # takes half the time of asyncio's own loop for an answer that streams
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    with exits_cleanly():
        sys.exit(main(sys.argv[1:]))
