"""`perdure import` of Open WebUI, LibreChat, Claude Code and Codex."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from perdure.checkpointers import SQLiteCheckpointer
from tests.cli.commands import read, run
from tests.cli.exports import (
    claude_code,
    codex,
    librechat,
    lines,
    open_webui,
)
from tests.cli.imported import (
    done,
    found,
    memories,
    only_thread,
    said,
    threads,
)


@pytest.mark.parametrize(
    "export", [open_webui(), librechat(), librechat(nested=False)], ids=["webui", "nested", "flat"]
)
def test_exports_of_open_webui_and_librechat_are_imported(export: Any, tmp_path: Path) -> None:
    """With branches, times, titles and ids; what a model thought is left out and counted."""
    (tmp_path / "e.json").write_text(json.dumps([export]))
    report = read("import", "e.json")
    name = only_thread()

    assert (report["conversations"], report["messages"], report["skipped"]) == (1, 4, [])
    assert done("e.json") == (1, 0, 1)
    assert name == export.get("id", "libre")
    assert [line.replace("[file: boat.pdf]\n", "") for line in said(name)] == [
        *("human: Which boat?", "ai: The blue one.", "human: Thank you")
    ]
    assert [*report["left_out"].values()] == [1]
    with SQLiteCheckpointer.open("x.db") as saver:
        assert [i.value.text for i in saver.history(name) if i.branch] == ["The red one."]
        assert saver.checkpoints(name)[0].metadata["title"] == "Boats"
        assert saver.thread(name).active_at.year in (2023, 2024)
    assert "assistant: The blue one." in memories()


@pytest.mark.parametrize(
    ("session", "expected", "left_out"),
    [
        (
            claude_code(),
            [
                *("human: Which boat?", "ai: Let me look."),
                *("ai: [Bash]\n```bash\nls boats\n```", "ai: The blue one."),
                *("ai: [Edit: /b.md]\na yacht", "human: Thank you"),
            ],
            {"command": 1, "thinking": 1, "tool_result": 1, "sidechain": 1},
        ),
        *(
            (
                codex(old=old),
                [
                    *("human: Which boat?", "ai: [shell]\n```bash\nbash -lc ls boats\n```"),
                    *("ai: The blue one.", "ai: [apply_patch]\n+ a yacht"),
                ],
                {"context": 1, "reasoning": 1, "function_call_output": 1},
            )
            for old in (False, True)
        ),
    ],
    ids=["claude code", "codex", "codex of old"],
)
def test_sessions_of_coding_agents_are_imported(
    session: Any, expected: list[str], left_out: dict[str, int], tmp_path: Path
) -> None:
    """What was said and what tools were asked, of a file or a folder; a session may go on."""
    (tmp_path / "logs" / "p").mkdir(parents=True)
    file = lines(tmp_path / "logs" / "p" / "rollout.jsonl", session[:-2])
    run("import", "logs")
    lines(file, session)
    report = read("import", str(file))
    name = only_thread()

    assert (report["conversations"], report["skipped"], report["left_out"]) == (1, [], left_out)
    assert said(name) == expected
    assert (name, len(threads())) == (session[2].get("sessionId", "codex"), 1)
    assert done("logs") == (1, 0, 1)
    assert {"user: Which boat?", "assistant: The blue one."} <= {*memories()}
    assert not [text for text in memories() if "[" in text or "<" in text]
    assert found("yacht")
    with SQLiteCheckpointer.open("x.db") as saver:
        branches = [item.value.text for item in saver.history(name) if item.branch]
        about = saver.checkpoints(name)[0].metadata
    if name == "code":
        assert branches == ["The red one."]
        assert about["title"] == "Boats"


def test_what_is_no_part_of_a_session_is_counted(tmp_path: Path) -> None:
    """A subagent's own file, what summarizes the talk before, and what programs write."""
    session = claude_code()
    sub = [{**line, "isSidechain": True} for line in session if "message" in line][:3]
    summary = {**session[-1], "uuid": "c10", "parentUuid": "c9", "isCompactSummary": True}
    note = {**session[-1], "uuid": "c11", "parentUuid": "c10", "isMeta": True}
    boundary: dict[str, Any] = {
        "type": "system",
        "subtype": "compact_boundary",
        "sessionId": "code",
    }
    boundary |= {"uuid": "b1", "parentUuid": None, "logicalParentUuid": "c9"}
    after = {**session[-1], "uuid": "c12", "parentUuid": "b1", "timestamp": "2026-03-10T08:00:00Z"}
    after["message"] = {"role": "user", "content": "And now?"}
    (tmp_path / "p").mkdir()
    lines(tmp_path / "p" / "agent-1.jsonl", sub)
    lines(tmp_path / "p" / "code.jsonl", [*session, summary, note, boundary, after])
    report = read("import", "p")

    assert (report["conversations"], report["unread"], report["skipped"]) == (1, 1, [])
    assert report["left_out"]["sidechain"] == 4
    assert (report["left_out"]["summary"], report["left_out"]["meta"]) == (1, 1)
    assert said("code")[-2:] == ["human: Thank you", "human: And now?"]
