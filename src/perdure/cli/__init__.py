"""The command line: thin commands over the calls that users make from Python.

A module is a command, or a group of them, and has its name.
"""

from perdure.cli import export, import_  # noqa: F401 - a command registers itself
from perdure.cli.app import main

__all__ = ["main"]
