"""What Pulumi makes on the dstack server, as the plan shows it: nothing unless the stack says so, and all of it after the site."""

from __future__ import annotations

import pytest
import yaml

from infra import preview
from infra.preview import Resource


def ours(plan) -> dict[tuple[str, str], Resource]:
    return {(resource.kind, resource.name): resource for resource in plan.resources if "flotilla:dstack:" in resource.type}


@pytest.mark.parametrize("stack", ["onprem", "aws-dev", "aws-prod", "gcp-dev", "gcp-prod"])
def test_a_stack_asks_nothing_of_its_server_unless_it_says_so(stack, planned):
    assert not ours(planned(stack))


@pytest.mark.parametrize(
    ("stack", "expected"),
    [
        ("onprem", {("Managed", "onprem"), ("Fleet", "gpus"), ("Machines", "gpus")}),
        ("aws-dev", {("Managed", "aws-dev"), ("Backend", "aws"), ("Fleet", "gpus"), ("Machines", "gpus")}),
        ("aws-prod", {("Managed", "aws-prod"), ("Fleet", "h100"), ("Machines", "h100")}),  # its machines are Pulumi's: no backend
        ("gcp-dev", {("Managed", "gcp-dev"), ("Backend", "gcp"), ("Fleet", "gpus"), ("Machines", "gpus")}),
    ],
)
def test_a_driven_stack_has_what_its_files_describe(stack, expected, changed):
    plan = changed(stack, {"dstack": {"drive": True, "host": "elsewhere"}})
    made = ours(plan)
    assert set(made) == expected
    texts = plan.files
    for (kind, name), resource in made.items():
        if kind in ("Fleet", "Machines"):
            assert resource.inputs["definition"] == yaml.safe_load(texts[f"{name}.fleet.dstack.yml"])
        if kind == "Backend":
            assert resource.inputs["config"] == yaml.safe_load(texts["server-config.yml"])["projects"][0]["backends"][0]
        if kind != "Managed":
            assert (resource.inputs["server"], resource.inputs["project"]) == ("http://127.0.0.1:3000", "main")


def test_a_control_node_has_its_backend_already(changed):
    plan = changed("aws-dev", {"dstack": {"drive": True, "host": "cloud"}})
    assert set(ours(plan)) == {("Managed", "aws-dev"), ("Fleet", "gpus"), ("Machines", "gpus")}
    assert "flotilla server login aws-dev" in plan.outputs["next"]
    [node] = [resource.urn for resource in plan.resources if resource.type == "aws:ec2/instance:Instance"]
    fleet = ours(plan)["Fleet", "gpus"]
    assert node in fleet.options["dependencies"]  # runs end before it goes
    assert fleet.inputs["forward"].startswith("aws ssm start-session ") and fleet.inputs["token"] == "[secret]"


def test_destroy_ends_machines_before_anything_of_the_network_goes(changed):
    plan = changed("aws-dev", {"dstack": {"drive": True, "host": "elsewhere"}})
    made = ours(plan)
    site = {resource.urn for resource in plan.resources if resource.type.startswith("aws:")}
    assert len(site) > 20
    assert site <= set(made["Backend", "aws"].options["dependencies"])
    assert made["Backend", "aws"].urn in made["Fleet", "gpus"].options["dependencies"]
    assert made["Fleet", "gpus"].urn in made["Machines", "gpus"].options["dependencies"]


def test_a_stack_made_under_the_components_old_name_keeps_what_is_below_it(changed, monkeypatch):
    """Without the alias the engine would replace fleets and their machines, whose URNs hold the component's type."""
    aliases = {}

    class Spy(preview.Recorder):
        def RegisterResource(self, request):
            aliases[request.type] = [alias.spec.type for alias in request.aliases]
            return super().RegisterResource(request)

    monkeypatch.setattr(preview, "Recorder", Spy)
    changed("onprem", {"dstack": {"drive": True}})
    assert aliases["flotilla:dstack:Managed"] == ["flotilla:dstack:Driven"]


def test_the_volume_of_a_protected_stack_is_protected(changed):
    volume = {"kind": "network", "volume": "kept", "size": "100GB"}
    settings = {"fleets.0.nodes": "1", "checkpoints": volume, "protect": "true", "dstack": {"drive": True, "host": "cloud"}}
    assert ours(changed("aws-dev", settings))["Volume", "kept"].options["protect"]
