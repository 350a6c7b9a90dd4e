"""The Pulumi program: read the stack, build its site, publish what runs on it."""

import sys
from importlib import import_module

import pulumi
from pulumi.runtime.settings import SETTINGS

from infra.config import read
from infra.publish import Publication
from stacks.load import StackError
from stacks.places import place_of

if SETTINGS.monitor is None:  # nobody would take the resources
    print("infra: is the Pulumi program; run it by `pulumi up --stack STACK`, or by python -m infra.preview STACK", file=sys.stderr)
    raise SystemExit(0 if "--help" in sys.argv else 2)

try:
    stack = read()
    made: list[pulumi.Resource] = []
    pulumi.runtime.register_stack_transformation(lambda args: made.append(args.resource))
    # infra/local/build.py, infra/aws/build.py, ...: a cloud's SDK takes seconds to import, so only the stack's own is.
    site = import_module(f"{place_of(stack).program}.build").build(stack)
    if stack.dstack and stack.dstack.drive:
        from infra.dstack_resources import Managed  # with dstack's client, another second

        Managed(stack, site, after=[resource for resource in made if not isinstance(resource, pulumi.ProviderResource)])
    published = Publication(stack, site)
except StackError as error:
    raise pulumi.RunError(str(error)) from None

for name, value in published.outputs.items():
    pulumi.export(name, value)
