"""Each `a…` method returns the same as its blocking twin."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

import pytest
from langchain_core.messages import HumanMessage

from perdure.checkpointers import Retention, SQLiteCheckpointer
from perdure.errors import PerdureError
from tests.contracts.puts import config_at, put, render_with_types

Saver = SQLiteCheckpointer


def put_thread(saver: Saver, number: int) -> None:
    """Put a thread `t<number>` that has a fork and a subgraph, and is equal for every number."""
    name, parent, messages = f"t{number}", None, [HumanMessage(str(i), id=str(i)) for i in range(4)]
    for i in range(4):
        metadata = {"source": "loop" if i % 2 else "input", "run_id": f"run {number} {i // 2}"}
        values = {"messages": messages[max(0, i - 1) : i + 1]}
        parent = put(saver, values, parent, thread=name, uid=f"c{i}", metadata=metadata)
        saver.put_writes(parent, [("n", i)], "task")
    put(saver, {"n": 1}, thread=name, ns="sub", uid="below")


def render_thread(saver: Saver, number: int) -> Any:
    """Render everything that can be read from a thread, except its name and times."""
    name = f"t{number}"
    if name not in {info.thread_id for info in saver.threads()}:
        return None
    text = render_with_types(
        [
            [(i.checkpoint_id, i.parent_id, i.is_head) for i in saver.checkpoints(name)],
            [record.checkpoint["channel_values"] for record in saver.list(config_at(name))],
            [record.pending_writes for record in saver.list(config_at(name))],
            [(item.value, item.seen) for item in saver.history(name)],
            saver.thread(name).items,
        ]
    )
    return text.replace(name, "t")


CHANGING_CALLS: list[Callable[[int], tuple[str, tuple[Any, ...], dict[str, Any]]]] = [
    lambda n: ("delete_thread", (f"t{n}",), {}),
    lambda n: ("delete_for_runs", ([f"run {n} 1"],), {}),
    lambda n: ("copy_thread", (f"t{n}", f"copy{n}"), {}),
    lambda n: ("copy_thread", (f"t{n}", f"copy{n}"), {"checkpoint_id": "c1"}),
    lambda n: ("copy_thread", ("nobody", f"copy{n}"), {}),
    lambda n: ("prune", ([f"t{n}"],), {}),
    lambda n: ("prune", ([f"t{n}"],), {"strategy": "delete"}),
    lambda n: ("prune", ([f"t{n}"],), {"strategy": "delete_all"}),
    lambda n: ("prune", ([f"t{n}"],), {"strategy": "no such"}),
    lambda n: ("retain", (Retention(last=2),), {"thread_ids": [f"t{n}"]}),
    lambda n: ("retain", (Retention(),), {}),
    lambda n: ("erase", (f"t{n}", ["1"]), {}),
    lambda n: ("erase", (f"t{n}",), {}),
    lambda n: ("erase", (f"t{n}", "1"), {}),
    lambda n: ("rewind", (f"t{n}", "c1"), {}),
    lambda n: ("rewind", (f"t{n}", "no such"), {"checkpoint_ns": "sub"}),
    lambda n: ("put_writes", (config_at(f"t{n}", "", "c3"), [("a", 1)], "new"), {"task_path": "p"}),
]
READING_CALLS: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("history", ("t0",), {}),
    ("history", ("t0",), {"checkpoint_id": "c1", "channel": "messages"}),
    ("history", ("t0",), {"checkpoint_ns": "nowhere"}),
    ("threads", (), {"limit": 1}),
    ("threads", (), {"after": "t1", "prefix": "t"}),
    ("thread", ("t0",), {}),
    ("thread", ("nobody",), {}),
    ("checkpoints", ("t0",), {"limit": 2}),
    ("checkpoints", ("t0",), {"checkpoint_ns": "sub"}),
    ("get_tuple", (config_at("t0"),), {}),
    ("get_tuple", (config_at("t0", "", "no such"),), {}),
    ("get_tuple", ({"configurable": {}},), {}),
    ("list", (config_at("t0"),), {"filter": {"source": "loop"}, "limit": 1}),
    ("list", (None,), {"before": config_at("t0", "", "c2")}),
    ("get_delta_channel_history", (), {"config": config_at("t0"), "channels": ["n", "messages"]}),
]


def call_blocking(saver: Saver, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    try:
        result = getattr(saver, name)(*args, **options)
        return list(result) if inspect.isgenerator(result) else result
    except PerdureError as exc:
        return (type(exc), str(exc))


def call_async(saver: Saver, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    async def await_call() -> Any:
        try:
            result = getattr(saver, f"a{name}")(*args, **options)
            return (
                [element async for element in result]
                if inspect.isasyncgen(result)
                else await result
            )
        except PerdureError as exc:
            return (type(exc), str(exc))

    return asyncio.run(await_call())


@pytest.mark.parametrize("call", READING_CALLS, ids=lambda call: call[0])
def test_async_reads_return_the_same_as_blocking_reads(
    saver: Saver, call: tuple[str, tuple[Any, ...], dict[str, Any]]
) -> None:
    """Errors are equal, too."""
    for number in range(2):
        put_thread(saver, number)

    assert call_blocking(saver, *call) == call_async(saver, *call)


@pytest.mark.parametrize("call", CHANGING_CALLS, ids=lambda call: call(0)[0])
def test_async_changes_have_the_same_effect_as_blocking_changes(
    saver: Saver, call: Callable[[int], tuple[str, tuple[Any, ...], dict[str, Any]]]
) -> None:
    """The stored changes, results and errors are equal."""
    for number in range(2):
        put_thread(saver, number)
    expected = (
        render_with_types(call_blocking(saver, *call(0)))
        .replace("copy0", "copy")
        .replace("t0", "t")
    )
    actual = (
        render_with_types(call_async(saver, *call(1))).replace("copy1", "copy").replace("t1", "t")
    )

    assert expected == actual
    assert render_thread(saver, 0) == render_thread(saver, 1)
    copied = [info.thread_id for info in saver.threads(prefix="copy")]
    assert len(copied) in (0, 2)
    if copied:
        assert [len(saver.checkpoints(name)) for name in copied[:1]] == [
            len(saver.checkpoints(name)) for name in copied[1:]
        ]


def test_every_public_method_has_an_async_twin_with_equal_signature() -> None:
    """This holds for every public method that uses the database."""
    exceptions = {"open", "from_conn_string", "setup", "get_next_version", "with_allowlist", "lock"}
    exceptions.add("aget_iter")  # the name under which langgraph's server calls `alist`
    exceptions.add("copy_context_values_to_metadata")  # does not use the database
    names = {
        name
        for name, member in inspect.getmembers(Saver, inspect.isroutine)
        if not name.startswith("_") and name not in exceptions
    }
    names_without_twin = {
        n for n in names if f"a{n}" not in names and not (n[0] == "a" and n[1:] in names)
    }

    assert names_without_twin == set()
    for name in sorted(n for n in names if f"a{n}" in names):
        plain, twin = (inspect.signature(getattr(Saver, n)) for n in (name, f"a{name}"))
        assert plain.parameters == twin.parameters, name
