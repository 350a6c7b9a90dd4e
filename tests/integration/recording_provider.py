"""A cloud that writes down what it is asked: a Pulumi resource provider for the real engine.

Run by the engine as `recording_provider.py aws ...`. Ids, outputs and answers: infra/<cloud>/preview_answers.py.
It checks no input (tests/contract/test_provider_inputs.py does) and proves nothing about what a cloud accepts: what it shows is what the
engine does with the program, in which order, and what a change replaces.

RECORD   file that receives one line of JSON for each call that creates, changes or deletes something
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import secrets
import sys
from concurrent import futures
from pathlib import Path
from types import ModuleType
from typing import Any

import grpc
from google.protobuf import empty_pb2, json_format, struct_pb2
from pulumi.runtime.proto import plugin_pb2, provider_pb2, provider_pb2_grpc

UNKNOWN = "04da6b54-80e4-46f7-96ec-b56ff0331ba9"  # the engine's word for text that is not known yet
INFRA = Path(__file__).parents[2] / "infra"

# Inputs that cannot change in place, by kind; `*` for all of them.
# https://www.pulumi.com/registry/packages/aws/ and .../gcp/ mark them; those that a change of settings reaches are here.
REPLACES = {
    "Bucket": ("bucket", "name", "location"),
    "FileSystem": ("subnetIds", "kmsKeyId"),
    "Firewall": ("name", "network"),
    "Instance": ("ami", "launchTemplate", "subnetId", "zone", "machineType", "userData", "metadataStartupScript"),
    "InstanceFromTemplate": ("sourceInstanceTemplate", "zone"),
    "InstanceTemplate": ("*",),
    "LustreFileSystem": ("subnetIds", "kmsKeyId", "storageType", "deploymentType"),
    "Network": ("name", "autoCreateSubnetworks", "networkProfile"),
    "PlacementGroup": ("*",),
    "SecurityGroup": ("name", "vpcId", "description"),
    "Subnet": ("cidrBlock", "availabilityZone", "vpcId"),
    "Subnetwork": ("name", "network", "region", "ipCidrRange"),
    "VolumeAttachment": ("instanceId", "volumeId"),
    "Vpc": ("cidrBlock",),
}


def plain(message: struct_pb2.Struct) -> dict[str, Any]:
    return json_format.MessageToDict(message)


def struct(values: dict[str, Any]) -> struct_pb2.Struct:
    return json_format.ParseDict(values, struct_pb2.Struct())


def assumed(cloud: str) -> ModuleType:
    """infra/<cloud>/preview_answers.py by its path: its package would load the cloud's whole SDK."""
    spec = importlib.util.spec_from_file_location("preview_answers", INFRA / cloud / "preview_answers.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class RecordingProvider(provider_pb2_grpc.ResourceProviderServicer):
    def __init__(self, cloud: str) -> None:
        self.cloud, self.assumed, self.tags = cloud, assumed(cloud), {}

    def record(self, call: str, urn: str, **more: Any) -> None:
        with Path(os.environ["RECORD"]).open("a") as lines:  # short writes: whole lines, whoever else writes
            lines.write(json.dumps({"call": call, "urn": urn} | more) + "\n")

    def outputs(self, urn: str, kind: str, inputs: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        id_, values = self.assumed.created(kind, urn.rpartition("::")[2], inputs)
        own = inputs.get("tags")  # a list on machines of GCP, where it means something else
        return id_, values | {"tagsAll": self.tags | own if isinstance(own, dict) else self.tags}

    # The plugin

    def Handshake(self, request, context):
        return provider_pb2.ProviderHandshakeResponse()

    def GetPluginInfo(self, request, context):
        return plugin_pb2.PluginInfo(version=importlib.metadata.version(f"pulumi-{self.cloud}"))

    def GetSchema(self, request, context):
        return provider_pb2.GetSchemaResponse(schema=json.dumps({"name": self.cloud, "version": "1.0.0"}))

    def CheckConfig(self, request, context):
        return provider_pb2.CheckResponse(inputs=request.news)

    def DiffConfig(self, request, context):
        olds, news = plain(request.olds), plain(request.news)
        changed = [key for key in olds.keys() | news.keys() if olds.get(key) != news.get(key)]
        kinds = provider_pb2.DiffResponse
        return kinds(
            changes=kinds.DIFF_SOME if changed else kinds.DIFF_NONE,
            replaces=[key for key in changed if key in ("region", "project")],
            diffs=changed,
        )

    def Configure(self, request, context):
        args = plain(request.args)
        tags = json.loads(args.get("defaultTags") or args.get("defaultLabels") or "{}")
        self.tags = tags.get("tags", tags)
        return provider_pb2.ConfigureResponse(supportsPreview=True)

    def Cancel(self, request, context):
        return empty_pb2.Empty()

    def Invoke(self, request, context):
        try:
            answer, _ = self.assumed.answer(request.tok, plain(request.args))
        except LookupError as error:
            context.abort(grpc.StatusCode.UNIMPLEMENTED, str(error))
        return provider_pb2.InvokeResponse(**{"return": struct(answer)})  # pyright: ignore[reportArgumentType]

    # Resources

    def Check(self, request, context):
        return provider_pb2.CheckResponse(inputs=request.news)

    def Diff(self, request, context):
        olds, news = plain(request.old_inputs), plain(request.news)
        changed = {key for key in olds.keys() | news.keys() if olds.get(key) != news.get(key)}
        fixed = REPLACES.get(request.urn.split("::")[2].rpartition(":")[2], ())
        replaces = {key for key in changed if key in fixed or "*" in fixed}
        kind = request.urn.split("::")[2].rpartition("$")[2]
        _, now = self.outputs(request.urn, kind, news)
        if plain(request.olds).get("tagsAll") != now["tagsAll"]:
            changed.add("tagsAll")
        kinds = provider_pb2.DiffResponse
        return kinds(changes=kinds.DIFF_SOME if changed else kinds.DIFF_NONE, replaces=sorted(replaces), diffs=sorted(changed))

    def Create(self, request, context):
        inputs = plain(request.properties)
        id_, outputs = self.outputs(request.urn, request.type, inputs)
        if request.preview:
            return provider_pb2.CreateResponse(properties=struct({key: inputs.get(key, UNKNOWN) for key in outputs}))
        self.record("create", request.urn)
        if request.type.endswith((":LaunchTemplate", ":InstanceTemplate")):  # one that replaces another is there beside it for a time
            fresh = f"{id_}-{secrets.token_hex(2)}"
            id_, outputs = fresh, json.loads(json.dumps(outputs).replace(id_, fresh))
        return provider_pb2.CreateResponse(id=id_, properties=struct(outputs))

    def Read(self, request, context):
        if request.properties.fields:  # of the stack's own
            return provider_pb2.ReadResponse(id=request.id, properties=request.properties, inputs=request.inputs)
        outputs, _ = self.assumed.existing(request.type, request.id)
        return provider_pb2.ReadResponse(id=request.id, properties=struct(outputs))

    def Update(self, request, context):
        _, outputs = self.outputs(request.urn, request.type, plain(request.news))
        if not request.preview:
            self.record("update", request.urn)
        return provider_pb2.UpdateResponse(properties=struct(outputs))

    def Delete(self, request, context):
        self.record("delete", request.urn)
        return empty_pb2.Empty()


def main() -> None:
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=8))
    provider_pb2_grpc.add_ResourceProviderServicer_to_server(RecordingProvider(sys.argv[1]), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    print(port, flush=True)  # the engine reads the port from the first line
    server.wait_for_termination()


if __name__ == "__main__":
    main()
