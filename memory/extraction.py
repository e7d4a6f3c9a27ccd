"""Extraction: memories made of what was said on a thread, exactly once in effect.

Each batch is one transaction: the memories, and the thread's watermark, which is swapped by its
version. Whatever is cut off before it never happened, whatever comes after finds it done; of two
that form one thread at the same time the slower one is refused, reads again, and goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final, Literal, Protocol, runtime_checkable

from langchain_core.runnables import RunnableConfig, ensure_config
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.store.base import BaseStore

from perdure.checkpointers.address import check_thread_id
from perdure.errors import ConfigurationError, UnknownThread, VersionConflict
from perdure.memory import thread_reader as reading
from perdure.memory.effects import Effects, arun, in_thread, run
from perdure.memory.extraction_report import ExtractionReport
from perdure.memory.forming.waiting import Waiting, noting, place_of, waiting_of, waiting_under
from perdure.memory.forming.work import CONFLICTS, Work
from perdure.memory.gate import Gate
from perdure.memory.options import choice, whole
from perdure.memory.proposals import Proposer, Scope
from perdure.memory.store_adapter import (
    RESERVED,
    StoreAdapter,
    adapter_of,
    namespace_of,
    removal_of,
)
from perdure.memory.templates import Template
from perdure.memory.thread_messages import ThreadHistory, ThreadMessage
from perdure.memory.turns import TurnExtractor
from perdure.memory.watermarks import Watermark, watermark
from perdure.stores.base import Namespace, PutItem, VersionRetention

_REMOVED: Final = ("form", "skip")


@runtime_checkable
class Retains(Protocol):
    """A store that can drop old versions, as a whole one of perdure's can."""

    def retain(self, rule: VersionRetention, *, prefix: Namespace = ()) -> int:
        """Drop closed versions that a rule does not keep."""


class Extraction:
    """Forms long-term memories of threads.

    Methods that begin with `a` are the async forms. `config` is that of a run; what fills in the
    namespace is taken from it.

    Args:
        saver: The checkpointer that has the threads. perdure's remember what was trimmed as well.
        store: Where memories are kept; on perdure's, each batch is one transaction. None: within a
            graph, the store it was compiled with.
        former: Proposes what to keep; None: `TurnExtractor()`, which needs no model.
        namespace: Labels; see `Template`.
        gate: What decides on what is kept; None: `Gate()`.
        messages_key: The channel of the messages.
        batch: How many messages are formed from at once, at most.
        removed: What becomes of messages that were removed from the state before they were formed:
            `"form"` them as all others, so that nothing is lost that a node trims or summarises; or
            `"skip"` them. A message that somebody deleted on purpose, with `RemoveMessage`, cannot
            be told from one that was trimmed: with `"form"` it still becomes a memory, unless it is
            erased from the checkpointer. A checkpointer that keeps no history has neither.

    Raises:
        ConfigurationError: An argument is wrong.
    """

    def __init__(
        self,
        saver: BaseCheckpointSaver[Any],
        store: BaseStore | None = None,
        former: Proposer | None = None,
        *,
        namespace: Sequence[str] = ("memories", "{user_id}"),
        gate: Gate | None = None,
        messages_key: str = "messages",
        batch: int = 50,
        removed: Literal["form", "skip"] = "form",
    ) -> None:
        if former is not None and not isinstance(former, Proposer):
            raise ConfigurationError(
                f"former is {former!r:.80}; expected TurnExtractor(…) or ModelExtractor(model, …)"
            )
        if gate is not None and not isinstance(gate, Gate):
            raise ConfigurationError(f"gate is {gate!r:.80}; expected a Gate")
        if not isinstance(messages_key, str) or not messages_key:
            raise ConfigurationError(f"messages_key is {messages_key!r}; expected a channel's name")
        self.saver, self.store = reading.check_saver(saver), store
        self._adapter = None if store is None else StoreAdapter(store)
        self.former: Proposer = TurnExtractor() if former is None else former
        self.namespace, self.gate = Template(namespace), gate or Gate()
        self.messages_key, self.batch = messages_key, whole("batch", batch, 1)
        self._skips = choice("removed", removed, _REMOVED) == "skip"

    # -- forming

    def extract(
        self, thread_id: str, config: RunnableConfig | None = None, *, anew: bool = False
    ) -> ExtractionReport:
        """Form memories of what was said on a thread since that was done last.

        Args:
            thread_id: The thread.
            config: Of a run.
            anew: Form all of it once more, say with a model what was formed without one. What is
                a memory already stays one: turns and episodes of the same messages, facts that say
                the same, and nothing that was deleted comes back. Who forms it is not noted, so
                without this, what one former has read is read for another, too.

        Raises:
            UnknownThread: There is no such thread.
            InvalidConfig: The config does not fill in the namespace.
            LimitExceeded: There is no room for more memories; what was not formed will be once
                there is, and it is asked for again.
            ModelFailed: The model gave no usable answer; what was not formed will be the next time.
            VersionConflict: Others changed the same memories, again and again.
            StorageError: The store refuses.
        """
        return run(self.forming(thread_id, config, anew=anew))

    async def aextract(
        self, thread_id: str, config: RunnableConfig | None = None, *, anew: bool = False
    ) -> ExtractionReport:
        """See `form`; what there is to compute is computed in a thread."""
        return await arun(in_thread(self.forming(thread_id, config, anew=anew)))

    # -- threads that wait

    def note(
        self, thread_id: str, config: RunnableConfig | None = None, *, anew: bool = False
    ) -> Waiting:
        """Note durably that a thread waits for memories to be formed of it; forming it ends that.

        Args:
            thread_id: The thread.
            config: Of a run.
            anew: That all of it is to be formed once more; see `form`.

        Raises:
            UnknownThread: There is no such thread, and it is to be formed anew.
            InvalidConfig: The config does not fill in the namespace.
            StorageError: The store refuses.
        """
        return run(self.noting(thread_id, config, anew=anew))

    async def anote(
        self, thread_id: str, config: RunnableConfig | None = None, *, anew: bool = False
    ) -> Waiting:
        """See `note`."""
        return await arun(self.noting(thread_id, config, anew=anew))

    def drop(self, thread_id: str, config: RunnableConfig | None = None) -> bool:
        """Take the note away that a thread waits, if there is no such thread.

        Returns:
            Whether there is none.

        Raises:
            InvalidConfig: The config does not fill in the namespace.
            StorageError: The store refuses.
        """
        return run(self.dropping(thread_id, config))

    def pending(self, prefix: Namespace = ()) -> list[Waiting]:
        """The threads that wait whose memories belong under a prefix, the longest wait first."""
        return run(waiting_under(self.adapter(), tuple(prefix)))

    async def apending(self, prefix: Namespace = ()) -> list[Waiting]:
        """See `pending`."""
        return await arun(waiting_under(self.adapter(), tuple(prefix)))

    def tidy(self) -> int:
        """Drop what perdure's own notes said before, which nobody asks for; returns how much.

        A store that keeps no versions, or is a part of one, is left as it is.
        """
        store = self.adapter().store
        if not isinstance(store, Retains):
            return 0
        return store.retain(VersionRetention(last=0), prefix=(RESERVED,))

    # -- steps, which other parts take too

    def adapter(self) -> StoreAdapter:
        """The store.

        Raises:
            ConfigurationError: There is none.
        """
        return self._adapter or adapter_of(None)

    def noting(
        self, thread_id: str, config: RunnableConfig | None, *, anew: bool = False
    ) -> Effects[Waiting]:
        """See `note`."""
        around = self._around(config)
        configurable = ensure_config(config)["configurable"]
        given = {name: str.__str__(configurable[name]) for name in self.namespace.names}
        thread_id, tries = check_thread_id(thread_id), CONFLICTS
        while True:
            beside = (yield from self._setting_back(thread_id, around)) if anew else []
            try:
                return (
                    yield from noting(around.adapter, around.namespace, thread_id, given, beside)
                )
            except VersionConflict:  # it was formed meanwhile
                if tries == 0:
                    raise
                tries -= 1

    def dropping(self, thread_id: str, config: RunnableConfig | None) -> Effects[bool]:
        """See `drop`."""
        around, thread_id = self._around(config), check_thread_id(thread_id)
        # as in `forming`: if the thread begins now, its note is another then
        note = yield from waiting_of(around.adapter, around.namespace, thread_id)
        try:
            yield from reading.glancing(self.saver, thread_id, self.messages_key, 1)
        except UnknownThread:
            if note is not None:
                removal = removal_of(place_of(note.namespace), thread_id, note.version)
                with suppress(VersionConflict):
                    yield from around.adapter.written([removal])
            return True
        return False

    def forming(
        self, thread_id: str, config: RunnableConfig | None, *, anew: bool = False
    ) -> Effects[ExtractionReport]:
        """See `form`."""
        around, thread_id = self._around(config), check_thread_id(thread_id)
        if anew:
            yield from self.noting(thread_id, config, anew=True)
        report = ExtractionReport(thread_id)
        while True:
            # the note is read before the thread: what is said after that touches it again
            note = yield from waiting_of(around.adapter, around.namespace, thread_id)
            mark = yield from watermark(around.adapter, around.namespace, thread_id)
            said = yield from reading.reading(self.saver, thread_id, self.messages_key, mark.ids)
            new = yield from self.unformed(mark, said, around)
            said = said.present() if self._skips else said
            work = Work(self.former, self.gate, self.batch, around, said, mark, note, report)
            overtaken = yield from work.through(new)
            report = work.report
            if not overtaken:
                return report

    def _around(self, config: RunnableConfig | None) -> Scope:
        return Scope(self.adapter(), namespace_of(self.namespace, config), config)

    def _setting_back(self, thread_id: str, around: Scope) -> Effects[list[PutItem]]:
        """What makes a thread one of which nothing was formed yet."""
        mark = yield from watermark(around.adapter, around.namespace, thread_id)
        said = yield from reading.reading(self.saver, thread_id, self.messages_key, None)
        if not mark.count:
            return []
        new = mark.beyond(said)
        left = mark.set_back(len(said.messages) - len(new or ()))
        return [left.put(around.namespace, thread_id)]

    def unformed(
        self, mark: Watermark, said: ThreadHistory, around: Scope
    ) -> Effects[list[ThreadMessage]]:
        """The messages of a thread that memories are to be formed of, and were not yet."""
        new = mark.beyond(said)
        if new is None:  # the thread was forked far back: the memories themselves tell
            new = []
            for spoken in mark.placed(said.messages):
                key = self.former.key(said.thread_id, spoken)
                found = key and (yield from around.adapter.got(around.namespace, key))
                new += [] if found else [spoken]
        return [each for each in new if not (self._skips and each.removed)]
