"""`perdure import` of lines: messages in OpenAI's and in LangChain's forms."""

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


def test_both_forms_of_jsonl_say_the_same(tmp_path: Path) -> None:
    """A message a line, a conversation a line, and an array of either, tool calls and all."""
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


def test_jsonl_is_imported_once_and_grows(tmp_path: Path) -> None:
    """Again changes nothing, appended lines are new messages, and --prefix makes other threads."""
    file = tmp_path / "log.jsonl"
    loose = [{"role": m["role"], "content": f"line {n}"} for n, m in enumerate(TALK[:2] * 2)]
    told = [import_and_count(write_jsonl(file, loose[:count])) for count in (2, 2, 4)]
    told.append(import_and_count(file, "--prefix", "old/"))

    assert told == [(1, 2, 0), (1, 0, 1), (1, 2, 0), (1, 4, 0)]
    name = read_thread_id()
    assert read_thread_texts(name) == read_thread_texts(f"old/{name}") != []


def test_lines_of_several_threads_may_be_mixed(tmp_path: Path) -> None:
    """A log that many threads wrote to gives each of them its messages in order."""
    mixed = [{"thread_id": t, "role": "user", "content": f"{t}{n}"} for n in range(3) for t in "ab"]
    assert import_and_count(write_jsonl(tmp_path / "log.jsonl", mixed)) == (2, 6, 0)
    assert read_thread_texts("a") == ["human: a0", "human: a1", "human: a2"]


def test_functions_of_old_are_tools(tmp_path: Path) -> None:
    """An answer belongs to the newest call of its function that has none yet."""
    call = {"name": "depth", "arguments": '{"m": 1}'}
    asked = {"role": "assistant", "content": None, "function_call": call}
    told = [{"role": "function", "name": "depth", "content": f"{n} m"} for n in (2, 3)]
    run("import", str(write_jsonl(tmp_path / "t.jsonl", [USER, asked, told[0], asked, told[1]])))
    with SQLiteCheckpointer.open("x.db") as saver:
        found: list[Any] = [item.value for item in saver.history(read_thread_id())]

    assert [m.type for m in found] == ["human", "ai", "tool", "ai", "tool"]
    assert [m.tool_call_id for m in found[2::2]] == [m.tool_calls[0]["id"] for m in found[1::2]]
    assert found[2].tool_call_id != found[4].tool_call_id


# -- LangGraph's own JSON


def test_a_history_of_langgraphs_server_is_one_thread(tmp_path: Path) -> None:
    """Its states come newest first; each message has the time of the first state that has it."""
    states = [build_thread_state(count, day=day) for count, day in ((4, 3), (3, 2), (1, 1))]
    old = [{k: v for k, v in state.items() if k != "checkpoint"} for state in states]
    for each in old:
        each["config"] = {"configurable": {"thread_id": "old"}}
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
        found: list[Any] = store.search(("memories", "ann"))
        assert {f"{item.provenance.at:%Y}" for item in found} == {"2024"}


def fields_of(messages: Iterable[Any]) -> list[Any]:
    return [(m.type, m.content, m.id, getattr(m, "tool_calls", None)) for m in messages]


def test_every_form_of_a_langchain_message_is_read(tmp_path: Path) -> None:
    """The server's, that of messages_to_dict, that of dumpd, streamed chunks, and the two roles."""
    stated = build_thread_state(4)["values"]["messages"]
    as_data = [{"type": each["type"], "data": each} for each in stated]
    dumped = json.loads(dumps(messages_from_dict(as_data)))
    chunks = [{**m, "type": {"ai": "AIMessageChunk"}.get(m["type"], m["type"])} for m in stated]
    for each in dumped:
        del each["kwargs"]["type"]  # as JavaScript writes it, with the class alone
    none = [{**stated[1], "content": None}]
    assert import_and_count(
        write_json(tmp_path / "n.json", [{"thread_id": "n", "messages": none}])
    ) == (1, 1, 0)
    roles = [{"role": "human", "content": "How deep is it?"}, {"role": "ai", "content": "2 m"}]
    for number, messages in enumerate((stated, as_data, dumped, chunks)):
        whole = {"thread_id": "w", "messages": messages}
        loose = [{"thread_id": "l", **message} for message in messages]
        file = write_json(tmp_path / f"{number}.json", [whole, *loose])
        assert import_and_count(file, "--db", f"{number}.db") == (2, 8, 0)
        with SQLiteCheckpointer.open(f"{number}.db") as saver:
            told = [fields_of(item.value for item in saver.history(name)) for name in "wl"]
        assert told[0] == told[1] == fields_of(messages_from_dict(as_data))
    assert import_and_count(
        write_json(tmp_path / "r.json", [{"thread_id": "r", "messages": roles}])
    ) == (1, 2, 0)
    assert read_thread_texts("r") == ["human: How deep is it?", "ai: 2 m"]


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
    run("import", str(write_jsonl(tmp_path / "t.jsonl", [{"thread_id": "t", **message}])))
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
        ('{"role": "function", "name": "f", "content": "x"}', "the result of a function"),
        ('{"role": "assistant", "content": "", "tool_calls": [{}]}', "malformed message (tool_"),
        (
            '{"thread_id": "t", "role": "user", "content": "other", "id": "u"}',
            "has the id of another",
        ),
        ('{"thread_id": "n", "messages": 5}', "'messages' is not a list"),
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
    found = import_and_read_problems("bad.jsonl")

    assert [reason[: len(why)] for reason, _ in found] == [why]
    assert read_thread_texts("t") == ["human: says u", "human: says u1"]


def test_a_thread_may_go_on_on_a_later_line(tmp_path: Path) -> None:
    """The longer one is the thread; the same again is no fault, and another one is a branch."""
    talk = [{"role": "user", "content": str(n)} for n in range(4)]
    found = [{"thread_id": "t", "messages": talk[:count]} for count in (2, 2, 4)]
    other = {"thread_id": "t", "messages": [{"role": "user", "content": "other"}]}

    assert import_and_count(write_jsonl(tmp_path / "c.jsonl", found)) == (1, 4, 0)
    assert read_thread_texts("t") == ["human: 0", "human: 1", "human: 2", "human: 3"]
    assert import_and_count(write_jsonl(tmp_path / "c.jsonl", [*found, other])) == (1, 1, 0)
    assert read_thread_texts("t") == ["human: other"]
    with SQLiteCheckpointer.open("x.db") as saver:
        branch = [item.value.text for item in saver.history("t") if item.branch]
    assert branch == ["0", "1", "2", "3"]
