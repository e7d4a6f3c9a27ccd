"""Random puts, edits, forks, copies, prunes and restarts agree with a model of plain dicts."""

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
from tests.contracts.model import (
    EDITS,
    PAD,
    SPLIT,
    Edit,
    NamespaceModel,
    Put,
    ThreadModel,
    render_items,
)
from tests.contracts.puts import checkpoint_id_of, config_at, list_checkpoint_ids, render_with_types
from tests.rounds import rounds

DAY = 86400.0

Edits = list[tuple[Edit, int]]
Kind = tuple[str, int]  # the metadata's source, and by how much its step is more than the parent's
small = st.integers(0, 7)
thread_ids = st.sampled_from(["t0", "t1", "u0"])
namespaces = st.sampled_from(["", "", "", "sub"])
kinds = st.sampled_from([*[("loop", 1)] * 5, ("input", 1), ("update", 1), ("fork", 1), ("loop", 3)])
edits = st.lists(st.tuples(st.sampled_from(EDITS), small), max_size=4)


class Clock:
    """A replacement of the module `time` that returns the time of the test."""

    now = 1_700_000_000.0

    def time(self) -> float:
        return self.now


class ThreadMachine(RuleBasedStateMachine):
    """The rules; `key` encrypts the file."""

    key: ClassVar[bytes | None] = None

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.patch = pytest.MonkeyPatch()
        for module in ("writer", "task_writes", "maintenance", "thread_copy"):
            self.patch.setattr(f"perdure.checkpointers.{module}.time", self.clock)
        self.folder = tempfile.TemporaryDirectory()
        self.models: dict[str, ThreadModel] = {}
        self.read_by_id: set[tuple[str, str, str]] = set()
        self.memory = InMemorySaver()
        self.numbers = itertools.count(1)
        self.saver = self.open_saver()

    def open_saver(self) -> SQLiteCheckpointer:
        path = Path(self.folder.name) / "talks.db"
        return SQLiteCheckpointer.open(path, key=self.key, synchronous="normal")

    def teardown(self) -> None:
        try:
            self.check_everything()
        finally:
            self.saver.close()
            self.folder.cleanup()
            self.patch.undo()

    # -- choosing

    def get_namespace(self, thread: str, ns: str) -> NamespaceModel:
        model = self.models.get(thread)
        return (model.namespaces.get(ns) if model else None) or NamespaceModel()

    def choose_checkpoint(self, thread: str, ns: str, n: int) -> str | None:
        """Return the head for 0, otherwise any checkpoint of the namespace."""
        namespace = self.get_namespace(thread, ns)
        return (
            list(namespace.puts)[n % len(namespace.puts)]
            if n and namespace.puts
            else namespace.head
        )

    def iter_namespaces(self) -> Iterator[tuple[str, str, NamespaceModel]]:
        for thread, model in self.models.items():
            for ns, namespace in model.namespaces.items():
                yield thread, ns, namespace

    def has_updated_head(self, thread: str) -> bool:
        """Return whether a head is an update of the state.

        A run may still continue from the updated checkpoint, so retention keeps it for a day, and
        the writes of the run reach the head. This model does not cover that behaviour.
        test_prunes_during_runs.py and test_updates_during_runs.py have models of it.
        """
        namespace_models = self.models[thread].namespaces.values() if thread in self.models else ()
        return any(
            namespace.head is not None
            and namespace.puts[namespace.head].metadata["source"] == "update"
            for namespace in namespace_models
        )

    def record_read_by_id(self, thread: str, ns: str, uid: str) -> None:
        """Record a read by id, except of a head, from which any run may continue."""
        if uid != self.get_namespace(thread, ns).head:
            self.read_by_id.add((thread, ns, uid))

    # -- putting

    @rule(
        thread=thread_ids,
        ns=namespaces,
        parent_choice=small,
        edits=edits,
        id_seed=small,
        kind=kinds,
        by_id=st.booleans(),
    )
    def put(
        self,
        thread: str,
        ns: str,
        parent_choice: int,
        edits: Edits,
        id_seed: int,
        kind: Kind,
        by_id: bool,
    ) -> None:
        """Put a step of a run, after edits of the parent's values, also in place.

        If the parent is not the head, it was either just read by its id, which starts a fork, or
        the run had read it before a later run started.
        """
        number = next(self.numbers)
        # ids of two formats that do not increase, so the order can only be that of the puts
        uid = (
            str(UUID(int=(7 - id_seed) << 64 | number))
            if id_seed % 2
            else f"{9 - id_seed}.{number}"
        )
        parent = self.choose_checkpoint(thread, ns, parent_choice)
        if by_id and parent is not None:
            assert self.saver.get_tuple(config_at(thread, ns, parent)) is not None
            self.record_read_by_id(thread, ns, parent)
        self.put_step(thread, ns, parent, uid, edits, kind)

    @rule(thread=thread_ids, ns=namespaces, choice=small, edits=edits)
    def put_once_more(
        self,
        thread: str,
        ns: str,
        choice: int,
        edits: Edits,
    ) -> None:
        """Put a checkpoint again with other values; it keeps its order."""
        uid = self.choose_checkpoint(thread, ns, choice)
        puts = self.get_namespace(thread, ns).puts
        if uid is not None and (puts[uid].parent is None or puts[uid].parent in puts):
            self.put_step(thread, ns, puts[uid].parent, uid, edits, ("loop", 1))

    def put_step(
        self,
        thread: str,
        ns: str,
        parent: str | None,
        uid: str,
        edits: Edits,
        kind: Kind,
    ) -> None:
        parent_put = self.get_namespace(thread, ns).puts[parent] if parent else None
        values = copy.deepcopy(parent_put.checkpoint["channel_values"]) if parent_put else {}
        versions = dict(parent_put.checkpoint["channel_versions"]) if parent_put else {}
        if parent_put and kind[0] == "loop":  # a run has the objects that it has read
            record = self.saver.get_tuple(config_at(thread, ns))
            if record is not None and checkpoint_id_of(record.config) == parent:
                values = record.checkpoint["channel_values"]
        changed_channels = {edit(values, n) for edit, n in edits}
        # Each put writes this channel, so that no update is merged with a run. The model of merges
        # is in test_updates_during_runs.py.
        values["turn"] = next(self.numbers)
        changed_channels.add("turn")
        new_versions = {channel: next(self.numbers) for channel in sorted(changed_channels)}
        checkpoint = empty_checkpoint()
        checkpoint["id"] = uid
        checkpoint["channel_values"] = values
        merged = {**versions, **new_versions}
        checkpoint["channel_versions"] = {c: v for c, v in merged.items() if c in values}
        checkpoint["versions_seen"] = {"node": dict(versions)}
        stored_versions: Any = {c: v for c, v in new_versions.items() if c in values}
        source, step_increase = kind
        number = parent_put.metadata["step"] + step_increase if parent_put else -1
        metadata: Any = {"source": source, "step": number}
        stored = copy.deepcopy(checkpoint)
        for saver in (self.saver, self.memory):
            saver.put(
                config_at(thread, ns, parent), copy.deepcopy(checkpoint), metadata, stored_versions
            )
        read_key = (thread, ns, parent or "")
        on_purpose = read_key in self.read_by_id
        self.read_by_id.discard(read_key)
        self.update_model(thread).put(
            ns, parent, stored, metadata, self.clock.now, on_purpose=on_purpose
        )

    def update_model(self, thread: str) -> ThreadModel:
        now = self.clock.now
        model = self.models.setdefault(thread, ThreadModel(next(self.numbers), now, now))
        model.updated_at = max(model.updated_at, now)
        return model

    @rule(
        thread=thread_ids,
        ns=namespaces,
        choice=small,
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
        self, thread: str, ns: str, choice: int, task: str, writes: list[tuple[str, Any]]
    ) -> None:
        """Put the writes of a task. Only interrupts and errors replace existing writes."""
        uid = self.choose_checkpoint(thread, ns, choice)
        if uid is None or (
            uid != self.get_namespace(thread, ns).head and self.has_updated_head(thread)
        ):
            return
        path = f"path of {task}"
        for saver in (self.saver, self.memory):
            saver.put_writes(config_at(thread, ns, uid), copy.deepcopy(writes), task, path)
        self.update_model(thread).put_writes(ns, uid, task, writes)

    # -- deleting, copying, moving

    @rule(thread=thread_ids)
    def delete_thread(self, thread: str) -> None:
        """Delete a thread, whose id may be used again."""
        self.saver.delete_thread(thread)
        self.memory.delete_thread(thread)
        self.models.pop(thread, None)

    @rule(thread=thread_ids, last=st.integers(0, 3), history=st.booleans())
    def retain_last(self, thread: str, last: int, history: bool) -> None:
        """Keep the newest checkpoints and the head."""
        if self.has_updated_head(thread):
            return
        self.saver.retain(Retention(last=last, history=history), thread_ids=[thread])
        self.keep_only_in_model(
            thread, lambda namespace: list(namespace.puts)[::-1][:last], history=history
        )

    @rule(thread=thread_ids, days=st.sampled_from([0.5, 2.0]))
    def retain_days(self, thread: str, days: float) -> None:
        """Keep the checkpoints that were put in the last days, and the head."""
        if self.has_updated_head(thread):
            return
        self.saver.retain(Retention(days=days), thread_ids=[thread])
        oldest = self.clock.now - days * DAY
        self.keep_only_in_model(
            thread, lambda namespace: {u for u, p in namespace.puts.items() if p.put_at >= oldest}
        )

    @rule(thread=thread_ids)
    def retain_turns(self, thread: str) -> None:
        """Keep the checkpoints that no step of a run followed."""

        def select_ends(namespace: NamespaceModel) -> set[str]:
            step_parents = {
                p.parent for p in namespace.puts.values() if p.metadata["source"] == "loop"
            }
            return set(namespace.puts) - step_parents

        if self.has_updated_head(thread):
            return
        self.saver.retain(Retention(turns=True), thread_ids=[thread])
        self.keep_only_in_model(thread, select_ends)

    @rule(thread=thread_ids)
    def prune(self, thread: str) -> None:
        """Keep only the heads."""
        if self.has_updated_head(thread):
            return
        self.saver.prune([thread])
        self.keep_only_in_model(thread, lambda namespace: [])

    def keep_only_in_model(
        self,
        thread: str,
        select_ids: Callable[[NamespaceModel], Iterable[str]],
        *,
        history: bool = True,
    ) -> None:
        if thread in self.models:
            self.models[thread].keep_only(select_ids, history=history)

    @rule(source=thread_ids, copy_id=st.sampled_from(["u0", "u1"]), choice=small)
    def copy_thread(self, source: str, copy_id: str, choice: int) -> None:
        """Copy a whole thread, or one checkpoint with its ancestors."""
        if source not in self.models or copy_id in self.models:
            return
        uid = self.choose_checkpoint(source, "", choice) if choice else None
        self.saver.copy_thread(source, copy_id, checkpoint_id=uid)
        model = copy.deepcopy(self.models[source])
        model.number, model.updated_at = next(self.numbers), self.clock.now
        model.equals_langgraph = False
        if uid is not None:
            model.cut_after(uid)
        self.models[copy_id] = model

    @rule(thread=thread_ids, ns=namespaces, choice=small)
    def rewind(self, thread: str, ns: str, choice: int) -> None:
        """Rewind the head to an older checkpoint."""
        uid = self.choose_checkpoint(thread, ns, choice)
        if uid is not None:
            self.saver.rewind(thread, uid, checkpoint_ns=ns)
            self.models[thread].namespaces[ns].head = uid

    @rule()
    def reopen(self) -> None:
        """Close the file, and open it without a cache."""
        self.saver.close()
        self.saver = self.open_saver()
        self.read_by_id.clear()

    @rule(days=st.sampled_from([-1.0, -0.0009765625, 0.375, 1.0]))
    def step_clock(self, days: float) -> None:
        """Set the clock forwards or backwards."""
        self.clock.now += days * DAY

    # -- reading

    @invariant()
    def check_heads_lists_and_counts(self) -> None:
        """Check the cheap reads after every step."""
        order = sorted(
            self.models, key=lambda t: (-self.models[t].updated_at, -self.models[t].number)
        )
        assert [
            (
                thread,
                sum(len(namespace.puts) for namespace in self.models[thread].namespaces.values()),
                self.expected_item_count(thread),
                self.models[thread].created_at,
                self.models[thread].updated_at,
                set(self.models[thread].namespaces),
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
        for thread, ns, namespace in self.iter_namespaces():
            assert namespace.listed_ids() == list_checkpoint_ids(self.saver, config_at(thread, ns))
            assert namespace.head is not None
            self.check_checkpoint(
                thread, ns, namespace.head, self.saver.get_tuple(config_at(thread, ns))
            )

    def expected_item_count(self, thread: str) -> int:
        """Return the stored number of items if it is possible, otherwise the least possible one."""
        model = self.models[thread]
        items = self.saver.thread(thread).items
        possible = range(len(model.log), len(model.log | model.write_items) + 1)
        return items if items in possible else len(model.log)

    @rule()
    def read_everything(self) -> None:
        """Check every checkpoint, its history and the trees, with the current cache."""
        self.check_everything()

    def check_everything(self) -> None:
        for thread, ns, namespace in self.iter_namespaces():
            for uid in namespace.puts:
                config = config_at(thread, ns, uid)
                self.check_checkpoint(thread, ns, uid, self.saver.get_tuple(config))
                self.record_read_by_id(thread, ns, uid)
                self.check_history(thread, ns, uid, namespace.puts[uid])
                if self.models[thread].equals_langgraph:
                    self.check_checkpoint(thread, ns, uid, self.memory.get_tuple(config))
            self.check_branch_history(thread, ns, namespace)
        for thread, model in self.models.items():
            puts = [
                (
                    put.order,
                    uid,
                    put.parent,
                    ns,
                    uid == namespace.head,
                    uid not in namespace.head_ancestor_ids(),
                )
                for ns, namespace in model.namespaces.items()
                for uid, put in namespace.puts.items()
            ]
            assert sorted(puts, reverse=True) == [
                (
                    *(info.order, info.checkpoint_id, info.parent_id, info.checkpoint_ns),
                    *(info.is_head, info.is_branch),
                )
                for info in self.saver.checkpoints(thread)
            ]

    def check_checkpoint(
        self, thread: str, ns: str, uid: str, record: CheckpointTuple | None
    ) -> None:
        put = self.models[thread].namespaces[ns].puts[uid]
        writes = [
            (task, *write)
            for task in sorted(put.writes)
            for _, write in sorted(
                put.writes[task].items(), key=lambda indexed_write: indexed_write[0]
            )
        ]
        assert record is not None
        assert uid == checkpoint_id_of(record.config)
        assert render_with_types(put.checkpoint["channel_values"]) == render_with_types(
            {c: record.checkpoint["channel_values"][c] for c in put.checkpoint["channel_values"]}
        )
        assert put.checkpoint == record.checkpoint
        assert put.metadata == record.metadata
        assert put.parent == (
            checkpoint_id_of(record.parent_config) if record.parent_config else None
        )
        assert render_with_types(writes) == render_with_types(record.pending_writes)

    def check_history(self, thread: str, ns: str, uid: str, put: Put) -> None:
        for channel in SPLIT:
            current_items = [
                i for _, i in render_items(channel, put.checkpoint["channel_values"].get(channel))
            ]
            history = self.saver.history(
                thread, channel=channel, checkpoint_id=uid, checkpoint_ns=ns
            )
            assert [(item, item in current_items) for item in put.history.get(channel, [])] == [
                (
                    render_with_types(list(item.value) if channel == "facts" else item.value),
                    item.seen,
                )
                for item in history
            ]

    def check_branch_history(self, thread: str, ns: str, namespace: NamespaceModel) -> None:
        assert namespace.head is not None
        for channel in SPLIT:
            head_history = self.saver.history(
                thread, channel=channel, checkpoint_id=namespace.head, checkpoint_ns=ns
            )
            history = self.saver.history(thread, channel=channel, checkpoint_ns=ns)
            branch_items = [item for item in history if item.branch]
            branch_texts = [
                render_with_types(list(i.value) if channel == "facts" else i.value)
                for i in branch_items
            ]
            expected_texts = {
                i
                for uid in namespace.branch_tip_ids()
                for i in namespace.puts[uid].history.get(channel, [])
            }
            assert render_with_types(
                [item for item in history if not item.branch]
            ) == render_with_types(head_history)
            assert sorted(
                expected_texts - set(namespace.puts[namespace.head].history.get(channel, []))
            ) == sorted(branch_texts)
            assert not any(item.seen for item in branch_items)
            assert sorted({item.position for item in branch_items}) == [
                i.position for i in branch_items
            ]


class SealedThreadMachine(ThreadMachine):
    """The same in an encrypted file."""

    key = KEY


short = settings(max_examples=rounds(200), stateful_step_count=25)
TestRandomStepsAgreeWithModel = ThreadMachine.TestCase
TestRandomStepsAgreeWithModel.settings = short
TestRandomStepsAgreeWithModelInEncryptedFile = SealedThreadMachine.TestCase
TestRandomStepsAgreeWithModelInEncryptedFile.settings = short
