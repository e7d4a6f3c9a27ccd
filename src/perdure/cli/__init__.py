"""The command line: thin commands over the calls that users make from Python.

A module is a command, or a group of them, and has its name.
"""

from perdure.cli import chat, memories, memories_review
from perdure.cli.app import main

__all__ = ["chat", "main", "memories", "memories_review"]
