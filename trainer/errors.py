"""What a person did, against what a program did."""

from __future__ import annotations


class ConfigError(ValueError):
    """An error in settings, paths or data that a person can fix. One line per error; trainer.cli.exits_cleanly makes it exit code 2."""
