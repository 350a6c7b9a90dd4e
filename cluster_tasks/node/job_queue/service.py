"""The queue as a service of the head: its rounds, and its answers to clients on a socket.

    python3 -I -B .../node/job_queue --socket S --folder /checkpoints/.queue-onprem --ray 41234 --stack onprem

`/flotilla/at/queue` on the dashboard's port leads here. What Ray's own client asks of a cluster before it submits is answered as Ray
does, so that `ray job submit --address http://localhost:8265/flotilla/at/queue` puts a job into the queue:

    GET  /api/version
    GET  /api/packages/gcs/NAME     whether the queue has it
    PUT  /api/packages/gcs/NAME
    POST /api/jobs/                 its metadata has the queue's own settings of the job, as JSON under `queue`

and what `flotilla queue` asks for:

    GET  /queue                     cluster, owners, jobs
    GET  /queue/jobs/NAME           a job, and every decision on it
    POST /queue/jobs/NAME           {"do": "hold" | "release" | "cancel" | "move", ...}
    POST /queue/owners/NAME         {"weight": 2, "quota": 8}
    GET  /queue/plan                when each job would start and end
    GET  /queue/decisions           the newest, of all jobs
    GET  /metrics                   for Prometheus
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import socketserver
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from ..dashboard import Dashboard, ray_token
from ..monitoring.alerts import post
from .forecast import forecast
from .jobs import STATES, TAKES, WAITS, Job, JobError, Record
from .keeper import Keeper, Rules
from .rayjobs import RayJobs
from .store import Store, StoreError

EVERY_SECONDS, IDLE_SECONDS = 1.0, 10.0  # between two rounds; while the queue is empty
NODES_A_SECOND = 64  # of Ray's list, which is read as a whole
AGAIN_SECONDS = 10.0  # between two tries to open the file
PRICE = "FLOTILLA_PRICE"
JSON_BYTES, PACKAGE_BYTES = 2**22, 2**30
PACKAGE = re.compile(r"_ray_pkg_[A-Za-z0-9_]+\.(zip|jar|whl)|[A-Za-z0-9._-]+\.whl")
SETTINGS = "queue"  # in a job's metadata

log = logging.getLogger(__name__)


class Refused(Exception):
    def __init__(self, code: int, why: str):
        super().__init__(why)
        self.code = code


class Queue:
    """What the socket's threads share."""

    def __init__(self, ray: RayJobs, rules: Rules, alert: Callable[[str, str], None]):
        self.ray, self.rules, self.alert = ray, rules, alert
        self.keeper: Keeper | None = None
        self.why = "the queue has just started"

    def run(self, folder: Path) -> None:
        """Forever."""
        while True:
            try:
                self.keeper = Keeper(Store(folder), self.ray, self.rules, self.alert)
                break
            except StoreError as error:
                if self.why != str(error):
                    log.error("%s", error)
                self.why = str(error)
                time.sleep(AGAIN_SECONDS)
        looked = 0.0
        while True:
            nodes = self.keeper.seen.nodes if self.keeper.seen else 0
            if self.keeper.busy or time.monotonic() - looked > IDLE_SECONDS:
                self.keeper.round()
                looked = time.monotonic()
            time.sleep(max(EVERY_SECONDS, nodes / NODES_A_SECOND))

    def get(self, path: str) -> Any:
        """The answer to a GET. Raises Refused."""
        if path == "/api/version":
            return self.ray.dashboard.ask("/api/version")
        keeper = self.opened()
        if name := package(path):
            if not keeper.store.package(name).exists():
                raise Refused(404, f"{name} is not here")
            return {}
        with keeper.lock:
            if path.startswith("/queue/jobs/"):
                record = keeper.known(path.removeprefix("/queue/jobs/"))
                return shown(record) | {"decisions": keeper.store.decisions(record.name)}
            answers: dict[str, Callable[[], Any]] = {
                "/queue": lambda: overview(keeper),
                "/queue/plan": lambda: planned(keeper),
                "/queue/decisions": keeper.store.decisions,
                "/metrics": lambda: metrics(keeper),
            }
            if path not in answers:
                raise Refused(404, f"{path} is nothing of the queue")
            return answers[path]()

    def post(self, path: str, known: Any) -> Any:
        """The answer to a POST. Raises Refused, JobError."""
        keeper = self.opened()
        if not isinstance(known, dict):
            raise Refused(400, "the body is not a JSON object")
        if path in ("/api/jobs/", "/api/jobs"):
            record = keeper.submit(submitted(known, self.rules.stack))
            return {"job_id": record.name, "submission_id": record.name}
        what, _, name = path.removeprefix("/queue/").partition("/")
        if what == "owners" and name:
            return keeper.owner(name, known).__dict__
        if what != "jobs" or not name:
            raise Refused(404, f"{path} is nothing of the queue")
        do, changes = known.get("do"), {key: value for key, value in known.items() if key != "do"}
        if do == "release" and not changes.keys() - {"budget_usd", "budget_gpu_hours", "deadline"}:
            return shown(keeper.release(name, **changes))
        if do == "move" and changes.keys() == {"priority"}:
            return shown(keeper.move(name, changes["priority"]))
        if do in ("hold", "cancel") and not changes:
            return shown(keeper.hold(name, *(("held", "held by hand") if do == "hold" else ("cancelled", "cancelled by hand"))))
        raise Refused(400, f"do: {do!r} with {sorted(changes)} is not hold, cancel, move with priority, or release with budgets")

    def put(self, path: str, content: bytes) -> None:
        name = package(path)
        if not name:
            raise Refused(400, f"{path} is no package of Ray's")
        self.opened().store.put_package(name, content)

    def opened(self) -> Keeper:
        if self.keeper is None:
            raise Refused(503, self.why)
        return self.keeper


def package(path: str) -> str | None:
    name = path.removeprefix("/api/packages/gcs/")
    return name if name != path and PACKAGE.fullmatch(name) else None


def submitted(request: dict[str, Any], stack: str) -> Job:
    """A job as Ray's client submits it (ray/dashboard/modules/job/common.py:JobSubmitRequest). Raises JobError."""
    metadata = request.get("metadata") or {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise JobError("metadata: is not a map of texts")
    try:
        own = json.loads(metadata.get(SETTINGS) or "{}")
    except ValueError as error:
        raise JobError(f"metadata.{SETTINGS}: {error}") from None
    if not isinstance(own, dict):
        raise JobError(f"metadata.{SETTINGS}: is not a JSON object")
    if not own.get("sizes"):  # `ray job submit` by hand
        sizes = {"gpus": request.get("entrypoint_num_gpus") or 0, "cpus": request.get("entrypoint_num_cpus") or 0}
        own |= {"sizes": [sizes], "driver": True}
    given = {"name": request.get("submission_id") or time.strftime("job-%Y%m%d-%H%M%S"), "command": request.get("entrypoint")}
    kept = {key: value for key, value in metadata.items() if key != SETTINGS}
    owner = own.pop("owner", None) or metadata.get("owner") or "nobody"
    return Job.of(own | given | {"owner": owner, "runtime_env": request.get("runtime_env") or {}, "metadata": kept})


def shown(record: Record) -> dict[str, Any]:
    """As clients see it: without the environment, which may hold secrets."""
    known = record.as_json()
    known["job"].pop("runtime_env")
    return known | {"name": record.name, "submission": record.submission if record.attempt else None, "remaining": record.remaining}


def cluster(keeper: Keeper) -> dict[str, Any]:
    seen = keeper.seen
    known: dict[str, Any] = {"stack": keeper.rules.stack, "hourly": keeper.rules.hourly, "clock": keeper.store.clock.now()}
    known |= {"trouble": keeper.trouble, "seconds": keeper.totals, "pauses": sum(each.pauses for each in keeper.records.values())}
    if seen:
        known |= {"gpus": seen.gpus, "cpus": seen.cpus, "other_gpus": keeper.other[0], "other_cpus": keeper.other[1]}
    return known


def overview(keeper: Keeper) -> dict[str, Any]:
    jobs = [shown(record) for record in sorted(keeper.records.values(), key=lambda each: each.order)]
    return {"cluster": cluster(keeper), "owners": {name: each.__dict__ for name, each in keeper.owners.items()}, "jobs": jobs}


def planned(keeper: Keeper) -> dict[str, Any]:
    """Raises Refused."""
    if keeper.seen is None:
        raise Refused(503, keeper.trouble or "the queue has not seen the cluster yet; ask again")
    records, now = [*keeper.records.values()], keeper.store.clock.now()
    return forecast(keeper.cluster(keeper.seen), records, keeper.owners, now, keeper.rules.min_run, keeper.rules.hourly)


def metrics(keeper: Keeper) -> str:
    """In Prometheus's text format; seconds are of GPUs, on a cluster without GPUs of CPUs."""
    records, now = [*keeper.records.values()], keeper.store.clock.now()
    waits = [now - each.since for each in records if each.state in WAITS]
    kind = "gpus" if keeper.seen and keeper.seen.gpus else "cpus"
    found = [f'flotilla_queue_jobs{{state="{state}"}} {sum(each.state == state for each in records)}' for state in STATES]
    found += [f"flotilla_queue_longest_wait_seconds {max(waits, default=0.0):.0f}"]
    found += [f"flotilla_queue_pauses_total {sum(each.pauses for each in records)}"]
    found += [f'flotilla_queue_used_seconds_total{{by="{use}"}} {seconds:.0f}' for use, seconds in keeper.totals.items()]
    owners = dict.fromkeys(sorted({each.job.owner for each in records}), 0.0)
    for each in records:
        owners[each.job.owner] += getattr(each, kind) if each.state in TAKES else 0.0
    found += [f"flotilla_queue_owner_has{{owner={json.dumps(owner)}}} {has:g}" for owner, has in owners.items()]
    return "\n".join([*found, ""])


def alerting(port: int | None, secret: Path | None) -> Callable[[str, str], None]:
    """Posts to the cluster's webhook, by monitoring/alerts.py on this node."""

    def alert(job: str, summary: str) -> None:
        if port is None or secret is None:
            return
        known = {"labels": {"alertname": "QueuedJob", "job": job, "severity": "warning"}, "annotations": {"summary": summary}}
        try:
            post(f"http://127.0.0.1:{port}/api/v2/alerts", [known], secret.read_text())
        except OSError as error:
            log.warning("the alert of %s was not sent: %s", job, error)

    return lambda job, summary: threading.Thread(target=alert, args=(job, summary), daemon=True).start()


def handler(queue: Queue) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = 120

        def do_GET(self) -> None:
            self.answer(lambda: queue.get(self.where))

        def do_POST(self) -> None:
            self.answer(lambda: queue.post(self.where, json.loads(self.body(JSON_BYTES) or "{}")))

        def do_PUT(self) -> None:
            self.answer(lambda: queue.put(self.where, self.body(PACKAGE_BYTES)))

        @property
        def where(self) -> str:
            return unquote(self.path.partition("?")[0])

        def body(self, most: int) -> bytes:
            size = self.headers.get("Content-Length", "")
            if not size.isdigit() or int(size) > most:
                raise Refused(413, f"a body of {size or 'unknown'} bytes; at most {most}")
            return self.rfile.read(int(size))

        def answer(self, make: Any) -> None:
            try:
                code, content = 200, make()
            except Refused as error:
                code, content = error.code, {"error": str(error)}
            except JobError as error:
                code, content = 400, {"error": str(error)}
            except ValueError as error:
                code, content = 400, {"error": f"not JSON: {error}"}
            except OSError as error:
                code, content = 503, {"error": f"Ray does not answer: {error}"}
            plain = isinstance(content, str)
            text = content.encode() if plain else json.dumps(content if content is not None else {}).encode()
            self.send_response(code)
            for key, value in (
                ("Content-Type", "text/plain; version=0.0.4" if plain else "application/json"),
                ("Content-Length", str(len(text))),
                ("Connection", "close"),
            ):
                self.send_header(key, value)
            self.end_headers()
            self.wfile.write(text)

        def address_string(self) -> str:
            return "socket"

        def log_message(self, format: str, *args: object) -> None:
            pass

    return Handler


class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    request_queue_size = 64


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="job_queue", allow_abbrev=False)
    add = parser.add_argument
    add("--socket", type=Path, required=True)
    add("--folder", type=Path, required=True)
    add("--ray", type=int, required=True, help="port of Ray's dashboard on this node")
    add("--stack", default="")
    add("--nodes", type=int, default=1)
    add("--stop-seconds", type=float, default=Rules.stop_seconds)
    add("--rules", type=json.loads, default={}, help="min_run in seconds; owners with weight and quota")
    add("--gate", type=Path)
    add("--leaving", type=Path)
    add("--alerts-port", type=int)
    add("--alerts-secret", type=Path)
    options = parser.parse_args(arguments)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
    price = os.environ.get(PRICE)
    rules = Rules(
        options.stack,
        options.nodes,
        float(price) if price else None,
        options.stop_seconds,
        options.rules.get("min_run", Rules.min_run),
        options.rules.get("owners", {}),
        options.gate,
        options.leaving,
    )
    ray = RayJobs(Dashboard(f"http://127.0.0.1:{options.ray}", ray_token(os.environ, options.stack)))
    queue = Queue(ray, rules, alerting(options.alerts_port, options.alerts_secret))
    options.socket.unlink(missing_ok=True)
    os.umask(0o077)
    with Server(str(options.socket), handler(queue)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        queue.run(options.folder)
