"""The part of Kubernetes' API that kubectl asks of sandboxes in pods. A pod's container is a sandbox of namespaces of this machine.

Attach and exec speak v5.channel.k8s.io: a byte for the stream before each message (0 input, 1 output, 2 errors, 3 the end's status, 255 for
the end of one). https://kubernetes.io/docs/reference/kubernetes-api/
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from pathlib import Path
from typing import Any

from aiohttp import WSMsgType, web

from trainer.environments.sandboxes.namespaces import NamespaceMachine, Namespaces
from trainer.environments.sandboxes.spec import SandboxError, Spec

MISSING = "registry.example/missing:1"  # an image that no registry has
CORE = {"kind": "APIResourceList", "groupVersion": "v1"}
CORE["resources"] = [  # type: ignore[assignment]
    {"name": "pods", "singularName": "pod", "namespaced": True, "kind": "Pod", "verbs": ["create", "delete", "get", "list", "watch"]},
]
NETWORKING = {"kind": "APIResourceList", "groupVersion": "networking.k8s.io/v1"}
NETWORKING["resources"] = [  # type: ignore[assignment]
    {"name": "networkpolicies", "singularName": "networkpolicy", "namespaced": True, "kind": "NetworkPolicy", "verbs": ["create", "get"]},
]
# The image's own shell waits for its input; here the pipe never ends, and who was attached ends the sandbox.
MAIN = 'mkfifo /tmp/.in; exec 4<>/tmp/.in; exec "$@" </tmp/.in'
HEARD = "until [ -p /tmp/.in ]; do sleep 0.1; done; cat >/tmp/.in"


class Kube:
    """Serves in a thread of its own."""

    def __init__(self) -> None:
        self.pods: dict[str, dict[str, Any]] = {}
        self.machines: dict[str, NamespaceMachine] = {}
        self.policies: dict[str, Any] = {}
        self.tasks: set[asyncio.Task[Any]] = set()
        self.port = 0
        self.locked = False  # no token is good enough; kubectl sends none without TLS
        self.started, self.stopping = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=lambda: asyncio.run(self.serve()), daemon=True)

    def start(self) -> None:
        self.thread.start()
        assert self.started.wait(30)

    def stop(self) -> None:
        self.stopping.set()
        self.thread.join(30)

    def config(self, file: Path) -> str:
        cluster = {"server": f"http://127.0.0.1:{self.port}"}
        parts = {"clusters": [{"name": "a", "cluster": cluster}], "users": [{"name": "a", "user": {"token": "of-the-cluster"}}]}
        context = {"contexts": [{"name": "a", "context": {"cluster": "a", "user": "a"}}], "current-context": "a"}
        file.write_text(json.dumps({"apiVersion": "v1", "kind": "Config", **parts, **context}))
        return str(file)

    async def serve(self) -> None:
        self.provider = Namespaces()
        app = web.Application(middlewares=[self.allowed])
        space = "/api/v1/namespaces/default/pods"
        policies = "/apis/networking.k8s.io/v1/namespaces/default/networkpolicies"
        app.router.add_get("/version", fixed({"major": "1", "minor": "32", "gitVersion": "v1.32.0"}))
        app.router.add_get("/api", fixed({"kind": "APIVersions", "versions": ["v1"]}))
        app.router.add_get("/apis", fixed(groups()))
        app.router.add_get("/api/v1", fixed(CORE))
        app.router.add_get("/apis/networking.k8s.io/v1", fixed(NETWORKING))
        app.router.add_get(policies + "/{name}", self.policy)
        app.router.add_post(policies, self.make_policy)
        app.router.add_get(space, self.list)
        app.router.add_post(space, self.create)
        app.router.add_get(space + "/{name}", self.get)
        app.router.add_delete(space + "/{name}", self.delete)
        app.router.add_get(space + "/{name}/exec", self.exec)
        app.router.add_get(space + "/{name}/attach", self.attach)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
        self.started.set()
        while not self.stopping.is_set():
            await asyncio.sleep(0.05)
        await runner.cleanup()
        self.provider.close()

    @web.middleware
    async def allowed(self, request: web.Request, handler: Any) -> Any:
        if self.locked:
            return failure(401, "Unauthorized", "Unauthorized")
        return await handler(request)

    async def policy(self, request: web.Request) -> web.Response:
        known = self.policies.get(name := request.match_info["name"])
        return web.json_response(known) if known else failure(404, "NotFound", f"{name} not found")

    async def make_policy(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.policies[body["metadata"]["name"]] = body
        return web.json_response(body, status=201)

    async def list(self, request: web.Request) -> web.Response:
        wanted = request.query.get("fieldSelector", "")
        items = [pod for pod in self.pods.values() if not wanted or wanted == f"status.phase={pod['status']['phase']}"]
        return web.json_response({"kind": "PodList", "apiVersion": "v1", "metadata": {"resourceVersion": "1"}, "items": items})

    async def create(self, request: web.Request) -> web.Response:
        pod = await request.json()
        name = pod["metadata"]["name"]
        pod["metadata"] |= {"namespace": "default", "uid": name}
        container = pod["spec"]["containers"][0]
        waiting = {"reason": "ErrImagePull", "message": f"failed to pull {MISSING}"} if container["image"] == MISSING else {}
        state = {"waiting": waiting} if waiting else {"running": {}}
        known = {"name": container["name"], "ready": not waiting, "restartCount": 0, "image": "", "imageID": "", "state": state}
        pod["status"] = {"phase": "Pending" if waiting else "Running", "containerStatuses": [known]}
        self.pods[name] = pod
        if not waiting:
            limits = container["resources"]["limits"]
            spec = Spec(memory_mb=int(limits["memory"][:-2]), disk_mb=int(limits["ephemeral-storage"][:-2]), workdir="/")
            self.machines[name] = machine = await self.provider.create(spec)
            self.keep(machine.exec(["sh", "-c", MAIN, "sh", *container["command"]], timeout=1e6))
        return web.json_response(pod, status=201)

    def keep(self, coroutine: Any) -> None:
        async def quiet() -> None:
            with contextlib.suppress(SandboxError):
                await coroutine

        task = asyncio.create_task(quiet())
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def get(self, request: web.Request) -> web.Response:
        pod = self.pods.get(name := request.match_info["name"])
        return web.json_response(pod) if pod else failure(404, "NotFound", f'pods "{name}" not found')

    async def delete(self, request: web.Request) -> web.Response:
        pod = self.pods.pop(name := request.match_info["name"], None)
        self.end(name)
        return web.json_response(pod) if pod else failure(404, "NotFound", f'pods "{name}" not found')

    def end(self, name: str) -> None:
        if machine := self.machines.pop(name, None):
            machine.close()
        if pod := self.pods.get(name):
            pod["status"]["phase"] = "Succeeded"

    async def attach(self, request: web.Request) -> web.StreamResponse:
        socket = web.WebSocketResponse(protocols=("v5.channel.k8s.io",))
        await socket.prepare(request)
        machine = self.machines.get(request.match_info["name"])
        try:
            async for message in socket:
                if message.type == WSMsgType.BINARY and message.data == b"\xff\x00":
                    break
                if machine and message.type == WSMsgType.BINARY and message.data[:1] == b"\x00":
                    self.keep(machine.exec(HEARD, stdin=message.data[1:], session="attach"))
        finally:
            self.end(request.match_info["name"])
        return socket

    async def exec(self, request: web.Request) -> web.StreamResponse:
        machine = self.machines.get(request.match_info["name"])
        if machine is None:
            return failure(400, "BadRequest", "container not found")
        socket = web.WebSocketResponse(protocols=("v5.channel.k8s.io",))
        await socket.prepare(request)
        given = b""
        async for message in socket:
            if message.data == b"\xff\x00":
                break
            given += message.data[1:]
        try:
            done = await machine.exec(request.query.getall("command"), stdin=given, timeout=1000, session="kube", output=1 << 26)
        except SandboxError:
            await socket.close()
            return socket
        for channel, text in ((b"\x01", done.stdout), (b"\x02", done.stderr)):
            data = text.encode()
            for at in range(0, len(data), 1 << 15):
                await socket.send_bytes(channel + data[at : at + (1 << 15)])
        await socket.send_bytes(b"\x03" + json.dumps(status(done.code)).encode())
        await socket.close()
        return socket


def fixed(content: Any) -> Any:
    async def answer(_: web.Request) -> web.Response:
        return web.json_response(content)

    return answer


def groups() -> dict[str, Any]:
    version = {"groupVersion": "networking.k8s.io/v1", "version": "v1"}
    return {"kind": "APIGroupList", "groups": [{"name": "networking.k8s.io", "versions": [version], "preferredVersion": version}]}


def status(code: int) -> dict[str, Any]:
    if code == 0:
        return {"metadata": {}, "status": "Success"}
    code = code if code > 0 else 128 - code
    causes = [{"reason": "ExitCode", "message": str(code)}]
    return {"metadata": {}, "status": "Failure", "reason": "NonZeroExitCode", "message": f"exit code {code}", "details": {"causes": causes}}


def failure(code: int, reason: str, message: str) -> web.Response:
    body = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": reason, "message": message, "code": code}
    return web.json_response(body, status=code)
