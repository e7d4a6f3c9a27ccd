"""Any course of puts, edits, forks, copies, prunes and restarts, against a model of plain dicts."""

from __future__ import annotations

import copy
import itertools
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar
from uuid import UUID

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from langchain_core.messages import HumanMessage
from langgraph.checkpoint.base import CheckpointTuple, empty_checkpoint
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.serde.types import ERROR, INTERRUPT

from perdure.checkpointers import Retention, SQLiteCheckpointer
from tests.backends import KEY
from tests.contracts.model import EDITS, PAD, SPLIT, Edit, Line, Put, Talk, items_of
from tests.contracts.puts import checkpoint_id_of, config_at, list_checkpoint_ids, render_with_types
from tests.rounds import rounds

DAY = 86400.0

Edits = list[tuple[Edit, int]]
Kind = tuple[str, int]  # the metadata's source, and by how much its step is more than the parent's
small = st.integers(0, 7)
threads_ = st.sampled_from(["t0", "t1", "u0"])
spaces = st.sampled_from(["", "", "", "sub"])
kinds = st.sampled_from([*[("loop", 1)] * 5, ("input", 1), ("update", 1), ("fork", 1), ("loop", 3)])
edits = st.lists(st.tuples(st.sampled_from(EDITS), small), max_size=4)


class Clock:
    """Stands in for the module `time`; tells what it is told."""

    now = 1_700_000_000.0

    def time(self) -> float:
        return self.now


class Threads(RuleBasedStateMachine):
    """The rules; `key` is what the file is encrypted with."""

    key: ClassVar[bytes | None] = None

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.patch = pytest.MonkeyPatch()
        for module in ("writer", "maintenance", "thread_copy"):
            self.patch.setattr(f"perdure.checkpointers.{module}.time", self.clock)
        self.folder = tempfile.TemporaryDirectory()
        self.talks: dict[str, Talk] = {}
        self.read_by_id: set[tuple[str, str, str]] = set()
        self.memory = InMemorySaver()
        self.numbers = itertools.count(1)
        self.saver = self.open()

    def open(self) -> SQLiteCheckpointer:
        path = Path(self.folder.name) / "talks.db"
        return SQLiteCheckpointer.open(path, key=self.key, synchronous="normal")

    def teardown(self) -> None:
        try:
            self.everything_reads_back()
        finally:
            self.saver.close()
            self.folder.cleanup()
            self.patch.undo()

    # -- choosing

    def line(self, thread: str, ns: str) -> Line:
        talk = self.talks.get(thread)
        return (talk.lines.get(ns) if talk else None) or Line()

    def choose(self, thread: str, ns: str, n: int) -> str | None:
        """The head for 0, else any checkpoint of the line."""
        line = self.line(thread, ns)
        return list(line.puts)[n % len(line.puts)] if n and line.puts else line.head

    def each(self) -> Iterator[tuple[str, str, Line]]:
        for thread, talk in self.talks.items():
            for ns, line in talk.lines.items():
                yield thread, ns, line

    def has_updated_head(self, thread: str) -> bool:
        """Return whether a head is an update of the state.

        A run may still go on from the updated checkpoint, so retention keeps it for a day, and what
        the run writes there reaches the head. test_prunes_during_runs.py and
        test_updates_during_runs.py have models of that; this one does not know it.
        """
        lines = self.talks[thread].lines.values() if thread in self.talks else ()
        return any(
            line.head is not None and line.puts[line.head].metadata["source"] == "update"
            for line in lines
        )

    def note_read(self, thread: str, ns: str, uid: str) -> None:
        """A head that is looked at by its id tells nothing of a run that goes on from it."""
        if uid != self.line(thread, ns).head:
            self.read_by_id.add((thread, ns, uid))

    # -- putting

    @rule(
        thread=threads_,
        ns=spaces,
        on=small,
        edits=edits,
        mixed=small,
        kind=kinds,
        by_id=st.booleans(),
    )
    def put(
        self,
        thread: str,
        ns: str,
        on: int,
        edits: Edits,
        mixed: int,
        kind: Kind,
        by_id: bool,
    ) -> None:
        """A run's step: what was read is changed, in place too, and put upon it.

        A parent that is not the head was read by its id just now, which goes on from there on
        purpose, or it was read earlier: the run met a later one.
        """
        number = next(self.numbers)
        # ids that neither grow nor look alike: order is that of putting
        uid = str(UUID(int=(7 - mixed) << 64 | number)) if mixed % 2 else f"{9 - mixed}.{number}"
        parent = self.choose(thread, ns, on)
        if by_id and parent is not None:
            assert self.saver.get_tuple(config_at(thread, ns, parent)) is not None
            self.note_read(thread, ns, parent)
        self.step(thread, ns, parent, uid, edits, kind)

    @rule(thread=threads_, ns=spaces, which=small, edits=edits)
    def put_once_more(
        self,
        thread: str,
        ns: str,
        which: int,
        edits: Edits,
    ) -> None:
        """The same checkpoint, put again with other values, keeps its place."""
        uid = self.choose(thread, ns, which)
        puts = self.line(thread, ns).puts
        if uid is not None and (puts[uid].parent is None or puts[uid].parent in puts):
            self.step(thread, ns, puts[uid].parent, uid, edits, ("loop", 1))

    def step(
        self,
        thread: str,
        ns: str,
        parent: str | None,
        uid: str,
        edits: Edits,
        kind: Kind,
    ) -> None:
        before = self.line(thread, ns).puts[parent] if parent else None
        values = copy.deepcopy(before.checkpoint["channel_values"]) if before else {}
        versions = dict(before.checkpoint["channel_versions"]) if before else {}
        if before and kind[0] == "loop":  # as a run has it: what it was given, objects and all
            found = self.saver.get_tuple(config_at(thread, ns))
            if found is not None and checkpoint_id_of(found.config) == parent:
                values = found.checkpoint["channel_values"]
        changed = {edit(values, n) for edit, n in edits}
        # each put writes this channel, so that no update is merged with a run; that has a model of
        # its own in test_updates_during_runs.py
        values["turn"] = next(self.numbers)
        changed.add("turn")
        new_versions = {channel: next(self.numbers) for channel in sorted(changed)}
        checkpoint = empty_checkpoint()
        checkpoint["id"] = uid
        checkpoint["channel_values"] = values
        merged = {**versions, **new_versions}
        checkpoint["channel_versions"] = {c: v for c, v in merged.items() if c in values}
        checkpoint["versions_seen"] = {"node": dict(versions)}
        new: Any = {c: v for c, v in new_versions.items() if c in values}
        source, ahead = kind
        number = before.metadata["step"] + ahead if before else -1
        metadata: Any = {"source": source, "step": number}
        stored = copy.deepcopy(checkpoint)
        for saver in (self.saver, self.memory):
            saver.put(config_at(thread, ns, parent), copy.deepcopy(checkpoint), metadata, new)
        read = (thread, ns, parent or "")
        on_purpose = read in self.read_by_id
        self.read_by_id.discard(read)
        self.talk(thread).put(ns, parent, stored, metadata, self.clock.now, on_purpose=on_purpose)

    def talk(self, thread: str) -> Talk:
        now = self.clock.now
        talk = self.talks.setdefault(thread, Talk(next(self.numbers), now, now))
        talk.updated_at = max(talk.updated_at, now)
        return talk

    @rule(
        thread=threads_,
        ns=spaces,
        which=small,
        task=st.sampled_from(["task", "00000000-0000-0000-0000-000000000001"]),
        writes=st.one_of(
            st.lists(
                st.sampled_from(
                    [("n", 1), ("n", PAD), ("messages", [HumanMessage("text 1", id="m1")])]
                ),
                min_size=1,
                max_size=3,
            ),
            st.sampled_from([INTERRUPT, ERROR]).flatmap(
                lambda channel: st.tuples(st.just(channel), st.text(max_size=3)).map(lambda w: [w])
            ),
        ),
    )
    def put_writes(
        self, thread: str, ns: str, which: int, task: str, writes: list[tuple[str, Any]]
    ) -> None:
        """What a task wrote; what is there stays, but for interrupts and errors."""
        uid = self.choose(thread, ns, which)
        if uid is None or (uid != self.line(thread, ns).head and self.has_updated_head(thread)):
            return
        path = f"path of {task}"
        for saver in (self.saver, self.memory):
            saver.put_writes(config_at(thread, ns, uid), copy.deepcopy(writes), task, path)
        self.talk(thread).put_writes(ns, uid, task, writes)

    # -- deleting, copying, moving

    @rule(thread=threads_)
    def delete_thread(self, thread: str) -> None:
        """All of it is gone, and the name is free."""
        self.saver.delete_thread(thread)
        self.memory.delete_thread(thread)
        self.talks.pop(thread, None)

    @rule(thread=threads_, last=st.integers(0, 3), history=st.booleans())
    def retain_last(self, thread: str, last: int, history: bool) -> None:
        """The newest stay, and the head."""
        if self.has_updated_head(thread):
            return
        self.saver.retain(Retention(last=last, history=history), thread_ids=[thread])
        self.kept(thread, lambda line: list(line.puts)[::-1][:last], history=history)

    @rule(thread=threads_, days=st.sampled_from([0.5, 2.0]))
    def retain_days(self, thread: str, days: float) -> None:
        """The young stay, by the clock they were put under, and the head."""
        if self.has_updated_head(thread):
            return
        self.saver.retain(Retention(days=days), thread_ids=[thread])
        oldest = self.clock.now - days * DAY
        self.kept(thread, lambda line: {u for u, p in line.puts.items() if p.put_at >= oldest})

    @rule(thread=threads_)
    def retain_turns(self, thread: str) -> None:
        """What no step of a run followed stays."""

        def ends(line: Line) -> set[str]:
            inside = {p.parent for p in line.puts.values() if p.metadata["source"] == "loop"}
            return set(line.puts) - inside

        if self.has_updated_head(thread):
            return
        self.saver.retain(Retention(turns=True), thread_ids=[thread])
        self.kept(thread, ends)

    @rule(thread=threads_)
    def prune(self, thread: str) -> None:
        """Only the heads stay."""
        if self.has_updated_head(thread):
            return
        self.saver.prune([thread])
        self.kept(thread, lambda line: [])

    def kept(
        self, thread: str, which: Callable[[Line], Iterable[str]], *, history: bool = True
    ) -> None:
        if thread in self.talks:
            self.talks[thread].keep(which, history=history)

    @rule(source=threads_, copied=st.sampled_from(["u0", "u1"]), which=small)
    def copy_thread(self, source: str, copied: str, which: int) -> None:
        """All of a thread, or the way to one checkpoint, under another name."""
        if source not in self.talks or copied in self.talks:
            return
        uid = self.choose(source, "", which) if which else None
        self.saver.copy_thread(source, copied, checkpoint_id=uid)
        talk = copy.deepcopy(self.talks[source])
        talk.number, talk.updated_at = next(self.numbers), self.clock.now
        talk.like_langgraph = False
        if uid is not None:
            talk.cut(uid)
        self.talks[copied] = talk

    @rule(thread=threads_, ns=spaces, which=small)
    def rewind(self, thread: str, ns: str, which: int) -> None:
        """The next run starts from an older checkpoint."""
        uid = self.choose(thread, ns, which)
        if uid is not None:
            self.saver.rewind(thread, uid, checkpoint_ns=ns)
            self.talks[thread].lines[ns].head = uid

    @rule()
    def reopen(self) -> None:
        """The file is closed, and opened by who remembers nothing."""
        self.saver.close()
        self.saver = self.open()
        self.read_by_id.clear()

    @rule(days=st.sampled_from([-1.0, -0.0009765625, 0.375, 1.0]))
    def step_clock(self, days: float) -> None:
        """The clock is set."""
        self.clock.now += days * DAY

    # -- looking

    @invariant()
    def heads_lists_and_counts(self) -> None:
        """The cheap looks, after every step."""
        order = sorted(self.talks, key=lambda t: (-self.talks[t].updated_at, -self.talks[t].number))
        assert [
            (
                thread,
                sum(len(line.puts) for line in self.talks[thread].lines.values()),
                self.items(thread),
                self.talks[thread].created_at,
                self.talks[thread].updated_at,
                set(self.talks[thread].lines),
            )
            for thread in order
        ] == [
            (
                info.thread_id,
                info.checkpoints,
                info.items,
                info.created_at.timestamp(),
                info.updated_at.timestamp(),
                set(info.namespaces),
            )
            for info in self.saver.threads()
        ]
        for thread, ns, line in self.each():
            assert line.listed() == list_checkpoint_ids(self.saver, config_at(thread, ns))
            assert line.head is not None
            self.reads_back(thread, ns, line.head, self.saver.get_tuple(config_at(thread, ns)))

    def items(self, thread: str) -> int:
        """How many items it has, or what it tells of them if that may be right."""
        talk = self.talks[thread]
        items = self.saver.thread(thread).items
        possible = range(len(talk.log), len(talk.log | talk.referred) + 1)
        return items if items in possible else len(talk.log)

    @rule()
    def look_at_everything(self) -> None:
        """Every checkpoint, its history and the trees, whatever is remembered by now."""
        self.everything_reads_back()

    def everything_reads_back(self) -> None:
        for thread, ns, line in self.each():
            for uid in line.puts:
                config = config_at(thread, ns, uid)
                self.reads_back(thread, ns, uid, self.saver.get_tuple(config))
                self.note_read(thread, ns, uid)
                self.was_said(thread, ns, uid, line.puts[uid])
                if self.talks[thread].like_langgraph:
                    self.reads_back(thread, ns, uid, self.memory.get_tuple(config))
            self.was_said_on_branches(thread, ns, line)
        for thread, talk in self.talks.items():
            puts = [
                (put.order, uid, put.parent, ns, uid == line.head, uid not in line.trunk())
                for ns, line in talk.lines.items()
                for uid, put in line.puts.items()
            ]
            assert sorted(puts, reverse=True) == [
                (
                    *(info.order, info.checkpoint_id, info.parent_id, info.checkpoint_ns),
                    *(info.is_head, info.is_branch),
                )
                for info in self.saver.checkpoints(thread)
            ]

    def reads_back(self, thread: str, ns: str, uid: str, found: CheckpointTuple | None) -> None:
        put = self.talks[thread].lines[ns].puts[uid]
        writes = [
            (task, *write)
            for task in sorted(put.writes)
            for _, write in sorted(put.writes[task].items(), key=lambda each: each[0])
        ]
        assert found is not None
        assert uid == checkpoint_id_of(found.config)
        assert render_with_types(put.checkpoint["channel_values"]) == render_with_types(
            {c: found.checkpoint["channel_values"][c] for c in put.checkpoint["channel_values"]}
        )
        assert put.checkpoint == found.checkpoint
        assert put.metadata == found.metadata
        assert put.parent == (
            checkpoint_id_of(found.parent_config) if found.parent_config else None
        )
        assert render_with_types(writes) == render_with_types(found.pending_writes)

    def was_said(self, thread: str, ns: str, uid: str, put: Put) -> None:
        for channel in SPLIT:
            here = [i for _, i in items_of(channel, put.checkpoint["channel_values"].get(channel))]
            found = self.saver.history(thread, channel=channel, checkpoint_id=uid, checkpoint_ns=ns)
            assert [(item, item in here) for item in put.said.get(channel, [])] == [
                (
                    render_with_types(list(item.value) if channel == "facts" else item.value),
                    item.seen,
                )
                for item in found
            ]

    def was_said_on_branches(self, thread: str, ns: str, line: Line) -> None:
        assert line.head is not None
        for channel in SPLIT:
            head = self.saver.history(
                thread, channel=channel, checkpoint_id=line.head, checkpoint_ns=ns
            )
            found = self.saver.history(thread, channel=channel, checkpoint_ns=ns)
            branches = [item for item in found if item.branch]
            told = [
                render_with_types(list(i.value) if channel == "facts" else i.value)
                for i in branches
            ]
            elsewhere = {i for uid in line.tips() for i in line.puts[uid].said.get(channel, [])}
            assert render_with_types(
                [item for item in found if not item.branch]
            ) == render_with_types(head)
            assert sorted(elsewhere - set(line.puts[line.head].said.get(channel, []))) == sorted(
                told
            )
            assert not any(item.seen for item in branches)
            assert sorted({item.position for item in branches}) == [i.position for i in branches]


class SealedThreads(Threads):
    """The same in an encrypted file."""

    key = KEY


short = settings(max_examples=rounds(200), stateful_step_count=25)
TestThreads = Threads.TestCase
TestThreads.settings = short
TestSealedThreads = SealedThreads.TestCase
TestSealedThreads.settings = short
