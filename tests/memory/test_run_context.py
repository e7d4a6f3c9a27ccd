"""The user by `context=` of a run: memory finds it there first, and leaves it with the thread."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.runnables import RunnableConfig
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import Command, interrupt
from pydantic import BaseModel

from perdure import SQLiteCheckpointer, SQLiteStore
from perdure.checkpointers.titles import read_existing_head
from perdure.errors import InvalidConfig
from perdure.graphs import memory_agent
from perdure.memory import (
    Background,
    Instructions,
    Profile,
    arecall,
    manage_memory,
    recall,
    remember,
    remember_turns,
    use_instructions,
    use_memories,
    view,
)
from perdure.memory.extraction import DueThreads, Extraction, Pace
from perdure.memory.middleware import MemoryMiddleware
from tests.memory.scripted import make_client
from tests.openai_server import Answer, OpenAIServer


@dataclass
class AsDataclass:
    """A context as a dataclass."""

    user_id: str | None = None
    team: str = "blue"


class AsModel(BaseModel):
    """A context as a pydantic model."""

    user_id: str | None = None
    team: str = "blue"


CONTEXTS: list[Callable[..., Any]] = [dict, AsDataclass, AsModel]
BOB: Any = {"configurable": {"thread_id": "t", "user_id": "bob"}}
TEA: Any = {"messages": [HumanMessage("I like green tea.", id="tea")]}


class File:
    """A database of threads and items."""

    def __init__(self, path: Path) -> None:
        self.path = path / "memory.db"
        self.store = SQLiteStore.open(self.path, index=None)
        self.saver = SQLiteCheckpointer.open(self.path)

    def reopen(self) -> None:
        """As another process sees it."""
        self.saver.close()
        self.saver = SQLiteCheckpointer.open(self.path)

    def graph(self, *nodes: Any, **options: Any) -> Any:
        """A graph of nodes, one after the other."""
        builder = StateGraph(MessagesState, **options)
        builder.add_sequence([(f"node-{number}", node) for number, node in enumerate(nodes)])
        return builder.add_edge(START, "node-0").compile(checkpointer=self.saver, store=self.store)

    def users(self) -> set[str]:
        """Whose memories, profiles or instructions there are."""
        own = ("perdure", "perdure.server")
        return {place[1] for place in self.store.list_namespaces() if place[0] not in own}

    def named(self, thread_id: str = "t") -> Any:
        """The user whom the metadata of a thread's head names."""
        return read_existing_head(self.saver, thread_id).metadata.get("user_id")

    def due(self) -> dict[str, Any]:
        """The namespaces of threads that a worker would extract."""
        due = DueThreads(Extraction(self.saver, self.store), Pace(0))
        return {job.thread_id: job.namespace for job in due.list_jobs()}


@pytest.fixture
def file(tmp_path: Path) -> Iterator[File]:
    file = File(tmp_path)
    yield file
    file.saver.close()
    file.store.close()


def invoked(graph: Any, how: str, given: Any, config: Any, **options: Any) -> Any:
    if how == "sync":
        return graph.invoke(given, config, **options)
    return asyncio.run(graph.ainvoke(given, config, **options))


def calls(name: str, **arguments: Any) -> Answer:
    """A model's answer that calls a tool."""
    function = {"name": name, "arguments": json.dumps(arguments)}
    call = {"id": "call-1", "type": "function", "function": function}
    return Answer({"content": None, "tool_calls": [call]}, "tool_calls")


def reply(state: Any) -> Any:
    return {"messages": [AIMessage("Good.")]}


# -- where labels come from


@pytest.mark.parametrize("how", ["sync", "async"])
@pytest.mark.parametrize("context", CONTEXTS)
def test_the_context_comes_before_the_config(file: File, context: Any, how: str) -> None:
    """In nodes of a graph, whose config names another user, and in functions they call."""
    instructions = Instructions(file.store, ("instructions", "{user_id}"))
    told: list[str] = []

    def node(state: Any, config: RunnableConfig) -> None:
        shown = view(use_instructions(instructions), use_memories(min_score=0))(state, config)
        told.extend([shown[0].text, str(recall("tea", min_score=0))])

    async def anode(state: Any, config: RunnableConfig) -> None:
        shows = view(use_instructions(instructions), use_memories(min_score=0))
        shown = await shows.acall(state, config)
        told.extend([shown[0].text, str(await arecall("tea", min_score=0))])

    for user in ("ann", "bob"):
        config: Any = {"configurable": {"user_id": user}}
        instructions.set(f"Serve {user}.", config)
        remember(f"The tea of {user} is green.", store=file.store, config=config)
    graph = file.graph(node if how == "sync" else anode, remember_turns(), context_schema=context)
    invoked(graph, how, TEA, BOB, context=context(user_id="ann"))

    assert all("ann" in text and "bob" not in text for text in told)
    asked: Any = {"store": file.store, "config": BOB, "min_score": 0}
    assert recall("I like green tea", **asked).memories[0].kind == "fact"
    assert file.named() == "ann"


@pytest.mark.parametrize("how", ["sync", "async"])
@pytest.mark.parametrize("context", CONTEXTS)
def test_in_an_agent_with_a_middleware_and_tools(file: File, context: Any, how: str) -> None:
    """Both labels of a namespace, of which only one is in the config."""
    place = ("memories", "{user_id}", "{team}")
    call = calls("manage_memory", action="create", text="The user likes green tea.")
    with OpenAIServer([call, "Kept."]) as server:
        agent: Any = create_agent(
            make_client(server),
            [manage_memory(place)],
            middleware=[
                MemoryMiddleware(use_memories(namespace=place), remember_turns(namespace=place))
            ],
            context_schema=context,
            checkpointer=file.saver,
            store=file.store,
        )
        invoked(agent, how, TEA, BOB, context=context(user_id="ann", team="red"))
    kinds = {item.value["kind"] for item in file.store.search(("memories", "ann", "red"))}

    assert (kinds, file.users()) == ({"fact", "turn"}, {"ann"})
    assert {"user_id": "ann", "team": "red"}.items() <= read_existing_head(
        file.saver, "t"
    ).metadata.items()


def test_in_a_memory_agent_without_a_schema(file: File) -> None:
    agent = memory_agent(checkpointer=file.saver, store=file.store)
    agent.invoke(TEA, {"configurable": {"thread_id": "t"}}, context={"user_id": "ann"})

    assert file.users() == {"ann"}


def test_what_the_context_does_not_say_the_config_says(file: File) -> None:
    """None is nothing said; a run without either is refused, and told of both."""
    graph = file.graph(remember_turns(), context_schema=AsDataclass)
    for context in (AsDataclass(), None):
        graph.invoke(TEA, BOB, context=context)

    assert file.users() == {"bob"}
    with pytest.raises(InvalidConfig, match=r"no 'user_id'.* context=\{'user_id'.*configurable"):
        graph.invoke(TEA, {"configurable": {"thread_id": "u"}}, context=AsDataclass())


@pytest.mark.parametrize("user", ["", " ", "a\0b", 5, ["ann"]])
def test_a_value_in_the_context_that_is_no_text_is_refused(file: File, user: Any) -> None:
    """The config's user does not stand in for it."""
    graph = file.graph(remember_turns())
    with pytest.raises(InvalidConfig, match="user_id"):
        graph.invoke(TEA, BOB, context={"user_id": user})
    assert file.users() == set()


def test_a_name_with_nul_in_the_context_is_not_another_users(file: File) -> None:
    """langgraph would take the NUL out of metadata, which makes the name of somebody else."""
    with pytest.raises(InvalidConfig, match="NUL"):
        file.graph(remember_turns()).invoke(
            TEA, BOB, context={"user_id": "a\0nn"}, durability="exit"
        )

    assert read_existing_head(file.saver, "t").metadata.get("user_id") != "ann"


def test_a_config_that_a_node_gives_is_no_runs(file: File) -> None:
    """A node may look into another user's memories: its config says whose."""
    profile = Profile(AsModel, file.store, key="about")

    def node(state: Any) -> None:
        remember("Bob likes tea.", config=BOB)
        profile.set(AsModel(team="red"), {"configurable": {"user_id": "bob"}})

    file.graph(node).invoke(TEA, {"configurable": {"thread_id": "t"}}, context={"user_id": "ann"})

    assert (file.users(), file.named()) == ({"bob"}, None)


# -- whose the thread is


@pytest.mark.parametrize("how", ["sync", "async"])
@pytest.mark.parametrize("durability", ["sync", "async", "exit"])
def test_the_thread_is_the_users(file: File, durability: Any, how: str) -> None:
    """Also after a run, an edit and a fork that name nobody, of another process; then a worker
    extracts what was said since."""
    graph = file.graph(view(use_memories()), reply, remember_turns())
    config: Any = {"configurable": {"thread_id": "t"}}
    invoked(graph, how, TEA, config, context={"user_id": "ann"}, durability=durability)
    first = graph.get_state(config).config

    assert file.named() == "ann"
    file.reopen()
    plain = file.graph(reply)
    for at, text in ((config, "I like figs."), (config, "I like pears."), (first, "I like nuts.")):
        plain.update_state(at, {"messages": [HumanMessage(text)]})
        assert file.named() == "ann"
    invoked(plain, how, {"messages": [HumanMessage("I like plums.")]}, config)
    file.saver.copy_thread("t", "copy")

    assert file.due() == {"t": ("memories", "ann"), "copy": ("memories", "ann")}
    with Background(Extraction(file.saver, file.store), pace=Pace(0)) as background:
        assert background.flush() == []
    assert file.users() == {"ann"}


def test_a_run_of_another_user_says_so_itself(file: File) -> None:
    """By the context or the config: the thread is whose the newest run was."""
    graph = file.graph(remember_turns())
    config: Any = {"configurable": {"thread_id": "t"}}
    named = []
    for given, context in ((config, {"user_id": "ann"}), (BOB, None), (config, {"user_id": "eve"})):
        graph.invoke(TEA, given, context=context)
        named.append(file.named())

    assert named == ["ann", "bob", "eve"]


def test_a_thread_whose_graph_waits_for_an_answer(file: File) -> None:
    """Its checkpoints name the user as soon as a step after the node is stored, whoever answers."""

    def ask(state: Any) -> Any:
        return {"messages": [AIMessage(interrupt("Really?"))]}

    config: Any = {"configurable": {"thread_id": "t"}}
    graph = file.graph(view(use_memories()), ask)
    graph.invoke(TEA, config, context={"user_id": "ann"})
    waiting = file.named()
    file.reopen()
    file.graph(view(use_memories()), ask).invoke(Command(resume="yes"), config)

    assert (waiting, file.named()) == ("ann", "ann")


def test_a_node_of_a_subgraph_names_the_user_of_the_thread(file: File) -> None:
    inner = StateGraph(MessagesState).add_sequence([("look", view(use_memories()))])
    graph = file.graph(inner.add_edge(START, "look").compile(), reply)
    graph.invoke(TEA, {"configurable": {"thread_id": "t"}}, context={"user_id": "ann"})

    assert file.named() == "ann"


def test_a_thread_without_a_user_is_reported_and_given_to_nobody(
    file: File, caplog: pytest.LogCaptureFixture
) -> None:
    """Its run had a user by context, and no node of perdure; a later node makes it the user's."""
    config: Any = {"configurable": {"thread_id": "t"}}
    file.graph(reply).invoke(TEA, config, context={"user_id": "ann"})
    file.graph(reply).invoke(TEA, {"configurable": {"thread_id": "quiet", "user_id": ""}})
    extraction = Extraction(file.saver, file.store)
    caplog.set_level(logging.WARNING, "perdure.background")
    with Background(extraction, pace=Pace(0)) as background:
        assert (background.flush(), background.unassigned()) == ([], ["t"])
        with pytest.raises(InvalidConfig, match="no 'user_id'"):
            background.extract_now("t")

    assert file.users() == set()
    assert "threads that name no user_id are not extracted: 1; pass this value" in caplog.text
    file.graph(view(use_memories()), reply).invoke(TEA, config, context={"user_id": "ann"})
    assert file.due() == {"t": ("memories", "ann")}
