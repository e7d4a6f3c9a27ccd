"""Running the commands of long-term memory as they are typed."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

from tests import store_commands
from tests.exports import lines

attempt = partial(store_commands.attempt, group="")
run = partial(store_commands.run, group="")
read = partial(store_commands.read, group="")
rows = store_commands.rows


def keys(*options: str) -> dict[str, str]:
    """The key of each memory that `perdure memories` lists, by its text."""
    return {memory["text"]: memory["key"] for memory in read("memories", *options)}


def texts(*options: str) -> list[str]:
    return list(keys(*options))


def recalled(query: str, *options: str) -> list[str]:
    return [memory["text"] for memory in read("recall", query, *options)]


def talks(folder: Path, **threads: list[str]) -> str:
    """A file to import: threads on which the user and the assistant speak in turn."""
    talk = [
        {
            "thread_id": name,
            "messages": [
                {"role": ("user", "assistant")[n % 2], "content": text, "create_time": 1.7e9 + n}
                for n, text in enumerate(said)
            ],
        }
        for name, said in threads.items()
    ]
    return str(lines(folder / "talks.jsonl", talk))


def line_of(**fields: Any) -> str:
    return json.dumps(fields) + "\n"
