"""`perdure threads`, `history`, `show`, `fork`, `rewind`, `delete` and `stats`."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, ToolMessage

from perdure.checkpointers import SQLiteCheckpointer
from perdure.checkpointers.import_metadata import read_thread_head_or_raise
from perdure.checkpointers.records import ClientMetadata
from perdure.cli.history import render_message_or_channel_item_lines
from perdure.graphs import chat_graph
from perdure.memory import Keep
from perdure.run_tables.thread_list import ThreadList
from perdure.stores import Provenance, SQLiteStore
from tests.cli.commands import invoke, run, run_and_read_error, run_json, split_rows
from tests.cli.talk import put_messages, read_checkpoint_ids, read_thread_texts, say_on_thread
from tests.server.graphs import asking_graph

URL = "https://a.example/sky.png"
DATA = "data:image/png;base64," + "iVBORw0KGgo" * 500


@pytest.fixture
def trip() -> str:
    """Write a thread of two turns, and return its id."""
    say_on_thread("trip", "I pack a red tent", "What do I pack?")
    return "trip"


# -- threads


def test_threads_are_listed_latest_first(trip: str) -> None:
    """A thread without a title is listed with its first words."""
    say_on_thread("other", "hello")
    threads = run_json("threads")
    table = split_rows(run("threads"))

    assert [info["thread_id"] for info in threads] == ["other", trip]
    assert [(info["items"], info["checkpoints"]) for info in threads] == [(2, 3), (4, 6)]
    assert table[0] == ["id", "title", "messages", "last activity"]
    assert [row[:3] for row in table[1:]] == [
        ["other", "hello", "2"],
        ["trip", "I pack a red tent", "4"],
    ]
    assert run_json("threads", "--limit", "1") == threads[:1]
    assert run_json("threads", "tr") == threads[1:]


def test_threads_are_found_by_text_of_their_messages(
    trip: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Words match in any form and are marked; messages that were stored since are found too."""
    say_on_thread("home", "The tents are dry")
    first, second = run("threads", "--search", "red tents").splitlines()[:2]
    [hit] = run_json("threads", "--search", "dry")
    none = invoke("threads", "--search", "zebra")

    assert first.split()[0] == trip
    assert second == "  user: I pack a **red** **tent**"
    assert (hit["thread_id"], hit["text"], hit["marks"]) == (
        "home",
        "The tents are dry",
        [[14, 17]],
    )
    assert (none.exit_code, none.stderr) == (1, "no message matches 'zebra'\n")
    assert "cannot be combined; remove one of them" in run_and_read_error(
        "threads", "red", "--search", "red", capsys=capsys
    )
    assert "text is ' '" in run_and_read_error("threads", "--search", " ", capsys=capsys)
    monkeypatch.setenv("PERDURE_SEARCH_THREADS", "false")
    assert "search_threads = false in PERDURE_SEARCH_THREADS" in run_and_read_error(
        "threads", "--search", "red", capsys=capsys
    )


def test_threads_are_found_by_title_and_id(trip: str) -> None:
    """The case is ignored; a title stays when a program that sets none continues the thread."""
    say_on_thread("x-1", "hello", title="Planning a TRIP", titled=True, update_time=1.7e9)
    say_on_thread("x-1", "more")
    say_on_thread("y", "hello")
    threads = run_json("threads", "tRiP")
    none = invoke("threads", "nowhere")

    assert [(t["thread_id"], t["title"]) for t in threads] == [
        ("x-1", "Planning a TRIP"),
        (trip, None),
    ]
    assert run_json("threads", "trip", "--limit", "1") == threads[:1]
    assert (none.exit_code, none.stdout) == (1, "")
    assert none.stderr == "no thread has 'nowhere' in its title or id\n"
    assert run("history", "x").startswith("Planning a TRIP\n\n● human")


def test_threads_without_messages_are_not_listed(trip: str, db: Path) -> None:
    """Clients of the server created the newest threads, and nothing was said in them."""
    with SQLiteCheckpointer.open(db) as saver:
        for number in range(3):
            client = ClientMetadata({}, is_reserved=True)
            assert ThreadList(saver).create_thread_if_absent(f"trip {number}", client)

    assert [thread["thread_id"] for thread in run_json("threads", "trip", "--limit", "1")] == [trip]


def test_threads_table_has_user_column_if_another_user_has_threads(trip: str) -> None:
    """JSON always has the user."""
    say_on_thread("mine", "hello", user_id="me")
    usual_columns = split_rows(run("threads"))[0]
    say_on_thread("hers", "hello", user_id="ann")
    table = split_rows(run("threads"))

    assert "user" not in usual_columns
    assert table[0] == [*usual_columns, "user"]
    assert [row[-1] for row in table[1:3]] == ["ann", "me"]
    assert [thread["user"] for thread in run_json("threads")] == ["ann", "me", None]


def test_imported_thread_is_listed_with_its_own_time(db: Path) -> None:
    """The table shows the time of the last activity that the import has read."""
    conversation = {"thread_id": "old", "messages": [{"role": "user", "content": "hello"}]}
    (db.parent / "old.jsonl").write_text(json.dumps({**conversation, "update_time": 1.6e9}))
    run("import", str(db.parent / "old.jsonl"))

    assert split_rows(run("threads"))[1][-1] == "2020-09-13"


def test_piped_table_is_not_cut(db: Path) -> None:
    """In a pipe, a long id or path is one word on one line."""
    say_on_thread("long-" * 40, "hello")

    assert run("threads").splitlines()[1].split()[0] == "long-" * 40
    assert str(db) in run("stats")


def test_threads_table_fits_80_columns_with_prefixes_of_ids(terminal: Any) -> None:
    """On a terminal, other commands accept the printed prefix, and a long title is cut."""
    thread = "68a1f2aa-7e1c-8001-9d5e-0c6b1a2b3c4d"
    say_on_thread(
        thread, "hello", title="A conversation with quite a long title, which has to be cut"
    )
    shown = terminal("threads").splitlines()

    assert len(shown) == 2
    assert shown[1].startswith("68a1f2aa  A conversation with quite a long title")
    assert "…" in shown[1]
    assert max(map(len, shown)) <= 80
    assert terminal("history", "68a1f2aa").count("hello") == 1


@pytest.mark.parametrize("thread", ["[red]x", "[/b]", "a b", "*", "größe", "--x"])
def test_special_characters_of_ids_are_printed_unchanged(thread: str) -> None:
    """No character of an id has an effect on the terminal."""
    say_on_thread(thread, "hello")

    assert run("show", "--", thread).splitlines()[0].strip() == thread
    assert run("threads").splitlines()[1].startswith(thread)
    assert remove_times(run("history", "--", thread)).startswith("● human\nhello\n")


# -- history


def remove_times(history: str) -> str:
    """Remove the times of messages from a printed history."""
    return re.sub(rf" · {datetime.now(UTC):%Y}-\d\d-\d\d \d\d:\d\dZ", "", history)


def test_history_prints_when_each_message_was_stored(trip: str) -> None:
    """The time is that of the first checkpoint with the message; JSON has it exactly."""
    checkpoint_times = {info["ts"] for info in run_json("show", trip)}
    items = run_json("history", trip)
    [first, *_] = run("history", trip).splitlines()
    time = datetime.fromisoformat(items[0]["stored_at"])

    assert {item["stored_at"] for item in items} < checkpoint_times
    assert first == f"● human · {time:%Y-%m-%d %H:%MZ}"


def test_history_marks_messages_that_the_model_sees(db: Path) -> None:
    """With a short window, the first turn is marked as history, in the text and in JSON."""
    say_on_thread("trip", "one", "two")
    put_messages("trip", Keep(-2))
    items = run_json("history", "trip")
    shown = remove_times(run("history", "trip")).split("\n\n")

    assert [(item["type"], item["seen"]) for item in items] == [
        *(("human", False), ("ai", False), ("human", True), ("ai", True)),
    ]
    assert [item["position"] for item in items] == [0, 1, 2, 3]
    assert shown[0] == "○ human\none"
    assert [block[:4] for block in shown if block] == ["○ hu", "○ ai", "● hu", "● ai"]


def test_history_names_who_answered_a_question(trip: str, db: Path) -> None:
    """The server writes the name into the metadata of checkpoints; see server/person.py."""
    before = invoke("history", trip)
    with SQLiteCheckpointer.open(db) as saver:
        config: Any = {"configurable": {"thread_id": trip}, "metadata": {"perdure_caller": "boss"}}
        config["metadata"]["perdure_deed"] = "answered"
        chat_graph(checkpointer=saver).invoke({"messages": [("human", "And now?")]}, config)
    after = invoke("history", trip)

    assert before.stderr == ""
    assert after.stderr == f"{trip!r}: answered by boss\n"


def test_history_is_limited_to_a_checkpoint_or_channel(trip: str) -> None:
    """A checkpoint may be named by a prefix; an empty or unknown channel is reported."""
    first = read_checkpoint_ids(trip)[1]
    unknown = invoke("history", trip, "--channel", "x")
    nothing = invoke("history", trip, "--checkpoint", read_checkpoint_ids(trip)[0])

    assert run_json("history", trip, "--checkpoint", first) == run_json("history", trip)[:1]
    shown = remove_times(run("history", trip, "--checkpoint", first[:18]))
    assert shown == "● human\nI pack a red tent\n"
    assert (nothing.stdout, nothing.stderr) == (
        "",
        "the channel 'messages' of the thread 'trip' is empty\n",
    )
    assert unknown.stderr == "the channel 'x' of the thread 'trip' is empty\n"


CODE = "Look:\n\n```python\ndef f():\n\treturn  1  # " + "long " * 30 + "\n```\n    x\n| a | b |"


def test_history_renders_code_tool_calls_and_attachments(db: Path) -> None:
    """Code is unchanged, calls and results are indented, other parts named; JSON has all fields."""
    parts: list[str | dict[str, Any]] = [
        {"type": "text", "text": "What is this?"},
        {"type": "image_url", "image_url": {"url": DATA}},
        "Say.",
    ]
    long_arguments = {"at": "pond", "code": "a = 1\nprint(a)", "url": DATA}
    calls = [
        {"name": "look", "args": {"at": 1, "how": {"deep": True}}, "id": "1"},
        {"name": "run", "args": long_arguments, "id": "2"},
    ]
    response_metadata = {"create_time": 1.7e9, "model_name": "gpt-4o"}
    messages: list[AnyMessage] = [
        HumanMessage(parts, id="h"),
        AIMessage([{"type": "tool_use", "name": "look"}], tool_calls=calls, id="a"),
        ToolMessage('{"deep": [1]}', tool_call_id="1", name="look", id="t"),
        AIMessage(CODE, id="b", response_metadata=response_metadata),
    ]
    put_messages("t", messages)
    shown, items = run("history", "t"), run_json("history", "t")

    assert remove_times(shown) == (
        "● human\nWhat is this?\n[image]\nSay.\n\n"
        '● ai\n  → look(at=1, how={"deep": true})\n'
        "  → run\n    at: pond\n    code:\n        a = 1\n        print(a)\n"
        "    url: [image/png, 4.1 kB]\n\n"
        '● tool · look\n    {\n      "deep": [\n        1\n      ]\n    }\n\n'
        f"● ai · 2023-11-14 22:13Z · gpt-4o\n{CODE}\n"
    )
    assert items[0]["content"] == parts
    assert items[1]["tool_calls"][1]["args"] == long_arguments


@pytest.mark.parametrize(
    ("block", "name"),
    [
        ({"type": "image", "url": f"{URL}?sig=x"}, f"image {URL}"),
        ({"type": "image", "base64": "AAAA", "mime_type": "image/png"}, "image"),
        ({"type": "image", "base64": "AAAA", "metadata": {"filename": "sky.png"}}, "image sky.png"),
        ({"type": "image", "source": {"type": "url", "url": URL}}, f"image {URL}"),
        ({"type": "image_url", "image_url": {"url": DATA}}, "image"),
        ({"type": "image_url", "image_url": {"url": URL}}, f"image {URL}"),
        ({"type": "input_image", "image_url": URL}, f"image {URL}"),
        ({"type": "input_image", "file_id": "file-1"}, "image file-1"),
        ({"type": "file", "file": {"filename": "a.pdf", "file_data": DATA}}, "file a.pdf"),
        ({"type": "file", "file_id": "file-1", "extras": {"name": "a.pdf"}}, "file a.pdf"),
        ({"type": "input_file", "filename": "a.pdf"}, "file a.pdf"),
        ({"type": "document", "title": "Plan", "source": {"url": URL}}, "document Plan"),
        ({"type": "reasoning", "summary": []}, "reasoning"),
    ],
)
def test_attachment_is_printed_as_name_address_or_id(block: Any, name: str) -> None:
    """The forms of langchain, OpenAI and Anthropic are recognised."""
    assert [line.text for line in render_message_or_channel_item_lines(HumanMessage([block]))] == [
        f"[{name}]"
    ]


def test_history_wraps_prose_and_not_code_or_tables(terminal: Any) -> None:
    """On a terminal, code, tables and indented lines keep their line breaks for copying."""
    wide = "x" * 50 + " " + "y" * 50
    put_messages("t", [AIMessage(f"{wide}\n```\n{wide}\n```\n    {wide}\n| {wide}", id="a")])
    shown = terminal("history", "t", "--no-pager").splitlines()

    assert [line.rstrip() for line in shown[1:]] == [
        "x" * 50,
        "y" * 50,
        "```",
        wide,
        "```",
        f"    {wide}",
        f"| {wide}",
    ]


def test_long_history_is_paged_on_a_terminal(
    terminal: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pager gets colours; --no-pager and a history that fits the screen use no pager."""
    seen: list[str] = []
    monkeypatch.setattr("pydoc.pager", seen.append)
    put_messages("t", [AIMessage("\n".join(map(str, range(50))), id="a")])
    put_messages("u", [HumanMessage("short", id="a")])
    printed = terminal("history", "t"), terminal("history", "t", "--no-pager")
    short = terminal("history", "u", color=True)

    assert printed[0] == ""
    assert re.match(r"\x1b\[1;32m● ai\x1b\[0m\n0\n", remove_times(seen[0]))
    assert printed[1].splitlines()[-1] == "49"
    assert len(seen) == 1
    assert remove_times(short) == "\x1b[1;36m● human\x1b[0m\nshort\n"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"a": [1, None]}, '{"a": [1, null]}'),
        ([1, b"x"], '[1, "[bytes]"]'),
        (("key", {"x": "ö"}), '["key", {"x": "ö"}]'),
        (AIMessage("", tool_calls=[{"name": "stop", "args": {}, "id": "2"}]), "  → stop()"),
        (ToolMessage("{not json", tool_call_id="1"), "    {not json"),
    ],
)
def test_items_of_other_channels_are_printed_as_json(value: Any, expected: str) -> None:
    assert [line.text for line in render_message_or_channel_item_lines(value)] == [expected]


# -- show


def test_show_draws_forks_as_branches(trip: str) -> None:
    """After a rewind, the old end and the new end are branches, and the head is marked."""
    run("rewind", trip, "--to", read_checkpoint_ids(trip)[2])
    say_on_thread(trip, "Something else?")
    lines = run("show", trip).splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("└── "))

    assert lines[0] == trip
    assert [line[:4] for line in lines[1:at]] == ["├── "] * 2
    assert read_checkpoint_ids(trip)[2].startswith(lines[at].split()[1])
    assert [line[:8] for line in lines[at + 1 :]] == [
        *("    ├── ", *["    │   "] * 2, "    └── ", *["        "] * 2),
    ]
    assert [i for i, line in enumerate(lines) if "← head" in line] == [len(lines) - 1]
    assert lines[-1].endswith("4 messages ← head")


def test_show_prints_deep_tree_without_cutting_it(db: Path, terminal: Any) -> None:
    """Nested forks may be wider than the terminal, and no checkpoint is cut or left out."""
    say_on_thread("deep", "hello")
    with SQLiteCheckpointer.open(db) as saver:
        for _ in range(22):
            at = str(read_thread_head_or_raise(saver, "deep").checkpoint_id)
            for _ in range(2):
                saver.rewind("deep", at)
                put_messages("deep", [HumanMessage("again")])
    shown = terminal("show", "deep", "--no-pager")

    assert shown.count(" message") == len(read_checkpoint_ids("deep")) - 1
    assert max(map(len, shown.splitlines())) > 80 + len(read_checkpoint_ids("deep")[0][:18])


def test_show_as_json_has_all_fields_of_checkpoints(db: Path, trip: str) -> None:
    with SQLiteCheckpointer.open(db) as saver:
        expected = [
            (i.checkpoint_id, i.parent_id, i.is_head, dict(i.counts), dict(i.metadata), i.ts)
            for i in saver.checkpoints(trip)
        ]
    names = ("checkpoint_id", "parent_id", "is_head", "counts", "metadata", "ts")

    assert [tuple(info[name] for name in names) for info in run_json("show", trip)] == expected


# -- fork, rewind


def test_fork_copies_a_thread_or_its_beginning(trip: str) -> None:
    """The copy is independent of the thread; an id that exists is refused."""
    run("fork", trip, "copy")
    run("fork", "tri", "start", "--at", read_checkpoint_ids(trip)[3][:18])
    say_on_thread("copy", "hello")
    taken = invoke("fork", trip, "copy").exception

    assert read_thread_texts("copy")[:4] == read_thread_texts(trip)
    assert len(read_thread_texts("copy")) == 6
    assert read_thread_texts("start") == read_thread_texts(trip)[:2]
    assert str(taken) == "the thread 'copy' already exists; pass another id as NEW"


def test_rewind_moves_the_head_and_deletes_nothing(trip: str) -> None:
    """The state is the earlier one, and all checkpoints remain; an ambiguous id is refused."""
    before, texts = read_checkpoint_ids(trip), read_thread_texts(trip)
    output = run("rewind", trip, "--to", before[3][:18])
    ambiguous, unknown = (invoke("rewind", trip, "--to", name) for name in ("1", "zzz"))

    assert output == f"'trip' continues from {before[3]}\n"
    assert read_thread_texts(trip) == texts[:2]
    assert read_checkpoint_ids(trip) == before
    assert "the checkpoint prefix '1' is ambiguous" in str(ambiguous.exception)
    assert "no checkpoint 'zzz'; run 'perdure show trip'" in str(unknown.exception)


# -- delete


def store_memories(db: Path) -> None:
    """Store memories of two users, one in quarantine, that rest on the threads trip and other."""
    with SQLiteStore.open(db) as store:
        for place, thread in (
            (("memories", "ann", "trip"), "trip"),
            (("memories", "bob"), "trip"),
            (("perdure", "quarantine", "memories", "bob"), "trip"),
            (("memories", "bob", "other"), "other"),
        ):
            provenance = Provenance(thread_id=thread, message_ids=("m",))
            store.put(place, "k", {"text": f"a lagoon in {place}"}, provenance=provenance)


def test_delete_asks_with_counts_and_deletes_memories_of_thread(db: Path, trip: str) -> None:
    """Without a yes everything stays; a yes deletes the thread and the memories of all users."""
    say_on_thread("trap", "a lagoon")
    store_memories(db)
    declined = invoke("delete", trip, stdin="n\n")
    remaining = run_json("threads", "trip"), run_json("store", "search", "memories")
    confirmed = invoke("delete", "tri", stdin="y\n")

    assert declined.exit_code == 1
    assert (
        "Delete 1 thread with 4 messages and 3 memories permanently: 'trip' (I pack a red tent)?"
        in declined.stderr
    )
    assert [len(rows_left) for rows_left in remaining] == [1, 3]
    assert confirmed.stdout.endswith(
        "deleted 1 thread with 4 messages and 3 memories: 'trip' (I pack a red tent)\n"
        "the deleted bytes have been removed from the file\n"
    )
    assert [item["namespace"][-1] for item in run_json("store", "search", "/")] == ["other"]
    assert read_thread_texts("trap")[0] == "a lagoon"
    assert b"red tent" not in b"".join(p.read_bytes() for p in db.parent.glob("x.db*"))


def test_delete_of_several_threads_deletes_all_or_none(db: Path, trip: str) -> None:
    """An unknown thread prevents the deletion; `--keep-memories` keeps the memories."""
    store_memories(db)
    run("fork", trip, "copy")
    unknown = invoke("delete", trip, "nope", "--yes")
    remaining = [info["thread_id"] for info in run_json("threads")]
    report = run_json("delete", trip, "copy", "trip", "--yes", "--keep-memories")

    assert "there is no thread 'nope'; run 'perdure threads' for a list" in str(unknown.exception)
    assert remaining == ["copy", trip]
    assert report == {"threads": [trip, "copy"], "messages": 8, "memories": 0, "clean": True}
    assert run_json("threads") == []
    assert len(run_json("store", "search", "memories")) == 3


# -- stats


def test_stats_count_threads_and_items(db: Path, trip: str) -> None:
    """One table has both, and a sentence about the version of SQLite."""
    store_memories(db)
    stats, shown = run_json("stats"), split_rows(run("stats"))
    line = next(row[1] for row in shown if row[0] == "wal_reset_bug")

    assert (stats["path"], stats["threads"], stats["checkpoints"]) == (str(db), 1, 6)
    assert (stats["messages"], stats["items"], stats["namespaces"]) == (4, 4, 4)
    assert stats["thread_bytes"] > 0 < stats["item_bytes"]
    assert [row[0] for row in shown] == list(stats)
    assert type(stats["wal_reset_bug"]) is bool
    assert line in ("no", f"present in SQLite {stats['sqlite_version']}; perdure works around it")


# -- errors


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("history nope", "there is no thread 'nope'; run 'perdure threads' for a list"),
        ("show nope", "there is no thread 'nope'; run 'perdure threads' for a list"),
        ("fork nope x", "there is no thread 'nope'; run 'perdure threads' for a list"),
        ("rewind nope --to 1", "there is no thread 'nope'; run 'perdure threads' for a list"),
        ("delete nope --yes", "there is no thread 'nope'; run 'perdure threads' for a list"),
        (
            "threads --limit 0",
            "Invalid value for '--limit': Input should be greater than or equal to 1",
        ),
        ("history t", "the thread prefix 't' is ambiguous: it matches trip, trap"),
        ("fork trip trip", "the thread 'trip' already exists"),
        ("stats --db no.db", "there is no database 'no.db' yet"),
    ],
)
def test_error_is_one_line_in_terms_of_commands(
    words: str, expected: str, trip: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """The exit code is 2, and stderr has one line without Python names."""
    say_on_thread("trap", "hello")
    message = run_and_read_error(*words.split(), capsys=capfd)

    assert expected in message.replace("trap, trip", "trip, trap")
    assert not re.search(r"\w\(\)|\b\w+=\w|\bb'", message)
    assert not Path("no.db").exists()


def test_history_as_json_escapes_control_characters(trip: str) -> None:
    """The output is valid JSON, also with characters that JSON need not escape."""
    put_messages("odd", [HumanMessage("a\u2028b\x1b\x9b\u202e", id="h")])
    shown = run("history", "odd", "--json")

    assert json.loads(shown)[0]["content"] == "a\u2028b\x1b\x9b\u202e"
    assert not re.search("[\x1b\x9b\u2028\u202e]", shown)


def test_waiting_and_unfinished_threads_are_marked(db: Path) -> None:
    """The status is printed in the list, with the tree and with the history."""
    say_on_thread("talk", "hello")
    with SQLiteCheckpointer.open(db) as saver:
        asking_graph(checkpointer=saver).invoke(
            {"said": "x"}, {"configurable": {"thread_id": "asks"}}
        )
        saver.copy_thread("talk", "cut")
        saver.rewind("cut", saver.checkpoints("cut", checkpoint_ns="")[-2].checkpoint_id)
    threads = {row["thread_id"]: row for row in run_json("threads")}
    table = split_rows(run("threads"))

    assert {name: row["status"] for name, row in threads.items()} == {
        "talk": "idle", "asks": "waiting", "cut": "unfinished"
    }  # fmt: skip
    assert (threads["asks"]["next"], threads["asks"]["waits_for_answers_to"]) == (
        ["part"],
        ["Sure?"],
    )
    assert [row[-1] for row in table] == [
        "status", "unfinished", "waiting", "idle"
    ]  # fmt: skip
    for command in ("show", "history"):
        assert "is waiting for an answer (at 'part': Sure?)" in invoke(command, "asks").output
        assert "has an unfinished run, which stopped " in invoke(command, "cut").output
        assert "waits" not in invoke(command, "talk").output
