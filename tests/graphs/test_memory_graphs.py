"""The graphs with long-term memory: on the hot path, in the background, and learning."""

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
from tests.memory.scripted import make_client
from tests.openai_server import Answer, OpenAIServer


def run_of(thread: str, user: str = "ann") -> Any:
    return {"configurable": {"thread_id": thread, "user_id": user}}


def says(text: str) -> Any:
    return {"messages": [("human", text)]}


def calls(name: str, **arguments: Any) -> Answer:
    """An answer that calls a tool."""
    function = {"name": name, "arguments": json.dumps(arguments)}
    message = {
        "content": None,
        "tool_calls": [{"id": "c", "type": "function"} | {"function": function}],
    }
    return Answer(message, "tool_calls")


@pytest.fixture
def file(tmp_path: Path) -> Iterator[tuple[SQLiteCheckpointer, SQLiteStore]]:
    """Checkpoints and memories in one file."""
    path = tmp_path / "agent.db"
    with SQLiteCheckpointer.open(path) as saver, SQLiteStore.open(path) as store:
        yield saver, store


def test_what_is_kept_by_a_tool_is_recalled_in_another_thread(file: Any) -> None:
    """The model keeps a fact; in a new thread it is shown it, with thread and day."""
    saver, store = file
    script: list[str | Answer] = [
        calls("manage_memory", action="create", text="Ann's canoe is called Nutshell."),
        "I will remember that.",
        "Nutshell!",
    ]
    with OpenAIServer(script) as server:
        agent = memory_agent(make_client(server), checkpointer=saver, store=store)
        agent.invoke(says("My canoe is called Nutshell, remember that"), run_of("monday"))
        out = agent.invoke(says("What is my canoe called?"), run_of("friday"))
        told = server.shown(2)[0]

    [kept] = Collection(store).list(config=run_of("x"), kind="fact")
    assert out["messages"][-1].text == "Nutshell!"
    assert told[0] == "system"
    assert '"Ann\'s canoe is called Nutshell."' in told[1]
    assert '"monday"' in told[1]
    assert kept.provenance.thread_id == "monday"  # type: ignore[union-attr]


def test_nobody_recalls_another_users_memories(file: Any) -> None:
    """What one user's agent keeps, another's is not shown, and cannot change."""
    saver, store = file
    kept = Collection(store).insert("Ann's canoe is called Nutshell.", config=run_of("x"))
    script: list[str | Answer] = [
        calls("manage_memory", action="delete", id=kept.key),
        "There is none.",
    ]
    with OpenAIServer(script) as server:
        agent = memory_agent(make_client(server), checkpointer=saver, store=store)
        out = agent.invoke(says("Forget the canoe Nutshell"), run_of("t", "bo"))
        told = server.shown(0)

    [answer] = [m for m in out["messages"] if isinstance(m, ToolMessage)]
    assert told == [("user", "Forget the canoe Nutshell")]
    assert answer.status == "error"
    assert len(Collection(store).list(config=run_of("x"))) == 1


def test_who_does_not_say_whose_memories_is_told(file: Any) -> None:
    """Without a user the agent does not run: nobody's memories are as good as anybody's."""
    saver, store = file
    agent = memory_agent(checkpointer=saver, store=store)
    with pytest.raises(InvalidConfig, match="user_id"):
        agent.invoke(says("hi"), {"configurable": {"thread_id": "t"}})


def test_a_window_counts_the_tools_and_the_memories(file: Any) -> None:
    """With a window the request stays within its budget, tools and recalled memories included."""
    saver, store = file
    facts = Collection(store)
    for number in range(8):
        facts.insert(f"Ann's canoe number {number} is called Nutshell {number}", config=run_of("x"))
    with OpenAIServer(lambda body: "yes " * 40) as server:
        memory = [use_memories(kinds=["fact"], min_score=0), trim(max_tokens=1_600)]
        agent = memory_agent(make_client(server), checkpointer=saver, store=store, memory=memory)
        for number in range(30):
            agent.invoke(says(f"And canoe number {number % 8}? {'please ' * 20}"), run_of("t"))
        bodies = server.requests

    characters = [len(json.dumps([b["messages"], b["tools"]])) for b in bodies]
    assert max(characters) < 4 * 1_600 * 1.5
    assert "Nutshell 5" in bodies[-1]["messages"][0]["content"]
    assert len(bodies[-1]["messages"]) < 30


@pytest.mark.parametrize("graph", ["chat", "agent", "middleware"])
def test_a_run_is_remembered_at_its_end(graph: str, file: Any) -> None:
    """Any thread finds it at once, its own only once it is cut off; another user's never."""
    saver, store = file
    window = trim(max_tokens=4_000)
    with OpenAIServer(lambda body: "Noted.") as server:
        model = make_client(server)
        opened: Any = {"checkpointer": saver, "store": store}
        parts: Any = [use_memories(), window, remember_turns()]
        middleware = [MemoryMiddleware(*parts)]
        agents: dict[str, Any] = {
            "chat": lambda: chat_graph(model, memory=parts, **opened),
            "agent": lambda: memory_agent(model, memory=[window], **opened),
            "middleware": lambda: create_agent(model, middleware=middleware, **opened),
        }
        agent = agents[graph]()
        agent.invoke(says("My canoe is called Nutshell"), run_of("monday"))
        agent.invoke(says("What is my canoe called?"), run_of("tuesday"))
        agent.invoke(says("What is my canoe called?"), run_of("monday"))
        agent.invoke(says("What is my canoe called?"), run_of("x", "bo"))
        elsewhere, same, anothers = (str(server.shown(n)[0]) for n in (1, 2, 3))
        for number in range(40):
            agent.invoke(says(f"And train number {number}? {'please ' * 150}"), run_of("monday"))
        agent.invoke(says("What is my canoe called?"), run_of("monday"))
        cut, *left = server.shown()

    assert '"memory": "user: My canoe is called Nutshell"' in elsewhere
    assert '"thread": "monday"' in elsewhere
    assert "Nutshell" not in same
    assert "Nutshell" not in anothers
    assert "Nutshell" in cut[1]
    assert "Nutshell" not in str(left)
    remembered = Collection(store).list(limit=200, config=run_of("x"))
    assert sum(memory.text.startswith("user: ") for memory in remembered) == 44


@pytest.mark.parametrize("how", ["trimmed", "summarised"])
def test_what_is_no_longer_shown_is_recalled_from_its_own_thread(how: str, file: Any) -> None:
    """It is remembered before it is summarised."""
    saver, store = file

    def replies(body: dict[str, Any]) -> str:
        summarises = "keep the memory of a conversation" in str(body["messages"][0]["content"])
        return "They spoke of boats." if summarises else "Noted."

    with OpenAIServer(replies) as server:
        model = make_client(server)
        shortens: Any = trim(max_tokens=3, token_counter=len)
        if how == "summarised":
            shortens = summarize(model, trigger=("messages", 4), keep=("messages", 2))
        chat = chat_graph(
            model,
            memory=[use_memories(), shortens, remember_turns()],
            checkpointer=saver,
            store=store,
        )
        for text in ("My canoe is called Nutshell", "It rains", "What is my canoe called?"):
            chat.invoke(says(text), run_of("monday"))
        requests = [server.shown(n) for n in range(len(server.requests))]
        asked = next(shown for shown in requests if "What is my canoe" in str(shown[-1]))
    role, told = asked[0]

    assert role == "system"
    assert '"memory": "user: My canoe is called Nutshell"' in told


def test_where_one_lived_is_not_recalled_as_present(file: Any) -> None:
    """After Ghent, Bruges and Lille: as a fact with its past, and as turns that are past."""
    saver, store = file
    chat = chat_graph(memory=[use_memories(), remember_turns()], checkpointer=saver, store=store)
    facts, config = Collection(store), run_of("monday")
    for number, place in enumerate(("Ghent", "Bruges", "Lille")):
        message = HumanMessage(f"I live in {place}", id=f"m{number}")
        chat.invoke({"messages": [message]}, config)
        source = Provenance("monday", None, (f"m{number}",), "user", "user")
        fact = f"Ann lives in {place}"
        if number:
            facts.supersede("home", fact, config=config, provenance=source)
        else:
            facts.insert(fact, config=config, key="home", provenance=source)
    asked = {"store": store, "config": config}
    lines = [json.loads(line) for line in recall("Where does Ann live?", **asked).lines]
    of_turns = recall("I live in", kinds=["turn"], **asked).lines
    present = {line["memory"] for line in map(json.loads, of_turns) if "until" not in line}

    assert [line["memory"] for line in lines if "lives" in line["memory"]] == ["Ann lives in Lille"]
    assert lines[0]["before"][0]["memory"] == "Ann lives in Bruges"
    assert not [line for line in lines if "user: I live in" in line["memory"]]
    assert present == {"user: I live in Lille"}
    assert len(of_turns) == 3


def test_a_store_that_fails_costs_no_answer(file: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither when it is asked, nor when the run is remembered."""
    saver, store = file

    def fails(*args: Any, **named: Any) -> Any:
        raise StorageError("no disk")

    for name in ("search", "get", "batch"):
        monkeypatch.setattr(store, name, fails)
    chat = chat_graph(memory=[use_memories(), remember_turns()], checkpointer=saver, store=store)
    out = chat.invoke(says("My canoe is called Nutshell"), run_of("monday"))

    assert "No model is configured" in out["messages"][-1].text


# -- as a server loads them


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What langgraph.json names, over a database of its own and without a model."""
    (tmp_path / "config.toml").touch()
    monkeypatch.setenv("PERDURE_CONFIG", str(tmp_path / "config.toml"))
    monkeypatch.setenv("PERDURE_DB", str(tmp_path / "served.db"))
    for name in ("MODEL", "BASE_URL", "API_KEY"):
        monkeypatch.delenv(f"PERDURE_{name}", raising=False)
    named = json.loads(Path(perdure.graphs.__file__).with_name("langgraph.json").read_text("utf-8"))
    parts = {**named["graphs"], "checkpointer": named["checkpointer"]["path"]}
    parts["store"] = named["store"]["path"]
    return {name: loaded(where) for name, where in parts.items()}


def loaded(where: str) -> Any:
    """What a loader takes from a module; of a graph's, the variable stands after a colon."""
    module, variable = where.replace(":", ".").rsplit(".", 1)
    return getattr(importlib.import_module(module), variable)


def test_a_server_chats_and_remembers(served: dict[str, Any]) -> None:
    """With the checkpointer and the store that the file names, each graph recalls the others."""

    async def talk() -> Any:
        async with served["checkpointer"]() as saver, served["store"]() as store:
            chat = served["memory_chat"]({})
            chat.checkpointer, chat.store = saver, store
            await chat.ainvoke(says("My canoe is called Nutshell"), run_of("monday"))
            agent = served["memory_agent"]({})
            agent.checkpointer, agent.store = saver, store
            return await agent.ainvoke(says("What is my canoe called?"), run_of("friday"))

    said = asyncio.run(talk())

    assert "thread monday" in said["messages"][-1].text


@pytest.mark.parametrize("named", [{}, {"user_id": ""}, {"user_id": "ann"}], ids=repr)
def test_each_served_graph_answers_in_an_event_loop(
    named: dict[str, str],
    served: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing that a server awaits blocks its loop; without a user it is the settings' user's."""
    monkeypatch.delenv("PERDURE_DB")
    monkeypatch.setattr("platformdirs.user_data_path", lambda name: tmp_path / "data" / name)

    def model(body: dict[str, Any]) -> str:
        return "Nutshell!"

    inputs: dict[str, Any] = {
        **dict.fromkeys(("chat", "memory_chat", "memory_agent"), says("The train leaves at ten")),
    }

    async def course() -> tuple[dict[str, Any], list[Any]]:
        found = {}
        async with served["checkpointer"]() as saver, served["store"]() as store:
            for name, given in inputs.items():
                config: Any = {"configurable": {"thread_id": name, **named}}
                made = served[name] if name == "chat" else served[name](config)
                graph = made.copy({"checkpointer": saver, "store": store})
                found[name] = await graph.ainvoke(given, config)
                states = [state async for state in graph.aget_state_history(config)]
                assert states[0].values.keys() == found[name].keys()
            return found, await store.alist_namespaces(prefix=("memories",))

    with OpenAIServer(model) as server:
        monkeypatch.setenv("PERDURE_MODEL", "scripted")
        monkeypatch.setenv("PERDURE_BASE_URL", server.base_url)
        served["memory_chat"]({})  # the first client of a process imports its HTTP library
        with blockbuster_ctx() as watch:
            for function in ("io.TextIOWrapper.read", "os.stat"):  # langgraph's server lets both be
                watch.functions[function].can_block_in("perdure/settings.py", "load")
            found, spaces = asyncio.run(course())

    assert inputs.keys() == served.keys() - {"checkpointer", "store"}
    assert found["memory_agent"]["messages"][-1].text == "Nutshell!"
    assert spaces == [("memories", named.get("user_id") or "me")]
