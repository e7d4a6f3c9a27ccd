"""`perdure import` of Open WebUI, LibreChat, Claude Code and Codex."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from perdure.checkpointers import SQLiteCheckpointer
from tests.cli.commands import run, run_json
from tests.cli.exports import (
    build_claude_code_session,
    build_codex_session,
    build_librechat_conversation,
    build_open_webui_chat,
    write_jsonl,
)
from tests.cli.imported import (
    import_and_count,
    read_all_thread_texts,
    read_memory_texts,
    read_thread_id,
    read_thread_texts,
    search_thread_texts,
)


@pytest.mark.parametrize(
    "export",
    [
        build_open_webui_chat(),
        build_librechat_conversation(),
        build_librechat_conversation(nested=False),
    ],
    ids=["webui", "nested", "flat"],
)
def test_exports_of_open_webui_and_librechat_are_imported(export: Any, tmp_path: Path) -> None:
    """Branches, times, titles and ids are kept; thoughts are left out and counted."""
    (tmp_path / "e.json").write_text(json.dumps([export]))
    report = run_json("import", "e.json")
    name = read_thread_id()

    assert (report["conversations"], report["messages"], report["skipped"]) == (1, 4, [])
    assert import_and_count("e.json") == (1, 0, 1)
    assert name == export.get("id", "libre")
    assert [line.replace("[file: boat.pdf]\n", "") for line in read_thread_texts(name)] == [
        *("human: Which boat?", "ai: The blue one.", "human: Thank you")
    ]
    assert [*report["left_out"].values()] == [1]
    with SQLiteCheckpointer.open("x.db") as saver:
        assert [i.value.text for i in saver.history(name) if i.branch] == ["The red one."]
        assert saver.checkpoints(name)[0].metadata["title"] == "Boats"
        assert saver.thread(name).active_at.year in (2023, 2024)
    assert "assistant: The blue one." in read_memory_texts()


def test_librechat_export_with_repeated_message_ends_at_newest_message(tmp_path: Path) -> None:
    """A message that occurs twice does not shift the times of later messages."""

    def build_message(uid: str, second: int, parent: str | None) -> dict[str, Any]:
        fields = {"messageId": uid, "parentMessageId": parent, "text": uid, "sender": "User"}
        return {**fields, "createdAt": f"2026-01-01T00:00:0{second}Z"}

    question = build_message("question", 3, None)
    answers = [build_message("newest", 5, "question"), build_message("older", 4, "question")]
    export: dict[str, Any] = {"conversationId": "libre", "title": "t"}
    export |= {"messages": [question, {**question, "createdAt": None}, *answers]}
    (tmp_path / "e.json").write_text(json.dumps([export]))
    run_json("import", "e.json")

    assert read_thread_texts(read_thread_id())[-1] == "human: newest"


@pytest.mark.parametrize(
    ("session", "expected", "left_out"),
    [
        (
            build_claude_code_session(),
            [
                *("human: Which boat?", "ai: Let me look."),
                *("ai: [Bash]\n```bash\nls boats\n```", "ai: The blue one."),
                *("ai: [Edit: /b.md]\na yacht", "human: Thank you"),
            ],
            {"command": 1, "thinking": 1, "tool_result": 1, "sidechain": 1},
        ),
        *(
            (
                build_codex_session(old=old),
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
    """Texts and tool calls are imported from a file or a folder; a session may grow."""
    (tmp_path / "logs" / "p").mkdir(parents=True)
    file = write_jsonl(tmp_path / "logs" / "p" / "rollout.jsonl", session[:-2])
    run("import", "logs")
    write_jsonl(file, session)
    report = run_json("import", str(file))
    name = read_thread_id()

    assert (report["conversations"], report["skipped"], report["left_out"]) == (1, [], left_out)
    assert read_thread_texts(name) == expected
    assert (name, len(read_all_thread_texts())) == (session[2].get("sessionId", "codex"), 1)
    assert import_and_count("logs") == (1, 0, 1)
    assert {"user: Which boat?", "assistant: The blue one."} <= {*read_memory_texts()}
    assert not [text for text in read_memory_texts() if "[" in text or "<" in text]
    assert search_thread_texts("yacht")
    with SQLiteCheckpointer.open("x.db") as saver:
        branches = [item.value.text for item in saver.history(name) if item.branch]
        metadata = saver.checkpoints(name)[0].metadata
    if name == "code":
        assert branches == ["The red one."]
        assert metadata["title"] == "Boats"


def test_subagent_and_summary_lines_are_counted_and_not_imported(tmp_path: Path) -> None:
    """Not imported are a subagent's file, a summary of earlier turns, and lines of programs."""
    session = build_claude_code_session()
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
    write_jsonl(tmp_path / "p" / "agent-1.jsonl", sub)
    write_jsonl(tmp_path / "p" / "code.jsonl", [*session, summary, note, boundary, after])
    report = run_json("import", "p")

    assert (report["conversations"], report["unread"], report["skipped"]) == (1, 1, [])
    assert report["left_out"]["sidechain"] == 4
    assert (report["left_out"]["summary"], report["left_out"]["meta"]) == (1, 1)
    assert read_thread_texts("code")[-2:] == ["human: Thank you", "human: And now?"]
