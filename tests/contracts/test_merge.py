"""`import_from` of another checkpointer: equal, extended, refused, renamed and cut-off threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from langchain_core.messages import HumanMessage
from langgraph.types import Command

from perdure.checkpointers import SQLiteCheckpointer
from perdure.checkpointers.thread_copy import DatabaseMerge
from perdure.checkpointers.titles import read_existing_head
from perdure.errors import ConfigurationError, ImportFailed
from tests import backends
from tests.contracts.puts import config_at, put
from tests.contracts.test_import import compile_graph, read_all_checkpoints

PAIRS = [
    ("file", "file"),
    ("sealed", "file"),
    ("file", "postgres-sealed"),
    ("postgres", "sealed"),
]


@pytest.fixture
def opened(tmp_path: Path) -> Any:
    """Opens a checkpointer of a kind; the folder tells those of one kind apart."""
    with ExitStack() as stack:

        def made(kind: str, name: str) -> SQLiteCheckpointer:
            folder = tmp_path / name
            folder.mkdir(exist_ok=True)
            return stack.enter_context(backends.BACKENDS[kind](folder))

        yield made


def talk(saver: SQLiteCheckpointer, thread: str, *texts: str) -> None:
    """Turns of a thread, with a subgraph and sends."""
    config: Any = {"configurable": {"thread_id": thread}, "metadata": {"user": "u1"}}
    for text in texts:
        compile_graph(saver).invoke({"messages": [("human", text)]}, config)


def fork(saver: SQLiteCheckpointer, thread: str) -> None:
    """A branch of a thread, which becomes its head."""
    early = list(compile_graph(saver).get_state_history({"configurable": {"thread_id": thread}}))[
        3
    ].config
    compile_graph(saver).update_state(early, {"messages": [("human", "a fork")]}, as_node="sub")


def shape(saver: SQLiteCheckpointer) -> list[Any]:
    """All that can be read of the threads."""
    threads = sorted(saver.threads(), key=lambda info: info.thread_id)
    return [
        read_all_checkpoints(saver),
        [(t.thread_id, t.created_at, t.updated_at, t.checkpoints) for t in threads],
        [saver.history(t.thread_id) for t in threads],
        [
            sorted(saver.checkpoints(t.thread_id), key=lambda i: (i.checkpoint_ns, i.checkpoint_id))
            for t in threads
        ],
        sorted(str(t.config) for t in saver.list(None, filter={"user": "u1"})),
        {t.thread_id: read_existing_head(saver, t.thread_id).title for t in threads},
    ]


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_what_is_new_comes_whole_and_once(source: str, target: str, opened: Any) -> None:
    """Branches, times, subgraphs, an interrupt, pruned threads; the second time nothing changes."""
    old, new = opened(source, "old"), opened(target, "new")
    talk(old, "a", "one", "two")
    fork(old, "a")
    talk(old, "waits", "well?")
    talk(old, "pruned", "one", "two")
    old.prune(["pruned"], strategy="keep_latest")
    put(new, {"x": 1}, thread="here", uid="1")

    first, second = new.import_from(old), new.import_from(old)

    assert (first.threads, first.unchanged, first.skipped) == (3, 0, 0)
    assert (second.threads, second.unchanged, second.checkpoints) == (3, 3, 0)
    new.delete_thread("here")
    assert shape(old) == shape(new)
    for saver in (old, new):
        compile_graph(saver).invoke(
            Command(resume="this"), {"configurable": {"thread_id": "waits"}}
        )
        assert [i.value.text for i in saver.history("waits")] == ["well?", "this"]


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_a_thread_that_went_on_is_extended(source: str, target: str, opened: Any) -> None:
    """There: it becomes that one; here: it stays; also if it waited for an answer before."""
    old, new = opened(source, "old"), opened(target, "new")
    for thread in ("there", "here", "waits"):
        talk(old, thread, "one" if thread != "waits" else "well?")
    new.import_from(old)
    talk(old, "there", "two")
    fork(old, "there")
    compile_graph(old).invoke(Command(resume="this"), {"configurable": {"thread_id": "waits"}})
    talk(new, "here", "three")
    new.get_tuple(config_at("there"))
    ours = [i.value.text for i in new.history("here")]

    report = new.import_from(old)

    assert (report.threads, report.unchanged) == (3, 1)
    assert ours == [i.value.text for i in new.history("here")]
    for saver in (old, new):
        saver.delete_thread("here")
        talk(saver, "there", "four")
    assert [i.value.text for i in old.history("there")] == [
        i.value.text for i in new.history("there")
    ]
    assert old.head("waits") == new.head("waits")


def test_a_thread_that_went_on_in_both_is_refused(opened: Any) -> None:
    """By name, and nothing of it changes; the others come, and under a new id it comes too."""
    old, new = opened("file", "old"), opened("sealed", "new")
    talk(old, "both", "one")
    new.import_from(old)
    talk(old, "both", "two")
    talk(old, "other", "one")
    talk(new, "both", "three")
    before = new.history("both")

    expected = r"neither continues the other: 'both'\. Other threads imported: 1\."
    with pytest.raises(ImportFailed, match=expected):
        new.import_from(old)
    assert before == new.history("both")
    assert new.history("other") == old.history("other")
    for unchanged in (1, 2):
        assert new.import_from(old, names={"both": "both too"}).unchanged == unchanged
    assert (before, old.history("both")) == (new.history("both"), new.history("both too"))
    for names, told in (({"none": "x"}, "no thread 'none'"), ({"both": ""}, "thread_id")):
        with pytest.raises(Exception, match=told):
            new.import_from(old, names=names)
    with pytest.raises(ConfigurationError, match="names apply only to an open checkpointer"):
        new.import_from("old.sqlite", names={"both": "x"})


@pytest.mark.parametrize("change", ["prune", "erase", "rewind"])
def test_what_was_removed_here_does_not_come_back(change: str, opened: Any) -> None:
    """A thread that was pruned, erased or rewound here is another one than it was."""
    old, new = opened("file", "old"), opened("file", "new")
    talk(old, "t", "one", "two")
    new.import_from(old)
    if change == "prune":
        new.prune(["t"], strategy="keep_latest")
    elif change == "erase":
        new.erase("t", [new.history("t")[0].value.id])
    else:
        new.rewind("t", new.checkpoints("t", checkpoint_ns="")[3].checkpoint_id)
    before = shape(new)

    with pytest.raises(ImportFailed, match="'t'"):
        new.import_from(old)
    assert before == shape(new)


@pytest.mark.parametrize("rewound", ["old", "new"])
def test_a_thread_that_was_rewound_in_one_and_went_on_in_the_other_is_refused(
    rewound: str, opened: Any
) -> None:
    """Where a thread goes on is not lost with what the other one says after it."""
    savers = {"old": opened("file", "old"), "new": opened("sealed", "new")}
    old, new = savers["old"], savers["new"]
    for number in range(4):
        put(old, {"n": number}, config_at(uid=f"{number - 1}") if number else None, uid=f"{number}")
    new.import_from(old)
    savers[rewound].rewind("t", "1")
    other = new if rewound == "old" else old
    put(other, {"n": 4}, config_at(uid="3"), uid="4")
    before = shape(new)

    with pytest.raises(ImportFailed, match="'t'"):
        new.import_from(old)
    assert before == shape(new)


def test_a_rewound_thread_goes_on_there(opened: Any) -> None:
    """Rewound before the first merge, and from there on."""
    old, new = opened("file", "old"), opened("sealed", "new")
    for number in range(3):
        put(old, {"n": number}, config_at(uid=f"{number - 1}") if number else None, uid=f"{number}")
    old.rewind("t", "1")
    new.import_from(old)
    put(old, {"n": 3}, config_at(uid="1"), uid="3")

    assert new.import_from(old).checkpoints == 1
    assert shape(old) == shape(new)


@pytest.mark.parametrize("names", [{"a": "x", "b": "x"}, {"a": "b"}])
def test_two_threads_cannot_become_one(names: dict[str, str], opened: Any) -> None:
    """Nothing is imported then."""
    old, new = opened("file", "old"), opened("file", "new")
    for thread in "ab":
        put(old, {"n": 1}, thread=thread, uid="1")

    with pytest.raises(ConfigurationError, match="two threads"):
        new.import_from(old, names=names)
    assert new.threads() == []
    assert new.import_from(old, names={"a": "b", "b": "a"}).threads == 2


class Killed(BaseException):
    """In the place of SIGKILL."""


@pytest.mark.parametrize("target", ["file", "postgres"])
def test_a_merge_that_was_cut_off_goes_on(
    target: str, opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every statement of a write: a thread is as before or whole, and then all is the same."""
    old, new = opened("file", "old"), opened(target, "new")
    talk(old, "a", "one")
    new.import_from(old)
    talk(old, "a", "two")
    talk(old, "b", "one")
    before, write, stops = shape(new), new.database.write, 0

    def cut_off(stops: int) -> Callable[..., Any]:
        def stopped(make: Callable[[], Any], *args: Any, **options: Any) -> Any:
            def flow() -> Any:
                left, steps, answer = stops, make(), None
                try:
                    while True:
                        statement = steps.send(answer)
                        if not left:
                            raise Killed
                        left -= 1
                        answer = yield statement
                except StopIteration as done:
                    return done.value

            return write(flow, *args, **options)

        return stopped

    for stops in range(0, 400, 5):
        with monkeypatch.context() as patch, suppress(Killed):
            patch.setattr(new.database, "write", cut_off(stops))
            new.import_from(old)
            break
        if not new.history("a")[2:]:
            assert before == shape(new)
    assert stops > 20
    assert shape(old) == shape(new)


@pytest.mark.repeats
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    steps=st.lists(
        st.tuples(st.sampled_from("ab"), st.sampled_from(["turn", "fork", "edit"])), max_size=8
    ),
    cut=st.integers(0, 8),
)
def test_random_threads_merge_to_the_same(
    steps: list[tuple[str, str]], cut: int, tmp_path: Path
) -> None:
    """Whatever was put before and after a first merge, the second one makes them equal."""
    with (
        SQLiteCheckpointer.open(":memory:") as old,
        SQLiteCheckpointer.open(":memory:", key=bytes(32)) as new,
    ):
        for number, (thread, step) in enumerate(steps):
            if number == cut:
                new.import_from(old)
            said = [HumanMessage(f"m{n}", id=f"{n}") for n in range(number, number + 3)]
            infos = old.checkpoints(thread) if any(t == thread for t, _ in steps[:number]) else []
            parents = [info.checkpoint_id for info in infos]
            parent = (
                config_at(thread, "", parents[-1 if step == "fork" else 0]) if parents else None
            )
            known = {"source": "fork" if step == "fork" else "loop"}
            values = {"messages": said[: 1 if step == "edit" else 3], "n": number}
            put(
                old,
                values,
                parent if infos else None,
                thread=thread,
                uid=f"{number}",
                metadata=known,
            )
        new.import_from(old)
        assert shape(old) == shape(new)


def test_what_has_no_class_here_arrives_whole(opened: Any, monkeypatch: Any) -> None:
    """Items are not decoded: those of a class that is not allowed are the same bytes there."""
    old, new = opened("file", "old"), opened("file", "new")
    talk(old, "t", "one")
    with monkeypatch.context() as patch:
        for name in ("value", "values"):
            patch.setattr(new._codec, name, None, raising=False)
        new.import_from(old)
    assert read_all_checkpoints(old) == read_all_checkpoints(new)


def test_the_async_form_does_the_same(opened: Any) -> None:
    """All threads come, as by the other one."""
    old, new = opened("file", "old"), opened("file", "new")
    talk(old, "t", "one")

    report = asyncio.run(new.aimport_from(old))

    assert (report.threads, shape(old)) == (1, shape(new))


@pytest.mark.parametrize("is_known", [False, True])
def test_what_is_erased_meanwhile_is_not_taken_over(
    opened: Any, monkeypatch: pytest.MonkeyPatch, is_known: bool
) -> None:
    """A new thread is read again; of one that was here before, the error tells that it has it."""
    there, here = opened("file", "there"), opened("file", "here")
    message = HumanMessage("what is erased while it is copied", id="m0")
    first = put(there, {"messages": [HumanMessage("first", id="m1")]})
    if is_known:
        here.import_from(there)
    put(there, {"messages": [HumanMessage("first", id="m1"), message]}, first)
    write = DatabaseMerge._write_new_records

    def erasing(self: DatabaseMerge, *args: Any) -> Any:
        done = write(self, *args)
        there.erase("t", ["m0"])
        monkeypatch.setattr(DatabaseMerge, "_write_new_records", write)
        return done

    monkeypatch.setattr(DatabaseMerge, "_write_new_records", erasing)
    if is_known:
        with pytest.raises(ImportFailed, match="erase it from thread 't' of this database as well"):
            here.import_from(there)
        return
    here.import_from(there)

    assert [item.value.id for item in here.history("t")] == ["m1"]
