"""The graphs with long-term memory: `chat_graph`, `memory_agent` and the served graphs."""

from __future__ import annotations

import asyncio
import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from blockbuster import blockbuster_ctx
from langchain.agents import create_agent
from langchain_core.messages import HumanMessage, ToolMessage

import perdure.graphs
from perdure.checkpointers import SQLiteCheckpointer
from perdure.errors import InvalidConfig, StorageError
from perdure.graphs import chat_graph, memory_agent
from perdure.memory import (
    Collection,
    recall,
    remember_turns,
    summarize,
    trim,
    use_memories,
)
from perdure.memory.middleware import MemoryMiddleware
from perdure.stores import Provenance, SQLiteStore
from tests.memory.scripted_models import make_client
from tests.openai_server import Answer, OpenAIServer


def make_config(thread: str, user: str = "ann") -> Any:
    return {"configurable": {"thread_id": thread, "user_id": user}}


def make_input(text: str) -> Any:
    return {"messages": [("human", text)]}


def make_tool_call(name: str, **arguments: Any) -> Answer:
    """Make a model's answer that calls a tool."""
    function = {"name": name, "arguments": json.dumps(arguments)}
    message = {
        "content": None,
        "tool_calls": [{"id": "c", "type": "function"} | {"function": function}],
    }
    return Answer(message, "tool_calls")


@pytest.fixture
def saver_and_store(tmp_path: Path) -> Iterator[tuple[SQLiteCheckpointer, SQLiteStore]]:
    """A checkpointer and a store in one file."""
    path = tmp_path / "agent.db"
    with SQLiteCheckpointer.open(path) as saver, SQLiteStore.open(path) as store:
        yield saver, store


def test_fact_stored_by_a_tool_is_recalled_in_another_thread(saver_and_store: Any) -> None:
    """In the new thread, the model receives the fact with the id of the first thread."""
    saver, store = saver_and_store
    script: list[str | Answer] = [
        make_tool_call("manage_memory", action="create", text="Ann's canoe is called Nutshell."),
        "I will remember that.",
        "Nutshell!",
    ]
    with OpenAIServer(script) as server:
        agent = memory_agent(make_client(server), checkpointer=saver, store=store)
        agent.invoke(
            make_input("My canoe is called Nutshell, remember that"), make_config("monday")
        )
        state = agent.invoke(make_input("What is my canoe called?"), make_config("friday"))
        first_message = server.shown(2)[0]

    [fact] = Collection(store).list(config=make_config("x"), kind="fact")
    assert state["messages"][-1].text == "Nutshell!"
    assert first_message[0] == "system"
    assert '"Ann\'s canoe is called Nutshell."' in first_message[1]
    assert '"monday"' in first_message[1]
    assert fact.provenance.thread_id == "monday"  # type: ignore[union-attr]


def test_agent_cannot_see_or_change_memories_of_another_user(saver_and_store: Any) -> None:
    """The tool call that deletes another user's memory fails."""
    saver, store = saver_and_store
    fact = Collection(store).insert("Ann's canoe is called Nutshell.", config=make_config("x"))
    script: list[str | Answer] = [
        make_tool_call("manage_memory", action="delete", id=fact.key),
        "There is none.",
    ]
    with OpenAIServer(script) as server:
        agent = memory_agent(make_client(server), checkpointer=saver, store=store)
        state = agent.invoke(make_input("Forget the canoe Nutshell"), make_config("t", "bo"))
        model_input = server.shown(0)

    [answer] = [m for m in state["messages"] if isinstance(m, ToolMessage)]
    assert model_input == [("user", "Forget the canoe Nutshell")]
    assert answer.status == "error"
    assert len(Collection(store).list(config=make_config("x"))) == 1


def test_agent_without_user_id_is_refused(saver_and_store: Any) -> None:
    """Without a user, the agent cannot know whose memories to use."""
    saver, store = saver_and_store
    agent = memory_agent(checkpointer=saver, store=store)
    with pytest.raises(InvalidConfig, match="user_id"):
        agent.invoke(make_input("hi"), {"configurable": {"thread_id": "t"}})


def test_trim_counts_tools_and_recalled_memories(saver_and_store: Any) -> None:
    """The request, with tools and recalled memories, stays within the limit."""
    saver, store = saver_and_store
    facts = Collection(store)
    for number in range(8):
        facts.insert(
            f"Ann's canoe number {number} is called Nutshell {number}", config=make_config("x")
        )
    with OpenAIServer(lambda body: "yes " * 40) as server:
        memory = [use_memories(kinds=["fact"], min_score=0), trim(max_tokens=1_600)]
        agent = memory_agent(make_client(server), checkpointer=saver, store=store, memory=memory)
        for number in range(30):
            agent.invoke(
                make_input(f"And canoe number {number % 8}? {'please ' * 20}"), make_config("t")
            )
        bodies = server.requests

    characters = [len(json.dumps([b["messages"], b["tools"]])) for b in bodies]
    assert max(characters) < 4 * 1_600 * 1.5
    assert "Nutshell 5" in bodies[-1]["messages"][0]["content"]
    assert len(bodies[-1]["messages"]) < 30


@pytest.mark.parametrize("graph", ["chat", "agent", "middleware"])
def test_run_is_remembered_at_its_end_for_the_same_user(graph: str, saver_and_store: Any) -> None:
    """Other threads of the user recall the run at once. Its own thread recalls the run only after
    its messages were trimmed.
    """
    saver, store = saver_and_store
    window = trim(max_tokens=4_000)
    with OpenAIServer(lambda body: "Noted.") as server:
        model = make_client(server)
        options: Any = {"checkpointer": saver, "store": store}
        parts: Any = [use_memories(), window, remember_turns()]
        middleware = [MemoryMiddleware(*parts)]
        agents: dict[str, Any] = {
            "chat": lambda: chat_graph(model, memory=parts, **options),
            "agent": lambda: memory_agent(model, memory=[window], **options),
            "middleware": lambda: create_agent(model, middleware=middleware, **options),
        }
        agent = agents[graph]()
        agent.invoke(make_input("My canoe is called Nutshell"), make_config("monday"))
        agent.invoke(make_input("What is my canoe called?"), make_config("tuesday"))
        agent.invoke(make_input("What is my canoe called?"), make_config("monday"))
        agent.invoke(make_input("What is my canoe called?"), make_config("x", "bo"))
        other_thread_prompt, same_thread_prompt, other_user_prompt = (
            str(server.shown(n)[0]) for n in (1, 2, 3)
        )
        for number in range(40):
            agent.invoke(
                make_input(f"And train number {number}? {'please ' * 150}"), make_config("monday")
            )
        agent.invoke(make_input("What is my canoe called?"), make_config("monday"))
        system_message, *other_messages = server.shown()

    assert '"memory": "user: My canoe is called Nutshell"' in other_thread_prompt
    assert '"thread": "monday"' in other_thread_prompt
    assert "Nutshell" not in same_thread_prompt
    assert "Nutshell" not in other_user_prompt
    assert "Nutshell" in system_message[1]
    assert "Nutshell" not in str(other_messages)
    remembered = Collection(store).list(limit=200, config=make_config("x"))
    assert sum(memory.text.startswith("user: ") for memory in remembered) == 44


@pytest.mark.parametrize("shortening", ["trimmed", "summarised"])
def test_removed_messages_are_recalled_in_their_own_thread(
    shortening: str, saver_and_store: Any
) -> None:
    """Messages are remembered before they are summarized or trimmed."""
    saver, store = saver_and_store

    def reply(body: dict[str, Any]) -> str:
        summarises = "keep the memory of a conversation" in str(body["messages"][0]["content"])
        return "They spoke of boats." if summarises else "Noted."

    with OpenAIServer(reply) as server:
        model = make_client(server)
        shortening_part: Any = trim(max_tokens=3, token_counter=len)
        if shortening == "summarised":
            shortening_part = summarize(model, trigger=("messages", 4), keep=("messages", 2))
        chat = chat_graph(
            model,
            memory=[use_memories(), shortening_part, remember_turns()],
            checkpointer=saver,
            store=store,
        )
        for text in ("My canoe is called Nutshell", "It rains", "What is my canoe called?"):
            chat.invoke(make_input(text), make_config("monday"))
        requests = [server.shown(n) for n in range(len(server.requests))]
        model_input = next(
            request for request in requests if "What is my canoe" in str(request[-1])
        )
    role, system_text = model_input[0]

    assert role == "system"
    assert '"memory": "user: My canoe is called Nutshell"' in system_text


def test_superseded_facts_and_turns_are_recalled_as_past(saver_and_store: Any) -> None:
    """Ann lived in Ghent, Bruges and Lille. Only Lille is recalled as present."""
    saver, store = saver_and_store
    chat = chat_graph(memory=[use_memories(), remember_turns()], checkpointer=saver, store=store)
    facts, config = Collection(store), make_config("monday")
    for number, place in enumerate(("Ghent", "Bruges", "Lille")):
        message = HumanMessage(f"I live in {place}", id=f"m{number}")
        chat.invoke({"messages": [message]}, config)
        source = Provenance("monday", None, (f"m{number}",), "user", "user")
        fact = f"Ann lives in {place}"
        if number:
            facts.supersede("home", fact, config=config, provenance=source)
        else:
            facts.insert(fact, config=config, key="home", provenance=source)
    options = {"store": store, "config": config}
    lines = [json.loads(line) for line in recall("Where does Ann live?", **options).lines]
    turn_lines = recall("I live in", kinds=["turn"], **options).lines
    current_turns = {line["memory"] for line in map(json.loads, turn_lines) if "until" not in line}

    assert [line["memory"] for line in lines if "lives" in line["memory"]] == ["Ann lives in Lille"]
    assert lines[0]["before"][0]["memory"] == "Ann lives in Bruges"
    assert not [line for line in lines if "user: I live in" in line["memory"]]
    assert current_turns == {"user: I live in Lille"}
    assert len(turn_lines) == 3


def test_chat_answers_although_the_store_fails(
    saver_and_store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store fails when it is searched, and when the run is remembered."""
    saver, store = saver_and_store

    def raise_storage_error(*args: Any, **options: Any) -> Any:
        raise StorageError("no disk")

    for name in ("search", "get", "batch"):
        monkeypatch.setattr(store, name, raise_storage_error)
    chat = chat_graph(memory=[use_memories(), remember_turns()], checkpointer=saver, store=store)
    out = chat.invoke(make_input("My canoe is called Nutshell"), make_config("monday"))

    assert "No model is configured" in out["messages"][-1].text


# -- graphs as a server loads them


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The objects that langgraph.json names, with a database of their own and without a model."""
    (tmp_path / "config.toml").touch()
    monkeypatch.setenv("PERDURE_CONFIG", str(tmp_path / "config.toml"))
    monkeypatch.setenv("PERDURE_DB", str(tmp_path / "served.db"))
    for name in ("MODEL", "BASE_URL", "API_KEY"):
        monkeypatch.delenv(f"PERDURE_{name}", raising=False)
    langgraph_json = json.loads(
        Path(perdure.graphs.__file__).with_name("langgraph.json").read_text("utf-8")
    )
    paths = {**langgraph_json["graphs"], "checkpointer": langgraph_json["checkpointer"]["path"]}
    paths["store"] = langgraph_json["store"]["path"]
    return {name: load_object(path) for name, path in paths.items()}


def load_object(path: str) -> Any:
    """Load an object by its path, in which a dot or a colon separates module and variable."""
    module, variable = path.replace(":", ".").rsplit(".", 1)
    return getattr(importlib.import_module(module), variable)


def test_served_graphs_recall_memories_of_each_other(served: dict[str, Any]) -> None:
    """The checkpointer and the store are those that langgraph.json names."""

    async def run_graphs() -> Any:
        async with served["checkpointer"]() as saver, served["store"]() as store:
            chat = served["memory_chat"]({})
            chat.checkpointer, chat.store = saver, store
            await chat.ainvoke(make_input("My canoe is called Nutshell"), make_config("monday"))
            agent = served["memory_agent"]({})
            agent.checkpointer, agent.store = saver, store
            return await agent.ainvoke(
                make_input("What is my canoe called?"), make_config("friday")
            )

    state = asyncio.run(run_graphs())

    assert "thread monday" in state["messages"][-1].text


@pytest.mark.parametrize("configurable", [{}, {"user_id": ""}, {"user_id": "ann"}], ids=repr)
def test_each_served_graph_answers_without_blocking_the_event_loop(
    configurable: dict[str, str],
    served: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without a user in the config, the memories belong to the user of the settings."""
    monkeypatch.delenv("PERDURE_DB")
    monkeypatch.setattr("platformdirs.user_data_path", lambda name: tmp_path / "data" / name)

    def reply(body: dict[str, Any]) -> str:
        return "Nutshell!"

    inputs: dict[str, Any] = {
        **dict.fromkeys(
            ("chat", "memory_chat", "memory_agent"), make_input("The train leaves at ten")
        ),
    }

    async def run_graphs() -> tuple[dict[str, Any], list[Any]]:
        states_by_name = {}
        async with served["checkpointer"]() as saver, served["store"]() as store:
            for name, input in inputs.items():
                config: Any = {"configurable": {"thread_id": name, **configurable}}
                graph_of_server = served[name] if name == "chat" else served[name](config)
                graph = graph_of_server.copy({"checkpointer": saver, "store": store})
                states_by_name[name] = await graph.ainvoke(input, config)
                states = [state async for state in graph.aget_state_history(config)]
                assert states[0].values.keys() == states_by_name[name].keys()
            return states_by_name, await store.alist_namespaces(prefix=("memories",))

    with OpenAIServer(reply) as server:
        monkeypatch.setenv("PERDURE_MODEL", "scripted")
        monkeypatch.setenv("PERDURE_BASE_URL", server.base_url)
        served["memory_chat"]({})  # the first client of a process imports its HTTP library
        with blockbuster_ctx() as blockbuster:
            for function in ("io.TextIOWrapper.read", "os.stat"):  # langgraph's server lets both be
                blockbuster.functions[function].can_block_in("perdure/settings.py", "load")
            states_by_graph, namespaces = asyncio.run(run_graphs())

    assert inputs.keys() == served.keys() - {"checkpointer", "store"}
    assert states_by_graph["memory_agent"]["messages"][-1].text == "Nutshell!"
    assert namespaces == [("memories", configurable.get("user_id") or "me")]
