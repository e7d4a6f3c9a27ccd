"""`perdure import` of lines with messages in the forms of OpenAI and LangChain."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from langchain_core.load import dumps
from langchain_core.messages import messages_from_dict

from perdure.checkpointers import SQLiteCheckpointer
from perdure.stores import SQLiteStore
from tests.cli.commands import run, run_json
from tests.cli.exports import (
    START,
    build_thread_state,
    write_json,
    write_jsonl,
)
from tests.cli.imported import (
    TALK,
    USER,
    import_and_count,
    import_and_read_problems,
    read_thread_id,
    read_thread_texts,
)


def test_jsonl_of_messages_equals_jsonl_of_conversations(tmp_path: Path) -> None:
    """A message or a conversation per line, and an array of either, give the same thread."""
    loose = [{"thread_id": "t", **message} for message in TALK]
    whole = {"thread_id": "t", "messages": TALK}
    files = [
        *(write_jsonl(tmp_path / "1.jsonl", [whole]), write_jsonl(tmp_path / "2.jsonl", loose)),
        *(write_json(tmp_path / "3.json", [whole]), write_json(tmp_path / "4.json", loose)),
    ]
    for file in files:
        assert import_and_count(file, "--db", f"{file.stem}.db") == (1, 6, 0)
        with SQLiteCheckpointer.open(f"{file.stem}.db") as saver:
            talk = [item.value for item in saver.history("t")]
        assert [m.type for m in talk] == ["system", "human", "ai", "tool", "ai", "human"]
        assert talk[2].tool_calls[0]["args"] == {"m": 1}
        assert talk[3].tool_call_id == talk[2].tool_calls[0]["id"] == "call-1"


def test_repeated_jsonl_import_adds_only_appended_lines(tmp_path: Path) -> None:
    """An unchanged file adds nothing, and --prefix makes other threads."""
    file = tmp_path / "log.jsonl"
    loose = [{"role": m["role"], "content": f"line {n}"} for n, m in enumerate(TALK[:2] * 2)]
    counts = [import_and_count(write_jsonl(file, loose[:count])) for count in (2, 2, 4)]
    counts.append(import_and_count(file, "--prefix", "old/"))

    assert counts == [(1, 2, 0), (1, 0, 1), (1, 2, 0), (1, 4, 0)]
    name = read_thread_id()
    assert read_thread_texts(name) == read_thread_texts(f"old/{name}") != []


def test_lines_of_several_threads_may_be_mixed(tmp_path: Path) -> None:
    """Each thread gets its messages in the order of the log."""
    mixed = [{"thread_id": t, "role": "user", "content": f"{t}{n}"} for n in range(3) for t in "ab"]
    assert import_and_count(write_jsonl(tmp_path / "log.jsonl", mixed)) == (2, 6, 0)
    assert read_thread_texts("a") == ["human: a0", "human: a1", "human: a2"]


def test_legacy_function_calls_are_imported_as_tool_calls(tmp_path: Path) -> None:
    """A result belongs to the newest call of its function that has no result yet."""
    call = {"name": "depth", "arguments": '{"m": 1}'}
    call_message = {"role": "assistant", "content": None, "function_call": call}
    results = [{"role": "function", "name": "depth", "content": f"{n} m"} for n in (2, 3)]
    run(
        "import",
        str(
            write_jsonl(
                tmp_path / "t.jsonl", [USER, call_message, results[0], call_message, results[1]]
            )
        ),
    )
    with SQLiteCheckpointer.open("x.db") as saver:
        messages: list[Any] = [item.value for item in saver.history(read_thread_id())]

    assert [m.type for m in messages] == ["human", "ai", "tool", "ai", "tool"]
    assert [m.tool_call_id for m in messages[2::2]] == [
        m.tool_calls[0]["id"] for m in messages[1::2]
    ]
    assert messages[2].tool_call_id != messages[4].tool_call_id


# -- LangGraph's own JSON


def test_state_history_of_langgraph_server_is_imported_as_one_thread(tmp_path: Path) -> None:
    """States are newest first; each message has the time of the first state that contains it."""
    states = [build_thread_state(count, day=day) for count, day in ((4, 3), (3, 2), (1, 1))]
    old = [{k: v for k, v in state.items() if k != "checkpoint"} for state in states]
    for old_state in old:
        old_state["config"] = {"configurable": {"thread_id": "old"}}
    thread = {"thread_id": "lg", "status": "idle", "values": {**states[0]["values"]}}
    thread |= {"created_at": "2024-05-01T10:00:00Z", "updated_at": "2024-05-03T10:00:00Z"}
    first = run_json("import", str(write_json(tmp_path / "history.json", states)))
    again = import_and_count(write_json(tmp_path / "threads.json", [thread]))

    assert (first["conversations"], first["messages"], first["users"]) == (1, 4, {"ann": 1})
    assert again == (1, 0, 1)
    assert import_and_count(write_json(tmp_path / "old.json", old)) == (1, 4, 0)
    assert read_thread_texts("old") == read_thread_texts("lg")
    assert read_thread_texts("lg") == [
        "human: How deep is it?",
        "ai: ",
        "tool: 2 m",
        "ai: Two metres.",
    ]
    with SQLiteCheckpointer.open("x.db") as saver:
        items = saver.history("lg")
        assert items[1].value.tool_calls[0]["args"] == {"m": 1}
        assert [f"{item.stored_at:%d}" for item in items] == ["01", "02", "02", "03"]
        assert f"{saver.thread('lg').active_at:%Y-%m-%d}" == "2024-05-03"
    with SQLiteStore.open("x.db") as store:
        memories: list[Any] = store.search(("memories", "ann"))
        assert {f"{item.provenance.at:%Y}" for item in memories} == {"2024"}


def get_message_fields(messages: Iterable[Any]) -> list[Any]:
    return [(m.type, m.content, m.id, getattr(m, "tool_calls", None)) for m in messages]


def test_every_json_form_of_langchain_messages_is_imported(tmp_path: Path) -> None:
    """The forms are the server's, `messages_to_dict`, `dumpd`, chunks, and roles human and ai."""
    server_form = build_thread_state(4)["values"]["messages"]
    as_data = [{"type": message_json["type"], "data": message_json} for message_json in server_form]
    dumped = json.loads(dumps(messages_from_dict(as_data)))
    chunks = [
        {**m, "type": {"ai": "AIMessageChunk"}.get(m["type"], m["type"])} for m in server_form
    ]
    for message_json in dumped:
        del message_json["kwargs"]["type"]  # as JavaScript writes it, with the class alone
    none = [{**server_form[1], "content": None}]
    assert import_and_count(
        write_json(tmp_path / "n.json", [{"thread_id": "n", "messages": none}])
    ) == (1, 1, 0)
    roles = [{"role": "human", "content": "How deep is it?"}, {"role": "ai", "content": "2 m"}]
    for number, messages in enumerate((server_form, as_data, dumped, chunks)):
        whole = {"thread_id": "w", "messages": messages}
        loose = [{"thread_id": "l", **message} for message in messages]
        file = write_json(tmp_path / f"{number}.json", [whole, *loose])
        assert import_and_count(file, "--db", f"{number}.db") == (2, 8, 0)
        with SQLiteCheckpointer.open(f"{number}.db") as saver:
            field_lists = [
                get_message_fields(item.value for item in saver.history(name)) for name in "wl"
            ]
        assert field_lists[0] == field_lists[1] == get_message_fields(messages_from_dict(as_data))
    assert import_and_count(
        write_json(tmp_path / "r.json", [{"thread_id": "r", "messages": roles}])
    ) == (1, 2, 0)
    assert read_thread_texts("r") == ["human: How deep is it?", "ai: 2 m"]


@pytest.mark.parametrize(
    "time_fields",
    [
        *({"timestamp": START}, {"timestamp": START * 1000}, {"created_at": START}),
        *({"created_at": "2023-11-14T22:13:20Z"}, {"timestamp": str(int(START))}),
        {"additional_kwargs": {"timestamp": START}},
    ],
)
@pytest.mark.parametrize("role_fields", [{"role": "user"}, {"type": "human"}])
def test_time_of_message_is_read_from_any_known_field(
    time_fields: Any, role_fields: Any, tmp_path: Path
) -> None:
    """The time is in seconds, milliseconds or ISO 8601."""
    message = {**role_fields, "content": "I live in Ghent", **time_fields}
    run("import", str(write_jsonl(tmp_path / "t.jsonl", [{"thread_id": "t", **message}])))
    with SQLiteStore.open("x.db") as store:
        (item,) = store.search(("memories", "me"))
    with SQLiteCheckpointer.open("x.db") as saver:
        (stored,) = saver.history("t")
        assert (stored.stored_at.timestamp(), stored.value.text) == (START, "I live in Ghent")
        assert saver.thread("t").active_at.timestamp() == START
    assert item.provenance is not None
    assert item.provenance.at == stored.stored_at


@pytest.mark.parametrize(
    ("line", "expected_reason"),
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
        ('{"role": "function", "name": "f", "content": "x"}', "the message is a function result"),
        ('{"role": "assistant", "content": "", "tool_calls": [{}]}', "malformed message (tool_"),
        (
            '{"thread_id": "t", "role": "user", "content": "other", "id": "u"}',
            "has the id of another",
        ),
        ('{"thread_id": "n", "messages": 5}', "'messages' is not a list"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_bad_line_is_named_and_other_lines_are_imported(
    line: str, expected_reason: str, tmp_path: Path
) -> None:
    """A message with the id of another message is bad as well."""
    good = [
        {"thread_id": "t", "id": f"u{n or ''}", "role": "user", "content": n} for n in ("", "1")
    ]
    first, last = (json.dumps({**message, "content": f"says {message['id']}"}) for message in good)
    (tmp_path / "bad.jsonl").write_text(f"{first}\n{line}\n\n{last}\n")
    problems = import_and_read_problems("bad.jsonl")

    assert [reason[: len(expected_reason)] for reason, _ in problems] == [expected_reason]
    assert read_thread_texts("t") == ["human: says u", "human: says u1"]


def test_thread_may_continue_on_a_later_line(tmp_path: Path) -> None:
    """The longest line is the thread; an equal line is no error, another one is a branch."""
    talk = [{"role": "user", "content": str(n)} for n in range(4)]
    conversations = [{"thread_id": "t", "messages": talk[:count]} for count in (2, 2, 4)]
    other = {"thread_id": "t", "messages": [{"role": "user", "content": "other"}]}

    assert import_and_count(write_jsonl(tmp_path / "c.jsonl", conversations)) == (1, 4, 0)
    assert read_thread_texts("t") == ["human: 0", "human: 1", "human: 2", "human: 3"]
    assert import_and_count(write_jsonl(tmp_path / "c.jsonl", [*conversations, other])) == (1, 1, 0)
    assert read_thread_texts("t") == ["human: other"]
    with SQLiteCheckpointer.open("x.db") as saver:
        branch = [item.value.text for item in saver.history("t") if item.branch]
    assert branch == ["0", "1", "2", "3"]
