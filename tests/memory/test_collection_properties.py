"""Any course of changes to memories, by tools and by hand, against a plain dictionary."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from langchain_core.messages import ToolMessage
from langgraph.store.memory import InMemoryStore

from perdure.effects import run
from perdure.errors import UnknownMemory
from perdure.memory.collection import Collection
from perdure.memory.gate import Gate, plan_admission
from perdure.memory.records import Candidate, StoreAdapter
from perdure.memory.tools import manage_memory
from perdure.stores import SQLiteStore
from tests.rounds import rounds

Space = tuple[str, ...]
TEXTS = [f"Ann likes {thing}" for thing in ("tea", "chess", "Oslo", "jazz")]
PLACES: list[tuple[Space, str]] = [  # a template and whom it is filled in with
    (("memories", "{user_id}"), "a"),
    (("memories", "{user_id}"), "DOTTED"),
    (("memories", "{user_id}", "b"), "a"),
]

places = st.integers(0, 2)
texts = st.sampled_from(TEXTS)
ways = st.sampled_from(["tool", "atool", "method", "amethod"])
numbers = st.integers(0, 30)


@dataclass
class Known:
    """A memory as it should be: what it says, None if it is deleted, and what it said."""

    text: str | None
    formerly: list[str] = field(default_factory=list)
    history: list[str] = field(default_factory=list)


class Changes(RuleBasedStateMachine):
    """The rules, on one kind of store."""

    versioned: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__()
        self.store: Any = (
            SQLiteStore.open(":memory:", index=None) if self.versioned else InMemoryStore()
        )
        self.gate = Gate()
        self.known: list[dict[str, Known]] = [{}, {}, {}]
        self.buried: list[set[str]] = [set(), set(), set()]
        self.keys: list[str] = ["nosuchkey"]
        dotted = "a.b" if self.versioned else "a-b"  # langgraph's own refuse dots
        self.places = [(space, user.replace("DOTTED", dotted)) for space, user in PLACES]

    def teardown(self) -> None:
        try:
            self.pasts()
        finally:
            if self.versioned:
                self.store.close()

    def collection(self, place: int) -> tuple[Collection, Any]:
        template, user = self.places[place]
        config = {"configurable": {"user_id": user, "thread_id": "t"}}
        return Collection(self.store, template, gate=self.gate), config

    def space(self, place: int) -> Space:
        template, user = self.places[place]
        return tuple(label.format(user_id=user) for label in template)

    def present(self, place: int) -> dict[str, str]:
        """What is there, by what it says."""
        return {known.text: key for key, known in self.known[place].items() if known.text}

    def done(self, place: int, way: str, action: str, key: str | None, text: str | None) -> Any:
        """Do it: the change and the key, as told by the tool or the method; None: no such id."""
        collection, config = self.collection(place)
        if "tool" in way:
            tool = manage_memory(collection.namespace.labels, self.store, gate=self.gate)
            args = {"action": action, "id": key, "text": text}
            call = {"name": tool.name, "args": args, "id": "c", "type": "tool_call"}
            message = (
                tool.invoke(call, config)
                if way == "tool"
                else asyncio.run(tool.ainvoke(call, config))
            )
            return _told(message)
        method = {"create": "insert"}.get(action, action)
        given = [part for part in (key, text) if part is not None]
        try:
            if way == "method":
                outcome = getattr(collection, method)(*given, config=config)
            else:
                outcome = asyncio.run(getattr(collection, f"a{method}")(*given, config=config))
        except UnknownMemory:
            return None
        return outcome.change, outcome.key

    # -- what is done

    @initialize()
    def begin(self) -> None:
        """Something is there."""
        for place in range(3):
            self.create(place, TEXTS[0], "method", shouted=False)

    @rule(place=places, text=texts, way=ways, shouted=st.booleans())
    def create(self, place: int, text: str, way: str, shouted: bool) -> None:
        """It is new, or the one that says so is told."""
        there = self.present(place).get(text)
        change, key = self.done(place, way, "create", None, f"{text.upper()}!" if shouted else text)
        if there is not None:
            assert (change, key) == ("unchanged", there)
            return
        assert change == "added"
        assert key not in self.keys
        self.added(place, key, f"{text.upper()}!" if shouted else text, text)

    @rule(place=places, number=numbers, text=texts, way=ways, replaces=st.booleans())
    def change(self, place: int, number: int, text: str, way: str, replaces: bool) -> None:
        """It is changed, unless there is no such memory here, or one says so already."""
        key = self.keys[number % len(self.keys)]
        known = self.known[place].get(key)
        told = self.done(place, way, "supersede" if replaces else "update", key, text)
        if known is None or known.text is None:
            assert told is None
            return
        there = self.present(place).get(text)
        if there is not None and (there != key or known.history[-1] == text):
            assert told == ("unchanged", there)
            return
        assert told == ("superseded" if replaces else "updated", key)
        known.formerly = [known.history[-1], *known.formerly][:10]
        known.history.append(text)
        known.text = text

    @rule(place=places, number=numbers, way=ways)
    def delete(self, place: int, number: int, way: str) -> None:
        """It is gone, if it was there; its past is not."""
        key = self.keys[number % len(self.keys)]
        known = self.known[place].get(key)
        told = self.done(place, way, "delete", key, None)
        if known is None or known.text is None:
            assert told is None
            return
        assert told == ("deleted", key)
        self.bury(place, known)
        known.text = None
        if not self.versioned:
            known.history = []

    @rule(place=places, number=numbers, asynchronous=st.booleans())
    def forget(self, place: int, number: int, asynchronous: bool) -> None:
        """Its past is gone as well; of what is not here, nothing is."""
        key = self.keys[number % len(self.keys)]
        known = self.known[place].get(key)
        collection, config = self.collection(place)
        if known is None or not known.history:
            with pytest.raises(UnknownMemory):
                collection.forget(key, config=config)
            return
        if asynchronous:
            receipt = asyncio.run(collection.aforget(key, config=config))
        else:
            receipt = collection.forget(key, config=config)
        assert receipt.keys == ((self.space(place), key),)
        self.bury(place, known)
        del self.known[place][key]

    @rule(place=places, text=texts)
    def extract(self, place: int, text: str) -> None:
        """What is formed unasked brings nothing back that was deleted or forgotten."""
        key = f"formed{len(self.keys)}"
        adapter, space = StoreAdapter(self.store), self.space(place)
        kept = run(plan_admission(self.gate, adapter, space, [Candidate(text)], [key]))
        run(adapter.write(kept.puts))
        [outcome] = kept.outcomes
        if text in self.buried[place]:
            assert outcome.change == "refused"
        elif text in self.present(place):
            assert (outcome.change, outcome.key) == ("unchanged", self.present(place)[text])
        elif outcome.change == "refused":  # nobody knows when it was said: maybe before it changed
            assert "said before" in outcome.reason
            assert text in self.past(place)
        else:
            assert (outcome.change, outcome.key) == ("added", key)
            self.added(place, key, text, text)

    def past(self, place: int) -> set[str]:
        """What present memories said before."""
        present = [known for known in self.known[place].values() if known.text is not None]
        return {_plain(text) for known in present for text in known.formerly}

    def added(self, place: int, key: str, written: str, text: str) -> None:
        self.keys.append(key)
        self.known[place][key] = Known(text, history=[written])

    def bury(self, place: int, known: Known) -> None:
        self.buried[place].update(_plain(text) for text in (*known.history, *known.formerly))

    # -- what is left

    @invariant()
    def present_memories(self) -> None:
        """Each namespace has its own memories, and no other."""
        for place in range(3):
            collection, config = self.collection(place)
            there = {
                key: (known.history[-1], known.formerly)
                for key, known in self.known[place].items()
                if known.text is not None
            }
            for listed in (
                collection.list(config=config),
                collection.search("Ann", limit=100, config=config),
            ):
                assert there == {
                    memory.key: (memory.text, [former.text for former in memory.previous])
                    for memory in listed
                }
                assert {memory.namespace for memory in listed} <= {self.space(place)}

    def pasts(self) -> None:
        """The history of each id, in each namespace, is whole, or there is none."""
        for place in range(3):
            collection, config = self.collection(place)
            for key in self.keys:
                known = self.known[place].get(key)
                versions = [memory.text for memory in collection.history(key, config=config)]
                expected = known.history if known else []
                assert (expected if self.versioned else expected[-1:]) == versions


def _plain(text: str) -> str:
    """The text of the list that it is, however it is written."""
    return next(each for each in TEXTS if each.upper() == text.upper().rstrip("!"))


def _told(message: ToolMessage) -> Any:
    """What the tool says that became of it."""
    if "There is no memory with the id" in message.text:
        return None
    for words, change in _SAID.items():
        if words in message.text:
            found = re.search(r"(?:id is|memory) ([2-9a-z]{9}|formed\d+)\b", message.text)
            assert found is not None
            return change, found[1]
    raise AssertionError(message.text)


_SAID = {
    "Kept.": "added",
    "is updated": "updated",
    "is superseded": "superseded",
    "is deleted": "deleted",
    "Nothing had to be changed": "unchanged",
    "says this already": "unchanged",
}


class PlainChanges(Changes):
    """The same on a store of langgraph's."""

    versioned = False


TestChanges = Changes.TestCase
TestChanges.settings = settings(max_examples=rounds(12), stateful_step_count=25)
TestPlainChanges = PlainChanges.TestCase
TestPlainChanges.settings = settings(max_examples=rounds(12), stateful_step_count=25)
