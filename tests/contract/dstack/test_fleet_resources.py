"""Fleets of a cloud as Pulumi makes, changes, reads and deletes them: the providers against a real server."""

from __future__ import annotations

import pytest
from support.dstack_place import SPOT

from infra.dstack_resources.client import Client, DstackRefused, when_free
from infra.dstack_resources.spec import plan

pytestmark = pytest.mark.hosts


def test_a_fleet_that_shrinks_to_nothing_is_made_changed_and_ended(aws):
    props = aws.props(SPOT | {"name": "life"})
    made = aws.fleet.create(props)
    assert aws.fleet.read(made.id, props).outs == made.outs == props
    assert not aws.fleet.diff(made.id, props, props).changes
    assert aws.machines.create(props).outs == props | {"come": True}  # none is wanted before a run wants it

    more = aws.props(props["definition"] | {"nodes": "0..4"})
    difference = aws.fleet.diff(made.id, props, more)
    assert (difference.changes, difference.replaces) == (True, [])
    aws.fleet.update(made.id, props, more)
    assert aws.dstack.api.fleets.get(aws.name, "life").spec.configuration.nodes.max == 4
    assert aws.fleet.read(made.id, more).outs == more

    longer = aws.props(props["definition"] | {"nodes": "0..4", "idle_duration": "2h"})
    assert aws.fleet.diff(made.id, more, longer).replaces == ["definition"]  # dstack changes that of a new fleet alone

    aws.fleet.delete(made.id, more)
    assert aws.fleet.read(made.id, more).id == ""
    aws.fleet.delete(made.id, more)


def test_what_somebody_else_changed_is_seen_and_put_back(aws):
    props = aws.props(SPOT | {"name": "drift"})
    made = aws.fleet.create(props)
    client = Client(aws.dstack.url, aws.dstack.token)
    cheaper = props["definition"] | {"max_price": 0.5}
    # The server may be at work on what was just made.
    when_free("fleet drift", lambda: client.fleets.apply_plan(aws.name, plan(client, aws.name, cheaper)), 60)
    seen = aws.fleet.read(made.id, props).outs
    assert seen is not None and seen["definition"]["max_price"] == 0.5
    difference = aws.fleet.diff(made.id, seen, props)
    assert (difference.changes, difference.replaces) == (True, [])
    aws.fleet.update(made.id, seen, props)
    assert aws.fleet.read(made.id, props).outs == props


def test_a_fleet_of_the_same_name_is_taken_over_only_on_demand(aws):
    props = aws.props(SPOT | {"name": "theirs"})
    aws.fleet.create(props)
    with pytest.raises(DstackRefused, match=r"^fleet theirs: project resources-aws has a fleet of that name already, .*dstack.adopt true$"):
        aws.fleet.create(props)
    aws.says(adopt=True)
    try:
        assert aws.fleet.create(props).outs == props
        wider = aws.props(props["definition"] | {"nodes": "0..3"})
        assert aws.fleet.create(wider).outs == wider
        with pytest.raises(
            DstackRefused, match=r"^fleet theirs: dstack cannot change its idle_duration in place; first: dstack fleet delete theirs"
        ):
            aws.fleet.create(aws.props(wider["definition"] | {"idle_duration": "2h"}))
    finally:
        aws.says()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"availability_zones": ["us-east-1z"]}, r"without availability_zones: g6.8xlarge in us-east-1, .*L4:24GB:1 \(spot\), \$1/h"),
        ({"instance_types": ["g6.9xlarge"]}, r"without instance_types: m5.large in us-east-1, .*\$0.05/h"),
        ({"max_price": 0.01}, r"without max_price: g6.8xlarge in us-east-1, .*\$1/h"),
        ({"resources": {"gpu": "L4:4", "disk": "200GB.."}}, r"without instance_types: g6.12xlarge in us-east-1, .*\$2.3/h"),
        ({"instance_types": ["p9.huge"], "availability_zones": ["us-east-1z"]}, "without all of these: m5.large in us-east-1"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_no_offers_say_what_was_asked_for_where_and_what_nearly_fits_at_which_price(aws, change, message):
    definition = SPOT | {"name": "none"} | change
    with pytest.raises(DstackRefused, match=message) as refused:
        aws.fleet.create(aws.props(definition))
    assert "backends of project resources-aws: aws (us-east-1);" in str(refused.value)
    assert all(str(value) in str(refused.value) for key, value in change.items() if key != "max_price")
    assert aws.fleet.read("", aws.props(definition)).id == ""  # nothing was made


def test_a_project_without_backends_says_so(place):
    with pytest.raises(DstackRefused, match=r"backends of project [\w-]+: none; nothing nearly fits$"):
        place.fleet.create(place.props(SPOT))
