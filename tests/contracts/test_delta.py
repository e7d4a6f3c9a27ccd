"""langgraph's `DeltaChannel`: values that are rebuilt from writes survive prunes and copies."""

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
from tests.contracts.puts import checkpoint_id_of, config_at

Durability = Literal["sync", "async", "exit"]


def append_words(state: list[str], updates: Sequence[list[str]]) -> list[str]:
    return [*state, *(word for update in updates for word in update)]


class SnapshotEveryUpdate(TypedDict):
    words: Annotated[list[str], DeltaChannel(append_words, snapshot_frequency=1)]
    total: Annotated[int, operator.add]


class SnapshotEveryThirdUpdate(TypedDict):
    words: Annotated[list[str], DeltaChannel(append_words, snapshot_frequency=3)]
    total: Annotated[int, operator.add]


class SnapshotEveryHundredthUpdate(TypedDict):
    words: Annotated[list[str], DeltaChannel(append_words, snapshot_frequency=100)]
    total: Annotated[int, operator.add]


STATE_BY_SNAPSHOT_FREQUENCY: dict[int, Any] = {
    1: SnapshotEveryUpdate,
    3: SnapshotEveryThirdUpdate,
    100: SnapshotEveryHundredthUpdate,
}


def compile_graph(saver: Any, snapshot_frequency: int) -> Any:
    """Compile a graph of two parallel nodes and a third.

    Every `snapshot_frequency` updates, the channel has a snapshot.
    """

    def make_node(name: str) -> Any:
        return lambda state: {"words": [f"{name}{len(state['words'])}"], "total": 1}

    builder = StateGraph(STATE_BY_SNAPSHOT_FREQUENCY[snapshot_frequency])
    for name in "abc":
        builder.add_node(name, make_node(name))
    builder.add_edge(START, "a")
    builder.add_edge(START, "b")
    builder.add_edge(["a", "b"], "c")
    return builder.compile(checkpointer=saver)


def run_graph(graph: Any, word: str, durability: Durability = "sync", config: Any = None) -> Any:
    return graph.invoke({"words": [word], "total": 0}, config or config_at(), durability=durability)


for_each_frequency = pytest.mark.parametrize("snapshot_frequency", [1, 3, 100])


@for_each_frequency
@pytest.mark.parametrize("durability", ["sync", "async", "exit"])
def test_state_and_history_equal_those_of_langgraph_memory_saver(
    saver: SQLiteCheckpointer, snapshot_frequency: int, durability: Durability
) -> None:
    """The states are equal for blocking and for async calls."""

    async def read_states(graph: Any) -> list[Any]:
        return [(s.values, s.next) async for s in graph.aget_state_history(config_at())]

    histories = []
    for checkpointer in (InMemorySaver(), saver):
        graph = compile_graph(checkpointer, snapshot_frequency)
        for word in "xyz":
            run_graph(graph, word, durability)
        histories.append([(s.values, s.next) for s in graph.get_state_history(config_at())])
        histories.append(asyncio.run(read_states(graph)))

    assert histories[0] == histories[1] == histories[2] == histories[3]
    assert len(histories[3][0][0]["words"]) == 12


@for_each_frequency
def test_state_is_unchanged_after_prune_and_copy(
    saver: SQLiteCheckpointer, snapshot_frequency: int
) -> None:
    """The writes of a head survive prunes and copies, and runs continue from the head."""
    graph = compile_graph(saver, snapshot_frequency)
    for word in "xyz":
        run_graph(graph, word)
    expected = graph.get_state(config_at()).values
    saver.copy_thread("t", "whole")
    saver.copy_thread(
        "t", "part", checkpoint_id=checkpoint_id_of(graph.get_state(config_at()).config)
    )
    saver.prune(["t", "part"])
    saver.retain(Retention(last=1, history=False), thread_ids=["whole"])

    for name in ("t", "whole", "part"):
        assert expected == graph.get_state(config_at(name)).values
    results = [
        run_graph(graph, "more", config=config_at(name))["words"] for name in ("t", "whole", "part")
    ]
    assert [[*expected["words"], "more", "a13", "b13", "c15"]] * 3 == results
    saver.delete_thread("t")
    saver.prune(["whole", "part"])
    assert results[1:] == [
        graph.get_state(config_at(name)).values["words"] for name in ("whole", "part")
    ]


@for_each_frequency
def test_retain_keeps_writes_that_kept_checkpoints_are_rebuilt_from(
    saver: SQLiteCheckpointer, snapshot_frequency: int
) -> None:
    """Every kept checkpoint has the same values as before."""
    graph = compile_graph(saver, snapshot_frequency)
    for word in "wxyz":
        run_graph(graph, word)
    before = {checkpoint_id_of(s.config): s.values for s in graph.get_state_history(config_at())}
    saver.retain(Retention(turns=True, last=2))
    after = {checkpoint_id_of(s.config): s.values for s in graph.get_state_history(config_at())}

    assert len(after) >= 5
    assert {uid: before[uid] for uid in after} == after


def test_prune_leaves_only_head_if_every_update_has_snapshot(saver: SQLiteCheckpointer) -> None:
    graph = compile_graph(saver, 1)
    for word in "xyz":
        run_graph(graph, word)
    saver.prune(["t"])

    assert len(saver.checkpoints("t")) == 1


def test_branches_are_rebuilt_without_writes_of_siblings(saver: SQLiteCheckpointer) -> None:
    """A fork has the writes of its ancestors, and no write of its sibling."""
    graph = compile_graph(saver, 100)
    run_graph(graph, "x")
    old = graph.get_state(config_at())
    left = run_graph(graph, "left")
    right = run_graph(graph, "right", config=old.config)

    assert [*old.values["words"], "left", "a5", "b5", "c7"] == left["words"]
    assert [*old.values["words"], "right", "a5", "b5", "c7"] == right["words"]
