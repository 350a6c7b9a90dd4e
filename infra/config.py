"""What Pulumi read of the stack file -> Stack."""

from __future__ import annotations

import pulumi
from pulumi.runtime import config

from stacks.host.project import project_root
from stacks.load import parse, stack_file
from stacks.schema import Stack


def read() -> Stack:
    """The current stack. Raises StackError."""
    # pulumi.Config answers by key alone, and a misspelt key must be seen too: so all that the engine passed is taken.
    passed = config.CONFIG.get()
    settings = {key: {"secure": ""} if config.is_config_secret(key) else value for key, value in passed.items()}
    name = pulumi.get_stack()
    return parse(name, settings, stack_file(name, project_root()))
