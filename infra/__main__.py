"""The Pulumi program: read the stack, build its site, publish what runs on it.

Pulumi runs it: `pulumi up --stack <stack>`. Without Pulumi's CLI: `flotilla preview <stack>`.
"""

import sys
from importlib import import_module

if __package__:  # `python -m infra`; the engine runs the folder by its path, which is in no package
    asked = {"-h", "--help"} & {*sys.argv}
    print((__doc__ or "").strip(), file=sys.stdout if asked else sys.stderr)
    sys.exit(0 if asked else 2)

import pulumi

from infra.config import read
from infra.control import ControlNode
from infra.publish import Publication
from infra.sdk import import_by_resource
from stacks.host.extras import missing
from stacks.host.project import project_root
from stacks.load import StackError
from stacks.places import place_of

try:
    stack = read()
    made: list[pulumi.Resource] = []
    pulumi.runtime.register_stack_transformation(lambda args: made.append(args.resource))
    import_by_resource(f"pulumi_{stack.cloud}")
    # infra/<place>/build.py: a cloud's SDK takes seconds to import, so only the stack's own is.
    site = import_module(f"{place_of(stack).program}.build").build(stack)
    if stack.dstack and stack.dstack.drive:
        from infra.dstack_resources import Managed  # with dstack's client, another second

        token = next((resource.token for resource in made if isinstance(resource, ControlNode)), None)
        Managed(stack, site, after=[resource for resource in made if not isinstance(resource, pulumi.ProviderResource)], token=token)
    published = Publication(stack, site)
except StackError as error:
    raise pulumi.RunError(str(error)) from None
except ModuleNotFoundError as error:
    if line := missing(error, "the stack"):
        raise pulumi.RunError(line) from None
    raise

for name, value in published.outputs.items():
    pulumi.export(name, value)

if __name__ == "__main__" and not pulumi.runtime.is_dry_run():  # the engine's update; the preview runs this by another name
    published.leave(project_root() / "build" / stack.name)
