"""Functions that settings name as package.module:function."""

from __future__ import annotations

import difflib
import importlib
import inspect
import traceback
from collections.abc import Callable
from typing import Any

from trainer.errors import ConfigError


def find(spec: str, setting: str) -> Callable[..., Any]:
    """The function that `spec` names; ConfigError naming `setting` where there is none, or where its module raises, with the line."""
    module_name, separator, name = spec.partition(":")
    if not (separator and module_name and name):
        raise ConfigError(f"{setting}: {spec!r} is not of the form package.module:function")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConfigError(f"{setting}: {spec}: cannot import it: {error}; install it, or put it below the working directory") from error
    except SyntaxError as error:
        raise ConfigError(f"{setting}: {spec}: {error.filename}:{error.lineno}: {error.msg}") from error
    except Exception as error:  # of whatever a person's own file does when it is read
        line = traceback.extract_tb(error.__traceback__)[-1]
        raise ConfigError(f"{setting}: {spec}: {line.filename}:{line.lineno}: {type(error).__name__}: {error}") from error
    function = getattr(module, name, None)
    if function is None:
        near = difflib.get_close_matches(name, [n for n in vars(module) if callable(getattr(module, n))], n=1)
        fix = f"did you mean {near[0]!r}?" if near else "define it there, or name another"
        raise ConfigError(f"{setting}: {module_name} has no {name!r}; {fix}")
    if not callable(function):
        raise ConfigError(f"{setting}: {spec} is a {type(function).__name__}, not a function; name a function")
    return function


def check_args(function: Callable[..., Any], positional: int, args: dict[str, Any], setting: str) -> None:
    """ConfigError where `function` cannot be called with so many positional arguments and these keyword arguments."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # some builtins have none
        return
    try:
        signature.bind(*[None] * positional, **args)
    except TypeError as error:
        name = getattr(function, "__name__", function)
        raise ConfigError(f"{setting}: {error}; {name} takes {signature}, called with {positional} positional arguments") from error
