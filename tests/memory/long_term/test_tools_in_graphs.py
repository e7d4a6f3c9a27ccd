"""The memory tools in graphs, mistakes of the developer, and the schemas that a model is shown."""

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
from perdure.memory.long_term.collection import Collection
from perdure.memory.long_term.extractors import build_turn_key
from perdure.memory.long_term.gate import Gate
from perdure.memory.long_term.tools import manage_memory, search_memory
from perdure.memory.short_term.reducers import ChatState
from perdure.stores import Provenance, SQLiteStore
from tests.memory.collection_helpers import ANN, BO, GHENT, TEA, call_tool, list_memory_texts
from tests.memory.scripted_models import ScriptedServer, make_client
from tests.openai_server import Answer, Reply


@pytest.fixture
def collection(store: Any) -> Collection:
    return Collection(store)


# -- mistakes of the developer


@pytest.mark.parametrize("user", [{}, {"user_id": 5}, {"user_id": None}, {"user_id": ""}])
def test_config_without_user_id_raises_also_within_graph(store: Any, user: dict[str, Any]) -> None:
    """The model is not answered."""
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
            make_tool_graph([tool]).invoke(make_tool_call_state(tool.name, arguments), config)
    assert store.search(()) == []


def test_tool_without_store_raises() -> None:
    with pytest.raises(ConfigurationError, match=r"needs? a store"):
        manage_memory().invoke({"action": "create", "text": TEA}, ANN)
    with pytest.raises(ConfigurationError, match=r"needs? a store"):
        search_memory().invoke({"query": "tea"}, ANN)


def test_user_id_that_leads_to_reserved_namespace_is_refused(store: Any) -> None:
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
def test_invalid_tool_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        manage_memory(**options)


@pytest.mark.parametrize("limit", [0, -1, True, 2.5, None])
def test_invalid_search_limit_is_refused(limit: Any) -> None:
    with pytest.raises(ConfigurationError, match="limit"):
        search_memory(limit=limit)


# -- schemas of the tools


def test_tool_schema_lists_and_describes_all_arguments() -> None:
    whole = manage_memory(gate=Gate()).tool_call_schema.model_json_schema()["properties"]  # type: ignore[union-attr]
    some = manage_memory(name="keep", description=" Drop it. ")
    search_arguments = search_memory().tool_call_schema.model_json_schema()["properties"]  # type: ignore[union-attr]

    assert list(whole) == ["action", "text", "id"]
    assert whole["action"]["enum"] == ["create", "update", "supersede", "delete"]
    assert all(part["description"] for part in (*whole.values(), *search_arguments.values()))
    assert list(search_arguments) == ["query", "limit", "since", "until"]
    assert (some.name, some.description) == ("keep", "Drop it.")
    assert search_memory(name="look-up", description="Find it.").name == "look-up"
    assert "'supersede' says what is true now" in whole["action"]["description"]


# -- in graphs


def make_tool_call_state(name: str, *arguments: dict[str, Any]) -> dict[str, Any]:
    calls = [{"name": name, "args": args, "id": f"c{n}"} for n, args in enumerate(arguments)]
    return {"messages": [AIMessage("", tool_calls=calls)]}


def make_tool_graph(tools: list[Any], **options: Any) -> Any:
    builder = StateGraph(ChatState).add_node("tools", ToolNode(tools)).add_edge(START, "tools")
    return builder.compile(**options)


def test_tool_node_uses_store_of_graph_and_records_checkpoint(
    store: Any, collection: Collection, call_mode: str
) -> None:
    """A mistake of the model is answered."""
    with SQLiteCheckpointer.open(":memory:") as saver:
        graph = make_tool_graph([manage_memory(), search_memory()], store=store, checkpointer=saver)
        state = make_tool_call_state(
            "manage_memory", {"action": "create", "text": TEA}, {"action": "delete"}
        )
        if call_mode == "sync":
            answers = graph.invoke(state, ANN)["messages"][1:]
        else:
            answers = asyncio.run(graph.ainvoke(state, ANN))["messages"][1:]
    [memory] = collection.list(config=ANN)

    assert [message.status for message in answers] == ["success", "error"]
    assert memory.provenance is not None
    assert memory.provenance.thread_id == "t1"
    assert memory.provenance.checkpoint_id


def test_superseding_by_tool_gives_previous_turn_an_end_date(
    store: Any, collection: Collection
) -> None:
    turns = [build_turn_key("t1", message, 0) for message in ("m1", "m2")]
    graph = make_tool_graph([manage_memory(store=store)])
    call: dict[str, Any] = {"action": "create", "text": GHENT}
    for number, (key, answers) in enumerate(
        zip(turns, (GHENT, "Ann moved to Bruges"), strict=True)
    ):
        store.put(("memories", "ann"), key, {"text": f"user: {answers}", "kind": "turn"})
        human = HumanMessage(answers, id=f"m{number + 1}")
        graph.invoke(
            {"messages": [human, *make_tool_call_state("manage_memory", call)["messages"]]}, ANN
        )
        [fact] = collection.list(kind="fact", config=ANN)
        call = {"action": "supersede", "id": fact.key, "text": "Ann moved to Bruges"}
    [previous] = fact.previous
    search = search_memory(store=store, limit=9, min_score=0)
    answer = call_tool("sync", search, query="Ann lives moved")
    shown = [json.loads(line) for line in answer.text.splitlines()[2:-1]]

    assert previous.message_ids == ("m1",)
    assert {item["id"]: item.get("until") for item in shown} == {
        fact.key: None,
        turns[0]: previous.until.date().isoformat(),
        turns[1]: None,
    }


def test_parallel_creates_of_same_text_store_one_memory(tmp_path: Path) -> None:
    with SQLiteStore.open(tmp_path / "m.db", index=None, synchronous="normal") as store:
        graph = make_tool_graph([manage_memory()], store=store)
        create = {"action": "create", "text": TEA}
        graph.invoke(make_tool_call_state("manage_memory", *[create] * 4), ANN)
        asyncio.run(graph.ainvoke(make_tool_call_state("manage_memory", *[create] * 4), BO))
        stored_texts = [list_memory_texts(Collection(store), config) for config in (ANN, BO)]

    assert stored_texts == [[TEA], [TEA]]


def make_tool_call_answer(name: str, **arguments: Any) -> Answer:
    function = {"name": name, "arguments": json.dumps(arguments)}
    call = {"id": "c1", "type": "function", "function": function}
    return Answer({"content": None, "tool_calls": [call]}, "tool_calls")


@pytest.mark.parametrize("is_async", [False, True])
def test_agent_finds_memory_of_other_thread(tmp_path: Path, is_async: bool) -> None:
    """The answer of the tool names the thread."""
    script: list[Reply] = [
        make_tool_call_answer("manage_memory", action="create", text=TEA, id=None),
        "I will remember that.",
        make_tool_call_answer("search_memory", query="What does Ann drink?"),
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
            if is_async:
                asyncio.run(agent.ainvoke(state, config))
            else:
                agent.invoke(state, config)
        shown = server.read_last_message(-1)

    assert TEA in shown
    assert '"thread": "t1"' in shown


def test_search_tool_shows_trust_of_memory_source(store: Any, collection: Collection) -> None:
    source = Provenance(thread_id="web", trust="tool")
    collection.insert(TEA, config=ANN, provenance=source)
    answer = call_tool("sync", search_memory(store=store), query="tea")

    assert json.loads(answer.text.splitlines()[2])["trust"] == "tool"
