"""The ends of threads of which no memories were formed yet, as the memories they will be.

So what was just said on another thread can be recalled while it waits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from langchain_core.runnables import RunnableConfig, ensure_config

from perdure.errors import UnknownThread
from perdure.memory.checking import whole
from perdure.memory.collection.keeping import keeping
from perdure.memory.drivers import Steps
from perdure.memory.forming import reading
from perdure.memory.forming.formation import Formation
from perdure.memory.forming.proposals import Addition, Batch, Surroundings
from perdure.memory.forming.turns import TurnFormer
from perdure.memory.forming.waiting import Waiting, waiting_under
from perdure.memory.forming.watermarks import watermark
from perdure.memory.longterm.memories import Memory
from perdure.stores.base import Namespace

_THREADS: Final = 8
_MESSAGES: Final = 200
_JUDGED: Final = 5_000  # verdicts that are remembered, about

_Name = tuple[Namespace, str, str, tuple[str, ...]]


class Tails:
    """What was said on threads that wait for memories to be formed of them.

    Args:
        formation: What will form them.
        threads: How many threads are looked at, those where something was said last.
        messages: How many messages of them together, the newest.

    Raises:
        ConfigurationError: A number is none that it can be.
    """

    def __init__(
        self, formation: Formation, *, threads: int = _THREADS, messages: int = _MESSAGES
    ) -> None:
        self.formation, self._turns = formation, TurnFormer()
        # what the gate said of each: the same is asked for at every turn of every other thread
        self._judged: dict[_Name, Mapping[str, Any] | None] = {}
        self.threads, self.messages = whole("threads", threads, 1), whole("messages", messages, 1)

    def waiting(
        self, namespaces: Sequence[Namespace], config: RunnableConfig | None = None
    ) -> Steps[list[Memory]]:
        """Memories of turns that are in no store yet, oldest first.

        Args:
            namespaces: Prefixes of those that they will belong to.
            config: Of the run, whose own thread is left out: it is shown anyway.
        """
        backing = self.formation.backing()
        own = ensure_config(config)["configurable"].get("thread_id")
        found: dict[tuple[Namespace, str], Waiting] = {}
        for prefix in namespaces:
            notes = yield from waiting_under(backing, prefix)
            found |= {(n.namespace, n.thread_id): n for n in notes if n.thread_id != str(own)}
        newest = sorted(found.values(), key=lambda note: note.at, reverse=True)
        memories: list[Memory] = []
        for note in newest[: self.threads]:
            room = self.messages - len(memories)
            if room > 0:
                around = Surroundings(backing, note.namespace, config)
                memories = [*(yield from self._tail(note, around, room)), *memories]
        return memories

    def _tail(self, note: Waiting, around: Surroundings, room: int) -> Steps[list[Memory]]:
        formation = self.formation
        mark = yield from watermark(around.backing, note.namespace, note.thread_id)
        try:
            said = yield from reading.reading(
                formation.saver, note.thread_id, formation.messages_key, None
            )
        except UnknownThread:  # it was deleted while it waited
            return []
        new = (yield from formation.unformed(mark, said, around))[-room:]
        # when exactly each was said would take a look at all checkpoints since
        new = [each if each.at is not None else replace(each, at=note.at) for each in new]
        batch = Batch(said.thread_id, said.checkpoint_id, new, shown=said.shown)
        additions = self._turns.formed(batch).additions
        return (yield from self._kept(additions[-room:], around))

    def _kept(self, additions: Sequence[Addition], around: Surroundings) -> Steps[list[Memory]]:
        """What the gate will keep of them, as it will be kept."""
        names = [_name(each, around.namespace) for each in additions]
        fresh = [i for i, name in enumerate(names) if name not in self._judged]
        if fresh:
            kept = yield from keeping(
                self.formation.gate,
                around.backing,
                around.namespace,
                [additions[i].candidate for i in fresh],
                [additions[i].key for i in fresh],
            )
            own = {put.key: put.value for put in kept.puts if put.namespace == around.namespace}
            if len(self._judged) > _JUDGED:
                self._judged.clear()
            self._judged |= {names[i]: own.get(additions[i].key) for i in fresh}
        values = [self._judged.get(name) for name in names]
        return [
            _unkept(around.namespace, each, value)
            for each, value in zip(additions, values, strict=True)
            if value is not None
        ]


def _name(addition: Addition, namespace: Namespace) -> _Name:
    candidate = addition.candidate
    return namespace, addition.key, candidate.text, candidate.shown


def _unkept(namespace: Namespace, addition: Addition, value: Mapping[str, Any]) -> Memory:
    source = addition.candidate.provenance
    at = source.at if source is not None else None
    text, kind = value["text"], value["kind"]
    return Memory(namespace, addition.key, text, kind, dict(value), source, valid_from=at)
