"""The tools of langmem work with perdure's store."""

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


class LangmemTools:
    """Both tools, called in a graph that was compiled with the store."""

    def __init__(self, store: SQLiteStore, mode: str) -> None:
        self.store, self.mode = store, mode
        self.manage = langmem.create_manage_memory_tool(("memories", "{user_id}"))
        self.search = langmem.create_search_memory_tool(("memories", "{user_id}"))

    def call(self, tool: Any, **arguments: Any) -> str:
        """Call a tool in a node and return its answer."""

        def call_blocking(state: dict[str, Any]) -> dict[str, Any]:
            return {"answer": tool.invoke(arguments)}

        async def call_async(state: dict[str, Any]) -> dict[str, Any]:
            return {"answer": await tool.ainvoke(arguments)}

        graph: Any = StateGraph(dict)
        graph.add_node("node", call_blocking if self.mode == "blocking" else call_async)
        compiled = graph.add_edge(START, "node").compile(store=self.store)
        if self.mode == "blocking":
            return str(compiled.invoke({}, CONFIG)["answer"])
        return str(asyncio.run(compiled.ainvoke({}, CONFIG))["answer"])


@pytest.mark.parametrize("mode", ["blocking", "awaited"])
def test_langmem_tools_create_find_update_and_delete_memories(mode: str, place: Place) -> None:
    """The store keeps versions of a memory, like those of any item."""
    with place.store() as store:
        tools = LangmemTools(store, mode)
        created = tools.call(tools.manage, content="Ann likes green tea", action="create")
        tools.call(tools.manage, content="Ann works in a school", action="create")
        [key] = re.findall(r"created? memory (\S+)", created)
        matches = json.loads(tools.call(tools.search, query="Which tea does she like?", limit=1))
        tools.call(tools.manage, content="Ann likes black tea", action="update", id=key)
        versions = [item.value for item in store.history(ANN, key)]
        tools.call(tools.manage, action="delete", id=key)
        remaining = json.loads(tools.call(tools.search, query="tea", limit=10))

    assert [(item["key"], item["value"]) for item in matches] == [
        (key, {"content": "Ann likes green tea"})
    ]
    assert versions == [{"content": "Ann likes green tea"}, {"content": "Ann likes black tea"}]
    assert key not in {item["key"] for item in remaining}
