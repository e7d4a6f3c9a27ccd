"""A thread keeps its user, whoever goes on with it without naming one."""

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
from perdure.checkpointers.thread_list import ThreadList, ThreadQuery
from perdure.checkpointers.titles import read_existing_head
from tests.contracts.puts import config_at, put

ANN: Any = {"configurable": {"thread_id": "t", "user_id": "ann", "owner": "ann"}}
SAY: Any = {"messages": [HumanMessage("Pay.", id="pay")]}
MORE: Any = {"messages": [HumanMessage("Now.", id="now")]}


def paying(saver: Any, **options: Any) -> Any:
    """A graph that asks before it pays."""

    def pay(state: Any) -> Any:
        return {"messages": [AIMessage(f"paid: {interrupt('Pay?')}")]}

    builder = StateGraph(MessagesState, **options).add_sequence([("pay", pay)])
    return builder.add_edge(START, "pay").compile(checkpointer=saver)


def answering(saver: Any, **options: Any) -> Any:
    """A graph that answers."""

    def answer(state: Any) -> Any:
        return {"messages": [AIMessage("Yes.")]}

    builder = StateGraph(MessagesState, **options).add_sequence([("answer", answer)])
    return builder.add_edge(START, "answer").compile(checkpointer=saver)


def users(saver: SQLiteCheckpointer, thread_id: str = "t") -> set[Any]:
    """The users of a thread by each way to ask; one if all agree, None and `""` being nobody."""
    head = read_existing_head(saver, thread_id)
    (listed,) = ThreadList(saver).search(ThreadQuery(ids=[thread_id]), lambda each: each, 1)
    found: set[Any] = {head.owner, head.metadata.get("user_id"), listed.metadata.get("owner")}
    for user in ("ann", "bob"):
        heads = saver.heads(filter={"user_id": user})
        tagged = [*saver.list(config_at(thread_id), filter={"user_id": user}, limit=1)]
        newest = saver.get_tuple(config_at(thread_id))
        is_newest = bool(tagged) and newest is not None and tagged[0].config == newest.config
        if is_newest != (thread_id in [each.thread_id for each in heads]):
            found.add(f"lists disagree on {user}")
        found |= {user} if is_newest else set()
    return {user or None for user in found}


def first_config(graph: Any) -> Any:
    return [*graph.get_state_history(config_at())][-1].config


def update_subgraph(graph: Any) -> Any:
    (waiting,) = graph.get_state(config_at(), subgraphs=True).tasks
    return graph.update_state(waiting.state.config, {"messages": [HumanMessage("In here.")]})


WAYS: dict[str, Callable[[Any], Any]] = {
    "update": lambda graph: graph.update_state(config_at(), MORE),
    "updates": lambda graph: graph.bulk_update_state(
        config_at(), [[StateUpdate(MORE, "pay")], [StateUpdate(SAY, "pay")]]
    ),
    "clear": lambda graph: graph.update_state(config_at(), None),
    "copy": lambda graph: graph.update_state(config_at(), None, "__copy__"),
    "resume": lambda graph: graph.invoke(Command(resume="yes"), config_at()),
    "resume at exit": lambda graph: graph.invoke(
        Command(resume="yes"), config_at(), durability="exit"
    ),
    "update and go": lambda graph: graph.invoke(Command(update=MORE, goto="pay"), config_at()),
    "none": lambda graph: graph.invoke(None, config_at()),
    "input": lambda graph: graph.invoke(MORE, config_at()),
    "input at exit": lambda graph: graph.invoke(MORE, config_at(), durability="exit"),
    "fork": lambda graph: graph.update_state(first_config(graph), MORE, "__start__"),
    "replay": lambda graph: graph.invoke(None, first_config(graph)),
    "empty context": lambda graph: graph.invoke(Command(resume="yes"), config_at(), context={}),
    "async": lambda graph: asyncio.run(graph.ainvoke(Command(resume="yes"), config_at())),
    "async update": lambda graph: asyncio.run(graph.aupdate_state(config_at(), MORE)),
}


@pytest.mark.parametrize("way", sorted(WAYS))
def test_a_thread_keeps_its_user(saver: SQLiteCheckpointer, way: str) -> None:
    """Also if the process does not have the thread in its cache, and twice in a row."""
    graph = paying(saver)
    graph.invoke(SAY, ANN)
    WAYS[way](graph)
    once = users(saver)
    saver._cache.drop_thread("t")
    WAYS["update"](graph)

    assert once == users(saver) == {"ann"}
    assert read_existing_head(saver, "t").metadata["owner"] == "ann"


def test_rewinding_and_copying_keep_the_user(saver: SQLiteCheckpointer) -> None:
    """The head is then an older checkpoint, or one of another thread."""
    graph = paying(saver)
    graph.invoke(SAY, ANN)
    graph.update_state(config_at(), MORE)
    saver.copy_thread("t", "copy")
    graph.update_state(config_at("copy"), MORE)
    saver.rewind("t", first_config(graph)["configurable"]["checkpoint_id"])
    rewound = users(saver)
    graph.update_state(config_at(), MORE, "__start__")

    assert rewound == users(saver) == users(saver, "copy") == {"ann"}


def test_the_functional_api_keeps_the_user(saver: SQLiteCheckpointer) -> None:
    """A workflow that is resumed, then called anew."""

    @task
    def ask(what: str) -> Any:
        return interrupt(what)

    @entrypoint(checkpointer=saver)
    def workflow(what: str) -> Any:
        return ask(what).result()

    workflow.invoke("Pay?", ANN)
    workflow.invoke(Command(resume="yes"), config_at())
    resumed = users(saver)
    workflow.invoke("Again?", config_at())

    assert resumed == users(saver) == {"ann"}


def test_subgraphs_keep_the_user(saver: SQLiteCheckpointer) -> None:
    """An update of a state within, and the checkpoints within after a resume."""
    builder = StateGraph(MessagesState).add_node("inner", paying(None))
    graph = builder.add_edge(START, "inner").compile(checkpointer=saver)
    graph.invoke(SAY, ANN)
    update_subgraph(graph)
    updated = users(saver)
    graph.invoke(Command(resume="yes"), config_at())
    everywhere: Any = {"configurable": {"thread_id": "t"}}
    unnamed = [each for each in saver.list(everywhere) if each.metadata.get("user_id") != "ann"]

    assert updated == users(saver) == {"ann"}
    assert unnamed == []


def test_puts_keep_the_user(saver: SQLiteCheckpointer) -> None:
    """Metadata holds the user of the parent, and nothing else of it."""
    parent = put(saver, {"n": 1}, metadata={"user_id": "ann", "title": "Payments"})
    put(saver, {"n": 2}, parent)
    stored = saver.get_tuple(config_at())

    assert stored is not None
    assert stored.metadata == {"source": "loop", "user_id": "ann"}


@dataclass
class AsDataclass:
    """A context that always has a user."""

    user_id: str | None = None


class AsModel(BaseModel):
    """A context that knows which of its fields were set."""

    user_id: str | None = None
    team: str = "blue"


@pytest.mark.parametrize("user", ["", None])
@pytest.mark.parametrize("where", ["configurable", dict, AsDataclass, AsModel])
def test_a_run_may_name_nobody(saver: SQLiteCheckpointer, where: Any, user: str | None) -> None:
    """A config or context can name nobody; then this and later runs belong to nobody."""
    saver.label("t", ["user_id"])
    graph = answering(saver, context_schema=where if where in (AsDataclass, AsModel) else None)
    graph.invoke(SAY, ANN)
    if where == "configurable":
        graph.invoke(MORE, {"configurable": {"thread_id": "t", "user_id": user}})
    else:
        graph.invoke(MORE, config_at(), context=where(user_id=user))
    named = users(saver)
    graph.update_state(config_at(), MORE)

    assert named == users(saver) == {None}


def test_a_context_that_leaves_out_the_user_does_not_name_nobody(
    saver: SQLiteCheckpointer,
) -> None:
    graph = answering(saver, context_schema=AsModel)
    graph.invoke(SAY, ANN)
    graph.invoke(MORE, config_at(), context={"team": "red"})

    assert users(saver) == {"ann"}


@pytest.mark.parametrize("where", ["user_id", "owner", "context"])
def test_another_user_takes_over(saver: SQLiteCheckpointer, where: str) -> None:
    """Neither `user_id` nor `owner` of the former user stays with the thread."""
    graph = answering(saver)
    graph.invoke(SAY, ANN)
    named: Any = {"configurable": {"thread_id": "t", where: "bob"}}
    graph.invoke(MORE, named if where != "context" else config_at(), context={"user_id": "bob"})
    graph.update_state(config_at(), MORE)
    head = read_existing_head(saver, "t")

    assert head.owner == "bob"
    assert saver.heads(filter={"user_id": "ann"}) == []


def test_the_same_user_keeps_the_owner(saver: SQLiteCheckpointer) -> None:
    """The owner of a thread may be another than the user of its runs."""
    graph = answering(saver)
    for owner in ({"owner": "ann"}, {}):
        graph.invoke(SAY, {"configurable": {"thread_id": "t", "user_id": "bob", **owner}})

    assert (
        read_existing_head(saver, "t").metadata.items()
        >= {"user_id": "bob", "owner": "ann"}.items()
    )


def test_an_imported_checkpoint_has_the_metadata_of_its_source(tmp_path: Path) -> None:
    """An import copies: it does not go on with the thread."""
    with SqliteSaver.from_conn_string(str(tmp_path / "peer.db")) as peer:
        graph = answering(peer)
        graph.invoke(SAY, ANN)
        graph.update_state(config_at(), MORE)
    with SQLiteCheckpointer.open(tmp_path / "own.db") as saver:
        saver.import_from(tmp_path / "peer.db")
        imported = users(saver)
        answering(saver).update_state(config_at(), MORE)

        assert imported == users(saver) == {None}
