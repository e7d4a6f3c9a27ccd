"""`perdure import` and `export` of all formats, repeated, and of broken and completed files."""

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
from pathlib import Path
from typing import Any, TypedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.messages import HumanMessage
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.graph import START as BEGIN
from langgraph.graph import StateGraph
from typer.testing import CliRunner

from perdure.checkpointers import SQLiteCheckpointer
from perdure.checkpointers.import_metadata import read_thread_head_or_raise
from perdure.cli.app import app
from perdure.cli.importing.thread_import import ThreadImport
from perdure.errors import ConfigurationError, ImportFailed
from perdure.graphs import chat_graph
from perdure.stores import SQLiteStore
from tests.backends import KEY
from tests.cli.commands import invoke, run, run_and_read_error, run_json
from tests.cli.exports import (
    START,
    ChatGPTConversation,
    build_claude_code_session,
    build_claude_conversation,
    build_claude_files,
    build_codex_session,
    build_librechat_conversation,
    build_open_webui_chat,
    build_thread_state,
    build_tool_conversation,
    build_zip,
    write_json,
    write_jsonl,
)
from tests.cli.imported import (
    TALK,
    USER,
    build_two_turns,
    import_and_count,
    import_and_read_problems,
    read_memory_texts,
    read_thread_texts,
)
from tests.cli.memory import list_memory_keys

# -- broken and unusual files


def build_broken_conversation() -> dict[str, Any]:
    """Build a conversation with many broken messages, and with two intact turns."""
    talk = build_two_turns("broken")
    for message in (
        *({"author": {"role": "robot"}}, {"author": None}, {"content": None}, {"content": "x"}),
        *({"content": {"content_type": "hologram"}}, {"content": {"parts": 5}}),
    ):
        talk.mapping[talk.add_message("assistant", "x")]["message"].update(message)
    conversation = talk.json
    conversation["mapping"]["odd"] = {"message": 5, "parent": talk.last_key}
    conversation["mapping"]["lost"] = {**conversation["mapping"]["broken-1"], "parent": "gone"}
    loop = {**conversation["mapping"]["broken-2"], "parent": "loop"}
    return {
        **conversation,
        "mapping": {**conversation["mapping"], "loop": loop},
        "create_time": "soon",
    }


def test_import_skips_and_names_broken_parts(tmp_path: Path) -> None:
    """Broken parts are named, intact ones are imported, and the exit code is 0."""
    talks = [
        5,
        {"title": "x"},
        {"id": "m", "mapping": None},
        build_broken_conversation(),
        build_two_turns().json,
    ]
    file = write_json(tmp_path / "c.json", talks)
    result = invoke("import", str(file))

    assert (result.exit_code, result.exception) == (0, None)
    assert result.stdout.startswith(
        "2 conversations: 10 new messages, 1 other conversation without messages, "
    )
    assert "unknown role 'robot' (1)" in result.stderr
    assert read_thread_texts("broken")[:2] == [
        "human: I am allergic to nuts",
        "ai: I will keep that in mind",
    ]
    assert sorted(import_and_read_problems(file), key=lambda problem: problem[0]) == [
        ("'mapping' is missing or is not a JSON object", None),
        ("'parts' is not a list", "broken-10"),
        ("is its own ancestor, so it was imported as a first message", "loop"),
        ("its parent is missing, so it was imported as a first message", "lost"),
        ("no content", "broken-7"),
        ("no content", "broken-8"),
        ("no conversation", None),
        ("no conversation", None),
        ("the message is not a JSON object", "odd"),
        ("unknown content 'hologram'", "broken-9"),
        ("unknown role 'None'", "broken-6"),
        ("unknown role 'robot'", "broken-5"),
    ]


@pytest.mark.parametrize("cut", [0.5, 0.99])
def test_truncated_file_is_imported_up_to_the_cut(tmp_path: Path, cut: float) -> None:
    """The complete file adds the rest later."""
    text = json.dumps(
        [build_two_turns("a").json, build_two_turns("b").json, build_two_turns("c").json]
    )
    (tmp_path / "c.json").write_text(text[: int(len(text) * cut)])

    assert import_and_read_problems("c.json") == [("not JSON: the rest", None)]
    assert import_and_count(write_json(tmp_path / "c.json", json.loads(text))) == (
        3,
        12 - 4 * round(3 * cut - 0.6),
        1 + (cut > 0.9),
    )


@pytest.mark.parametrize(
    ("data", "expected_error"),
    [
        (b"hello", "is not valid JSON: line 1, column 1; expected"),
        (b"", "no conversations"),
        (b"[5]", "no conversations"),
        (b"[", "no conversations"),
        (b" [ ]", "no conversations"),
        (b'[{"title": "x"}]', "no conversations"),
        (b'{"role": "user", "content": "caf\xe9"}', "not UTF-8 text: invalid byte at offset 32"),
        (b"PK\x03\x04 and no more", "cannot be unpacked"),
        (build_zip({"user.json": {"id": "x"}, "chat.html": "x"}), "no conversations"),
        (None, "No such file"),
    ],
)
def test_file_of_unknown_format_is_an_error(
    data: bytes | None, expected_error: str, tmp_path: Path
) -> None:
    """The error names the file, and no database is created."""
    if data is not None:
        (tmp_path / "a.json").write_bytes(data)
    exception = invoke("import", "a.json").exception

    assert isinstance(exception, ImportFailed)
    assert "'a.json'" in str(exception)
    assert expected_error in str(exception)
    assert not (tmp_path / "x.db").exists()


def test_zip_bomb_is_refused_without_unpacking(tmp_path: Path) -> None:
    """A member that would unpack to far more than a text does is not unpacked."""
    spaces = "[" + " " * (65 << 20) + "]"
    (tmp_path / "a.zip").write_bytes(build_zip({"conversations.json": spaces}))
    tracemalloc.start()
    exception = invoke("import", "a.zip").exception
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert "'conversations.json' was not unpacked, because it would expand from " in str(exception)
    assert " to 68.2 MB, more than " in str(exception)
    assert "import the folder" in str(exception)
    assert peak < 16 << 20


def test_tool_call_without_result_is_imported_as_text(tmp_path: Path) -> None:
    """A model takes neither a call without a result nor a result without a call, on any branch."""
    talk = build_two_turns()
    code = {"content_type": "code", "text": "1 + 1"}
    output = {"content_type": "execution_output", "text": "2"}
    call = talk.add_message("assistant", code, recipient="python")
    talk.add_message("assistant", "It failed")
    talk.add_message("tool", output, after=call, name="python")
    talk.add_message("tool", output, name="python")
    import_and_count(write_json(tmp_path / "c.json", [talk.json]))

    assert read_thread_texts("trip")[-3:] == [
        "ai: [python]\n```python\n1 + 1\n```",
        *["ai: [python]\n```\n2\n```"] * 2,
    ]


def test_repeated_import_reports_left_out_parts_again(tmp_path: Path) -> None:
    """An import without new messages reports the same left-out parts as the first one."""
    file = str(write_json(tmp_path / "c.json", [build_tool_conversation().json]))
    first, again = run_json("import", file), run_json("import", file)

    assert (again["messages"], again["unchanged"]) == (0, 1)
    assert first["left_out"] == again["left_out"] != {}


def test_import_without_readable_message_exits_with_1(tmp_path: Path) -> None:
    """The output says what was found; a repeated import without new messages exits with 0."""
    hidden = ChatGPTConversation("hidden")
    hidden.add_message("system", "", metadata={"is_visually_hidden_from_conversation": True})
    hidden.add_message("assistant", {"content_type": "thoughts", "thoughts": []})
    empty = ChatGPTConversation("empty")
    odd = {"thread_id": "odd", "messages": [{"role": "robot", "content": "x"}]}
    files = [
        str(write_json(tmp_path / "c.json", [hidden.json, empty.json])),
        str(write_jsonl(tmp_path / "o.jsonl", [odd])),
    ]
    result = invoke("import", *files)
    json_result = invoke("import", *files, "--json")
    readable_file = str(write_json(tmp_path / "good.json", [build_two_turns().json]))

    assert result.exit_code == json_result.exit_code == 1
    assert result.stdout == (
        "0 conversations: 1 other conversation without messages, "
        "2 other conversations without readable messages, 0 memories\n"
    )
    assert "left out: thoughts (1)" in result.stderr
    assert "unknown role 'robot' (1)" in result.stderr
    assert result.stderr.endswith("no message was read\n")
    assert json.loads(json_result.stdout)["unread"] == 2
    assert [invoke("import", readable_file, *files).exit_code for _ in range(2)] == [0, 0]


def test_import_of_database_without_threads_and_items_exits_with_1(tmp_path: Path) -> None:
    """A database with an item and no threads is imported, and may be imported again."""
    empty = invoke("import", str(create_empty_langgraph_database(tmp_path)))
    with SQLiteStore.open("other.db") as store:
        store.put(("notes",), "tea", {"text": "green"})
    results = [invoke("import", "other.db") for _ in range(2)]

    assert (empty.exit_code, empty.stderr) == (1, "no message was read\n")
    assert [result.exit_code for result in results] == [0, 0]


def list_containers_with_keys(value: Any) -> list[tuple[Any, Any]]:
    """Return every container within a JSON value, together with each of its keys."""
    if not isinstance(value, dict | list):
        return []
    keys = list(value) if isinstance(value, dict) else range(len(value))
    return [p for key in keys for p in [(value, key), *list_containers_with_keys(value[key])]]


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
    *(
        build_tool_conversation().json,
        build_broken_conversation(),
        build_claude_conversation(),
        {"thread_id": "t", "messages": TALK},
        BRANCHED,
    ),
    *(
        build_open_webui_chat(),
        build_librechat_conversation(),
        build_claude_code_session(),
        build_codex_session(),
        build_codex_session(old=True),
        build_thread_state(4),
    ),
    [*build_claude_files().values()],
]


@given(st.data(), st.sampled_from(EXPORTS))
def test_import_of_export_with_any_changed_value_does_not_crash(
    data: st.DataObject, export: Any
) -> None:
    """With any value replaced, there is a report, or an error says that the format is unknown."""
    changed = [copy.deepcopy(export), build_two_turns().json]
    container, key = data.draw(st.sampled_from(list_containers_with_keys(changed)))
    odd_values: list[Any] = [None, 5, 0.5, True, "", "x", "\ud800", [], ["x"], [[]], {}]
    container[key] = data.draw(st.sampled_from([*odd_values, {"x": 1}, 1e300, -1]))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "c.json"
        file.write_text(json.dumps(changed))
        result = invoke("import", str(file), "--db", f"{folder}/x.db", "--no-memories")

    assert isinstance(result.exception, ImportFailed | SystemExit | None)


# -- export


def test_export_is_imported_with_same_messages_and_titles(tmp_path: Path) -> None:
    """A second export gives the same text; messages that are not remembered stay so."""
    jsonl = write_jsonl(tmp_path / "t.jsonl", [{"thread_id": "t", "messages": TALK}])
    run(
        "import",
        str(
            write_json(
                tmp_path / "c.json", [build_tool_conversation().json, build_two_turns().json]
            )
        ),
        str(jsonl),
    )
    expected = run("export", "--all")
    Path("all.jsonl").write_text(run("export", "--all"), encoding="utf-8")
    os.rename("x.db", "old.db")
    run("import", "all.jsonl")

    assert (tmp_path / "all.jsonl").read_text() == expected
    assert run("export", "--all") == expected
    assert read_thread_texts("tools") == read_thread_texts("tools", "old.db")
    with SQLiteCheckpointer.open("x.db") as saver:
        assert "a coat" in saver.history("tools")[5].value.additional_kwargs["canvas"]
    assert json.loads(run("export", "too"))["gizmo_id"] == "g-trip"
    assert len(read_memory_texts()) == 4 + 4 + 3
    for arguments in ([], ["t", "--all"], ["gone"]):
        assert isinstance(invoke("export", *arguments).exception, ConfigurationError)


# -- another file of perdure


def test_import_merges_another_database_of_perdure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Threads, item versions and deletions are merged; threads changed in both files are named."""
    talk = write_json(tmp_path / "c.json", [build_tool_conversation().json, build_two_turns().json])
    run("import", str(talk), "--db", "other.db")
    with SQLiteStore.open("other.db") as source:
        source.put(("notes",), "tea", {"text": "green"})
        source.put(("notes",), "milk", {"text": "oats"})
    before = run("export", "--all", "--db", "other.db")
    first = run_json("import", "other.db")
    again = run_json("import", "other.db")
    with SQLiteStore.open("other.db") as source, SQLiteStore.open("x.db") as target:
        assert [*source.export()] == [*target.export()]
        source.put(("notes",), "tea", {"text": "black"})
        source.delete(("notes",), "milk")
        assert target.import_from(source).items == 1
        assert [*source.export()] == [*target.export()]
        assert target.get(("notes",), "milk") is None
    for db, text in (("x.db", "here"), ("other.db", "there")):
        run("chat", "--db", db, "-t", "trip", "-m", text)

    message = run_and_read_error("import", "other.db", capsys=capsys)
    run("import", "other.db", "--as", "trip=second")

    assert (first["conversations"], first["unchanged"]) == (2, 0)
    assert (again["conversations"], again["unchanged"], again["items"]) == (2, 2, 0)
    assert before.count('"thread_id"') == 2
    assert "neither version continues the other: 'trip'" in message
    assert "human: here" in read_thread_texts("trip")
    assert read_thread_texts("second") == read_thread_texts("trip", "other.db")
    for arguments in (["other.db", "--as", "trip"], ["other.db", "--as", "no=x"]):
        assert re.search(
            "expected OLD_ID=NEW_ID|no thread 'no'",
            run_and_read_error("import", *arguments, capsys=capsys),
        )
    assert "perdure databases" in run_and_read_error(
        "import", str(create_empty_langgraph_database(tmp_path)), "--as", "a=b", capsys=capsys
    )


@pytest.mark.parametrize("key", [None, KEY.hex()])
def test_merge_refuses_memories_that_were_forgotten(
    key: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused memories are counted and named; a copy of the database has the tombstones."""
    if key is not None:
        monkeypatch.setenv("PERDURE_KEY", key)
    talk = {"thread_id": "t", "messages": [{"role": "user", "content": "I live in Bergen"}]}
    run("import", str(write_jsonl(Path("t.jsonl"), [talk])), "--db", "other.db")
    run("copy", "--from", "other.db", "--to", "x.db")
    (memory_key,) = list_memory_keys().values()
    run("memories", "forget", memory_key, "--yes")
    first, again = run_json("import", "other.db"), run_json("import", "other.db")
    run("copy", "--from", "x.db", "--to", "copy.db")
    copied = run_json("import", "other.db", "--db", "copy.db")
    result = invoke("import", "other.db")

    assert [report["refused"] for report in (first, again, copied)] == [
        [{"namespace": ["memories", "me"], "key": memory_key}]
    ] * 3
    assert "1 item refused" in result.stdout
    assert f"in this database: '{memory_key}' in memories/me" in result.stderr
    assert list_memory_keys() == {}


def create_empty_langgraph_database(folder: Path) -> Path:
    """Create an empty database of langgraph's saver."""
    with SqliteSaver.from_conn_string(str(folder / "theirs.db")) as saver:
        saver.setup()
    return folder / "theirs.db"


# -- langgraph's database, and pipes


class StateWithAnyMessages(TypedDict, total=False):
    """A graph state whose messages may have any type."""

    messages: list[Any]


def test_import_of_langgraph_database_keeps_checkpoints(tmp_path: Path) -> None:
    """All checkpoints are imported and memories extracted.

    A thread without messages is named and kept.
    """
    old = tmp_path / "old.sqlite"
    with SqliteSaver.from_conn_string(str(old)) as saver:
        for name, message in (("trip", HumanMessage("I like figs")), ("own", ["user", "I like"])):
            builder: Any = StateGraph(StateWithAnyMessages)
            builder.add_node("say", lambda state: state)
            builder.add_edge(BEGIN, "say")
            graph = builder.compile(checkpointer=saver)
            graph.invoke({"messages": [message]}, {"configurable": {"thread_id": name}})
    first, again = run_json("import", str(old)), run_json("import", str(old))
    piped = CliRunner().invoke(app, ["import", "-", "--db", "y.db"], input=old.read_bytes())

    assert (first["conversations"], first["checkpoints"], first["memories"]) == (2, 6, 1)
    assert (again["checkpoints"], again["memories"], again["unchanged"]) == (0, 0, 2)
    assert run("import", str(old)) == "2 conversations: 2 unchanged conversations, 0 memories\n"
    assert [entry["conversation"] for entry in first["skipped"]] == ["own"]
    assert piped.stdout == "2 conversations: 6 new checkpoints, 1 memory\n"
    assert read_memory_texts() == ["user: I like figs"]
    assert "imported from a database keep their ids" in str(
        invoke("import", str(old), "--prefix", "x").exception
    )


def create_langgraph_database(path: Path, users: dict[str, Any]) -> str:
    """Create a database of langgraph's saver with a thread for each user; None means no user."""
    with SqliteSaver.from_conn_string(str(path)) as saver:
        graph: Any = chat_graph(checkpointer=saver)
        for thread, user in users.items():
            user_field = {} if user is None else {"user_id": user}
            graph_input = {"messages": [HumanMessage(f"I am the user of {thread}")]}
            graph.invoke(graph_input, {"configurable": {"thread_id": thread, **user_field}})
    return str(path)


def test_imported_memories_belong_to_user_of_each_thread(tmp_path: Path) -> None:
    """Threads without a user belong to the user of the settings; the report has the numbers."""
    users = {"a": "ann", "b": "ann", "c": 7, "d": None, "e": ""}
    old = create_langgraph_database(tmp_path / "old.sqlite", users)
    report = run("import", old, "--user", "zoe")
    again = run_json("import", old, "--user", "zoe")
    with SQLiteStore.open("x.db") as store:
        users_with_memories = {place[1] for place in store.list_namespaces(prefix=("memories",))}
        threads = {
            user: {item.provenance.thread_id for item in store.search(("memories", user))}  # type: ignore[union-attr]
            for user in users_with_memories
        }

    assert threads == {"ann": {"a", "b"}, "7": {"c"}, "zoe": {"d", "e"}}
    assert report.startswith("5 conversations (2 of ann, 2 of zoe, 1 of 7): ")
    assert report.endswith("checkpoints, 2 memories of ann, 2 of zoe, 1 of 7\n")
    assert again["users"] == {"ann": 2, "zoe": 2, "7": 1}
    assert (again["memories"], again["unchanged"], again["by_user"]) == (0, 5, {})


def test_import_continues_after_thread_of_invalid_user(tmp_path: Path) -> None:
    """The thread of the invalid user is imported and named, and the threads after it are read."""
    old = create_langgraph_database(
        tmp_path / "old.sqlite", {"a": "ann", "blank": "  ", "c": "bob"}
    )
    report = run_json("import", old)

    assert (report["conversations"], report["by_user"]) == (3, {"ann": 1, "bob": 1})
    assert [entry["conversation"] for entry in report["skipped"]] == ["blank"]
    assert "expected a string that has a visible character" in report["skipped"][0]["reason"]


def test_worker_extracts_threads_imported_for_later(tmp_path: Path) -> None:
    """Each user gets their memories, and the threads without a user are counted."""
    old = create_langgraph_database(tmp_path / "old.sqlite", {"a": "ann", "d": None})
    import_result = invoke("import", old, "--later")
    worker_result = invoke("worker", "--once")

    assert import_result.stdout.startswith("2 conversations (1 of ann, 1 of nobody): ")
    assert (
        "'perdure worker' extracts no memories from conversations without a user"
        in import_result.stderr
    )
    assert "threads without user_id (number of threads: 1);" in worker_result.stderr
    assert (len(read_memory_texts("ann")), read_memory_texts()) == (1, [])
    assert (
        "no memories are extracted from 1 thread without a user"
        in invoke("memories", "jobs").stderr
    )


def test_line_with_one_message_may_name_its_user(tmp_path: Path) -> None:
    """The field has the same meaning as in a conversation; a whole number is a user's name."""
    rows = [
        {"thread_id": "a", "user_id": "ann", **USER},
        {"thread_id": "a", "role": "user", "content": "and bye"},
        {"thread_id": "b", "user_id": 7, "messages": [USER]},
    ]
    lines_file = tmp_path / "talks.jsonl"
    lines_file.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    report = run("import", str(lines_file))

    assert report.startswith("2 conversations (1 of 7, 1 of ann): 3 new messages, ")
    assert (read_memory_texts("ann"), read_memory_texts("7"), read_memory_texts()) == (
        ["user: and bye", "user: hello"],
        ["user: hello"],
        [],
    )


def test_exported_lines_are_imported_for_their_users(tmp_path: Path) -> None:
    """The lines that `perdure export` writes belong to the users that they name."""
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
        metadata = read_thread_head_or_raise(saver, "a").metadata

    assert report == copied.stdout
    assert (
        report == "2 conversations (1 of ann, 1 of me): 2 new messages, 1 memory of ann, 1 of me\n"
    )
    assert (read_memory_texts("ann"), read_memory_texts()) == (
        ["user: hello"],
        ["user: good morning"],
    )
    assert (metadata["user_id"], metadata["owner"]) == ("ann", "team")


@pytest.mark.skipif(sys.platform == "win32", reason="has no named pipes")
def test_import_reads_a_named_pipe_once(tmp_path: Path) -> None:
    os.mkfifo("pipe.json")
    data = json.dumps(build_two_turns().json).encode()
    writer = threading.Thread(target=Path("pipe.json").write_bytes, args=(data,))
    writer.start()

    assert import_and_count("pipe.json") == (1, 4, 0)
    writer.join()


# -- memories, and interrupted imports


def test_repeated_import_extracts_memories_once(tmp_path: Path) -> None:
    """A memory has user, thread and time; --no-memories and --later extract none."""
    file = str(write_json(tmp_path / "c.json", [build_two_turns().json]))
    without = run("import", file, "--no-memories")
    later = run("import", file, "--later", "--prefix", "later/", "--user", "bo")
    before = read_memory_texts(), read_memory_texts("bo")
    after = run("import", file), run("import", file, "--user", "ann", "--prefix", "old/")
    with SQLiteStore.open("x.db") as store:
        item: Any = store.search(("memories", "ann"), query="nuts", limit=1)[0]

    assert without == later == "1 conversation: 4 new messages\n"
    assert before == ([], [])
    assert after[0] == "1 conversation: 1 unchanged conversation, 4 memories\n"
    assert (item.provenance.thread_id, item.provenance.actor) == ("old/trip", "user")
    assert item.provenance.at.timestamp() == START + 20


def test_import_stopped_by_ctrl_c_reports_what_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next import adds the rest."""
    talks = [build_two_turns(name).json for name in "abc"]
    file = str(write_json(tmp_path / "c.json", talks))
    store, remaining = ThreadImport.store_new_messages, [1]

    def store_or_interrupt(*arguments: Any) -> int:
        if not remaining:
            raise KeyboardInterrupt
        remaining.pop()
        return store(*arguments)

    monkeypatch.setattr(ThreadImport, "store_new_messages", store_or_interrupt)
    result = invoke("import", file)
    monkeypatch.setattr(ThreadImport, "store_new_messages", store)

    assert result.exit_code == 130
    assert (
        "interrupted: 1 conversation: 4 new messages, 4 memories; these are stored" in result.stderr
    )
    assert import_and_count(file) == (3, 8, 1)


@pytest.mark.slow
def test_killed_import_is_completed_by_repeating_it(tmp_path: Path) -> None:
    """After SIGKILL and the same import again, each message and each memory is stored once."""
    talks = []
    for number in range(40):
        talk = ChatGPTConversation(f"t{number}")
        for turn in range(8):
            talk.add_turn(
                f"On day {number} I ate {turn} plums", f"{turn} plums on day {number} is fine"
            )
        talks.append(talk.json)
    file = str(write_json(tmp_path / "c.json", talks))
    main = [sys.executable, "-c", "from perdure.cli import main; main()", "import", file]
    killed = subprocess.Popen(main, stdout=subprocess.DEVNULL)
    while not Path("x.db").exists() and killed.poll() is None:
        time.sleep(0.05)
    time.sleep(0.4)
    killed.kill()
    killed.wait()
    run("import", file)

    assert len(read_memory_texts()) == 640
    assert [len(read_thread_texts(talk["id"])) for talk in talks] == [16] * 40


def test_import_names_thread_id_that_memories_cannot_have(tmp_path: Path) -> None:
    """The thread is imported without memories, and the other threads with theirs."""
    talks = [build_two_turns("a\0b").json, build_two_turns().json]
    report = run_json("import", str(write_json(tmp_path / "c.json", talks)))

    assert (report["conversations"], report["memories"]) == (2, 4)
    assert [entry["conversation"] for entry in report["skipped"]] == ["a\0b"]


def test_import_keeps_head_of_thread_that_was_continued(tmp_path: Path) -> None:
    """The new messages of the export become a branch of the thread."""
    talk = build_two_turns()
    import_and_count(write_json(tmp_path / "c.json", [talk.json]))
    with SQLiteCheckpointer.open("x.db") as saver:
        graph: Any = chat_graph(checkpointer=saver)
        graph.invoke({"messages": [("user", "hi")]}, {"configurable": {"thread_id": "trip"}})
    before = read_thread_texts("trip")
    talk.add_turn("And later?", "Later as well")

    assert import_and_count(write_json(tmp_path / "c.json", [talk.json])) == (1, 2, 0)
    assert read_thread_texts("trip") == before


def test_import_names_unstorable_conversation_and_imports_others(db: Path) -> None:
    """Dates out of range, lone surrogates, and ids of any length do not stop the import."""
    date = "0001-01-01T00:00:00+14:00"
    early = {"uuid": "early", "created_at": date, "chat_messages": [
        {"uuid": "m\udfff", "sender": "human", "text": "I live in Ghent", "created_at": date}
    ]}  # fmt: skip
    odd = {"thread_id": "odd", "messages": [{"role": "user", "content": "hi", "\ud800k": "v"}]}
    long = {"thread_id": "L" * 5_000, "messages": [{"role": "user", "content": "long"}]}
    good = {"thread_id": "good", "messages": [{"role": "user", "content": "hello"}]}
    path = db.parent / "odd.json"
    path.write_text(json.dumps([early, odd, long, good]))
    report = run_json("import", str(path))

    assert (report["conversations"], report["messages"]) == (3, 3)
    assert [entry["conversation"] for entry in report["skipped"]] == ["odd"]
    assert sorted(len(info["thread_id"]) for info in run_json("threads")) == [4, 5, 36]


def test_conversation_with_unstorable_message_is_not_imported_in_part(db: Path) -> None:
    """The other conversations are imported completely."""
    talk: list[dict[str, Any]] = [{"role": "user", "content": f"number {i}"} for i in range(40)]
    talk[30] |= {"role": "assistant", "response_metadata": {"n": 10**30}}
    path = write_jsonl(
        db.parent / "l.jsonl",
        [{"thread_id": "big", "messages": talk}, {"thread_id": "small", "messages": talk[:30]}],
    )
    report = run_json("import", str(path))

    assert (report["conversations"], report["messages"]) == (1, 30)
    assert [entry["conversation"] for entry in report["skipped"]] == ["big"]
    assert [info["thread_id"] for info in run_json("threads")] == ["small"]
