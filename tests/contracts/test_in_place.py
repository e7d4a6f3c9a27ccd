"""What a node changes in place and does not return, which is no update to langgraph."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.messages import HumanMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph

from perdure.checkpointers import SQLiteCheckpointer


class Counted(MessagesState):
    count: int


@pytest.mark.parametrize("remembered", [True, False])
def test_a_change_in_place_that_no_node_returned(remembered: bool) -> None:
    """langgraph says that the channel did not change: it is as it was, cached or not."""

    def redacts(state: Counted) -> dict[str, Any]:
        state["messages"][0].content = "redacted"
        return {"count": 1}

    def talk(saver: Any) -> list[str]:
        builder = StateGraph(Counted).add_node("redacts", redacts)
        builder.add_node("counts", lambda state: {"count": 2})
        builder.add_edge(START, "redacts").add_edge("redacts", "counts")
        graph: Any = builder.compile(checkpointer=saver)
        config: Any = {"configurable": {"thread_id": "t"}}
        for _ in graph.stream({"messages": [HumanMessage("secret")]}, config, durability="sync"):
            if not remembered and isinstance(saver, SQLiteCheckpointer):
                saver._cache.forget("t")
        return [m.text for m in graph.get_state(config).values["messages"]]

    with SQLiteCheckpointer.open(":memory:") as saver:
        assert talk(InMemorySaver()) == talk(saver) == ["secret"]
