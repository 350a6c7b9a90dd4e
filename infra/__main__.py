"""The Pulumi program: read the stack, build its site, publish what runs on it."""

from importlib import import_module

import pulumi

from infra.config import read
from infra.publish import Publication
from stacks.load import StackError

try:
    stack = read()
    # infra/local.py, infra/ssh.py, ...: a cloud's SDK takes seconds to import, so only the stack's own is.
    site = import_module(f"infra.{stack.cloud}").build(stack)
    published = Publication(stack, site)
except StackError as error:
    raise pulumi.RunError(str(error)) from None

for name, value in published.outputs.items():
    pulumi.export(name, value)
