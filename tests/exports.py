"""Exported conversations in files, and the commands that import them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

import perdure.cli  # noqa: F401 - it adds the commands
from perdure.cli.app import app

EXPORT = Path(__file__).parent / "data" / "conversations.json"
CONVERSATIONS: list[dict[str, Any]] = json.loads(EXPORT.read_text(encoding="utf-8"))


def run_command(db: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, [*arguments, "--db", str(db)])


def import_file(db: Path, file: Path, *options: str) -> tuple[int, int, int]:
    """Import a file, and return the counts that the import reports.

    The counts are of conversations, new messages and unchanged conversations.
    """
    result = run_command(db, "import", str(file), "--json", *options)
    assert result.exception is None, result.exception
    report = json.loads(result.stdout)
    names = ["conversations", "messages", "unchanged", "empty", "left_out"]
    assert list(report) == [*names, "memories", "quarantined"]
    return report["conversations"], report["messages"], report["unchanged"]


def write_json(path: Path, value: Any) -> Path:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1), encoding="utf-8")
    return path


def write_json_lines(path: Path, values: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(value) + "\n" for value in values), encoding="utf-8")
    return path


def make_chatgpt_conversation(
    parents: dict[str, str | None], current: str, empty: frozenset[str] = frozenset()
) -> dict[str, Any]:
    """Return a conversation as in ChatGPT's export.

    The conversation has a node for each key, under ChatGPT's own root.
    """
    mapping: dict[str, Any] = {"root": {"id": "root", "parent": None, "children": []}}
    for number, (key, parent) in enumerate(parents.items()):
        message = {
            "id": key,
            "author": {"role": "user" if number % 2 == 0 else "assistant"},
            "create_time": float(number),
            "content": {"content_type": "text", "parts": ["" if key in empty else f"says {key}"]},
        }
        mapping[parent or "root"]["children"].append(key)
        mapping[key] = {"id": key, "message": message, "parent": parent or "root", "children": []}
    return {"conversation_id": "c", "mapping": mapping, "current_node": current}
