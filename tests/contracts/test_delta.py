"""langgraph's `DeltaChannel`: what is rebuilt from writes outlives prunes and copies."""

from __future__ import annotations

import asyncio
import operator
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypedDict

import pytest
from langgraph.channels import DeltaChannel
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, StateGraph

from perdure.checkpointers import Retention, SQLiteCheckpointer
from tests.contracts.puts import at, uid_of

Durability = Literal["sync", "async", "exit"]


def extend(state: list[str], updates: Sequence[list[str]]) -> list[str]:
    return [*state, *(word for update in updates for word in update)]


class Often(TypedDict):
    words: Annotated[list[str], DeltaChannel(extend, snapshot_frequency=1)]
    total: Annotated[int, operator.add]


class Sometimes(TypedDict):
    words: Annotated[list[str], DeltaChannel(extend, snapshot_frequency=3)]
    total: Annotated[int, operator.add]


class Seldom(TypedDict):
    words: Annotated[list[str], DeltaChannel(extend, snapshot_frequency=100)]
    total: Annotated[int, operator.add]


STATES: dict[int, Any] = {1: Often, 3: Sometimes, 100: Seldom}


def graph_with(saver: Any, every: int) -> Any:
    """Two nodes side by side and one after them; a snapshot every so many updates."""

    def node(name: str) -> Any:
        return lambda state: {"words": [f"{name}{len(state['words'])}"], "total": 1}

    builder = StateGraph(STATES[every])
    for name in "abc":
        builder.add_node(name, node(name))
    builder.add_edge(START, "a")
    builder.add_edge(START, "b")
    builder.add_edge(["a", "b"], "c")
    return builder.compile(checkpointer=saver)


def run(graph: Any, word: str, durability: Durability = "sync", config: Any = None) -> Any:
    return graph.invoke({"words": [word], "total": 0}, config or at(), durability=durability)


frequencies = pytest.mark.parametrize("every", [1, 3, 100])


@frequencies
@pytest.mark.parametrize("durability", ["sync", "async", "exit"])
def test_state_and_history_equal_langgraphs(
    saver: SQLiteCheckpointer, every: int, durability: Durability
) -> None:
    """Every state on the way is InMemorySaver's, through both doors."""

    async def states(graph: Any) -> list[Any]:
        return [(s.values, s.next) async for s in graph.aget_state_history(at())]

    found = []
    for either in (InMemorySaver(), saver):
        graph = graph_with(either, every)
        for word in "xyz":
            run(graph, word, durability)
        found.append([(s.values, s.next) for s in graph.get_state_history(at())])
        found.append(asyncio.run(states(graph)))

    assert found[0] == found[1] == found[2] == found[3]
    assert len(found[3][0][0]["words"]) == 12


@frequencies
def test_state_is_equal_after_prune_and_copy(saver: SQLiteCheckpointer, every: int) -> None:
    """What a head is rebuilt from outlives prunes and copies, and runs go on from it."""
    graph = graph_with(saver, every)
    for word in "xyz":
        run(graph, word)
    expected = graph.get_state(at()).values
    saver.copy_thread("t", "whole")
    saver.copy_thread("t", "part", checkpoint_id=uid_of(graph.get_state(at()).config))
    saver.prune(["t", "part"])
    saver.retain(Retention(last=1, history=False), thread_ids=["whole"])

    for name in ("t", "whole", "part"):
        assert expected == graph.get_state(at(name)).values
    results = [run(graph, "more", config=at(name))["words"] for name in ("t", "whole", "part")]
    assert [[*expected["words"], "more", "a13", "b13", "c15"]] * 3 == results
    saver.delete_thread("t")
    saver.prune(["whole", "part"])
    assert results[1:] == [graph.get_state(at(name)).values["words"] for name in ("whole", "part")]


@frequencies
def test_every_kept_checkpoint_can_be_rebuilt(saver: SQLiteCheckpointer, every: int) -> None:
    """Retention keeps what each checkpoint it keeps is rebuilt from."""
    graph = graph_with(saver, every)
    for word in "wxyz":
        run(graph, word)
    before = {uid_of(s.config): s.values for s in graph.get_state_history(at())}
    saver.retain(Retention(turns=True, last=2))
    after = {uid_of(s.config): s.values for s in graph.get_state_history(at())}

    assert len(after) >= 5
    assert {uid: before[uid] for uid in after} == after


def test_pruning_drops_what_no_snapshot_needs(saver: SQLiteCheckpointer) -> None:
    """With a snapshot at every update, only the head is left."""
    graph = graph_with(saver, 1)
    for word in "xyz":
        run(graph, word)
    saver.prune(["t"])

    assert len(saver.checkpoints("t")) == 1


def test_branches_are_rebuilt_from_their_own_writes(saver: SQLiteCheckpointer) -> None:
    """A fork holds what was written on its way, not what its sibling wrote."""
    graph = graph_with(saver, 100)
    run(graph, "x")
    old = graph.get_state(at())
    left = run(graph, "left")
    right = run(graph, "right", config=old.config)

    assert [*old.values["words"], "left", "a5", "b5", "c7"] == left["words"]
    assert [*old.values["words"], "right", "a5", "b5", "c7"] == right["words"]
