"""The tools of the hot path in graphs; what the developer does wrong, what a model is shown."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.messages import AIMessage, HumanMessage
from langgraph.graph import START, StateGraph
from langgraph.prebuilt import ToolNode

from perdure.checkpointers import SQLiteCheckpointer
from perdure.errors import ConfigurationError, InvalidConfig, InvalidNamespace
from perdure.memory.collection import Collection
from perdure.memory.extractors import build_turn_key
from perdure.memory.gate import Gate
from perdure.memory.reducers import ChatState
from perdure.memory.tools import manage_memory, search_memory
from perdure.stores import Provenance, SQLiteStore
from tests.memory.kept import ANN, BO, GHENT, TEA, call_tool, list_memory_texts
from tests.memory.scripted import ScriptedServer, make_client
from tests.openai_server import Answer, Reply


@pytest.fixture
def collection(store: Any) -> Collection:
    return Collection(store)


# -- what the developer does wrong


@pytest.mark.parametrize("user", [{}, {"user_id": 5}, {"user_id": None}, {"user_id": ""}])
def test_a_config_that_does_not_say_whose(store: Any, user: dict[str, Any]) -> None:
    """It is raised, within a graph too, and never answered."""
    config: Any = {"configurable": {"thread_id": "t", **user}}
    calls: dict[Any, Any] = {
        manage_memory: {"action": "create", "text": TEA},
        search_memory: {"query": "tea"},
    }
    for make, arguments in calls.items():
        tool = make(store=store)
        with pytest.raises(InvalidConfig, match="user_id"):
            tool.invoke(arguments, config)
        with pytest.raises(InvalidConfig, match="user_id"):
            asyncio.run(tool.ainvoke(arguments, config))
        with pytest.raises(InvalidConfig, match="user_id"):
            graph_of([tool]).invoke(calling(tool.name, arguments), config)
    assert store.search(()) == []


def test_no_store() -> None:
    """It is raised as well."""
    with pytest.raises(ConfigurationError, match="no store"):
        manage_memory().invoke({"action": "create", "text": TEA}, ANN)
    with pytest.raises(ConfigurationError, match="no store"):
        search_memory().invoke({"query": "tea"}, ANN)


def test_a_namespace_that_is_perdures_own(store: Any) -> None:
    """A user's id that would lead there is refused."""
    with pytest.raises(InvalidNamespace):
        manage_memory(("{user_id}",), store).invoke(
            {"action": "create", "text": TEA}, {"configurable": {"user_id": "perdure"}}
        )


@pytest.mark.parametrize(
    "options",
    [
        {"description": ""},
        {"description": None},
        {"name": ""},
        {"name": None},
        {"name": "keep it"},
        {"name": "k" * 65},
        {"schema": dict},
        {"gate": True},
        {"namespace": "memories"},
        {"store": "memory.db"},
    ],
    ids=str,
)
def test_options_that_are_none(options: dict[str, Any]) -> None:
    """What no tool can be made of is refused when it is made."""
    with pytest.raises(ConfigurationError):
        manage_memory(**options)


@pytest.mark.parametrize("limit", [0, -1, True, 2.5, None])
def test_a_limit_that_is_none(limit: Any) -> None:
    """So is a limit that is no number of memories."""
    with pytest.raises(ConfigurationError, match="limit"):
        search_memory(limit=limit)


# -- what a model is shown


def test_what_a_model_is_shown() -> None:
    """The arguments that there are, each described."""
    whole = manage_memory(gate=Gate()).tool_call_schema.model_json_schema()["properties"]  # type: ignore[union-attr]
    some = manage_memory(name="keep", description=" Drop it. ")
    found = search_memory().tool_call_schema.model_json_schema()["properties"]  # type: ignore[union-attr]

    assert list(whole) == ["action", "text", "id"]
    assert whole["action"]["enum"] == ["create", "update", "supersede", "delete"]
    assert all(part["description"] for part in (*whole.values(), *found.values()))
    assert list(found) == ["query", "limit", "since", "until"]
    assert (some.name, some.description) == ("keep", "Drop it.")
    assert search_memory(name="look-up", description="Find it.").name == "look-up"
    assert "'supersede' says what is true now" in whole["action"]["description"]


# -- within graphs


def calling(name: str, *arguments: dict[str, Any]) -> dict[str, Any]:
    calls = [{"name": name, "args": args, "id": f"c{n}"} for n, args in enumerate(arguments)]
    return {"messages": [AIMessage("", tool_calls=calls)]}


def graph_of(tools: list[Any], **options: Any) -> Any:
    builder = StateGraph(ChatState).add_node("tools", ToolNode(tools)).add_edge(START, "tools")
    return builder.compile(**options)


def test_in_a_tool_node(store: Any, collection: Collection, call_mode: str) -> None:
    """The store is the graph's, mistakes are answered, and the checkpoint is noted."""
    with SQLiteCheckpointer.open(":memory:") as saver:
        graph = graph_of([manage_memory(), search_memory()], store=store, checkpointer=saver)
        state = calling("manage_memory", {"action": "create", "text": TEA}, {"action": "delete"})
        if call_mode == "sync":
            said = graph.invoke(state, ANN)["messages"][1:]
        else:
            said = asyncio.run(graph.ainvoke(state, ANN))["messages"][1:]
    [memory] = collection.list(config=ANN)

    assert [message.status for message in said] == ["success", "error"]
    assert memory.provenance is not None
    assert memory.provenance.thread_id == "t1"
    assert memory.provenance.checkpoint_id


def test_superseding_by_a_tool_marks_the_turn(store: Any, collection: Collection) -> None:
    """The turn that the previous text rests on is past, and a search says since when."""
    turns = [build_turn_key("t1", message, 0) for message in ("m1", "m2")]
    graph = graph_of([manage_memory(store=store)])
    call: dict[str, Any] = {"action": "create", "text": GHENT}
    for number, (key, said) in enumerate(zip(turns, (GHENT, "Ann moved to Bruges"), strict=True)):
        store.put(("memories", "ann"), key, {"text": f"user: {said}", "kind": "turn"})
        human = HumanMessage(said, id=f"m{number + 1}")
        graph.invoke({"messages": [human, *calling("manage_memory", call)["messages"]]}, ANN)
        [fact] = collection.list(kind="fact", config=ANN)
        call = {"action": "supersede", "id": fact.key, "text": "Ann moved to Bruges"}
    [previous] = fact.previous
    search = search_memory(store=store, limit=9, min_score=0)
    answer = call_tool("sync", search, query="Ann lives moved")
    shown = [json.loads(line) for line in answer.text.splitlines()[2:-1]]

    assert previous.message_ids == ("m1",)
    assert {each["id"]: each.get("until") for each in shown} == {
        fact.key: None,
        turns[0]: previous.until.date().isoformat(),
        turns[1]: None,
    }


def test_the_same_twice_in_one_message(tmp_path: Path) -> None:
    """Calls that run side by side keep it once."""
    with SQLiteStore.open(tmp_path / "m.db", index=None, synchronous="normal") as store:
        graph = graph_of([manage_memory()], store=store)
        create = {"action": "create", "text": TEA}
        graph.invoke(calling("manage_memory", *[create] * 4), ANN)
        asyncio.run(graph.ainvoke(calling("manage_memory", *[create] * 4), BO))
        kept = [list_memory_texts(Collection(store), config) for config in (ANN, BO)]

    assert kept == [[TEA], [TEA]]


def tool_call(name: str, **arguments: Any) -> Answer:
    function = {"name": name, "arguments": json.dumps(arguments)}
    call = {"id": "c1", "type": "function", "function": function}
    return Answer({"content": None, "tool_calls": [call]}, "tool_calls")


@pytest.mark.parametrize("async_", [False, True])
def test_an_agent_remembers_in_another_thread(tmp_path: Path, async_: bool) -> None:
    """One thread keeps a fact, the next finds it and says from which thread it is."""
    script: list[Reply] = [
        tool_call("manage_memory", action="create", text=TEA, id=None),
        "I will remember that.",
        tool_call("search_memory", query="What does Ann drink?"),
        "Tea.",
    ]
    with (
        SQLiteStore.open(tmp_path / "m.db", index=None) as store,
        SQLiteCheckpointer.open(tmp_path / "m.db") as saver,
        ScriptedServer(script) as server,
    ):
        agent: Any = create_agent(
            make_client(server),
            [manage_memory(), search_memory()],
            store=store,
            checkpointer=saver,
        )
        for thread, text in (("t1", "I drink tea."), ("t9", "What do I drink?")):
            config = {"configurable": {"user_id": "ann", "thread_id": thread}}
            state = {"messages": [("user", text)]}
            if async_:
                asyncio.run(agent.ainvoke(state, config))
            else:
                agent.invoke(state, config)
        shown = server.read_last_message(-1)

    assert TEA in shown
    assert '"thread": "t1"' in shown


def test_a_memory_that_came_from_elsewhere(store: Any, collection: Collection) -> None:
    """Its day and trust are those of its source."""
    source = Provenance(thread_id="web", trust="tool")
    collection.insert(TEA, config=ANN, provenance=source)
    answer = call_tool("sync", search_memory(store=store), query="tea")

    assert json.loads(answer.text.splitlines()[2])["trust"] == "tool"
