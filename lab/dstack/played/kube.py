"""kube.py PORT CLUSTER KEY: the part of Kubernetes' API that dstack asks, and in few words what stands behind it.

The file CLUSTER names nodes (`name`, `address`, `labels`, `allocatable`) and claims. A pod is a Docker container with the network of its
node, which is one of the lab's hosts, reached over SSH with KEY. Scheduler: the first node that has the labels and the resources asked
for. Since a pod has its node's address, a service's address is that of its pod, and a NodePort is the port that sshd of the pod listens on.
https://kubernetes.io/docs/reference/kubernetes-api/
"""

from __future__ import annotations

import itertools
import json
import re
import shlex
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

KEY = sys.argv[3]
CLUSTER = json.loads(Path(sys.argv[2]).read_text())
NODE_PORTS = 30_000
COLLECTION = re.compile(r"/api/v1/namespaces/([^/]+)/(pods|services|secrets|persistentvolumeclaims)(?:/([^/]+))?")
UNITS = {"m": 1e-3, "": 1, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
RUNTIME = ("bootID", "containerRuntimeVersion", "kernelVersion", "kubeProxyVersion", "kubeletVersion")
NODE_INFO = (*RUNTIME, "machineID", "osImage", "systemUUID")
VERSION = ("gitCommit", "gitTreeState", "buildDate", "goVersion", "compiler", "platform")
changed = threading.Condition()
versions = itertools.count(1)
found: dict[tuple[str, str, str], dict[str, Any]] = {}  # by namespace, kind and name
namespaces = {"default"}


def amount(text: str) -> float:
    number, unit = re.fullmatch(r"([0-9.]+)([a-zA-Z]*)", str(text)).groups()  # type: ignore[union-attr]
    return float(number) * UNITS[unit]


def node(known: dict[str, Any]) -> dict[str, Any]:
    """As the API has it."""
    addresses = [{"type": kind, "address": known["address"]} for kind in ("InternalIP", "ExternalIP")]
    info = {"architecture": "amd64", "operatingSystem": "linux"} | dict.fromkeys(NODE_INFO, "played")
    status = {"addresses": addresses, "allocatable": known["allocatable"], "capacity": known["allocatable"], "nodeInfo": info}
    status["conditions"] = [{"type": "Ready", "status": "True"}]
    return {"metadata": {"name": known["name"], "labels": known["labels"]}, "spec": {}, "status": status}


def cluster() -> dict[str, Any]:
    """What has no namespace, by path."""
    nodes = {known["name"]: node(known) for known in CLUSTER["nodes"]}
    return {
        "/version/": {"major": "1", "minor": "34", "gitVersion": "v1.34.0", **dict.fromkeys(VERSION, "played")},
        "/api/v1/nodes": {"kind": "NodeList", "items": [*nodes.values()]},
        "/api/v1/pods": {"kind": "PodList", "items": pods()},
        **{f"/api/v1/nodes/{name}": content for name, content in nodes.items()},
        **{f"/api/v1/namespaces/{name}": {"kind": "Namespace", "metadata": {"name": name}} for name in namespaces},
    }


def store(namespace: str, kind: str, thing: dict[str, Any]) -> dict[str, Any]:
    """Add or change, and tell who watches."""
    with changed:
        thing["metadata"] |= {"namespace": namespace, "resourceVersion": str(next(versions))}
        found[namespace, kind, thing["metadata"]["name"]] = thing
        changed.notify_all()
    return thing


def pods(of: str | None = None) -> list[dict[str, Any]]:
    """All, or those of a node."""
    return [t for (_, kind, _), t in list(found.items()) if kind == "pods" and (of is None or t["spec"].get("nodeName") == of)]


def requests(pod: dict[str, Any]) -> dict[str, float]:
    asked = pod["spec"]["containers"][0].get("resources") or {}
    return {name: amount(value) for name, value in (asked.get("requests") or {}).items()}


def allows(labels: dict[str, str], rule: dict[str, Any]) -> bool:
    return rule["key"] in labels and (rule["operator"] == "Exists" or labels[rule["key"]] in rule["values"])


def fits(known: dict[str, Any], pod: dict[str, Any]) -> bool:
    affinity = ((pod["spec"].get("affinity") or {}).get("nodeAffinity") or {}).get("requiredDuringSchedulingIgnoredDuringExecution")
    terms = affinity["nodeSelectorTerms"] if affinity else [{"matchExpressions": []}]
    if not any(all(allows(known["labels"], rule) for rule in term["matchExpressions"]) for term in terms):
        return False
    taken = [requests(other) for other in pods(known["name"])]
    return all(
        value + sum(other.get(name, 0) for other in taken) <= amount(known["allocatable"].get(name, "0"))
        for name, value in requests(pod).items()
    )


def schedule(namespace: str, pod: dict[str, Any]) -> None:
    name = pod["metadata"]["name"]
    with changed:
        place = next((known for known in CLUSTER["nodes"] if fits(known, pod)), None)
        pod["status"] = {"phase": "Pending"}
        if place:
            pod["spec"]["nodeName"] = place["name"]
    if place is None:
        why = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no node has what it asks for"}
        store(namespace, "pods", pod | {"status": {"phase": "Pending", "conditions": [why]}})
        return
    container = {"name": pod["spec"]["containers"][0]["name"], "ready": True, "restartCount": 0, "image": "", "imageID": ""}
    done = ssh(place["address"], start_script(name, pod))
    print(name, "on", place["name"], done.returncode, done.stderr[-500:], flush=True)
    phase = "Running" if done.returncode == 0 else "Failed"
    addresses = {"hostIP": place["address"], "podIP": place["address"]}
    if (namespace, "pods", name) in found:
        store(namespace, "pods", pod | {"status": {"phase": phase, **addresses, "containerStatuses": [container]}})


def start_script(name: str, pod: dict[str, Any]) -> str:
    """What the node's kubelet does."""
    container, volumes = pod["spec"]["containers"][0], {volume["name"]: volume for volume in pod["spec"].get("volumes") or []}
    words, folders = ["docker", "run", "-d", "--name", name, "--hostname", name, "--network", "host"], []
    for mount in container.get("volumeMounts") or []:
        volume = volumes[mount["name"]]
        if claim := volume.get("persistentVolumeClaim"):
            folders.append(source := f"/mnt/shared/claims/{claim['claimName']}")
        elif path := volume.get("hostPath"):
            source = path["path"]
        else:
            words += ["--shm-size", str(int(amount(volume["emptyDir"]["sizeLimit"])))]
            continue
        words += ["-v", f"{source}:{mount['mountPath']}"]
    for pair in container.get("env") or []:
        words += ["-e", f"{pair['name']}={pair['value']}"]
    arguments = container["args"]
    if pod["metadata"]["labels"]["app.kubernetes.io/name"] == "dstack-ssh-proxy":
        port = node_port(pod)
        arguments = [argument.replace("sshd -D -e -p 22 ", f"sshd -D -e -p {port} ") for argument in arguments]
        # In place of its image, which has an sshd, and settings for it.
        words += [word for path in CLUSTER["software"] for word in ("-v", f"{path}:{path}")] + ["-v", "/dev/null:/etc/ssh/sshd_config"]
    words += ["--entrypoint", container["command"][0], CLUSTER["image"], *arguments]
    return "\n".join([*(f"mkdir -p {folder}" for folder in folders), shlex.join(words)])


def node_port(pod: dict[str, Any]) -> int:
    """Of the service that has the pod; dstack makes the pod first, and the service at once."""
    labels = pod["metadata"]["labels"]
    with changed:
        while True:
            for (_, kind, _), thing in found.items():
                if kind == "services" and thing["spec"]["selector"].items() <= labels.items():
                    return thing["spec"]["ports"][0]["nodePort"]
            if not changed.wait(20):
                raise TimeoutError("no service for the jump pod")


def ssh(address: str, script: str) -> subprocess.CompletedProcess[str]:
    options = ("BatchMode=yes", "StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null", "LogLevel=ERROR")
    words = ["ssh", "-i", KEY, *(word for option in options for word in ("-o", option)), f"root@{address}", "sh -es"]
    return subprocess.run(words, input=script, text=True, capture_output=True, check=False)


def made(namespace: str, kind: str, thing: dict[str, Any]) -> dict[str, Any]:
    if kind == "services":
        selector = thing["spec"]["selector"].items()
        of = next((pod for pod in pods() if selector <= pod["metadata"]["labels"].items()), {})
        thing["spec"]["clusterIP"] = of.get("status", {}).get("podIP") or "None"
        if thing["spec"]["type"] == "NodePort":
            for port in thing["spec"]["ports"]:
                port["nodePort"] = port.get("nodePort") or NODE_PORTS + len(found)
    elif kind == "pods":
        thing["status"] = {"phase": "Pending"}
        threading.Thread(target=schedule, args=(namespace, thing), daemon=True).start()
    return store(namespace, kind, thing)


def gone(namespace: str, kind: str, name: str) -> dict[str, Any]:
    thing = found.pop((namespace, kind, name))
    place = next((known for known in CLUSTER["nodes"] if known["name"] == thing["spec"].get("nodeName")), None) if kind == "pods" else None
    if place:
        threading.Thread(target=ssh, args=(place["address"], f"docker rm -f {name}"), daemon=True).start()
    return thing


class Api(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        print(format % args, flush=True)

    def answer(self, code: int, content: Any) -> None:
        body = json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def fail(self, code: int, reason: str) -> None:
        self.answer(code, {"kind": "Status", "status": "Failure", "reason": reason, "code": code})

    def act(self) -> None:
        url = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
        if url.path == "/objects":  # for tests, which are not the API's clients
            return self.answer(200, [{"kind": kind, **thing} for (_, kind, _), thing in list(found.items())])
        if self.headers.get("Authorization") != "Bearer token-of-the-cluster":
            return self.fail(401, "Unauthorized")
        if known := COLLECTION.fullmatch(url.path):
            namespace, kind, name = known.groups()
            return self.collection(namespace, kind, name, query, body)
        if (self.command, url.path) == ("POST", "/api/v1/namespaces"):
            namespaces.add(body["metadata"]["name"])
            return self.answer(201, body)
        known = cluster()
        return self.answer(200, known[url.path]) if url.path in known else self.fail(404, "NotFound")

    def collection(self, namespace: str, kind: str, name: str | None, query: dict[str, str], body: dict[str, Any]) -> None:
        place = (namespace, kind, name or body.get("metadata", {}).get("name", ""))
        if self.command == "POST":
            return self.fail(409, "AlreadyExists") if place in found else self.answer(201, made(namespace, kind, body))
        if name is None:
            wanted = query.get("fieldSelector", "").removeprefix("metadata.name=")
            if query.get("watch"):
                return self.watch(namespace, kind, wanted, float(query["timeoutSeconds"]))
            items = [
                thing for (where, what, called), thing in found.items() if (where, what) == (namespace, kind) and wanted in ("", called)
            ]
            return self.answer(200, {"kind": "List", "metadata": {}, "items": items})
        if place not in found:
            return self.fail(404, "NotFound")
        return self.answer(200, gone(*place) if self.command == "DELETE" else found[place])

    def watch(self, namespace: str, kind: str, name: str, seconds: float) -> None:
        """A line for each state of one object, for so long."""
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        seen, end = "", time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            with changed:
                thing = found.get((namespace, kind, name))
                now = thing["metadata"]["resourceVersion"] if thing else seen
                if now == seen:
                    changed.wait(left)
                    continue
            self.wfile.write(json.dumps({"type": "MODIFIED" if seen else "ADDED", "object": thing}).encode() + b"\n")
            self.wfile.flush()
            seen = now

    do_GET = do_POST = do_DELETE = act


for claim in CLUSTER["claims"]:
    bound = {"phase": "Bound", "capacity": {"storage": "10Gi"}}
    made("default", "persistentvolumeclaims", {"metadata": {"name": claim}, "spec": {"accessModes": ["ReadWriteMany"]}, "status": bound})
ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Api).serve_forever()
