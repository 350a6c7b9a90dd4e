"""Volumes as Pulumi makes, reads and deletes them: the provider against a real server."""

from __future__ import annotations

import pytest

from infra.dstack_resources.client import DstackRefused
from stacks.dstack_api import parse_apply_configuration

pytestmark = pytest.mark.hosts


@pytest.mark.slow
def test_a_volume_is_made_and_deleted(aws):
    definition = {"type": "volume", "name": "kept", "backend": "aws", "region": "us-east-1", "size": "100GB"}
    props = aws.props(definition)
    made = aws.volume.create(props)
    assert aws.volume.read(made.id, props).outs == props
    assert aws.dstack.api.volumes.get(aws.name, "kept").status.value == "active"
    bigger = aws.props(definition | {"size": "200GB"})
    assert aws.volume.diff(made.id, props, bigger).replaces == ["definition"]
    with pytest.raises(DstackRefused, match=r"^volume kept: project resources-aws has a volume of that name already.*adopt true$"):
        aws.volume.create(props)
    aws.says(adopt=True)
    try:
        assert aws.volume.create(props).outs == props
        with pytest.raises(DstackRefused, match=r"^volume kept: cannot be taken over, it has another size$"):
            aws.volume.create(bigger)
    finally:
        aws.says()
    aws.volume.delete(made.id, props)
    assert aws.volume.read(made.id, props).id == ""


@pytest.mark.slow
def test_a_volume_that_cannot_be_made_is_told_and_nothing_is_left(aws):
    definition = {
        "type": "volume",
        "name": "lost",
        "backend": "aws",
        "region": "us-east-1",
        "availability_zone": "us-east-1z",
        "size": "1GB",
    }
    with pytest.raises(DstackRefused, match=r"^volume lost: "):
        aws.volume.create(aws.props(definition))
    assert "lost" not in [volume.name for volume in aws.dstack.api.volumes.list(aws.name)]
    assert parse_apply_configuration(definition)  # the definition itself is in order
