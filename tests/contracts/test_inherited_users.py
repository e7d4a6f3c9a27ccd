"""A thread keeps its user when it is continued without a user."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.func import entrypoint, task
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import Command, StateUpdate, interrupt
from pydantic import BaseModel

from perdure.checkpointers import SQLiteCheckpointer
from perdure.checkpointers.import_metadata import read_thread_head_or_raise
from perdure.run_tables.thread_list import ThreadList, ThreadQuery
from tests.contracts.puts import config_at, put

CONFIG_OF_ANN: Any = {"configurable": {"thread_id": "t", "user_id": "ann", "owner": "ann"}}
FIRST_INPUT: Any = {"messages": [HumanMessage("Pay.", id="pay")]}
SECOND_INPUT: Any = {"messages": [HumanMessage("Now.", id="now")]}


def compile_paying_graph(saver: Any, **options: Any) -> Any:
    """Compile a graph with an interrupt before it pays."""

    def pay(state: Any) -> Any:
        return {"messages": [AIMessage(f"paid: {interrupt('Pay?')}")]}

    builder = StateGraph(MessagesState, **options).add_sequence([("pay", pay)])
    return builder.add_edge(START, "pay").compile(checkpointer=saver)


def compile_answering_graph(saver: Any, **options: Any) -> Any:
    """Compile a graph that answers each message."""

    def answer(state: Any) -> Any:
        return {"messages": [AIMessage("Yes.")]}

    builder = StateGraph(MessagesState, **options).add_sequence([("answer", answer)])
    return builder.add_edge(START, "answer").compile(checkpointer=saver)


def read_users(saver: SQLiteCheckpointer, thread_id: str = "t") -> set[Any]:
    """Return the users of a thread by each kind of query, with None for no user.

    All queries agree if there is one.
    """
    head = read_thread_head_or_raise(saver, thread_id)
    (listed,) = ThreadList(saver).search(ThreadQuery(ids=[thread_id]), lambda each: each, 1)
    users: set[Any] = {head.owner, head.metadata.get("user_id"), listed.metadata.get("owner")}
    for user in ("ann", "bob"):
        heads = saver.heads(filter={"user_id": user})
        tagged = [*saver.list(config_at(thread_id), filter={"user_id": user}, limit=1)]
        newest = saver.get_tuple(config_at(thread_id))
        is_newest = bool(tagged) and newest is not None and tagged[0].config == newest.config
        if is_newest != (thread_id in [item.thread_id for item in heads]):
            users.add(f"lists disagree on {user}")
        users |= {user} if is_newest else set()
    return {user or None for user in users}


def first_config(graph: Any) -> Any:
    return [*graph.get_state_history(config_at())][-1].config


def update_subgraph(graph: Any) -> Any:
    (waiting,) = graph.get_state(config_at(), subgraphs=True).tasks
    return graph.update_state(waiting.state.config, {"messages": [HumanMessage("In here.")]})


WAYS_TO_CONTINUE: dict[str, Callable[[Any], Any]] = {
    "update": lambda graph: graph.update_state(config_at(), SECOND_INPUT),
    "updates": lambda graph: graph.bulk_update_state(
        config_at(), [[StateUpdate(SECOND_INPUT, "pay")], [StateUpdate(FIRST_INPUT, "pay")]]
    ),
    "update with None": lambda graph: graph.update_state(config_at(), None),
    "copy of checkpoint": lambda graph: graph.update_state(config_at(), None, "__copy__"),
    "resume": lambda graph: graph.invoke(Command(resume="yes"), config_at()),
    "resume with durability exit": lambda graph: graph.invoke(
        Command(resume="yes"), config_at(), durability="exit"
    ),
    "update and goto": lambda graph: graph.invoke(
        Command(update=SECOND_INPUT, goto="pay"), config_at()
    ),
    "invoke with None": lambda graph: graph.invoke(None, config_at()),
    "input": lambda graph: graph.invoke(SECOND_INPUT, config_at()),
    "input with durability exit": lambda graph: graph.invoke(
        SECOND_INPUT, config_at(), durability="exit"
    ),
    "update of first checkpoint": lambda graph: graph.update_state(
        first_config(graph), SECOND_INPUT, "__start__"
    ),
    "replay from first checkpoint": lambda graph: graph.invoke(None, first_config(graph)),
    "empty context": lambda graph: graph.invoke(Command(resume="yes"), config_at(), context={}),
    "async resume": lambda graph: asyncio.run(graph.ainvoke(Command(resume="yes"), config_at())),
    "async update": lambda graph: asyncio.run(graph.aupdate_state(config_at(), SECOND_INPUT)),
}


@pytest.mark.parametrize("continuation", sorted(WAYS_TO_CONTINUE))
def test_continued_thread_keeps_its_user(saver: SQLiteCheckpointer, continuation: str) -> None:
    """The user also stays if the thread is not in the cache, and after a second continuation."""
    graph = compile_paying_graph(saver)
    graph.invoke(FIRST_INPUT, CONFIG_OF_ANN)
    WAYS_TO_CONTINUE[continuation](graph)
    users_after_first = read_users(saver)
    saver._cache.drop_thread("t")
    WAYS_TO_CONTINUE["update"](graph)

    assert users_after_first == read_users(saver) == {"ann"}
    assert read_thread_head_or_raise(saver, "t").metadata["owner"] == "ann"


def test_rewind_and_copy_keep_user_of_thread(saver: SQLiteCheckpointer) -> None:
    """The head is then an older checkpoint or that of another thread."""
    graph = compile_paying_graph(saver)
    graph.invoke(FIRST_INPUT, CONFIG_OF_ANN)
    graph.update_state(config_at(), SECOND_INPUT)
    saver.copy_thread("t", "copy")
    graph.update_state(config_at("copy"), SECOND_INPUT)
    saver.rewind("t", first_config(graph)["configurable"]["checkpoint_id"])
    users_after_rewind = read_users(saver)
    graph.update_state(config_at(), SECOND_INPUT, "__start__")

    assert users_after_rewind == read_users(saver) == read_users(saver, "copy") == {"ann"}


def test_functional_api_keeps_user_of_thread(saver: SQLiteCheckpointer) -> None:
    """A workflow is resumed, and then called again."""

    @task
    def ask(what: str) -> Any:
        return interrupt(what)

    @entrypoint(checkpointer=saver)
    def workflow(what: str) -> Any:
        return ask(what).result()

    workflow.invoke("Pay?", CONFIG_OF_ANN)
    workflow.invoke(Command(resume="yes"), config_at())
    users_after_resume = read_users(saver)
    workflow.invoke("Again?", config_at())

    assert users_after_resume == read_users(saver) == {"ann"}


def test_subgraph_updates_and_resumes_keep_user_of_thread(saver: SQLiteCheckpointer) -> None:
    """Every checkpoint of every namespace has the user."""
    builder = StateGraph(MessagesState).add_node("inner", compile_paying_graph(None))
    graph = builder.add_edge(START, "inner").compile(checkpointer=saver)
    graph.invoke(FIRST_INPUT, CONFIG_OF_ANN)
    update_subgraph(graph)
    users_after_update = read_users(saver)
    graph.invoke(Command(resume="yes"), config_at())
    all_namespaces: Any = {"configurable": {"thread_id": "t"}}
    unnamed = [
        checkpoint
        for checkpoint in saver.list(all_namespaces)
        if checkpoint.metadata.get("user_id") != "ann"
    ]

    assert users_after_update == read_users(saver) == {"ann"}
    assert unnamed == []


def test_put_inherits_only_user_from_metadata_of_parent(saver: SQLiteCheckpointer) -> None:
    parent = put(saver, {"n": 1}, metadata={"user_id": "ann", "title": "Payments"})
    put(saver, {"n": 2}, parent)
    stored = saver.get_tuple(config_at())

    assert stored is not None
    assert stored.metadata == {"source": "loop", "user_id": "ann"}


@dataclass
class DataclassContext:
    """A context that always has a user."""

    user_id: str | None = None


class ModelContext(BaseModel):
    """A context that knows which of its fields were set."""

    user_id: str | None = None
    team: str = "blue"


@pytest.mark.parametrize("user", ["", None])
@pytest.mark.parametrize("where", ["configurable", dict, DataclassContext, ModelContext])
def test_run_with_empty_user_removes_user_from_thread(
    saver: SQLiteCheckpointer, where: Any, user: str | None
) -> None:
    """The config or the context names no user. Then this run and later runs belong to nobody."""
    saver.copy_context_values_to_metadata("t", ["user_id"])
    graph = compile_answering_graph(
        saver, context_schema=where if where in (DataclassContext, ModelContext) else None
    )
    graph.invoke(FIRST_INPUT, CONFIG_OF_ANN)
    if where == "configurable":
        graph.invoke(SECOND_INPUT, {"configurable": {"thread_id": "t", "user_id": user}})
    else:
        graph.invoke(SECOND_INPUT, config_at(), context=where(user_id=user))
    users_after_run = read_users(saver)
    graph.update_state(config_at(), SECOND_INPUT)

    assert users_after_run == read_users(saver) == {None}


def test_context_without_user_keeps_user_of_thread(
    saver: SQLiteCheckpointer,
) -> None:
    graph = compile_answering_graph(saver, context_schema=ModelContext)
    graph.invoke(FIRST_INPUT, CONFIG_OF_ANN)
    graph.invoke(SECOND_INPUT, config_at(), context={"team": "red"})

    assert read_users(saver) == {"ann"}


@pytest.mark.parametrize("where", ["user_id", "owner", "context"])
def test_run_of_another_user_replaces_user_and_owner(saver: SQLiteCheckpointer, where: str) -> None:
    """Neither `user_id` nor `owner` of the former user stays with the thread."""
    graph = compile_answering_graph(saver)
    graph.invoke(FIRST_INPUT, CONFIG_OF_ANN)
    config_of_bob: Any = {"configurable": {"thread_id": "t", where: "bob"}}
    graph.invoke(
        SECOND_INPUT,
        config_of_bob if where != "context" else config_at(),
        context={"user_id": "bob"},
    )
    graph.update_state(config_at(), SECOND_INPUT)
    head = read_thread_head_or_raise(saver, "t")

    assert head.owner == "bob"
    assert saver.heads(filter={"user_id": "ann"}) == []


def test_next_run_of_same_user_keeps_owner(saver: SQLiteCheckpointer) -> None:
    """The owner of a thread and the user of its runs may differ."""
    graph = compile_answering_graph(saver)
    for owner in ({"owner": "ann"}, {}):
        graph.invoke(FIRST_INPUT, {"configurable": {"thread_id": "t", "user_id": "bob", **owner}})

    assert (
        read_thread_head_or_raise(saver, "t").metadata.items()
        >= {"user_id": "bob", "owner": "ann"}.items()
    )


def test_import_does_not_add_user_to_checkpoints(tmp_path: Path) -> None:
    """Imported checkpoints keep the metadata of their source."""
    with SqliteSaver.from_conn_string(str(tmp_path / "peer.db")) as peer:
        graph = compile_answering_graph(peer)
        graph.invoke(FIRST_INPUT, CONFIG_OF_ANN)
        graph.update_state(config_at(), SECOND_INPUT)
    with SQLiteCheckpointer.open(tmp_path / "own.db") as saver:
        saver.import_from(tmp_path / "peer.db")
        imported = read_users(saver)
        compile_answering_graph(saver).update_state(config_at(), SECOND_INPUT)

        assert imported == read_users(saver) == {None}
