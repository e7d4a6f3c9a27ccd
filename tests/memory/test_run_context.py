"""The `user_id` of `context=`: memory uses it before the config, and stores it with the thread."""

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
from perdure.checkpointers.import_metadata import read_thread_head_or_raise
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
from perdure.memory.long_term.extraction import DueThreads, Extraction, Pace
from perdure.memory.middleware import MemoryMiddleware
from tests.memory.scripted_models import make_client
from tests.openai_server import Answer, OpenAIServer


@dataclass
class DataclassContext:
    """A context as a dataclass."""

    user_id: str | None = None
    team: str = "blue"


class ModelContext(BaseModel):
    """A context as a pydantic model."""

    user_id: str | None = None
    team: str = "blue"


CONTEXTS: list[Callable[..., Any]] = [dict, DataclassContext, ModelContext]
BOB: Any = {"configurable": {"thread_id": "t", "user_id": "bob"}}
TEA: Any = {"messages": [HumanMessage("I like green tea.", id="tea")]}


class DatabaseFile:
    """A database file with a checkpointer and a store."""

    def __init__(self, path: Path) -> None:
        self.path = path / "memory.db"
        self.store = SQLiteStore.open(self.path, index=None)
        self.saver = SQLiteCheckpointer.open(self.path)

    def reopen(self) -> None:
        """Open the file again, as another process would."""
        self.saver.close()
        self.saver = SQLiteCheckpointer.open(self.path)

    def build_graph(self, *nodes: Any, **options: Any) -> Any:
        """Return a graph that runs the nodes one after the other."""
        builder = StateGraph(MessagesState, **options)
        builder.add_sequence([(f"node-{number}", node) for number, node in enumerate(nodes)])
        return builder.add_edge(START, "node-0").compile(checkpointer=self.saver, store=self.store)

    def list_users(self) -> set[str]:
        """Return the users who have memories, profiles or instructions."""
        own = ("perdure", "perdure.server")
        return {place[1] for place in self.store.list_namespaces() if place[0] not in own}

    def read_thread_user(self, thread_id: str = "t") -> Any:
        """Return the user in the metadata of the head of a thread."""
        return read_thread_head_or_raise(self.saver, thread_id).metadata.get("user_id")

    def list_due_namespaces(self) -> dict[str, Any]:
        """Return the namespaces that a worker would extract to, by thread."""
        due = DueThreads(Extraction(self.saver, self.store), Pace(0))
        return {job.thread_id: job.namespace for job in due.list_jobs()}


@pytest.fixture
def file(tmp_path: Path) -> Iterator[DatabaseFile]:
    file = DatabaseFile(tmp_path)
    yield file
    file.saver.close()
    file.store.close()


def invoke_graph(graph: Any, call_mode: str, input: Any, config: Any, **options: Any) -> Any:
    if call_mode == "sync":
        return graph.invoke(input, config, **options)
    return asyncio.run(graph.ainvoke(input, config, **options))


def make_tool_call_answer(name: str, **arguments: Any) -> Answer:
    """A model's answer that calls a tool."""
    function = {"name": name, "arguments": json.dumps(arguments)}
    call = {"id": "call-1", "type": "function", "function": function}
    return Answer({"content": None, "tool_calls": [call]}, "tool_calls")


def reply(state: Any) -> Any:
    return {"messages": [AIMessage("Good.")]}


# -- sources of labels


@pytest.mark.parametrize("call_mode", ["sync", "async"])
@pytest.mark.parametrize("context", CONTEXTS)
def test_user_of_context_precedes_user_of_config_in_nodes(
    file: DatabaseFile, context: Any, call_mode: str
) -> None:
    """The rule also holds in functions that a node calls."""
    instructions = Instructions(file.store, ("instructions", "{user_id}"))
    texts: list[str] = []

    def node(state: Any, config: RunnableConfig) -> None:
        shown = view(use_instructions(instructions), use_memories(min_score=0))(state, config)
        texts.extend([shown[0].text, str(recall("tea", min_score=0))])

    async def anode(state: Any, config: RunnableConfig) -> None:
        memory_view = view(use_instructions(instructions), use_memories(min_score=0))
        shown = await memory_view.acall(state, config)
        texts.extend([shown[0].text, str(await arecall("tea", min_score=0))])

    for user in ("ann", "bob"):
        config: Any = {"configurable": {"user_id": user}}
        instructions.set(f"Serve {user}.", config)
        remember(f"The tea of {user} is green.", store=file.store, config=config)
    graph = file.build_graph(
        node if call_mode == "sync" else anode, remember_turns(), context_schema=context
    )
    invoke_graph(graph, call_mode, TEA, BOB, context=context(user_id="ann"))

    assert all("ann" in text and "bob" not in text for text in texts)
    options: Any = {"store": file.store, "config": BOB, "min_score": 0}
    assert recall("I like green tea", **options).memories[0].kind == "fact"
    assert file.read_thread_user() == "ann"


@pytest.mark.parametrize("call_mode", ["sync", "async"])
@pytest.mark.parametrize("context", CONTEXTS)
def test_agent_middleware_and_tools_use_labels_of_context(
    file: DatabaseFile, context: Any, call_mode: str
) -> None:
    """The namespace has two labels, and the config has only one of them."""
    namespace = ("memories", "{user_id}", "{team}")
    call = make_tool_call_answer("manage_memory", action="create", text="The user likes green tea.")
    with OpenAIServer([call, "Kept."]) as server:
        agent: Any = create_agent(
            make_client(server),
            [manage_memory(namespace)],
            middleware=[
                MemoryMiddleware(
                    use_memories(namespace=namespace), remember_turns(namespace=namespace)
                )
            ],
            context_schema=context,
            checkpointer=file.saver,
            store=file.store,
        )
        invoke_graph(agent, call_mode, TEA, BOB, context=context(user_id="ann", team="red"))
    kinds = {item.value["kind"] for item in file.store.search(("memories", "ann", "red"))}

    assert (kinds, file.list_users()) == ({"fact", "turn"}, {"ann"})
    assert {"user_id": "ann", "team": "red"}.items() <= read_thread_head_or_raise(
        file.saver, "t"
    ).metadata.items()


def test_memory_agent_uses_context_without_schema(file: DatabaseFile) -> None:
    agent = memory_agent(checkpointer=file.saver, store=file.store)
    agent.invoke(TEA, {"configurable": {"thread_id": "t"}}, context={"user_id": "ann"})

    assert file.list_users() == {"ann"}


def test_config_is_used_if_context_has_no_user(file: DatabaseFile) -> None:
    """A run without a user in either is refused, and the error names both."""
    graph = file.build_graph(remember_turns(), context_schema=DataclassContext)
    for context in (DataclassContext(), None):
        graph.invoke(TEA, BOB, context=context)

    assert file.list_users() == {"bob"}
    with pytest.raises(InvalidConfig, match=r"no 'user_id'.* context=\{'user_id'.*configurable"):
        graph.invoke(TEA, {"configurable": {"thread_id": "u"}}, context=DataclassContext())


@pytest.mark.parametrize("user", ["", " ", "a\0b", 5, ["ann"]])
def test_invalid_user_in_context_is_refused(file: DatabaseFile, user: Any) -> None:
    """The user of the config is not used instead."""
    graph = file.build_graph(remember_turns())
    with pytest.raises(InvalidConfig, match="user_id"):
        graph.invoke(TEA, BOB, context={"user_id": user})
    assert file.list_users() == set()


def test_user_id_with_nul_in_context_is_refused(file: DatabaseFile) -> None:
    """langgraph would remove the NUL from the metadata, which gives the name of another user."""
    with pytest.raises(InvalidConfig, match="NUL"):
        file.build_graph(remember_turns()).invoke(
            TEA, BOB, context={"user_id": "a\0nn"}, durability="exit"
        )

    assert read_thread_head_or_raise(file.saver, "t").metadata.get("user_id") != "ann"


def test_config_passed_by_node_precedes_context_of_run(file: DatabaseFile) -> None:
    """A node may use another user's memories by passing a config."""
    profile = Profile(ModelContext, file.store, key="about")

    def node(state: Any) -> None:
        remember("Bob likes tea.", config=BOB)
        profile.set(ModelContext(team="red"), {"configurable": {"user_id": "bob"}})

    file.build_graph(node).invoke(
        TEA, {"configurable": {"thread_id": "t"}}, context={"user_id": "ann"}
    )

    assert (file.list_users(), file.read_thread_user()) == ({"bob"}, None)


# -- the user of a thread


@pytest.mark.parametrize("call_mode", ["sync", "async"])
@pytest.mark.parametrize("durability", ["sync", "async", "exit"])
def test_thread_keeps_user_of_context_in_later_runs_without_user(
    file: DatabaseFile, durability: Any, call_mode: str
) -> None:
    """Later runs, edits and forks in another process name nobody.

    A worker still extracts for this user.
    """
    graph = file.build_graph(view(use_memories()), reply, remember_turns())
    config: Any = {"configurable": {"thread_id": "t"}}
    invoke_graph(graph, call_mode, TEA, config, context={"user_id": "ann"}, durability=durability)
    first = graph.get_state(config).config

    assert file.read_thread_user() == "ann"
    file.reopen()
    plain = file.build_graph(reply)
    for position, text in (
        (config, "I like figs."),
        (config, "I like pears."),
        (first, "I like nuts."),
    ):
        plain.update_state(position, {"messages": [HumanMessage(text)]})
        assert file.read_thread_user() == "ann"
    invoke_graph(plain, call_mode, {"messages": [HumanMessage("I like plums.")]}, config)
    file.saver.copy_thread("t", "copy")

    assert file.list_due_namespaces() == {"t": ("memories", "ann"), "copy": ("memories", "ann")}
    with Background(Extraction(file.saver, file.store), pace=Pace(0)) as background:
        assert background.flush() == []
    assert file.list_users() == {"ann"}


def test_thread_belongs_to_user_of_newest_run(file: DatabaseFile) -> None:
    graph = file.build_graph(remember_turns())
    config: Any = {"configurable": {"thread_id": "t"}}
    users = []
    for run_config, context in (
        (config, {"user_id": "ann"}),
        (BOB, None),
        (config, {"user_id": "eve"}),
    ):
        graph.invoke(TEA, run_config, context=context)
        users.append(file.read_thread_user())

    assert users == ["ann", "bob", "eve"]


def test_interrupted_thread_keeps_user_of_context(file: DatabaseFile) -> None:
    def ask(state: Any) -> Any:
        return {"messages": [AIMessage(interrupt("Really?"))]}

    config: Any = {"configurable": {"thread_id": "t"}}
    graph = file.build_graph(view(use_memories()), ask)
    graph.invoke(TEA, config, context={"user_id": "ann"})
    waiting = file.read_thread_user()
    file.reopen()
    file.build_graph(view(use_memories()), ask).invoke(Command(resume="yes"), config)

    assert (waiting, file.read_thread_user()) == ("ann", "ann")


def test_node_of_subgraph_stores_user_of_thread(file: DatabaseFile) -> None:
    inner = StateGraph(MessagesState).add_sequence([("look", view(use_memories()))])
    graph = file.build_graph(inner.add_edge(START, "look").compile(), reply)
    graph.invoke(TEA, {"configurable": {"thread_id": "t"}}, context={"user_id": "ann"})

    assert file.read_thread_user() == "ann"


def test_thread_without_stored_user_is_reported_and_not_extracted(
    file: DatabaseFile, caplog: pytest.LogCaptureFixture
) -> None:
    """Its run had a user in the context, but no node of perdure.

    A later run with such a node stores the user.
    """
    config: Any = {"configurable": {"thread_id": "t"}}
    file.build_graph(reply).invoke(TEA, config, context={"user_id": "ann"})
    file.build_graph(reply).invoke(TEA, {"configurable": {"thread_id": "quiet", "user_id": ""}})
    extraction = Extraction(file.saver, file.store)
    caplog.set_level(logging.WARNING, "perdure.background")
    with Background(extraction, pace=Pace(0)) as background:
        assert (background.flush(), background.unassigned()) == ([], ["t"])
        with pytest.raises(InvalidConfig, match="no 'user_id'"):
            background.extract_now("t")

    assert file.list_users() == set()
    assert "threads without user_id (number of threads: 1); pass this value" in caplog.text
    file.build_graph(view(use_memories()), reply).invoke(TEA, config, context={"user_id": "ann"})
    assert file.list_due_namespaces() == {"t": ("memories", "ann")}
