"""`import_from` another checkpointer: new, extended, refused, renamed and interrupted threads."""

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
from perdure.checkpointers.import_metadata import read_thread_head_or_raise
from perdure.checkpointers.thread_copy import DatabaseImport
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
def open_saver(tmp_path: Path) -> Any:
    """A function that opens a checkpointer of some kind in the folder `name`."""
    with ExitStack() as stack:

        def open_kind(kind: str, name: str) -> SQLiteCheckpointer:
            folder = tmp_path / name
            folder.mkdir(exist_ok=True)
            return stack.enter_context(backends.BACKENDS[kind](folder))

        yield open_kind


def run_turns(saver: SQLiteCheckpointer, thread: str, *texts: str) -> None:
    """Run turns of a graph that has a subgraph and uses `Send`."""
    config: Any = {"configurable": {"thread_id": thread}, "metadata": {"user": "u1"}}
    for text in texts:
        compile_graph(saver).invoke({"messages": [("human", text)]}, config)


def fork_thread(saver: SQLiteCheckpointer, thread: str) -> None:
    """Fork a thread; the fork becomes its head."""
    early = list(compile_graph(saver).get_state_history({"configurable": {"thread_id": thread}}))[
        3
    ].config
    compile_graph(saver).update_state(early, {"messages": [("human", "a fork")]}, as_node="sub")


def read_all_threads(saver: SQLiteCheckpointer) -> list[Any]:
    """Return everything that can be read from all threads."""
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
        {t.thread_id: read_thread_head_or_raise(saver, t.thread_id).title for t in threads},
    ]


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_import_copies_new_threads_completely_and_only_once(
    source: str, target: str, open_saver: Any
) -> None:
    """Branches, times, subgraphs, interrupts and pruned threads are copied. A second import copies
    nothing.
    """
    old, new = open_saver(source, "old"), open_saver(target, "new")
    run_turns(old, "a", "one", "two")
    fork_thread(old, "a")
    run_turns(old, "waits", "well?")
    run_turns(old, "pruned", "one", "two")
    old.prune(["pruned"], strategy="keep_latest")
    put(new, {"x": 1}, thread="here", uid="1")

    first, second = new.import_from(old), new.import_from(old)

    assert (first.threads, first.unchanged, first.skipped) == (3, 0, 0)
    assert (second.threads, second.unchanged, second.checkpoints) == (3, 3, 0)
    new.delete_thread("here")
    assert read_all_threads(old) == read_all_threads(new)
    for saver in (old, new):
        compile_graph(saver).invoke(
            Command(resume="this"), {"configurable": {"thread_id": "waits"}}
        )
        assert [i.value.text for i in saver.history("waits")] == ["well?", "this"]


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_import_extends_threads_that_continued_in_the_source(
    source: str, target: str, open_saver: Any
) -> None:
    """A thread that continued in the target stays as it is. One thread waits for an answer."""
    old, new = open_saver(source, "old"), open_saver(target, "new")
    for thread in ("there", "here", "waits"):
        run_turns(old, thread, "one" if thread != "waits" else "well?")
    new.import_from(old)
    run_turns(old, "there", "two")
    fork_thread(old, "there")
    compile_graph(old).invoke(Command(resume="this"), {"configurable": {"thread_id": "waits"}})
    run_turns(new, "here", "three")
    new.get_tuple(config_at("there"))
    texts_before = [i.value.text for i in new.history("here")]

    report = new.import_from(old)

    assert (report.threads, report.unchanged) == (3, 1)
    assert texts_before == [i.value.text for i in new.history("here")]
    for saver in (old, new):
        saver.delete_thread("here")
        run_turns(saver, "there", "four")
    assert [i.value.text for i in old.history("there")] == [
        i.value.text for i in new.history("there")
    ]
    assert old.head("waits") == new.head("waits")


def test_import_refuses_threads_that_continued_on_both_sides(open_saver: Any) -> None:
    """The error names the thread, which is unchanged. Other threads are imported, and the refused
    thread can be imported under a new id.
    """
    old, new = open_saver("file", "old"), open_saver("sealed", "new")
    run_turns(old, "both", "one")
    new.import_from(old)
    run_turns(old, "both", "two")
    run_turns(old, "other", "one")
    run_turns(new, "both", "three")
    before = new.history("both")

    expected = r"^1 of 2 threads .* neither version continues the other: 'both'\. "
    with pytest.raises(ImportFailed, match=expected):
        new.import_from(old)
    assert before == new.history("both")
    assert new.history("other") == old.history("other")
    for unchanged in (1, 2):
        assert new.import_from(old, names={"both": "both too"}).unchanged == unchanged
    assert (before, old.history("both")) == (new.history("both"), new.history("both too"))
    for names, expected_error in (({"none": "x"}, "no thread 'none'"), ({"both": ""}, "thread_id")):
        with pytest.raises(Exception, match=expected_error):
            new.import_from(old, names=names)
    with pytest.raises(ConfigurationError, match="requires an open checkpointer as the source"):
        new.import_from("old.sqlite", names={"both": "x"})


@pytest.mark.parametrize("change", ["prune", "erase", "rewind"])
def test_import_does_not_restore_checkpoints_removed_in_the_target(
    change: str, open_saver: Any
) -> None:
    """A thread that was pruned, erased or rewound in the target is refused."""
    old, new = open_saver("file", "old"), open_saver("file", "new")
    run_turns(old, "t", "one", "two")
    new.import_from(old)
    if change == "prune":
        new.prune(["t"], strategy="keep_latest")
    elif change == "erase":
        new.erase("t", [new.history("t")[0].value.id])
    else:
        new.rewind("t", new.checkpoints("t", checkpoint_ns="")[3].checkpoint_id)
    before = read_all_threads(new)

    with pytest.raises(ImportFailed, match="'t'"):
        new.import_from(old)
    assert before == read_all_threads(new)


@pytest.mark.parametrize("rewound", ["old", "new"])
def test_import_refuses_thread_rewound_on_one_side_and_continued_on_other(
    rewound: str, open_saver: Any
) -> None:
    """The rewind is not undone by checkpoints that the other side added."""
    savers = {"old": open_saver("file", "old"), "new": open_saver("sealed", "new")}
    old, new = savers["old"], savers["new"]
    for number in range(4):
        put(old, {"n": number}, config_at(uid=f"{number - 1}") if number else None, uid=f"{number}")
    new.import_from(old)
    savers[rewound].rewind("t", "1")
    other = new if rewound == "old" else old
    put(other, {"n": 4}, config_at(uid="3"), uid="4")
    before = read_all_threads(new)

    with pytest.raises(ImportFailed, match="'t'"):
        new.import_from(old)
    assert before == read_all_threads(new)


def test_import_extends_thread_that_was_rewound_before_first_merge(open_saver: Any) -> None:
    """The thread continues from the checkpoint to which it was rewound."""
    old, new = open_saver("file", "old"), open_saver("sealed", "new")
    for number in range(3):
        put(old, {"n": number}, config_at(uid=f"{number - 1}") if number else None, uid=f"{number}")
    old.rewind("t", "1")
    new.import_from(old)
    put(old, {"n": 3}, config_at(uid="1"), uid="3")

    assert new.import_from(old).checkpoints == 1
    assert read_all_threads(old) == read_all_threads(new)


@pytest.mark.parametrize("names", [{"a": "x", "b": "x"}, {"a": "b"}])
def test_import_refuses_names_that_map_two_threads_to_one(
    names: dict[str, str], open_saver: Any
) -> None:
    """Nothing is imported after this error."""
    old, new = open_saver("file", "old"), open_saver("file", "new")
    for thread in "ab":
        put(old, {"n": 1}, thread=thread, uid="1")

    with pytest.raises(ConfigurationError, match="two threads"):
        new.import_from(old, names=names)
    assert new.threads() == []
    assert new.import_from(old, names={"a": "b", "b": "a"}).threads == 2


class Killed(BaseException):
    """An error that ends an import in the middle of a write, as SIGKILL does."""


@pytest.mark.parametrize("target", ["file", "postgres"])
def test_import_interrupted_at_any_statement_can_be_repeated(
    target: str, open_saver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an interruption each thread is unchanged or complete. A second import finishes."""
    old, new = open_saver("file", "old"), open_saver(target, "new")
    run_turns(old, "a", "one")
    new.import_from(old)
    run_turns(old, "a", "two")
    run_turns(old, "b", "one")
    before, write, statement_count = read_all_threads(new), new.database.write, 0

    def fail_after(stops: int) -> Callable[..., Any]:
        def write_until_killed(make: Callable[[], Any], *args: Any, **options: Any) -> Any:
            def limited_flow() -> Any:
                remaining, steps, answer = stops, make(), None
                try:
                    while True:
                        statement = steps.send(answer)
                        if not remaining:
                            raise Killed
                        remaining -= 1
                        answer = yield statement
                except StopIteration as done:
                    return done.value

            return write(limited_flow, *args, **options)

        return write_until_killed

    for statement_count in range(0, 400, 5):
        with monkeypatch.context() as patch, suppress(Killed):
            patch.setattr(new.database, "write", fail_after(statement_count))
            new.import_from(old)
            break
        if not new.history("a")[2:]:
            assert before == read_all_threads(new)
    assert statement_count > 20
    assert read_all_threads(old) == read_all_threads(new)


@pytest.mark.repeats
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    steps=st.lists(
        st.tuples(st.sampled_from("ab"), st.sampled_from(["turn", "fork", "edit"])), max_size=8
    ),
    import_at=st.integers(0, 8),
)
def test_repeated_import_makes_random_threads_equal(
    steps: list[tuple[str, str]], import_at: int, tmp_path: Path
) -> None:
    """Both databases are equal after a second import, whatever was put around the first one."""
    with (
        SQLiteCheckpointer.open(":memory:") as old,
        SQLiteCheckpointer.open(":memory:", key=bytes(32)) as new,
    ):
        for number, (thread, step) in enumerate(steps):
            if number == import_at:
                new.import_from(old)
            messages = [HumanMessage(f"m{n}", id=f"{n}") for n in range(number, number + 3)]
            infos = old.checkpoints(thread) if any(t == thread for t, _ in steps[:number]) else []
            parents = [info.checkpoint_id for info in infos]
            parent = (
                config_at(thread, "", parents[-1 if step == "fork" else 0]) if parents else None
            )
            metadata = {"source": "fork" if step == "fork" else "loop"}
            values = {"messages": messages[: 1 if step == "edit" else 3], "n": number}
            put(
                old,
                values,
                parent if infos else None,
                thread=thread,
                uid=f"{number}",
                metadata=metadata,
            )
        new.import_from(old)
        assert read_all_threads(old) == read_all_threads(new)


def test_import_copies_items_without_decoding_them(open_saver: Any, monkeypatch: Any) -> None:
    """Items of classes that cannot be rebuilt here arrive with the same bytes."""
    old, new = open_saver("file", "old"), open_saver("file", "new")
    run_turns(old, "t", "one")
    with monkeypatch.context() as patch:
        for name in ("value", "values"):
            patch.setattr(new._codec, name, None, raising=False)
        new.import_from(old)
    assert read_all_checkpoints(old) == read_all_checkpoints(new)


def test_aimport_from_imports_the_same_as_import_from(open_saver: Any) -> None:
    """The async method imports all threads."""
    old, new = open_saver("file", "old"), open_saver("file", "new")
    run_turns(old, "t", "one")

    report = asyncio.run(new.aimport_from(old))

    assert (report.threads, read_all_threads(old)) == (1, read_all_threads(new))


@pytest.mark.parametrize("is_known", [False, True])
def test_import_skips_messages_erased_in_source_meanwhile(
    open_saver: Any, monkeypatch: pytest.MonkeyPatch, is_known: bool
) -> None:
    """A new thread is read again. If the target had the thread before, the import is refused."""
    source, target = open_saver("file", "there"), open_saver("file", "here")
    message = HumanMessage("what is erased while it is copied", id="m0")
    first = put(source, {"messages": [HumanMessage("first", id="m1")]})
    if is_known:
        target.import_from(source)
    put(source, {"messages": [HumanMessage("first", id="m1"), message]}, first)
    write = DatabaseImport._write_thread_unless_rejected

    def write_then_erase(self: DatabaseImport, *args: Any) -> Any:
        result = write(self, *args)
        source.erase("t", ["m0"])
        monkeypatch.setattr(DatabaseImport, "_write_thread_unless_rejected", write)
        return result

    monkeypatch.setattr(DatabaseImport, "_write_thread_unless_rejected", write_then_erase)
    if is_known:
        with pytest.raises(
            ImportFailed,
            match="erase the same data from the imported thread 't'",
        ):
            target.import_from(source)
        return
    target.import_from(source)

    assert [item.value.id for item in target.history("t")] == ["m1"]
