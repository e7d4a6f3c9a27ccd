"""Instructions that an agent can learn: versions in a store, read, written and rolled back."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, Literal

from langchain_core.runnables import RunnableConfig
from langgraph.store.base import BaseStore

from perdure.errors import ConfigurationError, VersionConflict
from perdure.memory.effects import Effect, Effects, arun, run
from perdure.memory.run_config import Place, provenance, source, store_of_graph, versioned
from perdure.memory.templates import Template

if TYPE_CHECKING:
    from perdure.stores.base import StoredItem

Change = Literal["set", "update", "rollback"]
TEXT: Final = "instructions"
"""The field of an item that holds the text, as in LangGraph's own examples."""


@dataclass(frozen=True, slots=True)
class InstructionsVersion:
    """What the instructions were, or are.

    Attributes:
        text: The instructions.
        version: Counts from 1; 0 is the default, which no store holds.
        diff: What changed in the text, as a unified diff; "" for the default.
        change: What made it: `"set"` by hand, an `"update"` by reflection, a `"rollback"`.
        valid_from: Since when (UTC); None: it is the default.
        valid_to: Until when; None: it is in force.
        thread_id: The thread whose run made it, if that is known.
        checkpoint_id: The checkpoint of that thread which the run had reached.
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

    Each change is a new version of one item; none is ever destroyed. Methods that begin with `a`
    are the async forms. `config` is that of the run; None: within a node, the run it belongs to.

    Args:
        store: A store with versions, `SQLiteStore` or a scope of one; others, langgraph's too, are
            refused, since nothing keeps two runs from losing each other's change there. None:
            within a graph, the store it was compiled with.
        namespace: Labels; see `Template`. with `"{user_id}"` in it, each user has their own.
        key: The item's key, a template as well.
        default: What holds as long as nothing is stored.

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
        self.default = _text(default, "default")

    def current(
        self, config: RunnableConfig | None = None, *, as_of: datetime | None = None
    ) -> InstructionsVersion:
        """What holds now, or held at a moment.

        Raises:
            ConfigurationError: There is no store with versions, the config does not fill the
                templates, or the item is something else.
        """
        return run(self.reading(self.place(config), as_of))

    async def acurrent(
        self, config: RunnableConfig | None = None, *, as_of: datetime | None = None
    ) -> InstructionsVersion:
        """See `current`."""
        return await arun(self.reading(self.place(config), as_of))

    def history(self, config: RunnableConfig | None = None) -> list[InstructionsVersion]:
        """All versions, oldest first, with the threads that caused them."""
        return run(self._versions(self.place(config)))

    async def ahistory(self, config: RunnableConfig | None = None) -> list[InstructionsVersion]:
        """See `history`."""
        return await arun(self._versions(self.place(config)))

    def set(self, text: str, config: RunnableConfig | None = None) -> InstructionsVersion:
        """Write a text as the new version; one that holds already is not written again.

        Raises:
            ConfigurationError: The text says nothing; see also `current`.
        """
        return run(self._setting(self.place(config), _text(text, "text")))

    async def aset(self, text: str, config: RunnableConfig | None = None) -> InstructionsVersion:
        """See `set`."""
        return await arun(self._setting(self.place(config), _text(text, "text")))

    def rollback(self, n: int, config: RunnableConfig | None = None) -> InstructionsVersion:
        """Write the text of version `n` as the new version; 0 is the default.

        Raises:
            ConfigurationError: There is no such version; see also `current`.
        """
        return run(self._rolling_back(self.place(config), n))

    async def arollback(self, n: int, config: RunnableConfig | None = None) -> InstructionsVersion:
        """See `rollback`."""
        return await arun(self._rolling_back(self.place(config), n))

    # -- steps, which other nodes take too

    def place(self, config: RunnableConfig | None) -> Place:
        """Where the instructions of a run are.

        Raises:
            ConfigurationError: There is no store with versions, or no such place.
        """
        store = self.store
        if store is None:
            store = versioned(store_of_graph("the instructions"))
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
        self, place: Place, former: InstructionsVersion, text: str, change: Change
    ) -> Effects[InstructionsVersion]:
        """Write a text in place of `former`.

        Raises:
            VersionConflict: Another is in force by now.
        """
        value = noted(former.text, text, change)
        options: dict[str, Any] = {
            "index": [TEXT],  # what changed in it is not searched
            "ttl": None,  # they do not expire, whatever the store's default
            "if_version": former.version,
            "provenance": provenance(place),
        }
        yield Effect(
            lambda: place.store.put(place.namespace, place.key, value, **options),
            lambda: place.store.aput(place.namespace, place.key, value, **options),
        )
        # by now another may be in force, and after a delete versions go on from the last
        versions = yield from self._versions(place)
        for version in reversed(versions):
            if version.text == text and version.version > former.version:
                return version
        raise VersionConflict(
            f"the instructions {place.key!r} in {place.namespace!r} were erased as they were "
            "written: write them again"
        )

    def _versions(self, place: Place) -> Effects[list[InstructionsVersion]]:
        items = yield Effect(
            lambda: place.store.history(place.namespace, place.key),
            lambda: place.store.ahistory(place.namespace, place.key),
        )
        return [_version(item) for item in items]

    def _setting(
        self, place: Place, text: str, change: Change = "set"
    ) -> Effects[InstructionsVersion]:
        while True:  # each turn that fails is one in which somebody else succeeded
            former = yield from self.reading(place)
            if former.text == text:
                return former
            try:
                return (yield from self.writing(place, former, text, change))
            except VersionConflict:
                continue

    def _rolling_back(self, place: Place, n: int) -> Effects[InstructionsVersion]:
        texts = {old.version: old.text for old in (yield from self._versions(place))}
        texts[0] = self.default
        if isinstance(n, bool) or n not in texts:
            raise ConfigurationError(
                f"the instructions {place.key!r} in {place.namespace!r} have no version {n!r}; "
                f"expected one of {sorted(texts)}"
            )
        return (yield from self._setting(place, texts[n], "rollback"))


def noted(former: str, text: str, change: Change) -> dict[str, str]:
    """What an item holds of instructions that take the place of former ones."""
    return {TEXT: text, "diff": _diff(former, text), "change": change}


def check_instructions(instructions: Any) -> Instructions:
    """Instructions, if they are.

    Raises:
        ConfigurationError: They are not.
    """
    if not isinstance(instructions, Instructions):
        raise ConfigurationError(
            f"the instructions are {instructions!r:.80}; expected Instructions(store)"
        )
    return instructions


def _text(text: Any, name: str) -> str:
    if not isinstance(text, str) or not text.strip():
        raise ConfigurationError(f"{name} is {text!r:.80}; expected text that says something")
    return text


def _version(item: StoredItem) -> InstructionsVersion:
    text = item.value.get(TEXT)
    if not isinstance(text, str):
        raise ConfigurationError(
            f"the item {item.key!r} in {item.namespace!r} has no text under {TEXT!r}: it is "
            "something else; name another key or namespace for the instructions"
        )
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


def _diff(former: str, text: str) -> str:
    lines = difflib.unified_diff(former.splitlines(), text.splitlines(), n=1, lineterm="")
    return "\n".join(list(lines)[2:])  # without the names of files
