"""`perdure import` and `export`: every file that holds conversations, again, broken and mended."""

from __future__ import annotations

import copy
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
import tracemalloc
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.load import dumps
from langchain_core.messages import HumanMessage, messages_from_dict
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.graph import START as BEGIN
from langgraph.graph import StateGraph
from typer.testing import CliRunner

from perdure.checkpointers import Retention, SQLiteCheckpointer
from perdure.checkpointers.titles import existing_head
from perdure.cli import import_chatgpt, import_claude
from perdure.cli.app import app, opened
from perdure.cli.conversation import MessageNode
from perdure.cli.import_thread import ConversationsReport, Importing, ThreadImport
from perdure.errors import ConfigurationError, ImportFailed
from perdure.graphs import chat_graph
from perdure.stores import SQLiteStore
from tests.backends import KEY
from tests.cli.commands import attempt, error, read, run
from tests.cli.exports import (
    CITE,
    START,
    Talk,
    claude,
    claude_code,
    claude_files,
    codex,
    deep_research,
    langgraph_state,
    librechat,
    lines,
    open_webui,
    tools,
    written,
    zipped,
)
from tests.cli.memory import keys

CALL = {"type": "function", "id": "call-1", "function": {"name": "depth", "arguments": '{"m": 1}'}}
IMAGE = {"type": "image_url", "image_url": {"url": "https://example.invalid/pond.png"}}
TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "You look things up."},
    {"role": "user", "content": "How deep is the pond?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "2 m", "tool_call_id": "call-1"},
    {"role": "assistant", "content": "Two metres."},
    {"role": "user", "content": [{"type": "text", "text": "This pond?"}, IMAGE]},
]
USER = {"role": "user", "content": "hello"}


def simple(id: str = "trip", at: float = START) -> Talk:
    """Two turns."""
    talk = Talk(id, at)
    talk.ask("I am allergic to nuts", "I will keep that in mind")
    talk.ask("I live in Ghent", "A fine city that is")
    return talk


def said(thread: str, db: Path | str = "x.db") -> list[str]:
    with SQLiteCheckpointer.open(db) as saver:
        items = [item.value for item in saver.history(thread) if not item.branch]
        return [f"{item.type}: {item.text}" for item in items]


def state(thread: str, db: str = "x.db") -> list[tuple[str, str]]:
    """The messages that the thread has now, in their last version."""
    with SQLiteCheckpointer.open(db) as saver:
        stored = saver.get_tuple({"configurable": {"thread_id": thread}})
    assert stored is not None
    return [(m.type, m.text) for m in stored.checkpoint["channel_values"]["messages"]]


def threads() -> list[list[str]]:
    """What was said on each thread, in the order of what was said first."""
    with SQLiteCheckpointer.open("x.db") as saver:
        names = [head.thread_id for head in saver.heads(limit=1000)]
    return sorted(said(name) for name in names)


def only_thread(number: int = 0) -> str:
    """The id of the thread that was written first, or of a later one."""
    with SQLiteCheckpointer.open("x.db") as saver:
        return [head.thread_id for head in saver.heads(limit=1000)][-1 - number]


def memories(user: str = "me") -> list[str]:
    with SQLiteStore.open("x.db") as store:
        return sorted(item.value["text"] for item in store.search(("memories", user), limit=1000))


def done(*arguments: Path | str) -> tuple[int, int, int]:
    """The conversations, new messages and unchanged conversations of an import."""
    report = read("import", *map(str, arguments), "--no-memories")
    return report["conversations"], report["messages"], report["unchanged"]


def problems(*arguments: Path | str) -> list[tuple[str, str | None]]:
    found = read("import", *map(str, arguments))["skipped"]
    return [(each["reason"], each["message"]) for each in found]


# -- ChatGPT


def test_what_is_no_conversation_reads_well_and_is_no_memory(tmp_path: Path) -> None:
    """Calls of tools are a line or a code block, what tells nothing is counted, glyphs are gone."""
    (tmp_path / "e.zip").write_bytes(zipped({"conversations.json": [tools().json]}))
    result = attempt("import", "e.zip")
    code = "for day in range(2):\n    if day:\n        print(day)"

    assert result.stdout == "1 conversation: 14 new messages, 4 memories\n"
    assert result.stderr == (
        "left out: user_editable_context (1), model_editable_context (1), thoughts (1), "
        "reasoning_recap (1), bio (1), tether_browsing_display (1), web.run (1), "
        "canmore.create_textdoc (1), canmore.update_textdoc (1)\n"
    )
    assert said("tools") == [
        "human: [file: dates.pdf]\n[image: g.png]\nPlan my trip to Ghent, I am allergic to nuts",
        "ai: [memory: User is allergic to nuts.]",
        "ai: [web: ghent ferry times]",
        "ai: [quote: Ferries, https://a.example]",
        "ai: The ferry to Ghent leaves at nine. (Ferries of Ghent, https://ferry.example/ghent) "
        "It is slow.",
        "ai: [canvas: Packing list]\n# Bring\n\n- a coat",
        "ai: [canvas changed]\n- two coats",
        "ai: ",
        "tool: [image: A ferry at dawn]",
        "ai: ",
        "tool: 1",
        "ai: [error: it took long]",
        "human: Thank you",
        "ai: Walnuts are in it (Nuts, https://nuts.example), so mind:\n\n"
        "```python\ndef f():\n    return 1\n```",
    ]
    assert [text.split()[1] for text in memories()] == ["The", "Walnuts", "Thank", "[file:"]
    with SQLiteCheckpointer.open("x.db") as saver:
        items = [item.value for item in saver.history("tools")]
        (head, *_) = saver.checkpoints("tools")
    assert "a coat" in items[5].additional_kwargs["canvas"]
    assert [
        (call["name"], call["args"]) for item in (items[7], items[9]) for call in item.tool_calls
    ] == [
        ("dalle_text2im", {"input": "A ferry at dawn, in oils"}),
        ("python", {"input": code}),
    ]
    assert [(item.name, item.tool_call_id) for item in (items[8], items[10])] == [
        ("dalle_text2im", items[7].id),
        ("python", items[9].id),
    ]
    assert items[4].response_metadata["model_name"] == "gpt-5-thinking"
    assert [head.metadata[name] for name in ("title", "model", "gizmo_id")] == [
        "A trip to Ghent",
        "gpt-4o",
        "g-trip",
    ]


def found(text: str) -> list[str]:
    """The beginnings of the messages that the search of threads finds."""
    hits = json.loads(attempt("threads", "--search", text, "--json").stdout)
    return [hit["text"].partition("\n")[0] for hit in hits]


def test_documents_of_a_canvas_are_shown_and_found(tmp_path: Path) -> None:
    """Text, code, changes and comments; none is a memory."""
    talk = Talk("canvas")
    code = {"name": "Tides", "type": "code/python", "content": "print('ebb')"}
    comment = {"comments": [{"pattern": "ebb", "comment": "say flood instead"}]}
    talk.add("user", "Write it")
    for tool, call in (("create", code), ("comment", comment)):
        talk.call(f"canmore.{tool}_textdoc", json.dumps(call), f"Successfully {tool}d")
    cut = Talk("cut")
    cut.call("canmore.create_textdoc", '{"name": "Cut", "content": "the moonrise', "Error")
    run("import", str(written(tmp_path / "c.json", [talk.json, cut.json, tools().json])))

    assert said("canvas")[1:] == [
        "ai: [canvas: Tides]\n```python\nprint('ebb')\n```",
        "ai: [canvas comments]\nsay flood instead",
    ]
    assert found("ebb") == ["[canvas: Tides]"]
    assert found("moonrise") == ["[canvas]"]
    assert found("flood") == ["[canvas comments]"]
    assert found("coats")[0] == "[canvas changed]"
    assert not [text for text in memories() if "coat" in text or "ebb" in text]


@pytest.mark.parametrize("in_text", [False, True])
def test_the_report_of_a_deep_research_is_an_answer(in_text: bool, tmp_path: Path) -> None:
    """It is the assistant's message, once, with its sources and time; a plan is none."""
    talk = simple()
    deep_research(talk, f"# Ferries\n\nOne leaves at nine.{CITE}", in_text=in_text)
    talk.ask("Thank you", "You are welcome")
    deep_research(talk, "", done=False)
    run("import", str(written(tmp_path / "c.json", [talk.json])))
    report = (
        "ai: # Ferries\n\nOne leaves at nine. (Ferries of Ghent, https://ferry.example/ghent)\n\n"
        "Sources:\n- Ferries of Ghent, https://ferry.example/ghent\n- Tides, https://tides.example"
    )

    assert said("trip")[5:] == [
        report,
        *("human: Thank you", "ai: You are welcome", "human: Research the ferries"),
    ]
    assert "# Ferries" in found("ferries leaves")
    with SQLiteStore.open("x.db") as store:
        (item,) = [i for i in store.search(("memories", "me"), limit=99) if "nine" in str(i.value)]
        assert item.provenance is not None
        assert item.provenance.at is not None
        assert item.provenance.at.timestamp() == START + 80 + 20 + 600 - 20


def test_what_a_former_import_left_out_is_added(tmp_path: Path) -> None:
    """A document is in its message, a report in its place; neither is a branch or said twice."""
    talk = tools()
    deep_research(talk, "One leaves at nine.")
    talk.ask("Thank you", "You are welcome")
    whole = written(tmp_path / "c.json", [talk.json])
    former_import(whole)
    before = state("tools"), memories()
    updated, again = read("import", str(whole)), read("import", str(whole))
    run("import", str(whole), "--db", "fresh.db")
    talk.ask("And now?", "Nothing")
    grown = done(written(tmp_path / "c.json", [talk.json]))

    assert (updated["messages"], updated["updated"], updated["outdated"]) == (0, 3, 0)
    assert (again["updated"], again["unchanged"], again["memories"]) == (0, 1, 0)
    assert grown == (1, 2, 0)
    assert state("tools")[:-2] != before[0]
    assert state("tools")[:-2] == state("tools", "fresh.db")
    new = set(memories()) - set(before[1])
    assert [text.partition("\n")[0] for text in new] == ["assistant: One leaves at nine."]
    assert found("bring") == ["[canvas: Packing list]"]
    with SQLiteCheckpointer.open("x.db") as saver:
        assert not [item for item in saver.history("tools") if item.branch]


def test_what_cannot_be_added_is_counted(tmp_path: Path) -> None:
    """It is on a branch that the thread has left."""
    talk = simple()
    talk.call("canmore.create_textdoc", '{"name": "List", "content": "a coat"}', "Success")
    deep_research(talk, "One leaves at nine.")
    talk.ask("Thank you", "You are welcome")
    whole = written(tmp_path / "c.json", [talk.json])
    former_import(whole)
    with SQLiteCheckpointer.open("x.db") as saver:
        saver.rewind("trip", saver.checkpoints("trip")[-1].checkpoint_id)
    before = state("trip")
    result = attempt("import", str(whole))

    assert result.exit_code == 0
    assert "2 messages that a former import left out" in result.stderr
    assert state("trip") == before


def former_import(file: Path, reader: Any = import_chatgpt.read) -> None:
    """Import a file as the version before did, which left out documents and reports."""
    shorter = reader(json.loads(file.read_text())[0])
    for key, text in shorter.former.items():
        parent, message, at = shorter.nodes[key]
        if text:
            about = {**message.response_metadata}
            about.pop("searched", None)
            fields = {"content": text, "response_metadata": {**about, "remember": False}}
            short = message.model_copy(update=fields)
            shorter.nodes[key] = MessageNode(parent, short, at)
        else:
            del shorter.nodes[key]
            for other, node in shorter.nodes.items():
                if node.parent == key:
                    shorter.nodes[other] = node._replace(parent=parent)
    shorter.former = {}
    with opened("x.db", None, create=True) as database:
        Importing(database, ConversationsReport(), wanted=True, later=False).store("", [shorter])


def test_times_may_be_in_milliseconds(tmp_path: Path) -> None:
    """Those of a conversation and of its messages."""
    talk = simple().json
    for node in talk["mapping"].values():
        if node["message"] is not None:
            node["message"]["create_time"] *= 1000
    talk = {**talk, "create_time": START * 1000, "update_time": START * 1000 + 80_000}
    run("import", str(written(tmp_path / "c.json", [talk])))
    with SQLiteCheckpointer.open("x.db") as saver:
        assert saver.thread("trip").active_at.timestamp() == START + 80
        assert saver.checkpoints("trip")[0].metadata["create_time"] == START
        assert saver.history("trip")[0].value.response_metadata["create_time"] == START + 20


def test_an_export_is_taken_in_every_form(tmp_path: Path) -> None:
    """ZIP, split or within folders, an unpacked folder, files, one object, stdin: all the same."""
    one, two = simple("one").json, simple("two", START + 9).json
    split = {"a/conversations-000.json": [one], "a/conversations-001.json": [two]}
    (tmp_path / "split.zip").write_bytes(
        zipped({**split, "a/user.json": {}, "__MACOSX/a/._conversations.json": b"\x00"})
    )
    folder = tmp_path / "unpacked" / "within"
    folder.mkdir(parents=True)
    both = written(folder / "conversations.json", [one, two])
    (folder / "chat.html").write_text("<html>")
    apart = [str(written(tmp_path / f"{talk['id']}.json", talk)) for talk in (one, two)]
    (tmp_path / "odd name.dat").write_bytes(zipped({"x.json": [one, two]}))
    given = [
        *(["split.zip"], ["unpacked"], [str(both)], apart, ["odd name.dat"]),
        [str(written(tmp_path / "indented.json", [one, two]))],
    ]
    for number, files in enumerate(given):
        assert done(*files, "--db", f"{number}.db") == (2, 8, 0)
    for data in (json.dumps([one, two]), zipped(split)):
        piped = CliRunner().invoke(app, ["import", "-", "--db", "-.db", "--json"], input=data)
        assert json.loads(piped.stdout)["conversations"] == 2


def test_a_shared_link_is_a_conversation(tmp_path: Path) -> None:
    """Its messages stand in a list, somewhere in what the page holds."""
    talk = simple().json
    line = list(talk.pop("mapping").values())
    page = {"props": {"pageProps": {"serverResponse": {"data": talk}}}}
    talk["linear_conversation"] = line

    assert done(written(tmp_path / "share.json", page)) == (1, 4, 0)
    assert said("trip")[0] == "human: I am allergic to nuts"


def test_threads_have_the_conversations_own_times(tmp_path: Path) -> None:
    """Lists and age rules go by them, the newest first; what is due for memories does not."""
    week = timedelta(days=7).total_seconds()
    talks = [simple(name, START + week * n).json for name, n in (("b", 2), ("c", 3), ("a", 1))]
    before = datetime.now(UTC)
    run("import", str(written(tmp_path / "c.json", talks)), "--no-memories")
    with SQLiteCheckpointer.open("x.db") as saver:
        found = saver.threads()
        days = (time.time() - START - week * 2.5) / 86400
        report = saver.retain(Retention(days=days))

        assert [each.thread_id for each in found] == ["c", "b", "a"]
        assert [each.active_at.timestamp() - START - 80 for each in found] == [
            *(week * 3, week * 2, week)
        ]
        assert len(saver.heads(active_since=before)) == 3
        assert report.threads == 2  # that only heads are left of
        assert len(saver.checkpoints("c")) > 1


def test_regenerated_answers_are_forks(tmp_path: Path) -> None:
    """The branch that was shown last is the thread; growing exports bring only what is new."""
    talk = simple()
    first = done(written(tmp_path / "c.json", [talk.json]))
    kept = talk.last
    talk.last = talk.mapping[kept]["parent"]
    other = talk.add("assistant", "A rainy city that is")
    second = done(written(tmp_path / "c.json", [talk.json]))
    shown = said("trip")[-1]
    back = done(written(tmp_path / "c.json", [{**talk.json, "current_node": kept}]))

    assert (first, second, back) == ((1, 4, 0), (1, 1, 0), (1, 0, 1))
    assert shown == "ai: A rainy city that is"
    assert said("trip")[-1] == "ai: A fine city that is"
    with SQLiteCheckpointer.open("x.db") as saver:
        assert [item.value.id for item in saver.history("trip") if item.branch] == [other]


# -- what is not as expected


def broken() -> dict[str, Any]:
    """A conversation of which much is broken, with two turns that are not."""
    talk = simple("broken")
    for message in (
        *({"author": {"role": "robot"}}, {"author": None}, {"content": None}, {"content": "x"}),
        *({"content": {"content_type": "hologram"}}, {"content": {"parts": 5}}),
    ):
        talk.mapping[talk.add("assistant", "x")]["message"].update(message)
    found = talk.json
    found["mapping"]["odd"] = {"message": 5, "parent": talk.last}
    found["mapping"]["lost"] = {**found["mapping"]["broken-1"], "parent": "gone"}
    loop = {**found["mapping"]["broken-2"], "parent": "loop"}
    return {**found, "mapping": {**found["mapping"], "loop": loop}, "create_time": "soon"}


def test_nothing_bad_is_the_end(tmp_path: Path) -> None:
    """It is left out and named; what is good is imported, the exit code is 0."""
    talks = [5, {"title": "x"}, {"id": "m", "mapping": None}, broken(), simple().json]
    file = written(tmp_path / "c.json", talks)
    result = attempt("import", str(file))

    assert (result.exit_code, result.exception) == (0, None)
    assert result.stdout.startswith("2 conversations: 10 new messages, 1 more without messages, ")
    assert "unknown role 'robot' (1)" in result.stderr
    assert said("broken")[:2] == ["human: I am allergic to nuts", "ai: I will keep that in mind"]
    assert sorted(problems(file), key=lambda each: each[0]) == [
        ("'mapping' is missing or no object", None),
        ("'parts' is no list", "broken-10"),
        ("its own ancestor, read as a beginning", "loop"),
        ("no content", "broken-7"),
        ("no content", "broken-8"),
        ("no conversation", None),
        ("no conversation", None),
        ("parent missing, read as a beginning", "lost"),
        ("the message is no object", "odd"),
        ("unknown content 'hologram'", "broken-9"),
        ("unknown role 'None'", "broken-6"),
        ("unknown role 'robot'", "broken-5"),
    ]


@pytest.mark.parametrize("cut", [0.5, 0.99])
def test_a_file_that_was_cut_off_gives_what_is_whole(tmp_path: Path, cut: float) -> None:
    """The mended file brings the rest."""
    text = json.dumps([simple("a").json, simple("b").json, simple("c").json])
    (tmp_path / "c.json").write_text(text[: int(len(text) * cut)])

    assert problems("c.json") == [("not JSON: the rest", None)]
    assert done(written(tmp_path / "c.json", json.loads(text))) == (
        3,
        12 - 4 * round(3 * cut - 0.6),
        1 + (cut > 0.9),
    )


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"hello", "is no valid JSON: line 1, column 1; expected"),
        (b"", "no conversations"),
        (b"[5]", "no conversations"),
        (b"[", "no conversations"),
        (b" [ ]", "no conversations"),
        (b'[{"title": "x"}]', "no conversations"),
        (b'{"role": "user", "content": "caf\xe9"}', "not UTF-8 text: byte 32"),
        (b"PK\x03\x04 and no more", "cannot be unpacked"),
        (zipped({"user.json": {"id": "x"}, "chat.html": "x"}), "no conversations"),
        (None, "No such file"),
    ],
)
def test_a_file_of_no_known_kind_is_an_error(data: bytes | None, why: str, tmp_path: Path) -> None:
    """It is named, and no database is begun."""
    if data is not None:
        (tmp_path / "a.json").write_bytes(data)
    failed = attempt("import", "a.json").exception

    assert isinstance(failed, ImportFailed)
    assert "'a.json'" in str(failed)
    assert why in str(failed)
    assert not (tmp_path / "x.db").exists()


def test_a_bomb_is_refused(tmp_path: Path) -> None:
    """A file of a ZIP that unpacks to far more than text does is not unpacked."""
    spaces = "[" + " " * (65 << 20) + "]"
    (tmp_path / "a.zip").write_bytes(zipped({"conversations.json": spaces}))
    tracemalloc.start()
    failed = attempt("import", "a.zip").exception
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert "'conversations.json' has 68.2 MB in " in str(failed)
    assert "import the folder" in str(failed)
    assert peak < 16 << 20


def test_a_call_without_its_result_is_text(tmp_path: Path) -> None:
    """A model takes no call without a result, and no result without its call, on no branch."""
    talk = simple()
    code = {"content_type": "code", "text": "1 + 1"}
    output = {"content_type": "execution_output", "text": "2"}
    call = talk.add("assistant", code, recipient="python")
    talk.add("assistant", "It failed")
    talk.add("tool", output, after=call, name="python")
    talk.add("tool", output, name="python")
    done(written(tmp_path / "c.json", [talk.json]))

    assert said("trip")[-3:] == [
        "ai: [python]\n```python\n1 + 1\n```",
        *["ai: [python]\n```\n2\n```"] * 2,
    ]


def test_what_is_left_out_is_told_again(tmp_path: Path) -> None:
    """By an import that brings nothing new, too."""
    file = str(written(tmp_path / "c.json", [tools().json]))
    first, again = read("import", file), read("import", file)

    assert (again["messages"], again["unchanged"]) == (0, 1)
    assert first["left_out"] == again["left_out"] != {}


def test_an_import_that_read_no_message_fails(tmp_path: Path) -> None:
    """It says what it saw and exits with 1; a repeated import without news exits with 0."""
    hidden = Talk("hidden")
    hidden.add("system", "", metadata={"is_visually_hidden_from_conversation": True})
    hidden.add("assistant", {"content_type": "thoughts", "thoughts": []})
    empty = Talk("empty")
    odd = {"thread_id": "odd", "messages": [{"role": "robot", "content": "x"}]}
    files = [
        str(written(tmp_path / "c.json", [hidden.json, empty.json])),
        str(lines(tmp_path / "o.jsonl", [odd])),
    ]
    result = attempt("import", *files)
    again = attempt("import", *files, "--json")
    good = str(written(tmp_path / "good.json", [simple().json]))

    assert result.exit_code == again.exit_code == 1
    assert result.stdout == (
        "0 conversations: 1 more without messages, 2 more of which no message could be read, "
        "0 memories\n"
    )
    assert "left out: thoughts (1)" in result.stderr
    assert "unknown role 'robot' (1)" in result.stderr
    assert result.stderr.endswith("no message was read\n")
    assert json.loads(again.stdout)["unread"] == 2
    assert [attempt("import", good, *files).exit_code for _ in range(2)] == [0, 0]


def test_a_database_without_threads_was_not_read(tmp_path: Path) -> None:
    """One of langgraph's saver has none; one of perdure's has an item, which is known at last."""
    empty = attempt("import", str(langgraphs(tmp_path)))
    with SQLiteStore.open("other.db") as there:
        there.put(("notes",), "tea", {"text": "green"})
    told = [attempt("import", "other.db") for _ in range(2)]

    assert (empty.exit_code, empty.stderr) == (1, "no message was read\n")
    assert [each.exit_code for each in told] == [0, 0]


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every container within a JSON value, with each of its keys."""
    if not isinstance(value, dict | list):
        return []
    keys = list(value) if isinstance(value, dict) else range(len(value))
    return [p for key in keys for p in [(value, key), *places(value[key])]]


EXACT = {
    "langchain": {"type": "human", "additional_kwargs": {"x": 1}},
    "at": "2026-01-01T00:00:00Z",
}
BRANCHED = {
    "thread_id": "t",
    "messages": [{**USER, "id": "1", **EXACT}, {**USER, "id": "2"}],
    "branches": [{"after": 1, "messages": [{**USER, "id": "3", **EXACT}]}],
}
EXPORTS = [
    *(tools().json, broken(), claude(), {"thread_id": "t", "messages": TALK}, BRANCHED),
    *(open_webui(), librechat(), claude_code(), codex(), codex(old=True), langgraph_state(4)),
    [*claude_files().values()],
]


@given(st.data(), st.sampled_from(EXPORTS))
def test_no_change_of_an_export_breaks_the_importer(data: st.DataObject, export: Any) -> None:
    """With anything in the place of any value, there is a report, or the file is of no kind."""
    changed = [copy.deepcopy(export), simple().json]
    within, key = data.draw(st.sampled_from(places(changed)))
    odd: list[Any] = [None, 5, 0.5, True, "", "x", "\ud800", [], ["x"], [[]], {}]
    within[key] = data.draw(st.sampled_from([*odd, {"x": 1}, 1e300, -1]))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "c.json"
        file.write_text(json.dumps(changed))
        result = attempt("import", str(file), "--db", f"{folder}/x.db", "--no-memories")

    assert isinstance(result.exception, ImportFailed | SystemExit | None)


# -- Claude


def test_claudes_export_is_imported(tmp_path: Path) -> None:
    """Pasted text is the user's own, files and tools are no memories, thoughts are left out."""
    twice = [claude(), claude("other", name="")]
    (tmp_path / "data.zip").write_bytes(zipped({"conversations.json": twice, "users.json": []}))
    report = read("import", "data.zip")

    assert (report["conversations"], report["left_out"]) == (2, {"thinking": 2, "tool_result": 2})
    assert said("pond") == [
        "human: [file: pond.txt]\n```\n2 m\n3 m\n```",
        "human: pasted: it has carps",
        "human: [file: pond.png]",
        "human: How deep is this pond?",
        "ai: Let me look.",
        "ai: [web_search: pond depth]",
        "ai: Three metres.",
        "ai: [artifact: Pond plan]\n<svg/>",
        "human: Thank you for that",
    ]
    assert not [text for text in memories() if "[" in text or "2 m" in text]
    with SQLiteCheckpointer.open("x.db") as saver:
        assert saver.thread("pond").active_at.isoformat() == "2024-05-01T10:02:00.123456+00:00"
        assert saver.checkpoints("pond")[0].metadata["title"] == "The pond"


def test_claudes_branches_and_faults(tmp_path: Path) -> None:
    """An edited question is a fork; what is broken is named."""
    talk = claude()
    again = {**talk["chat_messages"][2], "uuid": "again", "text": "Is it?"}
    odd = [5, {**again, "uuid": "odd", "sender": "robot"}]
    blocks = {**again, "uuid": "blocks", "content": [{"type": "hologram"}, {"type": "text"}]}
    talk["chat_messages"] += [again, *odd, blocks]
    talk["current_leaf_message_uuid"] = "again"
    file = written(tmp_path / "c.json", [talk, {"uuid": "none", "chat_messages": 5}])

    assert [reason for reason, _ in problems(file)] == [
        "the message is no object",
        "unknown sender 'robot'",
        "unknown content 'hologram'",
        "no content",
        "'chat_messages' is no list",
    ]
    assert said("pond")[-2:] == ["ai: [artifact: Pond plan]\n<svg/>", "human: Is it?"]


BIRDS = (  # noqa: SIM905
    "heron egret bittern osprey plover kestrel dunlin avocet curlew godwit"
).split()


def test_what_claude_wrote_and_was_given_is_shown_and_found(tmp_path: Path) -> None:
    """Artifacts, files, code, attachments; what is pasted is the user's own, and a memory."""
    (tmp_path / "e.zip").write_bytes(zipped(claude_files()))
    report = read("import", "e.zip")

    assert said("birds") == [
        "human: [file: notes.pdf]\n```\na printed godwit\n```",
        "human: my own curlew",
        "human: Look",
        "ai: Here you are.",
        "ai: " + "\n\n".join([
            "[artifact: Plan]\n# Heron\n\nlines of a heron",
            "[artifact changed: plan]\nan egret",
            "[artifact changed: plan]\nonly a bittern",
            "[create_file: /mnt/a.py]\n```py\nprint('osprey')\n```",
            "[str_replace: /mnt/a.md]\none plover",
            "[repl]\n```javascript\nconst kestrel = 1\n```",
            "[bash_tool: List files]\n```bash\nls /dunlin\n```",
            "[web_search: pond depth]",
            '[broken_off]\n{"code": "a redshank',
            "[message_compose]\nBirds\nDear avocet",
        ]),
    ]  # fmt: skip
    assert {bird: bool(found(bird)) for bird in BIRDS} == dict.fromkeys(BIRDS, True)
    assert "user: my own curlew" in memories()
    assert not [text for text in memories() if "godwit" in text or "[" in text]
    assert report["left_out"] == {"tool_result": 10, "arguments of message_compose": 1}


def test_what_else_claudes_export_holds_has_its_place(tmp_path: Path) -> None:
    """Memories are memories, documents are items of their project, the rest is named."""
    (tmp_path / "e.zip").write_bytes(zipped(claude_files()))
    first = attempt("import", "e.zip")
    again = read("import", "e.zip")
    (tmp_path / "folder").mkdir()
    for name, value in claude_files().items():
        part = f"{name.partition('.')[0].partition('/')[0]}-000.zip"
        (tmp_path / "folder" / part).write_bytes(zipped({name: value}))
    parts = read("import", "folder", "--db", "parts.db")
    quiet = read("import", "e.zip", "--db", "quiet.db", "--no-memories")
    with SQLiteStore.open("x.db") as store:
        documents = {i.key: i.value for i in store.search(("projects", "me", "proj"), limit=9)}

    assert first.stdout.startswith("2 conversations: 7 new messages, 2 new items, ")
    assert first.stderr.endswith("files that were not read: users.json\n")
    assert {text for text in memories() if "user" not in text and "assistant" not in text} == {
        *("Work context: Ann counts sandpipers.", "Personal: She lives in Ghent.", "Curt"),
    }
    assert (again["messages"], again["items"], again["memories"]) == (0, 0, 0)
    assert documents["doc"] == {
        "project": "Birds", "title": "birds.md", "text": "# All birds\n\nwhimbrel"
    }  # fmt: skip
    assert documents["instructions"]["text"] == "Be brief"
    assert (parts["messages"], parts["items"]) == (7, 2)
    assert quiet["left_out"]["memory of the export"] == 3
    assert said("d") == ["ai: A page of terns", "ai: [write_file]\n<tern/>"]


def test_a_list_of_links_says_what_to_download(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has no conversation; beside one that has, it is named."""
    names = ["light_metadata-000.zip", "conversations-000.zip"]
    links = [{"filename": name, "export_url": "https://secret.example/x"} for name in names]
    manifest = written(tmp_path / "m.json", {"total_files": 2, "data_files": links})
    told = error("import", str(manifest), into=capsys)
    (tmp_path / "folder").mkdir()
    written(tmp_path / "folder" / "m.json", {"data_files": links})
    (tmp_path / "folder" / names[1]).write_bytes(zipped({"conversations.json": [claude()]}))
    report = read("import", "folder")

    assert "download light_metadata-000.zip, conversations-000.zip from them" in told
    assert "secret" not in told
    assert report["conversations"] == 1
    assert "conversations-000.zip" in report["skipped"][0]["reason"]


def test_a_former_import_of_claudes_is_completed(tmp_path: Path) -> None:
    """Documents are in their messages and are found, what was pasted is a memory, once each."""
    whole = written(tmp_path / "c.json", claude_files()["conversations.json"])
    former_import(whole, import_claude.read)
    before = memories()
    first, again = read("import", str(whole)), read("import", str(whole))
    run("import", str(whole), "--db", "fresh.db")

    assert first["messages"] == again["messages"] == again["updated"] == 0
    assert first["updated"] > 0
    assert state("birds")[-1] == state("birds", "fresh.db")[-1]
    assert set(memories()) - set(before) == {"user: my own curlew"}
    assert {bird: bool(found(bird)) for bird in BIRDS} == dict.fromkeys(BIRDS, True)
    with SQLiteCheckpointer.open("x.db") as saver:
        assert not [item for item in saver.history("birds") if item.branch]


# -- other programs


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


# -- JSONL


def test_both_forms_of_jsonl_say_the_same(tmp_path: Path) -> None:
    """A message a line, a conversation a line, and an array of either, tool calls and all."""
    loose = [{"thread_id": "t", **message} for message in TALK]
    whole = {"thread_id": "t", "messages": TALK}
    files = [
        *(lines(tmp_path / "1.jsonl", [whole]), lines(tmp_path / "2.jsonl", loose)),
        *(written(tmp_path / "3.json", [whole]), written(tmp_path / "4.json", loose)),
    ]
    for file in files:
        assert done(file, "--db", f"{file.stem}.db") == (1, 6, 0)
        with SQLiteCheckpointer.open(f"{file.stem}.db") as saver:
            talk = [item.value for item in saver.history("t")]
        assert [m.type for m in talk] == ["system", "human", "ai", "tool", "ai", "human"]
        assert talk[2].tool_calls[0]["args"] == {"m": 1}
        assert talk[3].tool_call_id == talk[2].tool_calls[0]["id"] == "call-1"


def test_jsonl_is_imported_once_and_grows(tmp_path: Path) -> None:
    """Again changes nothing, appended lines are new messages, and --prefix makes other threads."""
    file = tmp_path / "log.jsonl"
    loose = [{"role": m["role"], "content": f"line {n}"} for n, m in enumerate(TALK[:2] * 2)]
    told = [done(lines(file, loose[:count])) for count in (2, 2, 4)]
    told.append(done(file, "--prefix", "old/"))

    assert told == [(1, 2, 0), (1, 0, 1), (1, 2, 0), (1, 4, 0)]
    name = only_thread()
    assert said(name) == said(f"old/{name}") != []


def test_lines_of_several_threads_may_be_mixed(tmp_path: Path) -> None:
    """A log that many threads wrote to gives each of them its messages in order."""
    mixed = [{"thread_id": t, "role": "user", "content": f"{t}{n}"} for n in range(3) for t in "ab"]
    assert done(lines(tmp_path / "log.jsonl", mixed)) == (2, 6, 0)
    assert said("a") == ["human: a0", "human: a1", "human: a2"]


def test_functions_of_old_are_tools(tmp_path: Path) -> None:
    """An answer belongs to the newest call of its function that has none yet."""
    call = {"name": "depth", "arguments": '{"m": 1}'}
    asked = {"role": "assistant", "content": None, "function_call": call}
    told = [{"role": "function", "name": "depth", "content": f"{n} m"} for n in (2, 3)]
    run("import", str(lines(tmp_path / "t.jsonl", [USER, asked, told[0], asked, told[1]])))
    with SQLiteCheckpointer.open("x.db") as saver:
        found: list[Any] = [item.value for item in saver.history(only_thread())]

    assert [m.type for m in found] == ["human", "ai", "tool", "ai", "tool"]
    assert [m.tool_call_id for m in found[2::2]] == [m.tool_calls[0]["id"] for m in found[1::2]]
    assert found[2].tool_call_id != found[4].tool_call_id


# -- LangGraph's own JSON


def test_a_history_of_langgraphs_server_is_one_thread(tmp_path: Path) -> None:
    """Its states come newest first; each message has the time of the first state that has it."""
    states = [langgraph_state(count, day=day) for count, day in ((4, 3), (3, 2), (1, 1))]
    old = [{k: v for k, v in state.items() if k != "checkpoint"} for state in states]
    for each in old:
        each["config"] = {"configurable": {"thread_id": "old"}}
    thread = {"thread_id": "lg", "status": "idle", "values": {**states[0]["values"]}}
    thread |= {"created_at": "2024-05-01T10:00:00Z", "updated_at": "2024-05-03T10:00:00Z"}
    first = read("import", str(written(tmp_path / "history.json", states)))
    again = done(written(tmp_path / "threads.json", [thread]))

    assert (first["conversations"], first["messages"], first["users"]) == (1, 4, {"ann": 1})
    assert again == (1, 0, 1)
    assert done(written(tmp_path / "old.json", old)) == (1, 4, 0)
    assert said("old") == said("lg")
    assert said("lg") == ["human: How deep is it?", "ai: ", "tool: 2 m", "ai: Two metres."]
    with SQLiteCheckpointer.open("x.db") as saver:
        items = saver.history("lg")
        assert items[1].value.tool_calls[0]["args"] == {"m": 1}
        assert [f"{item.stored_at:%d}" for item in items] == ["01", "02", "02", "03"]
        assert f"{saver.thread('lg').active_at:%Y-%m-%d}" == "2024-05-03"
    with SQLiteStore.open("x.db") as store:
        found: list[Any] = store.search(("memories", "ann"))
        assert {f"{item.provenance.at:%Y}" for item in found} == {"2024"}


def fields_of(messages: Iterable[Any]) -> list[Any]:
    return [(m.type, m.content, m.id, getattr(m, "tool_calls", None)) for m in messages]


def test_every_form_of_a_langchain_message_is_read(tmp_path: Path) -> None:
    """The server's, that of messages_to_dict, that of dumpd, streamed chunks, and the two roles."""
    stated = langgraph_state(4)["values"]["messages"]
    as_data = [{"type": each["type"], "data": each} for each in stated]
    dumped = json.loads(dumps(messages_from_dict(as_data)))
    chunks = [{**m, "type": {"ai": "AIMessageChunk"}.get(m["type"], m["type"])} for m in stated]
    roles = [{"role": "human", "content": "How deep is it?"}, {"role": "ai", "content": "2 m"}]
    for number, messages in enumerate((stated, as_data, dumped, chunks)):
        whole = {"thread_id": "w", "messages": messages}
        loose = [{"thread_id": "l", **message} for message in messages]
        file = written(tmp_path / f"{number}.json", [whole, *loose])
        assert done(file, "--db", f"{number}.db") == (2, 8, 0)
        with SQLiteCheckpointer.open(f"{number}.db") as saver:
            told = [fields_of(item.value for item in saver.history(name)) for name in "wl"]
        assert told[0] == told[1] == fields_of(messages_from_dict(as_data))
    assert done(written(tmp_path / "r.json", [{"thread_id": "r", "messages": roles}])) == (1, 2, 0)
    assert said("r") == ["human: How deep is it?", "ai: 2 m"]


@pytest.mark.parametrize(
    "time",
    [
        *({"timestamp": START}, {"timestamp": START * 1000}, {"created_at": START}),
        *({"created_at": "2023-11-14T22:13:20Z"}, {"timestamp": str(int(START))}),
        {"additional_kwargs": {"timestamp": START}},
    ],
)
@pytest.mark.parametrize("form", [{"role": "user"}, {"type": "human"}])
def test_an_old_message_is_not_of_today(time: Any, form: Any, tmp_path: Path) -> None:
    """Its time is in one of several places, in seconds, milliseconds or ISO 8601."""
    message = {**form, "content": "I live in Ghent", **time}
    run("import", str(lines(tmp_path / "t.jsonl", [{"thread_id": "t", **message}])))
    with SQLiteStore.open("x.db") as store:
        (item,) = store.search(("memories", "me"))
    with SQLiteCheckpointer.open("x.db") as saver:
        (told,) = saver.history("t")
        assert (told.stored_at.timestamp(), told.value.text) == (START, "I live in Ghent")
        assert saver.thread("t").active_at.timestamp() == START
    assert item.provenance is not None
    assert item.provenance.at == told.stored_at


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('{"role": "user", "content": "cut', "not JSON"),
        ('{"type": "human", "data": {}}', "no content"),
        ('{"type": "human", "data": {"content": 5}}', "content is neither text nor a list"),
        ('{"type": "tool", "data": {"content": "x"}}', "malformed message (tool)"),
        ('{"type": "remove", "content": "", "id": "x"}', "the removal of a message"),
        ("[1]", "no conversation"),
        ('{"role": "robot", "content": "x"}', "unknown role 'robot'"),
        ('{"role": ["user"], "content": "x"}', "unknown role \"['user']\""),
        ('{"role": "user"}', "no content"),
        ('{"role": "assistant"}', "no content"),
        ('{"role": "user", "content": 5}', "content is neither text nor a list of parts"),
        ('{"role": "user", "content": ["x", 5]}', "content is neither text nor a list of parts"),
        ('{"role": "tool", "content": "x"}', "malformed message (tool)"),
        ('{"role": "function", "name": "f", "content": "x"}', "the answer of a function"),
        ('{"role": "assistant", "content": "", "tool_calls": [{}]}', "malformed message (tool_"),
        ('{"thread_id": "t", "role": "user", "content": "other", "id": "u"}', "the id of another"),
        ('{"thread_id": "n", "messages": 5}', "'messages' is no list"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_a_bad_line_is_named_and_the_others_are_read(line: str, why: str, tmp_path: Path) -> None:
    """Also a message that has another's id, and a thread that says something else."""
    good = [
        {"thread_id": "t", "id": f"u{n or ''}", "role": "user", "content": n} for n in ("", "1")
    ]
    first, last = (json.dumps({**each, "content": f"says {each['id']}"}) for each in good)
    (tmp_path / "bad.jsonl").write_text(f"{first}\n{line}\n\n{last}\n")
    found = problems("bad.jsonl")

    assert [reason[: len(why)] for reason, _ in found] == [why]
    assert said("t") == ["human: says u", "human: says u1"]


def test_a_thread_may_go_on_on_a_later_line(tmp_path: Path) -> None:
    """The longer one is the thread; the same again is no fault, and another one is a branch."""
    talk = [{"role": "user", "content": str(n)} for n in range(4)]
    found = [{"thread_id": "t", "messages": talk[:count]} for count in (2, 2, 4)]
    other = {"thread_id": "t", "messages": [{"role": "user", "content": "other"}]}

    assert done(lines(tmp_path / "c.jsonl", found)) == (1, 4, 0)
    assert said("t") == ["human: 0", "human: 1", "human: 2", "human: 3"]
    assert done(lines(tmp_path / "c.jsonl", [*found, other])) == (1, 1, 0)
    assert said("t") == ["human: other"]
    with SQLiteCheckpointer.open("x.db") as saver:
        branch = [item.value.text for item in saver.history("t") if item.branch]
    assert branch == ["0", "1", "2", "3"]


# -- conversations without ids


def turns(*texts: str, **about: Any) -> dict[str, Any]:
    """A line of a training file."""
    roles = "user", "assistant"
    messages = [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)]
    return {"messages": messages, **about}


def test_unrelated_files_of_one_name_are_threads_of_their_own(tmp_path: Path) -> None:
    """Neither is a branch of the other, whether they have a message or a conversation a line."""
    told = ("How deep is the pond?", "Two metres."), ("Who built the ferry?", "Nobody knows.")
    files = []
    for folder, talk in zip("abcd", (told[0], told[1], ("Hi", "Ho"), ("Hi", "Hey")), strict=True):
        (tmp_path / folder).mkdir()
        form = turns(*talk)
        values = [form] if folder in "ac" else form["messages"]
        files.append(lines(tmp_path / folder / "chat.jsonl", values))

    assert done(*files) == (4, 8, 0)
    assert done(*reversed(files)) == (4, 0, 4)
    assert threads() == [
        *(["human: Hi", "ai: Hey"], ["human: Hi", "ai: Ho"]),
        *(["human: How deep is the pond?", "ai: Two metres."],),
        *(["human: Who built the ferry?", "ai: Nobody knows."],),
    ]


def test_a_training_file_may_grow_anywhere(tmp_path: Path) -> None:
    """Lines come at the top, one goes on, one is repeated; each conversation is one thread."""
    prompt = {"role": "system", "content": "You look things up."}
    talks = [turns("Hi", f"Answer {n}") for n in range(20)]
    for talk in talks:
        talk["messages"].insert(0, prompt)
    first = done(lines(tmp_path / "t.jsonl", talks[5:]))
    longer = {"messages": [*talks[7]["messages"], {"role": "user", "content": "And then?"}]}
    grown = [*talks[:5], *talks[5:7], longer, *talks[8:], talks[3]]
    second, third = (done(lines(tmp_path / "t.jsonl", grown)) for _ in range(2))
    shorter = done(lines(tmp_path / "u.jsonl", talks[::-1]))

    assert (first, second, third) == ((15, 45, 0), (21, 19, 14), (21, 0, 21))
    assert shorter == (20, 0, 20)
    assert [len(talk) for talk in threads()].count(4) == 1
    assert len(threads()) == 21
    with SQLiteCheckpointer.open("x.db") as saver:
        for head in saver.heads(limit=1000):
            assert not [item for item in saver.history(head.thread_id) if item.branch]


def test_equal_lines_of_a_file_are_threads_of_their_own(tmp_path: Path) -> None:
    """The same lines in another file, or in the same again, are none."""
    talk = turns("Hi", "Ho")
    told = [done(lines(tmp_path / "t.jsonl", [talk] * count)) for count in (2, 2, 3)]
    told.append(done(lines(tmp_path / "other.jsonl", [talk] * 2)))
    one = turns("Hi")
    told += [done(lines(tmp_path / "u.jsonl", [one, talk, one])) for _ in range(2)]

    assert told == [(2, 4, 0), (2, 0, 2), (3, 2, 2), (2, 0, 2), (3, 1, 2), (3, 0, 3)]
    assert threads() == [["human: Hi"], *[["human: Hi", "ai: Ho"]] * 3]


def test_long_conversations_that_differ_late_are_found_again(tmp_path: Path) -> None:
    """Also after the thread of one of them was deleted, and if only a branch can be read."""
    talks = [turns(*map(str, range(30)), f"end {n}") for n in range(4)]
    first = done(lines(tmp_path / "t.jsonl", talks))
    with SQLiteCheckpointer.open("x.db") as saver:
        saver.delete_thread(only_thread(1))
    second = [done(lines(tmp_path / "t.jsonl", talks[::-1])) for _ in range(2)]
    odd = {"role": "robot", "content": "x"}
    branch = {"after": 0, "messages": [USER]}
    alone = [
        done(lines(tmp_path / "u.jsonl", [{"messages": [odd], "branches": [branch]}]))
        for _ in range(2)
    ]

    assert (first, second) == ((4, 124, 0), [(4, 31, 3), (4, 0, 4)])
    assert alone == [(1, 1, 0), (1, 0, 1)]


def test_two_users_do_not_share_a_thread(tmp_path: Path) -> None:
    """Neither those whom lines name, of either form, nor those for whom a file is imported."""
    whole = [turns("Hi", "Ho", user_id=user) for user in ("ann", "bob")]
    loose = [{"user_id": user, **USER} for user in ("ann", "bob", "ann")]

    assert done(lines(tmp_path / "w.jsonl", whole)) == (2, 4, 0)
    assert done(lines(tmp_path / "l.jsonl", loose)) == (2, 3, 0)
    for user in ("ann", "zoe", "zoe"):
        run("import", str(lines(tmp_path / "n.jsonl", [turns("Hi", "Ho")])), "--user", user)
    assert len(threads()) == 5
    assert (len(memories("ann")), len(memories("zoe"))) == (2, 2)


def test_times_tell_conversations_apart(tmp_path: Path) -> None:
    """Small talk of two days is two threads; what was said is dated."""
    talks = [
        {"messages": [{**USER, "created_at": f"2024-05-0{day}T10:00:00Z"}]} for day in (1, 2, 1)
    ]
    assert done(lines(tmp_path / "t.jsonl", talks[:2])) == (2, 2, 0)
    twice = lines(tmp_path / "u.jsonl", [talks[1], talks[0]])
    assert done(twice, twice) == (4, 0, 4)


def test_a_former_import_is_repeated_and_goes_on(tmp_path: Path) -> None:
    """Threads that were named by file and place are found by what was said first."""
    talks = [turns("Hi", f"Answer {n}") for n in range(4)]
    former = [{"thread_id": f"chat-{n}", **talk} for n, talk in enumerate(talks, 1)]
    log = [{"thread_id": "log", **message} for message in turns("Who?", "Me.")["messages"]]
    merged = [{"thread_id": "two-1", **turns(*told)} for told in (("A", "B"), ("C", "D"))]
    done(lines(tmp_path / "old.jsonl", [*former, *log, *merged]))
    longer = turns("Hi", "Answer 2", "More?", "No.")
    told = [
        done(lines(tmp_path / "chat.jsonl", talks)),
        done(lines(tmp_path / "chat.jsonl", [turns("New"), *talks[:2], longer, talks[3]])),
        done(lines(tmp_path / "log.jsonl", turns("Who?", "Me.", "Why?")["messages"])),
        done(lines(tmp_path / "two.jsonl", [turns("A", "B"), turns("C", "D")])),
    ]

    assert told == [(4, 0, 4), (5, 3, 3), (1, 1, 0), (2, 0, 2)]
    assert said("chat-3") == ["human: Hi", "ai: Answer 2", "human: More?", "ai: No."]
    assert said("log") == ["human: Who?", "ai: Me.", "human: Why?"]
    assert len(threads()) == 4 + 1 + 1 + 1


def test_a_thread_that_was_talked_on_is_found_again(tmp_path: Path) -> None:
    """It stays where it is, and what the file has in addition is a branch of it."""
    done(lines(tmp_path / "t.jsonl", [turns("Hi", "Ho")]))
    name = only_thread()
    with SQLiteCheckpointer.open("x.db") as saver:
        graph: Any = chat_graph(checkpointer=saver)
        graph.invoke({"messages": [("user", "and here")]}, {"configurable": {"thread_id": name}})

    assert done(lines(tmp_path / "t.jsonl", [turns("Hi", "Ho")])) == (1, 0, 1)
    assert done(lines(tmp_path / "t.jsonl", [turns("Hi", "Ho", "Why?")])) == (1, 1, 0)
    assert said(name)[:3] == ["human: Hi", "ai: Ho", "human: and here"]
    assert len(threads()) == 1


# -- files of OpenAI's fine-tuning and batch documentation


def batch(name: str, **body: Any) -> dict[str, Any]:
    """A line of the input file of a batch."""
    url = f"/v1/{body.pop('to', 'chat/completions')}"
    return {"custom_id": name, "method": "POST", "url": url, "body": {"model": "gpt-4o", **body}}


def answered(name: str, body: Any, **about: Any) -> dict[str, Any]:
    """A line of the output file of a batch."""
    response = {"status_code": 200, "request_id": "r", "body": body}
    return {"id": "batch_req_1", "custom_id": name, "response": response, "error": None, **about}


def test_examples_of_every_kind_are_imported_whole(tmp_path: Path) -> None:
    """Preference is a branch, a completion two messages; tools and answers to grade are counted."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    ask = [{"role": "user", "content": "How deep is it?"}]
    two, three = ([{"role": "assistant", "content": f"{n} metres"}] for n in ("Two", "Three"))
    weighed = [{**USER, "content": "Hi"}, {"role": "assistant", "content": "Ho", "weight": 0}]
    examples: list[dict[str, Any]] = [
        {"input": {"messages": ask, "tools": [tool]},
         "preferred_output": two, "non_preferred_output": three},
        {"prompt": "Water is", "completion": " wet"},
        {"messages": weighed, "tools": [tool], "parallel_tool_calls": True},
        {"messages": [{**USER, "content": "Name a boat"}], "reference_answer": {"name": "ferry"}},
        {"input": {}, "preferred_output": two, "non_preferred_output": three},
        {"prompt": ["a"], "completion": "b"},
    ]  # fmt: skip
    report = read("import", str(lines(tmp_path / "t.jsonl", examples)))

    assert (report["conversations"], report["messages"]) == (4, 8)
    assert report["left_out"] == {"tools": 2, "parallel_tool_calls": 1, "reference_answer": 1}
    assert [each["reason"] for each in report["skipped"]] == [
        "an example of preference without 'input.messages'",
        "the prompt or its completion is no text",
    ]
    assert threads() == [
        *(["human: Hi", "ai: Ho"], ["human: How deep is it?", "ai: Two metres"]),
        *(["human: Name a boat"], ["human: Water is", "ai:  wet"]),
    ]
    assert done(tmp_path / "t.jsonl") == (4, 0, 4)
    with SQLiteCheckpointer.open("x.db") as saver:
        said_ = [i for head in saver.heads() for i in saver.history(head.thread_id)]
    assert [i.value.text for i in said_ if i.branch] == ["Three metres"]
    assert [i.value.additional_kwargs for i in said_ if i.value.text == "Ho"] == [{"weight": 0}]


def test_a_batch_is_imported_with_its_answers(tmp_path: Path) -> None:
    """Of chat completions, responses and completions; what failed or is no message is named."""
    ask = {"role": "user", "content": [{"type": "input_text", "text": "How deep?"}]}
    call = {"type": "function_call", "call_id": "c", "name": "depth", "arguments": "{}"}
    told = {"type": "function_call_output", "call_id": "c", "output": "2 m"}
    requests = [
        batch("1", messages=[{**USER, "content": "Hi"}], tools=[{"type": "function"}]),
        batch("2", to="responses", instructions="Be brief", input=[ask, call, told]),
        batch("3", to="responses", input="Who?"),
        batch("4", to="completions", prompt="Water is"),
        batch("5", to="embeddings", input="some text"),
        batch("6", messages=[{**USER, "content": "Fail"}]),
    ]
    answer = {"role": "assistant", "content": "Ho", "refusal": None}
    output = {
        "type": "message",
        "role": "assistant",
        "id": "m",
        "status": "completed",
        "content": [{"type": "output_text", "text": "2 metres", "annotations": []}],
    }
    choices = [
        {"index": n, "message": {**answer, "content": t}} for n, t in enumerate(("Ho", "Hey"))
    ]
    answers = [
        answered("1", {"object": "chat.completion", "created": int(START), "choices": choices}),
        answered("2", {"object": "response", "created_at": START, "output": [
            {"type": "reasoning", "summary": []}, output]}),
        answered("4", {"choices": [{"index": 0, "text": " wet"}]}),
        answered("6", None, response=None, error={"code": "batch_expired", "message": "late"}),
        answered("7", {"choices": choices}),
    ]  # fmt: skip
    asked, got = lines(tmp_path / "in.jsonl", requests), lines(tmp_path / "out.jsonl", answers)
    first = done(asked)
    report = read("import", str(got), str(asked))
    alone = attempt("import", str(got), "--db", "alone.db")

    assert first == (5, 8, 0)
    assert (report["messages"], report["unchanged"]) == (4, 2)
    assert report["left_out"] == {"tools": 1}
    assert sorted(each["reason"] for each in report["skipped"]) == [
        "a batch request failed: batch_expired",
        "a batch request to '/v1/embeddings', which is no conversation",
        "the answer to a batch request that is in none of the files; import the batch's input "
        "file in the same command",
    ]
    assert threads() == [
        *(["human: Fail"], ["human: Hi", "ai: Ho"], ["human: Water is", "ai:  wet"]),
        ["human: Who?"],
        ["system: Be brief", "human: How deep?", "ai: ", "tool: 2 m", "ai: 2 metres"],
    ]
    assert done(got, asked) == (5, 0, 5)
    assert alone.exit_code == 1
    assert "import the batch's input file" in alone.stderr


# -- export


def test_what_is_exported_is_imported_the_same(tmp_path: Path) -> None:
    """The same messages, titles, models and times; what is no memory stays none."""
    jsonl = lines(tmp_path / "t.jsonl", [{"thread_id": "t", "messages": TALK}])
    run("import", str(written(tmp_path / "c.json", [tools().json, simple().json])), str(jsonl))
    expected = run("export", "--all")
    Path("all.jsonl").write_text(run("export", "--all"), encoding="utf-8")
    os.rename("x.db", "old.db")
    run("import", "all.jsonl")

    assert (tmp_path / "all.jsonl").read_text() == expected
    assert run("export", "--all") == expected
    assert said("tools") == said("tools", "old.db")
    with SQLiteCheckpointer.open("x.db") as saver:
        assert "a coat" in saver.history("tools")[5].value.additional_kwargs["canvas"]
    assert json.loads(run("export", "too"))["gizmo_id"] == "g-trip"
    assert len(memories()) == 4 + 4 + 3
    for wrong in ([], ["t", "--all"], ["gone"]):
        assert isinstance(attempt("export", *wrong).exception, ConfigurationError)


# -- another file of perdure


def test_files_of_perdure_are_merged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Threads, versions of items and deletions come; what went on in both is refused by name."""
    talk = written(tmp_path / "c.json", [tools().json, simple().json])
    run("import", str(talk), "--db", "other.db")
    with SQLiteStore.open("other.db") as there:
        there.put(("notes",), "tea", {"text": "green"})
        there.put(("notes",), "milk", {"text": "oats"})
    before = run("export", "--all", "--db", "other.db")
    first = read("import", "other.db")
    again = read("import", "other.db")
    with SQLiteStore.open("other.db") as there, SQLiteStore.open("x.db") as here:
        assert [*there.export()] == [*here.export()]
        there.put(("notes",), "tea", {"text": "black"})
        there.delete(("notes",), "milk")
        assert here.import_from(there).items == 1
        assert [*there.export()] == [*here.export()]
        assert here.get(("notes",), "milk") is None
    for db, text in (("x.db", "here"), ("other.db", "there")):
        run("chat", "--db", db, "-t", "trip", "-m", text)

    told = error("import", "other.db", into=capsys)
    run("import", "other.db", "--as", "trip=second")

    assert (first["conversations"], first["unchanged"]) == (2, 0)
    assert (again["conversations"], again["unchanged"], again["items"]) == (2, 2, 0)
    assert before.count('"thread_id"') == 2
    assert "neither continues the other: 'trip'" in told
    assert "human: here" in said("trip")
    assert said("second") == said("trip", "other.db")
    for wrong in (["other.db", "--as", "trip"], ["other.db", "--as", "no=x"]):
        assert re.search("expected ID=NEW|no thread 'no'", error("import", *wrong, into=capsys))
    assert "files of perdure" in error(
        "import", str(langgraphs(tmp_path)), "--as", "a=b", into=capsys
    )


@pytest.mark.parametrize("key", [None, KEY.hex()])
def test_memories_that_were_forgotten_here_are_not_merged(
    key: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are counted, and named on stderr and in JSON; a copy keeps the tombstones."""
    if key is not None:
        monkeypatch.setenv("PERDURE_KEY", key)
    talk = {"thread_id": "t", "messages": [{"role": "user", "content": "I live in Bergen"}]}
    run("import", str(lines(Path("t.jsonl"), [talk])), "--db", "other.db")
    run("copy", "--from", "other.db", "--to", "x.db")
    (identity,) = keys().values()
    run("memories", "forget", identity, "--yes")
    first, again = read("import", "other.db"), read("import", "other.db")
    run("copy", "--from", "x.db", "--to", "copy.db")
    copied = read("import", "other.db", "--db", "copy.db")
    shown = attempt("import", "other.db")

    assert [report["refused"] for report in (first, again, copied)] == [
        [{"namespace": ["memories", "me"], "key": identity}]
    ] * 3
    assert "1 item refused" in shown.stdout
    assert f"refused: '{identity}' in memories/me" in shown.stderr
    assert keys() == {}


def langgraphs(folder: Path) -> Path:
    """An empty database of langgraph's saver."""
    with SqliteSaver.from_conn_string(str(folder / "theirs.db")) as saver:
        saver.setup()
    return folder / "theirs.db"


# -- langgraph's database, and pipes


class Own(TypedDict, total=False):
    """A state whose messages are what a program makes of them."""

    messages: list[Any]


def test_a_database_of_langgraphs_saver_is_taken_over(tmp_path: Path) -> None:
    """With all its checkpoints, and memories; what holds no messages is named, and kept."""
    old = tmp_path / "old.sqlite"
    with SqliteSaver.from_conn_string(str(old)) as saver:
        for name, message in (("trip", HumanMessage("I like figs")), ("own", ["user", "I like"])):
            builder: Any = StateGraph(Own)
            builder.add_node("say", lambda state: state)
            builder.add_edge(BEGIN, "say")
            graph = builder.compile(checkpointer=saver)
            graph.invoke({"messages": [message]}, {"configurable": {"thread_id": name}})
    first, again = read("import", str(old)), read("import", str(old))
    piped = CliRunner().invoke(app, ["import", "-", "--db", "y.db"], input=old.read_bytes())

    assert (first["conversations"], first["checkpoints"], first["memories"]) == (2, 6, 1)
    assert (again["checkpoints"], again["memories"], again["unchanged"]) == (0, 0, 2)
    assert run("import", str(old)) == "2 conversations: 2 unchanged, 0 memories\n"
    assert [each["conversation"] for each in first["skipped"]] == ["own"]
    assert piped.stdout == "2 conversations: 6 new checkpoints, 1 memory\n"
    assert memories() == ["user: I like figs"]
    assert "keeps its own thread ids" in str(attempt("import", str(old), "--prefix", "x").exception)


def langgraphs_database(path: Path, users: dict[str, Any]) -> str:
    """A file of langgraph's saver with a thread for each of some users; None: it names none."""
    with SqliteSaver.from_conn_string(str(path)) as saver:
        graph: Any = chat_graph(checkpointer=saver)
        for thread, user in users.items():
            named = {} if user is None else {"user_id": user}
            said = {"messages": [HumanMessage(f"I am the user of {thread}")]}
            graph.invoke(said, {"configurable": {"thread_id": thread, **named}})
    return str(path)


def test_memories_are_of_the_users_whom_a_services_threads_name(tmp_path: Path) -> None:
    """As with a worker; those of nobody are the settings' user's, and the report says how many."""
    users = {"a": "ann", "b": "ann", "c": 7, "d": None, "e": ""}
    old = langgraphs_database(tmp_path / "old.sqlite", users)
    report = run("import", old, "--user", "zoe")
    again = read("import", old, "--user", "zoe")
    with SQLiteStore.open("x.db") as store:
        found = {place[1] for place in store.list_namespaces(prefix=("memories",))}
        threads = {
            user: {item.provenance.thread_id for item in store.search(("memories", user))}  # type: ignore[union-attr]
            for user in found
        }

    assert threads == {"ann": {"a", "b"}, "7": {"c"}, "zoe": {"d", "e"}}
    assert report.startswith("5 conversations (2 of ann, 2 of zoe, 1 of 7): ")
    assert report.endswith("checkpoints, 2 memories of ann, 2 of zoe, 1 of 7\n")
    assert again["users"] == {"ann": 2, "zoe": 2, "7": 1}
    assert (again["memories"], again["unchanged"], again["by_user"]) == (0, 5, {})


def test_a_user_of_whom_there_can_be_no_memories_ends_no_import(tmp_path: Path) -> None:
    """Its thread is taken over and named; the threads after it are read."""
    old = langgraphs_database(tmp_path / "old.sqlite", {"a": "ann", "blank": "  ", "c": "bob"})
    report = read("import", old)

    assert (report["conversations"], report["by_user"]) == (3, {"ann": 1, "bob": 1})
    assert [each["conversation"] for each in report["skipped"]] == ["blank"]
    assert "expected text that is not blank" in report["skipped"][0]["reason"]


def test_what_a_worker_is_to_do_of_a_services_threads(tmp_path: Path) -> None:
    """It gives each user theirs, and says of how many threads there is no user."""
    old = langgraphs_database(tmp_path / "old.sqlite", {"a": "ann", "d": None})
    later = attempt("import", old, "--later")
    work = attempt("worker", "--once")

    assert later.stdout.startswith("2 conversations (1 of ann, 1 of nobody): ")
    assert "'perdure worker' leaves those of nobody" in later.stderr
    assert "threads that name no user_id are not extracted: 1;" in work.stderr
    assert (len(memories("ann")), memories()) == (1, [])
    assert "no user is named: 1 thread" in attempt("memories", "jobs").stderr


def test_a_line_that_is_a_message_names_its_user(tmp_path: Path) -> None:
    """As one that is a conversation; a whole number is a user's name."""
    rows = [
        {"thread_id": "a", "user_id": "ann", **USER},
        {"thread_id": "a", "role": "user", "content": "and bye"},
        {"thread_id": "b", "user_id": 7, "messages": [USER]},
    ]
    lines_file = tmp_path / "talks.jsonl"
    lines_file.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    report = run("import", str(lines_file))

    assert report.startswith("2 conversations (1 of 7, 1 of ann): 3 new messages, ")
    assert (memories("ann"), memories("7"), memories()) == (
        ["user: and bye", "user: hello"],
        ["user: hello"],
        [],
    )


def test_lines_name_their_users(tmp_path: Path) -> None:
    """What `perdure export` writes goes back to the users that it is of."""
    rows = [
        {"thread_id": "a", "user_id": "ann", "owner": "team", "messages": [USER]},
        {"thread_id": "b", "messages": [{"role": "user", "content": "good morning"}]},
    ]
    lines_file = tmp_path / "talks.jsonl"
    lines_file.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    report = run("import", str(lines_file))
    exported = run("export", "--all")
    copied = CliRunner().invoke(
        app, ["import", "-", "--db", "y.db", "--user", "zoe"], input=exported
    )
    with SQLiteCheckpointer.open("y.db") as saver:
        known = existing_head(saver, "a").metadata

    assert report == copied.stdout
    assert (
        report == "2 conversations (1 of ann, 1 of me): 2 new messages, 1 memory of ann, 1 of me\n"
    )
    assert (memories("ann"), memories()) == (["user: hello"], ["user: good morning"])
    assert (known["user_id"], known["owner"]) == ("ann", "team")


@pytest.mark.skipif(sys.platform == "win32", reason="has no named pipes")
def test_a_named_pipe_is_a_file(tmp_path: Path) -> None:
    """It is read once."""
    os.mkfifo("pipe.json")
    data = json.dumps(simple().json).encode()
    writing = threading.Thread(target=Path("pipe.json").write_bytes, args=(data,))
    writing.start()

    assert done("pipe.json") == (1, 4, 0)
    writing.join()


# -- memories, and what cuts an import off


def test_memories_are_made_once(tmp_path: Path) -> None:
    """Of whom, of which thread, and when, is known; --no-memories and --later leave them out."""
    file = str(written(tmp_path / "c.json", [simple().json]))
    without = run("import", file, "--no-memories")
    later = run("import", file, "--later", "--prefix", "later/", "--user", "bo")
    before = memories(), memories("bo")
    after = run("import", file), run("import", file, "--user", "ann", "--prefix", "old/")
    with SQLiteStore.open("x.db") as store:
        item: Any = store.search(("memories", "ann"), query="nuts", limit=1)[0]

    assert without == later == "1 conversation: 4 new messages\n"
    assert before == ([], [])
    assert after[0] == "1 conversation: 1 unchanged, 4 memories\n"
    assert (item.provenance.thread_id, item.provenance.actor) == ("old/trip", "user")
    assert item.provenance.at.timestamp() == START + 20


def test_ctrl_c_says_what_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the next import goes on."""
    talks = [simple(name).json for name in "abc"]
    file = str(written(tmp_path / "c.json", talks))
    store, left = ThreadImport.run, [1]

    def cut_off(*given: Any) -> int:
        if not left:
            raise KeyboardInterrupt
        left.pop()
        return store(*given)

    monkeypatch.setattr(ThreadImport, "run", cut_off)
    result = attempt("import", file)
    monkeypatch.setattr(ThreadImport, "run", store)

    assert result.exit_code == 130
    assert "cut off: 1 conversation: 4 new messages, 4 memories; that is kept" in result.stderr
    assert done(file) == (3, 8, 1)


def test_an_import_that_was_killed_goes_on(tmp_path: Path) -> None:
    """SIGKILL in the middle, and the same import again: each message once, and one memory each."""
    talks = []
    for number in range(40):
        talk = Talk(f"t{number}")
        for turn in range(8):
            talk.ask(f"On day {number} I ate {turn} plums", f"{turn} plums on day {number} is fine")
        talks.append(talk.json)
    file = str(written(tmp_path / "c.json", talks))
    main = [sys.executable, "-c", "from perdure.cli import main; main()", "import", file]
    killed = subprocess.Popen(main, stdout=subprocess.DEVNULL)
    while not Path("x.db").exists() and killed.poll() is None:
        time.sleep(0.05)
    time.sleep(0.4)
    killed.kill()
    killed.wait()
    run("import", file)

    assert len(memories()) == 640
    assert [len(said(talk["id"])) for talk in talks] == [16] * 40


def test_an_id_that_no_memory_can_name_is_named(tmp_path: Path) -> None:
    """Its thread is there, and so are the other threads with their memories."""
    talks = [simple("a\0b").json, simple().json]
    report = read("import", str(written(tmp_path / "c.json", talks)))

    assert (report["conversations"], report["memories"]) == (2, 4)
    assert [each["conversation"] for each in report["skipped"]] == ["a\0b"]


def test_an_import_continues_a_talk_that_went_on(tmp_path: Path) -> None:
    """A thread that was talked on stays where it was; the rest of the export is a branch."""
    talk = simple()
    done(written(tmp_path / "c.json", [talk.json]))
    with SQLiteCheckpointer.open("x.db") as saver:
        graph: Any = chat_graph(checkpointer=saver)
        graph.invoke({"messages": [("user", "hi")]}, {"configurable": {"thread_id": "trip"}})
    before = said("trip")
    talk.ask("And later?", "Later as well")

    assert done(written(tmp_path / "c.json", [talk.json])) == (1, 2, 0)
    assert said("trip") == before


def test_what_no_file_can_hold_is_named_and_the_rest_is_there(db: Path) -> None:
    """Dates off the calendar, halves of characters in ids and keys, ids of any length."""
    at = "0001-01-01T00:00:00+14:00"
    early = {"uuid": "early", "created_at": at, "chat_messages": [
        {"uuid": "m\udfff", "sender": "human", "text": "I live in Ghent", "created_at": at}
    ]}  # fmt: skip
    odd = {"thread_id": "odd", "messages": [{"role": "user", "content": "hi", "\ud800k": "v"}]}
    long = {"thread_id": "L" * 5_000, "messages": [{"role": "user", "content": "long"}]}
    good = {"thread_id": "good", "messages": [{"role": "user", "content": "hello"}]}
    path = db.parent / "odd.json"
    path.write_text(json.dumps([early, odd, long, good]))
    report = read("import", str(path))

    assert (report["conversations"], report["messages"]) == (3, 3)
    assert [each["conversation"] for each in report["skipped"]] == ["odd"]
    assert sorted(len(info["thread_id"]) for info in read("threads")) == [4, 5, 36]


def test_of_a_conversation_with_a_message_that_cannot_be_stored_nothing_is(db: Path) -> None:
    """The others are there, whole."""
    talk: list[dict[str, Any]] = [{"role": "user", "content": f"number {i}"} for i in range(40)]
    talk[30] |= {"role": "assistant", "response_metadata": {"n": 10**30}}
    path = lines(
        db.parent / "l.jsonl",
        [{"thread_id": "big", "messages": talk}, {"thread_id": "small", "messages": talk[:30]}],
    )
    report = read("import", str(path))

    assert (report["conversations"], report["messages"]) == (1, 30)
    assert [each["conversation"] for each in report["skipped"]] == ["big"]
    assert [info["thread_id"] for info in read("threads")] == ["small"]
