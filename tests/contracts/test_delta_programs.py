"""Random programs on a `DeltaChannel`: the history agrees with the state after each step."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Annotated, Any

import pytest
from deepagents.graph import create_deep_agent
from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, RemoveMessage
from langgraph.channels import DeltaChannel
from langgraph.graph import START, StateGraph
from langgraph.graph.message import REMOVE_ALL_MESSAGES, add_messages
from langgraph.types import Overwrite
from typing_extensions import TypedDict

from perdure.checkpointers import Retention
from tests.backends import Place
from tests.contracts.puts import config_at
from tests.rounds import rounds

DURABILITIES: Any = ["sync", "async", "exit"]


def merge_and_give_ids(state: list[AnyMessage] | None, updates: Sequence[Any]) -> list[AnyMessage]:
    """Merge messages, as a reducer that gives a new id at each replay to a message without one."""
    for update in updates:
        for part in update if isinstance(update, list) else [update]:
            ids = {message.id for message in state or ()} | {REMOVE_ALL_MESSAGES}
            if not isinstance(part, RemoveMessage) or part.id in ids:
                state = add_messages(state or [], [part])  # type: ignore[assignment, arg-type]
    return state or []


def deepagents_reducer() -> Any:
    """Return the reducer of deepagents, which leaves messages without an id as they are."""
    agent: Any = create_deep_agent(model=GenericFakeChatModel(messages=iter(())))
    return agent.channels["messages"].reducer


class RandomProgram:
    """A random program that changes a thread.

    Attributes:
        wrong: What was wrong after a step.
    """

    def __init__(self, seed: int, place: Place) -> None:
        self.random, self.place = random.Random(seed), place
        self.reduce = self.random.choice([merge_and_give_ids, deepagents_reducer()])
        self.gives_ids = self.reduce is merge_and_give_ids
        self.snapshot_frequency = self.random.choice([1, 2, 3, 50])
        self.is_cold = self.random.random() < 0.4  # the cache is emptied after each step
        self.count = 0
        self.saver = place.saver()
        make: Any = TypedDict
        channel: Any = DeltaChannel(self.reduce, snapshot_frequency=self.snapshot_frequency)
        self.builder: Any = StateGraph(make("State", {"messages": Annotated[list, channel]}))
        for name in "abc":
            self.builder.add_node(name, self.node)
        self.builder.add_edge(START, "a")
        self.is_parallel = self.random.random() < 0.5
        self.builder.add_edge(START if self.is_parallel else "a", "b")
        self.builder.add_edge("b", "c")
        self.graph = self.builder.compile(checkpointer=self.saver)

    def text(self) -> str:
        self.count += 1
        return f"text {self.count}."

    def message(self) -> Any:
        """Return a message in one of its forms."""
        text, choose = self.text(), self.random.choice
        forms: list[Any] = [
            HumanMessage(text, id=choice)
            if (choice := choose([None, f"id{self.count}"]))
            else HumanMessage(text),
            AIMessage(text, id=f"id{self.count}"),
            {"role": "user", "content": text},
        ]
        return choose(forms if self.gives_ids else [*forms, ("human", text)])

    def answer(self) -> AIMessage:
        return AIMessage(self.text(), id=f"id{self.count}")

    def node(self, state: Any) -> Any:
        """Add, remove, replace or overwrite messages, as a node."""
        messages, kind = state["messages"], self.random.random()
        ids = [message.id for message in messages if message.id]
        if kind < 0.5:
            return {"messages": [self.answer() for _ in range(self.random.choice([1, 1, 2, 3]))]}
        if kind < 0.6:
            return {"messages": self.answer()}
        if kind < 0.75 and ids:
            return {"messages": [RemoveMessage(self.random.choice(ids)), self.answer()]}
        if kind < 0.82 and ids:
            return {"messages": [AIMessage(self.text(), id=self.random.choice(ids))]}
        if kind < 0.9:
            remove: Any = RemoveMessage(REMOVE_ALL_MESSAGES)
            return {"messages": [remove, self.answer(), *messages[-2:]]}
        if kind < 0.94 and not (self.gives_ids or self.is_parallel):
            return {"messages": Overwrite([self.answer(), *messages[-1:]])}
        return {"messages": []} if kind < 0.97 else {}

    def step(self) -> None:
        """Run the graph, or change the thread in another way."""
        kind, has_thread = self.random.random(), bool(self.saver.threads())
        durability = self.random.choice(DURABILITIES)
        input = {"messages": [self.message() for _ in range(self.random.choice([1, 1, 2]))]}
        if kind < 0.6 or not has_thread:
            self.graph.invoke(input, config_at(), durability=durability)
        elif kind < 0.7:
            self.graph.update_state(config_at(), input, as_node=self.random.choice("abc"))
        elif kind < 0.8:
            snapshot = self.random.choice(list(self.graph.get_state_history(config_at())))
            self.graph.invoke(input, snapshot.config, durability=durability)
        elif kind < 0.87:
            self.erase_some_messages()
        elif kind < 0.91:
            self.saver.retain(Retention(last=1), thread_ids=["t"])
        elif kind < 0.95:
            self.saver.copy_thread("t", "copy")
            self.saver.delete_thread("t")
            self.saver.copy_thread("copy", "t")
            self.saver.delete_thread("copy")
        else:
            self.saver.close()
            self.saver = self.place.saver()
            self.graph = self.builder.compile(checkpointer=self.saver)
        if self.is_cold:
            self.saver._reader.cache.drop_thread("t")

    def erase_some_messages(self) -> None:
        items = [item.value for item in self.saver.history("t") if item.value.id]
        erased = self.random.sample(items, min(len(items), self.random.choice([1, 1, 2])))
        self.saver.erase("t", [message.id for message in erased])
        remaining_texts = {item.value.text for item in self.saver.history("t")}

        assert remaining_texts.isdisjoint(message.text for message in erased)

    def check_history(self) -> None:
        """Compare the history with the state, which langgraph replays from the writes."""
        state = [m.text for m in self.graph.get_state(config_at()).values.get("messages", [])]
        items = [item for item in self.saver.history("t") if not item.branch]
        [head] = [info for info in self.saver.checkpoints("t", checkpoint_ns="") if info.is_head]

        assert len({item.value.text for item in items}) == len(items)
        assert sorted(state) == sorted(item.value.text for item in items if item.seen)
        assert not any(item.seen is None for item in items)
        assert head.counts.get("messages", 0) == len(state)
        assert self.saver.thread("t").messages == len(items)


@pytest.mark.repeats
@pytest.mark.parametrize("number", range(8))
def test_history_agrees_with_state_after_random_programs(place: Place, number: int) -> None:
    """The history has each message once.

    `seen` is true for messages of the state, and counts are right.
    """
    for seed in range(number * 1000, number * 1000 + rounds(12)):
        program = RandomProgram(seed, place)
        with program.saver:
            for _ in range(program.random.randint(3, 9)):
                program.step()
                program.check_history()
            program.saver.delete_thread("t")
        program.saver.close()
