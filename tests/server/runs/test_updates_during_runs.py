"""Updates and prunes of a thread during a run: by HTTP, or of a run that HTTP started."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Annotated, Any, TypedDict

import pytest
from langchain_core.messages import AIMessage, AnyMessage
from langgraph.graph import START, StateGraph, add_messages
from langgraph.types import interrupt
from langgraph_sdk import get_sync_client
from langgraph_sdk.errors import ConflictError

from perdure.checkpointers import open_checkpointer
from perdure.server import create_app
from perdure.server.graphs import Graphs
from perdure.settings import Settings
from tests.server.running import run_server
from tests.server.talking import Gate

AT: Any = {"configurable": {"thread_id": "t"}, "metadata": {"graph_id": "titled"}}
ASK: Any = {"messages": [{"role": "user", "content": "q"}]}
TITLE: Any = {"title": "A question"}


class Titled(TypedDict, total=False):
    messages: Annotated[list[AnyMessage], add_messages]
    title: str
    tags: Annotated[list[str], operator.add]


def build_three_step_graph(
    during: Callable[[], Any] = lambda: None, *, asks: bool = False
) -> StateGraph[Titled]:
    """Return a graph of three nodes; the second calls `during`, and asks if `asks` is set."""

    def second(state: Titled) -> Any:
        during()
        reply = interrupt("Really?") if asks else "two"
        return {"messages": [AIMessage(reply)]}

    builder: Any = StateGraph(Titled)
    builder.add_node("first", lambda state: {"messages": [AIMessage("one")]})
    builder.add_node("second", second)
    builder.add_node("third", lambda state: {"messages": [AIMessage("three")]})
    builder.add_edge(START, "first").add_edge("first", "second").add_edge("second", "third")
    return builder  # type: ignore[no-any-return]


def message_texts(values: Any) -> list[str]:
    return [message["content"] for message in values["messages"]]


@pytest.mark.parametrize("asks", [False, True])
def test_http_updates_during_run_of_program_are_kept(db: Settings, asks: bool) -> None:
    """The program holds no lock, so the server can update and prune its thread during the run."""
    app = create_app(db, graphs=Graphs({"titled": build_three_step_graph(asks=asks)}))
    done: list[Any] = []
    with run_server(app) as url, get_sync_client(url=url) as sdk:

        def during() -> None:
            if not done:
                for number in range(2):
                    values = {"tags": [f"tag {number}"], **TITLE}
                    done.append(sdk.threads.update_state("t", values, as_node="second"))
                    sdk.threads.prune(["t"], strategy="keep_latest")

        sdk.threads.create(thread_id="t", graph_id="titled")
        with open_checkpointer(db.db) as saver:
            graph = build_three_step_graph(during, asks=asks).compile(checkpointer=saver)
            graph.invoke(ASK, AT)
        state: Any = sdk.threads.get_state("t")
        if asks:
            assert [each["value"] for each in state["interrupts"]] == ["Really?"]
            assert state["values"]["title"] == "A question"
            sdk.runs.wait("t", "titled", command={"resume": "two"})
            state = sdk.threads.get_state("t")

    assert len(done) == 2
    assert message_texts(state["values"]) == ["q", "one", "two", "three"]
    assert state["values"]["tags"] == ["tag 0", "tag 1"]
    assert state["values"]["title"] == "A question"


@pytest.mark.parametrize("durability", ["sync", "async"])
def test_program_updates_during_http_run_are_kept(db: Settings, durability: Any) -> None:
    """The server refuses to update or prune the thread during the run; a program may."""
    gate = Gate()

    def during() -> None:
        gate.reached.set()
        assert gate.open.wait(60)

    app = create_app(db, graphs=Graphs({"titled": build_three_step_graph(during)}))
    with run_server(app) as url, get_sync_client(url=url) as sdk:
        sdk.threads.create(thread_id="t", graph_id="titled")
        run = sdk.runs.create("t", "titled", input=ASK, durability=durability)["run_id"]
        assert gate.reached.wait(60)
        with pytest.raises(ConflictError):
            sdk.threads.update_state("t", TITLE, as_node="second")
        with pytest.raises(ConflictError):
            sdk.threads.prune(["t"], strategy="keep_latest")
        with open_checkpointer(db.db) as saver:
            graph: Any = build_three_step_graph().compile(checkpointer=saver)
            for number in range(2):
                graph.update_state(AT, {"tags": [f"tag {number}"], **TITLE}, "second")
                saver.prune(["t"], strategy="keep_latest")
        gate.open.set()
        values: Any = sdk.runs.join("t", run)
        state: Any = sdk.threads.get_state("t")
        status = sdk.runs.get("t", run)["status"]

    assert status == "success"
    assert message_texts(values) == message_texts(state["values"]) == ["q", "one", "two", "three"]
    assert state["values"]["tags"] == ["tag 0", "tag 1"]
    assert state["values"]["title"] == "A question"
