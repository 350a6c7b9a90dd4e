"""A service's package whose resources are imported one at a time has what the complete one has."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SERVICES = ("pulumi_aws.ec2", "pulumi_aws.iam", "pulumi_gcp.container")
LAZY = "import sys; from infra.sdk import import_by_resource; import_by_resource(sys.argv[1].partition('.')[0])\n"
COMPLETE = """
import importlib, json, sys
package = importlib.import_module(sys.argv[1])
package.outputs  # the SDK's packages are imported when they are first used
names = sorted(name for name in vars(package) if not name.startswith("_") and hasattr(getattr(package, name), "__module__"))
print(json.dumps({name: getattr(package, name).__module__ for name in names}))
"""
EACH = """
import importlib, json, sys
package = importlib.import_module(sys.argv[1])
package.outputs
names = json.load(sys.stdin)
first, found = ("__getattr__" in vars(package)), {}
for name in names:
    found[name] = getattr(package, name).__module__
print(json.dumps([first, "__getattr__" in vars(package), found]))
"""
PREVIEW = """
import contextlib, io, json, sys
from infra import preview
with contextlib.redirect_stdout(io.StringIO()):
    preview.main([sys.argv[1], "--no-prices"])
print(json.dumps([name for name in sys.modules if name.startswith("pulumi_")]))
"""


def run(code: str, argument: str, given: str = "") -> Any:
    command = [sys.executable, "-c", code, argument]
    return json.loads(subprocess.run(command, cwd=ROOT, input=given, capture_output=True, text=True, check=True, timeout=500).stdout)


@pytest.mark.parametrize("service", SERVICES)
def test_every_name_of_a_service_is_the_same_one(service: str) -> None:
    names = run(COMPLETE, service)
    assert len(names) > 100
    first, last, found = run(LAZY + EACH, service, json.dumps(names))
    assert found == names
    assert first and last  # no name needed the complete package


def test_a_name_that_no_module_is_called_after_comes_from_the_complete_package() -> None:
    modules = {"BucketVersioningInitArgs": "pulumi_aws.s3.bucket_versioning", "Bucket": "pulumi_aws.s3.bucket"}
    assert run(LAZY + EACH, "pulumi_aws.s3", json.dumps([*modules])) == [True, False, modules]


@pytest.mark.parametrize(
    ("stack", "used", "unused"),
    [
        ("aws-prod", "pulumi_aws.ec2.vpc", "pulumi_aws.ec2.vpn_gateway"),
        ("gcp-prod", "pulumi_gcp.compute.network", "pulumi_gcp.compute.vpn_gateway"),
    ],
)
def test_a_preview_imports_what_the_stack_has(stack: str, used: str, unused: str) -> None:
    imported = run(PREVIEW, stack)
    assert used in imported
    assert unused not in imported
