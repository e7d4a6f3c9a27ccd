"""Instructions that an agent can learn: versions in a store, and the node that shows them."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, Literal

from langchain_core.runnables import RunnableConfig
from langgraph.store.base import BaseStore

from perdure.errors import VersionConflict
from perdure.memory.clock import Clock, clock_of
from perdure.memory.effects import Effect, Effects, awaiting, blocking
from perdure.memory.nodes import MessagesNode, Shown
from perdure.memory.options import choice, instance, whole
from perdure.memory.options import text as checked_text
from perdure.memory.run_config import Place, provenance, source, store_of_graph, versioned
from perdure.memory.summary import with_summary, without_summary
from perdure.memory.templates import Template

if TYPE_CHECKING:
    from perdure.stores.base import StoredItem

Change = Literal["set", "update", "rollback"]
TEXT: Final = "instructions"
"""The field of an item that holds the text, as in LangGraph's own examples."""


@dataclass(frozen=True, slots=True)
class InstructionsVersion:
    """A version of the instructions, with the thread whose run made it.

    `version` counts from 1; 0 is the default, which no store holds. `diff` is a unified diff to the
    previous text. `valid_to` is None while it holds.
    """

    text: str
    version: int = 0
    diff: str = ""
    change: Change | None = None
    valid_from: datetime | None = None
    valid_to: datetime | None = None
    thread_id: str | None = None
    checkpoint_id: str | None = None


class Instructions:
    """The instructions of an agent, in a store.

    Each change is a new version of one item; none is ever destroyed. `config` is that of the run.

    Args:
        store: A store with versions, such as `SQLiteStore`; None: that of the graph.
        namespace: Labels; see `Template`. With `"{user_id}"` in it, each user has their own.
        key: The item's key, a template as well.
        default: The text while nothing is stored.

    Raises:
        ConfigurationError: An argument is wrong.
    """

    def __init__(
        self,
        store: BaseStore | None = None,
        namespace: tuple[str, ...] = ("instructions",),
        key: str = "agent",
        default: str = "You are a helpful assistant.",
    ) -> None:
        self.store = None if store is None else versioned(store)
        self.namespace, self.key = Template(namespace), Template((key,))
        self.default = checked_text("default", default)

    def _current(
        self, config: RunnableConfig | None = None, *, as_of: datetime | None = None
    ) -> Effects[InstructionsVersion]:
        """What holds now, or held at a moment.

        Raises:
            ConfigurationError: There is no store with versions, or the item is something else.
        """
        return (yield from self.reading(self.place(config), as_of))

    def _history(self, config: RunnableConfig | None = None) -> Effects[list[InstructionsVersion]]:
        """All versions, oldest first, with the threads that caused them."""
        return (yield from self._versions(self.place(config)))

    def _set(self, text: str, config: RunnableConfig | None = None) -> Effects[InstructionsVersion]:
        """Write a text as the new version; one that holds already is not written again."""
        text = checked_text("text", text)
        return (yield from self._replaced(self.place(config), text, "set"))

    def _rollback(
        self, version: int, config: RunnableConfig | None = None
    ) -> Effects[InstructionsVersion]:
        """Write the text of an earlier version as the new version; 0 is the default."""
        place = self.place(config)
        texts = {old.version: old.text for old in (yield from self._versions(place))}
        texts[0] = self.default
        choice("version", str(whole("version", version, 0)), list(map(str, sorted(texts))))
        return (yield from self._replaced(place, texts[version], "rollback"))

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
        """Where the instructions of a run are; for errors see `current`."""
        store = versioned(store_of_graph("the instructions")) if self.store is None else self.store
        namespace, [key] = self.namespace.filled(config), self.key.filled(config)
        return Place(store, namespace, key, *source(config))

    def reading(self, place: Place, as_of: datetime | None = None) -> Effects[InstructionsVersion]:
        """Read what holds now, or held at a moment."""
        item = yield Effect(
            lambda: place.store.get(place.namespace, place.key, as_of=as_of),
            lambda: place.store.aget(place.namespace, place.key, as_of=as_of),
        )
        return InstructionsVersion(self.default) if item is None else _version(item)

    def writing(
        self, place: Place, previous: InstructionsVersion, text: str, change: Change
    ) -> Effects[InstructionsVersion]:
        """Write a text in place of `previous`; VersionConflict if another version holds by now."""
        value = noted(previous.text, text, change)
        options: dict[str, Any] = {
            "index": [TEXT],  # the diff is not searched
            "ttl": None,  # they do not expire, whatever the store's default
            "if_version": previous.version,
            "provenance": provenance(place),
        }
        yield Effect(
            lambda: place.store.put(place.namespace, place.key, value, **options),
            lambda: place.store.aput(place.namespace, place.key, value, **options),
        )
        return (yield from self.reading(place))  # another may hold by now

    def _versions(self, place: Place) -> Effects[list[InstructionsVersion]]:
        items = yield Effect(
            lambda: place.store.history(place.namespace, place.key),
            lambda: place.store.ahistory(place.namespace, place.key),
        )
        return [_version(item) for item in items]

    def _replaced(self, place: Place, text: str, change: Change) -> Effects[InstructionsVersion]:
        while True:  # each round that fails is one in which another writer succeeded
            previous = yield from self.reading(place)
            if previous.text == text:
                return previous
            try:
                return (yield from self.writing(place, previous, text, change))
            except VersionConflict:
                continue


def noted(previous: str, text: str, change: Change) -> dict[str, str]:
    """The value of an item whose instructions take the place of previous ones."""
    lines = difflib.unified_diff(previous.splitlines(), text.splitlines(), n=1, lineterm="")
    diff = "\n".join(list(lines)[2:])  # without the names of files
    return {TEXT: text, "diff": diff, "change": change}


def check_instructions(instructions: Any) -> Instructions:
    """Instructions, if they are; ConfigurationError otherwise."""
    expected = "Instructions(store)"
    return instance("instructions", instructions, Instructions, expected)  # type: ignore[no-any-return]


def _version(item: StoredItem) -> InstructionsVersion:
    field = f"the field {TEXT!r} of the item {item.key!r} in {item.namespace!r}"
    expected = "text; name another key or namespace for the instructions"
    text = instance(field, item.value.get(TEXT), str, expected)
    source = item.provenance
    return InstructionsVersion(
        text,
        item.version,
        diff=str(item.value.get("diff", "")),
        change=item.value.get("change"),
        valid_from=item.valid_from,
        valid_to=item.valid_to,
        thread_id=source.thread_id if source else None,
        checkpoint_id=source.checkpoint_id if source else None,
    )


# -- showing them


def use_instructions(
    instructions: Instructions,
    *,
    as_of: Clock | str | None = None,
    messages_key: str = "messages",
) -> UseInstructions:
    """A node that shows the current instructions as the one system message.

    A different system message is replaced; the summary of `summarize()` in it stays. In a `view` it
    comes before the part that cuts. `as_of` gives the moment whose instructions are used: a
    function of the run's config, or the name of the moment there; None: now.
    """
    return UseInstructions(instructions, messages_key, clock_of("as_of", as_of))


class UseInstructions(MessagesNode):
    """See `use_instructions`, which makes it."""

    def __init__(self, instructions: Instructions, messages_key: str, as_of: Clock) -> None:
        super().__init__(messages_key)
        self.instructions, self._as_of = check_instructions(instructions), as_of

    def _through(self, shown: Shown, state: Any, config: RunnableConfig | None) -> Effects[Shown]:
        """The same, under the instructions."""
        place = self.instructions.place(config)
        text = (yield from self.instructions.reading(place, self._as_of(config))).text
        if shown.system is None:
            return shown.under(text)
        summary, plain = without_summary([shown.system])
        bare = replace(shown, system=plain[0] if plain else None).under(text)
        return with_summary(bare, summary)

    through = blocking(_through)  # type: ignore[arg-type]
    athrough = awaiting(_through)  # type: ignore[arg-type]
