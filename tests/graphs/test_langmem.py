"""langmem's tools on our store: what they write is found, changed and removed through them."""

from __future__ import annotations

import asyncio
import json
import re
import warnings
from typing import Any

import pytest
from langgraph.graph import START, StateGraph

from perdure.stores import SQLiteStore
from tests.backends import Place

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # langgraph's own, about what langmem imports
    import langmem  # type: ignore[import-untyped]  # ships no types

ANN = ("memories", "ann@example.com")
CONFIG: Any = {"configurable": {"user_id": "ann@example.com"}}


class Tools:
    """Both tools, within a graph that was compiled with the store, blocking or awaited."""

    def __init__(self, store: SQLiteStore, door: str) -> None:
        self.store, self.door = store, door
        self.manage = langmem.create_manage_memory_tool(("memories", "{user_id}"))
        self.search = langmem.create_search_memory_tool(("memories", "{user_id}"))

    def call(self, tool: Any, **given: Any) -> str:
        """What a tool answers in a node."""

        def node(state: dict[str, Any]) -> dict[str, Any]:
            return {"answer": tool.invoke(given)}

        async def anode(state: dict[str, Any]) -> dict[str, Any]:
            return {"answer": await tool.ainvoke(given)}

        graph: Any = StateGraph(dict)
        graph.add_node("node", node if self.door == "blocking" else anode)
        compiled = graph.add_edge(START, "node").compile(store=self.store)
        if self.door == "blocking":
            return str(compiled.invoke({}, CONFIG)["answer"])
        return str(asyncio.run(compiled.ainvoke({}, CONFIG))["answer"])


@pytest.mark.parametrize("door", ["blocking", "awaited"])
def test_the_tools_of_langmem(door: str, place: Place) -> None:
    """Created, found, updated and deleted; versions are kept of it like of any item."""
    with place.store() as store:
        tools = Tools(store, door)
        created = tools.call(tools.manage, content="Ann likes green tea", action="create")
        tools.call(tools.manage, content="Ann works in a school", action="create")
        [key] = re.findall(r"created? memory (\S+)", created)
        found = json.loads(tools.call(tools.search, query="Which tea does she like?", limit=1))
        tools.call(tools.manage, content="Ann likes black tea", action="update", id=key)
        versions = [item.value for item in store.history(ANN, key)]
        tools.call(tools.manage, action="delete", id=key)
        left = json.loads(tools.call(tools.search, query="tea", limit=10))

    assert [(item["key"], item["value"]) for item in found] == [
        (key, {"content": "Ann likes green tea"})
    ]
    assert versions == [{"content": "Ann likes green tea"}, {"content": "Ann likes black tea"}]
    assert key not in {item["key"] for item in left}
