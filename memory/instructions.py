"""Instructions that an agent can learn: versions in a store, and the node that shows them."""

from __future__ import annotations

import difflib
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final, Literal

from langchain_core.messages import SystemMessage
from langchain_core.runnables import RunnableConfig
from langgraph.store.base import BaseStore

from perdure.errors import VersionConflict
from perdure.memory.effects import Effects, awaiting, blocking
from perdure.memory.nodes import MessagesNode, Shown
from perdure.memory.options import choice, instance, whole
from perdure.memory.options import text as checked_text
from perdure.memory.records import Memory
from perdure.memory.run_config import Clock, Versioned, clock_of, source, store_of_graph
from perdure.memory.store_adapter import INSTRUCTIONS, Place, StoreAdapter, namespace_of
from perdure.memory.summary import with_summary, without_summary
from perdure.memory.templates import Template
from perdure.stores.base import Provenance, PutItem

Change = Literal["set", "update", "rollback"]
LONGEST: Final = 20_000
"""Characters up to which a model may extend instructions."""


@dataclass(frozen=True, slots=True)
class InstructionsVersion:
    """A version of the instructions, with the thread whose run made it."""

    text: str
    version: int = 0  # from 1 on; 0 is the default, which no store holds
    diff: str = ""  # a unified diff to the previous text
    change: Change | None = None
    valid_from: datetime | None = None
    valid_to: datetime | None = None  # None while it holds
    thread_id: str | None = None
    checkpoint_id: str | None = None


class Instructions:
    """The instructions of an agent: an item of a store, of which each change is a new version.

    Args:
        store: A store with versions, such as `SQLiteStore`; None: that of the graph.
        namespace: Labels; see `Template`. With `"{user_id}"` in it, each user has their own.
        key: The item's key, a template as well.
        default: The text while nothing is stored.
    """

    def __init__(
        self,
        store: BaseStore | None = None,
        namespace: tuple[str, ...] = ("instructions",),
        key: str = "agent",
        default: str = "You are a helpful assistant.",
    ) -> None:
        self._adapter = None if store is None else _versioned(store)
        self.namespace, self.key = Template(namespace), Template((key,))
        self.default = checked_text("default", default)

    def _current(
        self, config: RunnableConfig | None = None, *, as_of: datetime | None = None
    ) -> Effects[InstructionsVersion]:
        """What holds now, or held at a moment."""
        return self.reading(self.place(config), as_of)

    def _history(self, config: RunnableConfig | None = None) -> Effects[list[InstructionsVersion]]:
        """All versions, oldest first, with the threads that caused them."""
        place = self.place(config)
        items = yield from place.adapter.versions(place.namespace, place.key)
        return [_version(item) for item in items]

    def _set(self, text: str, config: RunnableConfig | None = None) -> Effects[InstructionsVersion]:
        """Write a text as the new version; one that holds already is not written again."""
        return self._replaced(checked_text("text", text), "set", config)

    def _rollback(
        self, version: int, config: RunnableConfig | None = None
    ) -> Effects[InstructionsVersion]:
        """Write the text of an earlier version as the new version; 0 is the default."""
        texts = {old.version: old.text for old in (yield from self._history(config))}
        texts[0] = self.default
        choice("version", str(whole("version", version, 0)), list(map(str, sorted(texts))))
        return (yield from self._replaced(texts[version], "rollback", config))

    current = blocking(_current)
    acurrent = awaiting(_current)
    history = blocking(_history)
    ahistory = awaiting(_history)
    set = blocking(_set)
    aset = awaiting(_set)
    rollback = blocking(_rollback)
    arollback = awaiting(_rollback)

    # -- effects that other nodes use too

    def place(self, config: RunnableConfig | None) -> Place:
        """Where the instructions of a run are."""
        adapter = self._adapter or _versioned(store_of_graph("the instructions"))
        thread_id, checkpoint_id = source(config)
        made_by = None if thread_id is None else Provenance(thread_id, checkpoint_id)
        [key] = self.key.filled(config)
        return Place(adapter, namespace_of(self.namespace, config), key, made_by)

    def reading(self, place: Place, as_of: datetime | None = None) -> Effects[InstructionsVersion]:
        """Read what holds now, or held at a moment."""
        item = yield from place.adapter.got(place.namespace, place.key, as_of)
        return InstructionsVersion(self.default) if item is None else _version(item)

    def writing(
        self, place: Place, previous: InstructionsVersion, text: str, change: Change
    ) -> Effects[InstructionsVersion]:
        """Write a text in place of `previous`; VersionConflict if another version holds by now."""
        if previous.text == text:
            return previous
        yield from place.adapter.written([replacing(place, previous, text, change)])
        return (yield from self.reading(place))  # another may hold by now

    def _replaced(
        self, text: str, change: Change, config: RunnableConfig | None
    ) -> Effects[InstructionsVersion]:
        place = self.place(config)
        while True:  # each round that fails is one in which another writer succeeded
            previous = yield from self.reading(place)
            with suppress(VersionConflict):
                return (yield from self.writing(place, previous, text, change))


def replacing(place: Place, previous: InstructionsVersion, text: str, change: Change) -> PutItem:
    """The operation that writes a text in place of the previous one, with the diff between them."""
    lines = difflib.unified_diff(previous.text.splitlines(), text.splitlines(), n=1, lineterm="")
    diff = "\n".join(list(lines)[2:])  # without the names of files
    return PutItem(
        place.namespace,
        place.key,
        {INSTRUCTIONS: text, "diff": diff, "change": change},
        [INSTRUCTIONS],  # the diff is not searched
        ttl=None,  # they do not expire, whatever the store's default
        if_version=previous.version,
        provenance=place.provenance,
    )


def _versioned(store: Any) -> StoreAdapter:
    expected = "a store that keeps versions, like perdure.stores.SQLiteStore.open(path)"
    return StoreAdapter(instance("the store of instructions", store, Versioned, expected))


def _version(item: Memory) -> InstructionsVersion:
    field = f"the field {INSTRUCTIONS!r} of the item {item.key!r} in {item.namespace!r}"
    expected = "text; name another key or namespace for the instructions"
    made_by = item.provenance or Provenance()
    return InstructionsVersion(
        instance(field, item.value.get(INSTRUCTIONS), str, expected),
        item.version or 0,
        str(item.value.get("diff", "")),
        item.value.get("change"),
        item.valid_from,
        item.valid_to,
        made_by.thread_id,
        made_by.checkpoint_id,
    )


class UseInstructions(MessagesNode):
    """A node that shows the current instructions as the one system message.

    A different system message is replaced; the summary of `summarize()` in it stays. `as_of` gives
    the moment whose instructions are used: a function of the run's config, or the name of the
    moment there; None: now.
    """

    def __init__(
        self,
        instructions: Instructions,
        *,
        as_of: Clock | str | None = None,
        messages_key: str = "messages",
    ) -> None:
        super().__init__(messages_key)
        self._as_of = clock_of("as_of", as_of)
        expected = "Instructions(store)"
        self._instructions = instance("instructions", instructions, Instructions, expected)

    def _through(self, shown: Shown, state: Any, config: RunnableConfig | None) -> Effects[Shown]:
        place = self._instructions.place(config)
        text = (yield from self._instructions.reading(place, self._as_of(config))).text
        summary, plain = without_summary([shown.system] if shown.system else [])
        system = next((each for each in plain if each.text == text), SystemMessage(text))
        return with_summary(replace(shown, system=system), summary)

    through = blocking(_through)  # type: ignore[arg-type]
    athrough = awaiting(_through)  # type: ignore[arg-type]


use_instructions = UseInstructions
"""Makes the node: `use_instructions(instructions)`."""
