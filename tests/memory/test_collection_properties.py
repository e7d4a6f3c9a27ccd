"""Random sequences of changes to memories, by tools and by hand, compared with a dictionary."""

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
class ExpectedMemory:
    """The expected state of a memory: its text (None if deleted), former texts and versions."""

    text: str | None
    formerly: list[str] = field(default_factory=list)
    history: list[str] = field(default_factory=list)


class MemoryChanges(RuleBasedStateMachine):
    """The rules, on one kind of store."""

    versioned: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__()
        self.store: Any = (
            SQLiteStore.open(":memory:", index=None) if self.versioned else InMemoryStore()
        )
        self.gate = Gate()
        self.expected: list[dict[str, ExpectedMemory]] = [{}, {}, {}]
        self.forgotten_texts: list[set[str]] = [set(), set(), set()]
        self.used_keys: list[str] = ["nosuchkey"]
        dotted = "a.b" if self.versioned else "a-b"  # langgraph's own refuse dots
        self.places = [(space, user.replace("DOTTED", dotted)) for space, user in PLACES]

    def teardown(self) -> None:
        try:
            self.check_histories()
        finally:
            if self.versioned:
                self.store.close()

    def open_collection(self, place: int) -> tuple[Collection, Any]:
        template, user = self.places[place]
        config = {"configurable": {"user_id": user, "thread_id": "t"}}
        return Collection(self.store, template, gate=self.gate), config

    def fill_namespace(self, place: int) -> Space:
        template, user = self.places[place]
        return tuple(label.format(user_id=user) for label in template)

    def map_texts_to_keys(self, place: int) -> dict[str, str]:
        """Return the keys of the present memories by their texts."""
        return {known.text: key for key, known in self.expected[place].items() if known.text}

    def run_action(
        self, place: int, way: str, action: str, key: str | None, text: str | None
    ) -> Any:
        """Execute an action, and return the reported change and key, or None for an unknown key."""
        collection, config = self.open_collection(place)
        if "tool" in way:
            tool = manage_memory(collection.namespace.labels, self.store, gate=self.gate)
            args = {"action": action, "id": key, "text": text}
            call = {"name": tool.name, "args": args, "id": "c", "type": "tool_call"}
            message = (
                tool.invoke(call, config)
                if way == "tool"
                else asyncio.run(tool.ainvoke(call, config))
            )
            return _parse_tool_answer(message)
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
        """Create one memory in each namespace."""
        for place in range(3):
            self.create(place, TEXTS[0], "method", shouted=False)

    @rule(place=places, text=texts, way=ways, shouted=st.booleans())
    def create(self, place: int, text: str, way: str, shouted: bool) -> None:
        """A new text is added; a text that exists is reported as unchanged."""
        there = self.map_texts_to_keys(place).get(text)
        change, key = self.run_action(
            place, way, "create", None, f"{text.upper()}!" if shouted else text
        )
        if there is not None:
            assert (change, key) == ("unchanged", there)
            return
        assert change == "added"
        assert key not in self.used_keys
        self.record_added(place, key, f"{text.upper()}!" if shouted else text, text)

    @rule(place=places, number=numbers, text=texts, way=ways, replaces=st.booleans())
    def change(self, place: int, number: int, text: str, way: str, replaces: bool) -> None:
        """A memory is changed, unless it does not exist or another one has the text already."""
        key = self.used_keys[number % len(self.used_keys)]
        known = self.expected[place].get(key)
        reported = self.run_action(place, way, "supersede" if replaces else "update", key, text)
        if known is None or known.text is None:
            assert reported is None
            return
        there = self.map_texts_to_keys(place).get(text)
        if there is not None and (there != key or known.history[-1] == text):
            assert reported == ("unchanged", there)
            return
        assert reported == ("superseded" if replaces else "updated", key)
        known.formerly = [known.history[-1], *known.formerly][:10]
        known.history.append(text)
        known.text = text

    @rule(place=places, number=numbers, way=ways)
    def delete(self, place: int, number: int, way: str) -> None:
        """A memory is deleted if it exists. Its past stays."""
        key = self.used_keys[number % len(self.used_keys)]
        known = self.expected[place].get(key)
        reported = self.run_action(place, way, "delete", key, None)
        if known is None or known.text is None:
            assert reported is None
            return
        assert reported == ("deleted", key)
        self.record_forgotten(place, known)
        known.text = None
        if not self.versioned:
            known.history = []

    @rule(place=places, number=numbers, asynchronous=st.booleans())
    def forget(self, place: int, number: int, asynchronous: bool) -> None:
        """A memory and its past are removed. An unknown memory raises an error."""
        key = self.used_keys[number % len(self.used_keys)]
        known = self.expected[place].get(key)
        collection, config = self.open_collection(place)
        if known is None or not known.history:
            with pytest.raises(UnknownMemory):
                collection.forget(key, config=config)
            return
        if asynchronous:
            receipt = asyncio.run(collection.aforget(key, config=config))
        else:
            receipt = collection.forget(key, config=config)
        assert receipt.keys == ((self.fill_namespace(place), key),)
        self.record_forgotten(place, known)
        del self.expected[place][key]

    @rule(place=places, text=texts)
    def extract(self, place: int, text: str) -> None:
        """An extracted text does not bring back a deleted or forgotten memory."""
        key = f"formed{len(self.used_keys)}"
        adapter, space = StoreAdapter(self.store), self.fill_namespace(place)
        kept = run(plan_admission(self.gate, adapter, space, [Candidate(text)], [key]))
        run(adapter.write(kept.puts))
        [outcome] = kept.outcomes
        if text in self.forgotten_texts[place]:
            assert outcome.change == "refused"
        elif text in self.map_texts_to_keys(place):
            assert (outcome.change, outcome.key) == (
                "unchanged",
                self.map_texts_to_keys(place)[text],
            )
        elif outcome.change == "refused":  # nobody knows when it was said: maybe before it changed
            assert "said before" in outcome.reason
            assert text in self.list_former_texts(place)
        else:
            assert (outcome.change, outcome.key) == ("added", key)
            self.record_added(place, key, text, text)

    def list_former_texts(self, place: int) -> set[str]:
        """Return the former texts of the present memories."""
        present = [known for known in self.expected[place].values() if known.text is not None]
        return {_find_original_text(text) for known in present for text in known.formerly}

    def record_added(self, place: int, key: str, written: str, text: str) -> None:
        self.used_keys.append(key)
        self.expected[place][key] = ExpectedMemory(text, history=[written])

    def record_forgotten(self, place: int, known: ExpectedMemory) -> None:
        self.forgotten_texts[place].update(
            _find_original_text(text) for text in (*known.history, *known.formerly)
        )

    # -- what is left

    @invariant()
    def check_present_memories(self) -> None:
        """Each namespace has its own memories, and no others."""
        for place in range(3):
            collection, config = self.open_collection(place)
            there = {
                key: (known.history[-1], known.formerly)
                for key, known in self.expected[place].items()
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
                assert {memory.namespace for memory in listed} <= {self.fill_namespace(place)}

    def check_histories(self) -> None:
        """The history of each key, in each namespace, is complete, or there is none."""
        for place in range(3):
            collection, config = self.open_collection(place)
            for key in self.used_keys:
                known = self.expected[place].get(key)
                versions = [memory.text for memory in collection.history(key, config=config)]
                expected = known.history if known else []
                assert (expected if self.versioned else expected[-1:]) == versions


def _find_original_text(text: str) -> str:
    """Return the text of `TEXTS` that this text is a variant of."""
    return next(each for each in TEXTS if each.upper() == text.upper().rstrip("!"))


def _parse_tool_answer(message: ToolMessage) -> Any:
    """Return the change and the key that the answer of the tool reports."""
    if "There is no memory with the id" in message.text:
        return None
    for words, change in _CHANGES_BY_WORDS.items():
        if words in message.text:
            match = re.search(r"(?:id is|memory) ([2-9a-z]{9}|formed\d+)\b", message.text)
            assert match is not None
            return change, match[1]
    raise AssertionError(message.text)


_CHANGES_BY_WORDS = {
    "Kept.": "added",
    "is updated": "updated",
    "is superseded": "superseded",
    "is deleted": "deleted",
    "Nothing had to be changed": "unchanged",
    "says this already": "unchanged",
}


class LanggraphStoreChanges(MemoryChanges):
    """The same rules on a store of langgraph."""

    versioned = False


TestMemoryChanges = MemoryChanges.TestCase
TestMemoryChanges.settings = settings(max_examples=rounds(12), stateful_step_count=25)
TestLanggraphStoreChanges = LanggraphStoreChanges.TestCase
TestLanggraphStoreChanges.settings = settings(max_examples=rounds(12), stateful_step_count=25)
