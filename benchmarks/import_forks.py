"""Measure the CPU time of `ThreadImport`, by messages, if each answer was regenerated once.

    python -m benchmarks.import_forks [600 1200 2400 4800]

Every third message is an answer that was regenerated, and thus the end of a branch. If twice as
many messages take twice as long, the cost is linear.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

from perdure import SQLiteCheckpointer
from perdure.cli.importing.chatgpt import build_chatgpt_conversation
from perdure.cli.importing.thread_import import ThreadImport


def conversation(messages: int) -> dict[str, Any]:
    """Build a ChatGPT conversation in which each question has two answers."""
    mapping: dict[str, Any] = {}
    last: str | None = None
    for turn in range(messages // 3):
        for key, above, role in (
            (f"q{turn}", last, "user"),
            (f"b{turn}", f"q{turn}", "assistant"),
            (f"a{turn}", f"q{turn}", "assistant"),
        ):
            content = {"content_type": "text", "parts": [f"says {key} about the boats of Ghent"]}
            message = {"author": {"role": role}, "content": content, "create_time": 1.7e9 + turn}
            mapping[key] = {"parent": above, "message": message}
        last = f"a{turn}"
    return {"conversation_id": "c", "mapping": mapping, "current_node": last}


def cpu_s(messages: int) -> tuple[float, float]:
    """Return the CPU seconds of importing a conversation, and of importing it again."""
    times = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.db"
        with SQLiteCheckpointer.open(path, synchronous="normal") as saver:
            for _ in range(2):
                talk = build_chatgpt_conversation(conversation(messages))
                begun = time.process_time()
                ThreadImport(saver, "c", talk).store_new_messages()
                times.append(time.process_time() - begun)
    return times[0], times[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("messages", type=int, nargs="*", default=[600, 1200, 2400, 4800])
    print("messages  CPU s  again")
    for messages in parser.parse_args().messages:
        first, again = cpu_s(messages)
        print(f"{messages:8,}  {first:5.2f}  {again:5.2f}")


if __name__ == "__main__":
    main()
