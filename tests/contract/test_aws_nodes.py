"""The machines that Pulumi launches on AWS: cards, disks, images, capacity, and what stands before they start."""

from __future__ import annotations

import subprocess

import pytest
from support.aws_plans import BY_PULUMI, script, template
from support.plans import definition, of


def test_nodes_have_all_their_cards_and_no_public_address(planned):
    cards = template(planned("aws-prod"))["networkInterfaces"]
    kinds = [(card["networkCardIndex"], card["deviceIndex"], card["interfaceType"]) for card in cards]
    assert kinds == [(0, 0, "interface"), (0, 1, "efa-only"), *((card, 0, "efa-only") for card in range(1, 32))]
    [group] = [resource.id for resource in of(planned("aws-prod"), "SecurityGroup") if resource.name.endswith("-nodes")]
    assert {tuple(card["securityGroups"]) for card in cards} == {(group,)}
    assert not any("associatePublicIpAddress" in card for card in cards)  # AWS refuses it with several


def test_a_single_card_says_that_it_has_no_public_address(changed):
    [card] = template(changed("aws-dev", BY_PULUMI))["networkInterfaces"]
    assert (card["interfaceType"], card["associatePublicIpAddress"]) == ("efa", "false")
    [first_of_many] = template(changed("aws-prod", {"fleets.0.nics": 1}))["networkInterfaces"]
    assert (first_of_many["interfaceType"], first_of_many["associatePublicIpAddress"]) == ("interface", "false")


def test_a_tag_is_in_no_template_whose_change_would_replace_the_nodes(planned, changed):
    assert template(changed("aws-prod", {"tags.owner": "somebody-else"})) == template(planned("aws-prod"))


def test_fewer_cards_may_be_asked_for(changed):
    assert len(template(changed("aws-prod", {"fleets.0.nics": "9"}))["networkInterfaces"]) == 9


def test_disks_are_encrypted_and_metadata_takes_tokens_alone(planned, changed):
    for plan in (planned("aws-prod"), changed("aws-dev", BY_PULUMI)):
        [disk] = template(plan)["blockDeviceMappings"]
        assert (disk["ebs"]["encrypted"], disk["ebs"]["volumeType"]) == ("true", "gp3")
        assert template(plan)["metadataOptions"]["httpTokens"] == "required"
        [bastion] = [resource.inputs for resource in of(plan, "Instance") if resource.name.endswith("-bastion")]
        assert (bastion["rootBlockDevice"]["encrypted"], bastion["metadataOptions"]["httpTokens"]) == (True, "required")
    assert template(planned("aws-prod"))["blockDeviceMappings"][0]["ebs"]["volumeSize"] == 1000


def test_instances_take_all_from_the_template(planned):
    instances = [resource for resource in of(planned("aws-prod"), "Instance") if "-h100-" in resource.name]
    assert [instance.name for instance in instances] == [f"flotilla-aws-prod-h100-{index}" for index in range(4)]
    assert all(instance.inputs.keys() == {"launchTemplate", "tags", "volumeTags"} for instance in instances)
    assert instances[1].inputs["volumeTags"]["cost-center"] == "research"
    assert {instance.inputs["launchTemplate"]["id"] for instance in instances} == {of(planned("aws-prod"), "LaunchTemplate")[0].id}


@pytest.mark.parametrize(
    ("capacity", "said", "grouped"),
    [
        ({"kind": "on-demand"}, {}, True),
        (
            {"kind": "spot"},
            {"marketType": "spot", "spotOptions": {"spotInstanceType": "one-time", "instanceInterruptionBehavior": "terminate"}},
            True,
        ),
        ({"kind": "reservation", "id": "cr-0123456789abcdef0"}, "cr-0123456789abcdef0", False),
        # Its group is another one than the stack makes.
        ({"kind": "reservation", "id": "cr-0123456789abcdef0", "policy": "side-by-side"}, "cr-0123456789abcdef0", False),
        ({"kind": "block", "id": "cr-0123456789abcdef0"}, {"marketType": "capacity-block"}, False),
    ],
)
def test_capacity_is_bought_in_one_way_and_what_is_held_has_no_placement_group_of_the_stacks(capacity, said, grouped, changed):
    plan = changed("aws-prod", {"fleets.0.capacity": capacity})
    market = template(plan).get("instanceMarketOptions", {})
    target = template(plan).get("capacityReservationSpecification", {}).get("capacityReservationTarget", {}).get("capacityReservationId")
    assert target == capacity.get("id")
    assert market == (said if isinstance(said, dict) else {})
    assert [resource.inputs["strategy"] for resource in of(plan, "PlacementGroup")] == ["cluster"] * grouped
    own = capacity.get("policy")
    assert ("placement" in template(plan)) == (grouped or own is not None)
    assert own in (None, template(plan).get("placement", {}).get("groupName"))


def test_a_pinned_image_is_taken_and_another_stays_that_of_the_first_up(planned, changed):
    [pinned] = of(planned("aws-prod"), "LaunchTemplate")
    assert (pinned.inputs["imageId"], pinned.options.get("ignoreChanges")) == ("ami-0123456789abcdef0", None)
    plan = changed("aws-prod", {"fleets.0.image": ..., "checkpoints": {"kind": "bucket"}})
    [newest] = of(plan, "LaunchTemplate")
    assert (newest.inputs["imageId"], newest.options["ignoreChanges"]) == ("ami-00000000000000000", ["imageId"])
    assert plan.outputs["cloud"]["image_h100"] == "ami-00000000000000000"
    assert any("base-oss-nvidia-driver-gpu-ubuntu-22.04" in line for line in plan.assumed)


def test_user_data_is_a_script_that_bash_reads_and_ec2_has_room_for(planned, changed):
    for plan in (planned("aws-prod"), changed("aws-dev", BY_PULUMI)):
        done = subprocess.run(["bash", "-n"], input=script(plan), capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        assert len(script(plan)) < 16384


def test_a_machine_starts_when_it_can_reach_what_it_needs(planned, changed):
    """Its script installs packages and mounts the checkpoints: by then there are routes, rules and permissions."""
    for plan in (planned("aws-prod"), changed("aws-dev", BY_PULUMI)):
        needed = {resource.urn for kind in ("Route", "RouteTableAssociation", "SecurityGroupEgressRule") for resource in of(plan, kind)}
        needed |= {resource.urn for resource in of(plan, "RolePolicy") if "-node-" in resource.name}
        needed -= {resource.urn for resource in of(plan, "SecurityGroupEgressRule") if not resource.name.endswith(("dev-out", "prod-out"))}
        made_of = {resource.urn: resource.options.get("dependencies", []) for resource in plan.resources}
        for instance in of(plan, "Instance"):
            assert needed <= before(instance.urn, made_of), instance.name


def before(urn: str, made_of: dict[str, list[str]]) -> set[str]:
    """What is made before a resource, by way of others too."""
    found, waiting = set(), [urn]
    while waiting:
        new = set(made_of[waiting.pop()]) - found
        found |= new
        waiting += new
    return found


def test_work_grows_with_the_nodes_and_with_nothing_else(planned, changed):
    few, many = planned("aws-prod"), changed("aws-prod", {"fleets.0.nodes": 256})
    assert len(many.resources) - len(few.resources) == 252
    assert len(definition(many, "h100.fleet.dstack.yml")["ssh_config"]["hosts"]) == 256
