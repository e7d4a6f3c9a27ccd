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

from perdure.effects import run_operation
from perdure.errors import UnknownMemory
from perdure.memory.long_term.collection import Collection
from perdure.memory.long_term.gate import Gate, judge_candidates_and_plan_puts
from perdure.memory.long_term.records import Candidate, StoreAdapter
from perdure.memory.long_term.tools import manage_memory
from perdure.stores import SQLiteStore
from tests.rounds import rounds

Space = tuple[str, ...]
TEXTS = [f"Ann likes {thing}" for thing in ("tea", "chess", "Oslo", "jazz")]
PLACES: list[tuple[Space, str]] = [  # a template and its user ID
    (("memories", "{user_id}"), "a"),
    (("memories", "{user_id}"), "DOTTED"),
    (("memories", "{user_id}", "b"), "a"),
]

places = st.integers(0, 2)
texts = st.sampled_from(TEXTS)
call_forms = st.sampled_from(["tool", "atool", "method", "amethod"])
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
        dotted = "a.b" if self.versioned else "a-b"  # stores of langgraph refuse dots
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
        return {
            memory_state.text: key
            for key, memory_state in self.expected[place].items()
            if memory_state.text
        }

    def run_action(
        self, place: int, call_form: str, action: str, key: str | None, text: str | None
    ) -> Any:
        """Execute an action, and return the reported change and key, or None for an unknown key."""
        collection, config = self.open_collection(place)
        if "tool" in call_form:
            tool = manage_memory(collection.namespace.labels, self.store, gate=self.gate)
            args = {"action": action, "id": key, "text": text}
            call = {"name": tool.name, "args": args, "id": "c", "type": "tool_call"}
            message = (
                tool.invoke(call, config)
                if call_form == "tool"
                else asyncio.run(tool.ainvoke(call, config))
            )
            return _parse_tool_answer(message)
        method = {"create": "insert"}.get(action, action)
        arguments = [part for part in (key, text) if part is not None]
        try:
            if call_form == "method":
                outcome = getattr(collection, method)(*arguments, config=config)
            else:
                outcome = asyncio.run(getattr(collection, f"a{method}")(*arguments, config=config))
        except UnknownMemory:
            return None
        return outcome.change, outcome.key

    # -- rules

    @initialize()
    def begin(self) -> None:
        """Create one memory in each namespace."""
        for place in range(3):
            self.create(place, TEXTS[0], "method", shouted=False)

    @rule(place=places, text=texts, call_form=call_forms, shouted=st.booleans())
    def create(self, place: int, text: str, call_form: str, shouted: bool) -> None:
        """A new text is added; a text that exists is reported as unchanged."""
        existing_key = self.map_texts_to_keys(place).get(text)
        change, key = self.run_action(
            place, call_form, "create", None, f"{text.upper()}!" if shouted else text
        )
        if existing_key is not None:
            assert (change, key) == ("unchanged", existing_key)
            return
        assert change == "added"
        assert key not in self.used_keys
        self.record_added(place, key, f"{text.upper()}!" if shouted else text, text)

    @rule(place=places, number=numbers, text=texts, call_form=call_forms, replaces=st.booleans())
    def change(self, place: int, number: int, text: str, call_form: str, replaces: bool) -> None:
        """A memory is changed, unless it does not exist or another one has the text already."""
        key = self.used_keys[number % len(self.used_keys)]
        memory_state = self.expected[place].get(key)
        reported = self.run_action(
            place, call_form, "supersede" if replaces else "update", key, text
        )
        if memory_state is None or memory_state.text is None:
            assert reported is None
            return
        existing_key = self.map_texts_to_keys(place).get(text)
        if existing_key is not None and (existing_key != key or memory_state.history[-1] == text):
            assert reported == ("unchanged", existing_key)
            return
        assert reported == ("superseded" if replaces else "updated", key)
        memory_state.formerly = [memory_state.history[-1], *memory_state.formerly][:10]
        memory_state.history.append(text)
        memory_state.text = text

    @rule(place=places, number=numbers, call_form=call_forms)
    def delete(self, place: int, number: int, call_form: str) -> None:
        """A memory is deleted if it exists. Its past stays."""
        key = self.used_keys[number % len(self.used_keys)]
        memory_state = self.expected[place].get(key)
        reported = self.run_action(place, call_form, "delete", key, None)
        if memory_state is None or memory_state.text is None:
            assert reported is None
            return
        assert reported == ("deleted", key)
        self.record_forgotten(place, memory_state)
        memory_state.text = None
        if not self.versioned:
            memory_state.history = []

    @rule(place=places, number=numbers, asynchronous=st.booleans())
    def forget(self, place: int, number: int, asynchronous: bool) -> None:
        """A memory and its past are removed. An unknown memory raises an error."""
        key = self.used_keys[number % len(self.used_keys)]
        memory_state = self.expected[place].get(key)
        collection, config = self.open_collection(place)
        if memory_state is None or not memory_state.history:
            with pytest.raises(UnknownMemory):
                collection.forget(key, config=config)
            return
        if asynchronous:
            receipt = asyncio.run(collection.aforget(key, config=config))
        else:
            receipt = collection.forget(key, config=config)
        assert receipt.keys == ((self.fill_namespace(place), key),)
        self.record_forgotten(place, memory_state)
        del self.expected[place][key]

    @rule(place=places, text=texts)
    def extract(self, place: int, text: str) -> None:
        """An extracted text does not bring back a deleted or forgotten memory."""
        key = f"formed{len(self.used_keys)}"
        adapter, space = StoreAdapter(self.store), self.fill_namespace(place)
        plan = run_operation(
            judge_candidates_and_plan_puts(self.gate, adapter, space, [Candidate(text)], [key])
        )
        run_operation(adapter.write(plan.puts))
        [outcome] = plan.outcomes
        if text in self.forgotten_texts[place]:
            assert outcome.change == "refused"
        elif text in self.map_texts_to_keys(place):
            assert (outcome.change, outcome.key) == (
                "unchanged",
                self.map_texts_to_keys(place)[text],
            )
        elif outcome.change == "refused":  # its time is unknown, so it may be a former text
            assert "this statement is older" in outcome.reason
            assert text in self.list_former_texts(place)
        else:
            assert (outcome.change, outcome.key) == ("added", key)
            self.record_added(place, key, text, text)

    def list_former_texts(self, place: int) -> set[str]:
        """Return the former texts of the present memories."""
        present = [
            memory_state
            for memory_state in self.expected[place].values()
            if memory_state.text is not None
        ]
        return {
            _find_original_text(text) for memory_state in present for text in memory_state.formerly
        }

    def record_added(self, place: int, key: str, written: str, text: str) -> None:
        self.used_keys.append(key)
        self.expected[place][key] = ExpectedMemory(text, history=[written])

    def record_forgotten(self, place: int, known: ExpectedMemory) -> None:
        self.forgotten_texts[place].update(
            _find_original_text(text) for text in (*known.history, *known.formerly)
        )

    # -- invariants

    @invariant()
    def check_present_memories(self) -> None:
        """Each namespace has its own memories, and no others."""
        for place in range(3):
            collection, config = self.open_collection(place)
            expected_memories = {
                key: (memory_state.history[-1], memory_state.formerly)
                for key, memory_state in self.expected[place].items()
                if memory_state.text is not None
            }
            for listed in (
                collection.list(config=config),
                collection.search("Ann", limit=100, config=config),
            ):
                assert expected_memories == {
                    memory.key: (memory.text, [former.text for former in memory.previous])
                    for memory in listed
                }
                assert {memory.namespace for memory in listed} <= {self.fill_namespace(place)}

    def check_histories(self) -> None:
        """The history of each key, in each namespace, is complete, or there is none."""
        for place in range(3):
            collection, config = self.open_collection(place)
            for key in self.used_keys:
                memory_state = self.expected[place].get(key)
                versions = [memory.text for memory in collection.history(key, config=config)]
                expected = memory_state.history if memory_state else []
                assert (expected if self.versioned else expected[-1:]) == versions


def _find_original_text(text: str) -> str:
    """Return the text of `TEXTS` that this text is a variant of."""
    return next(original for original in TEXTS if original.upper() == text.upper().rstrip("!"))


def _parse_tool_answer(message: ToolMessage) -> Any:
    """Return the change and the key that the answer of the tool reports."""
    if "There is no memory with the id" in message.text:
        return None
    duplicate = re.search(r"another memory, (\w+), already contains this text", message.text)
    if duplicate is not None:
        return "unchanged", duplicate[1]
    for words, change in _CHANGES_BY_WORDS.items():
        if words in message.text:
            match = re.search(r"(?:id is|memory) ([2-9a-z]{9}|formed\d+)\b", message.text)
            assert match is not None
            return change, match[1]
    raise AssertionError(message.text)


_CHANGES_BY_WORDS = {
    "Stored.": "added",
    "is updated": "updated",
    "is superseded": "superseded",
    "is deleted": "deleted",
    "Nothing had to be changed": "unchanged",
    "Nothing was changed": "unchanged",
}


class LanggraphStoreChanges(MemoryChanges):
    """The same rules on a store of langgraph."""

    versioned = False


TestMemoryChanges = MemoryChanges.TestCase
TestMemoryChanges.settings = settings(max_examples=rounds(12), stateful_step_count=25)
TestLanggraphStoreChanges = LanggraphStoreChanges.TestCase
TestLanggraphStoreChanges.settings = settings(max_examples=rounds(12), stateful_step_count=25)
