"""Graphs that ask a person a question, and a langgraph.json that names them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from langgraph.graph.state import CompiledStateGraph

from perdure.checkpointers import open_checkpointer
from perdure.graphs.langgraph_json import LanggraphFile
from perdure.stores import open_store

GRAPHS = '''
import operator
from typing import Annotated, Any, TypedDict

from langchain_core.messages import AIMessage, AnyMessage
from langgraph.graph import START, StateGraph
from langgraph.graph.message import add_messages
from langgraph.types import interrupt

from perdure.memory import remember_turns, use_memories


class State(TypedDict):
    messages: Annotated[list[AnyMessage], add_messages]
    heard: Annotated[list[Any], operator.add]


class Context(TypedDict, total=False):
    user_id: str


CALL = {"action_requests": [{"name": "refund", "args": {"euros": 5}, "description": "Refund?"}],
        "review_configs": [{"action_name": "refund",
                            "allowed_decisions": ["approve", "edit", "reject", "respond"]}]}
TWO = {"action_requests": [{"name": "refund", "args": {"euros": 5}}, {"name": "drop", "args": {}}],
       "review_configs": [{"action_name": "refund",
                           "allowed_decisions": ["approve", "edit", "reject"]},
                          {"action_name": "drop", "allowed_decisions": ["approve", "reject"]}]}


def asking(question, fails=False):
    """Ask, hear the answer, and say so; what is said is remembered, and recalled before."""

    def hear(state, config, runtime=None):
        answers = [interrupt(question)]
        if fails:
            raise ValueError("no such account")
        user = config["configurable"].get("user_id")
        return {"heard": answers, "messages": [AIMessage(f"{user} gets {answers[0]!r}")]}

    made = StateGraph(State, context_schema=Context)
    made.add_node("recall", use_memories())
    made.add_node("hear", hear)
    made.add_node("remember", remember_turns())
    made.add_edge(START, "recall")
    made.add_edge("recall", "hear")
    made.add_edge("hear", "remember")
    return made.compile()


review = asking(CALL)
batch = asking(TWO)
plain = asking("Are you sure?")
several = StateGraph(State)
several.add_node("first", lambda state: {"heard": [interrupt("First?")]})
several.add_node("second", lambda state: {"heard": [interrupt("Second?")]})
several.add_edge(START, "first")
several.add_edge(START, "second")
failing = asking("Are you sure?", fails=True)
twice = StateGraph(State)
twice.add_node("first", lambda state: {"heard": [interrupt("One?")]})
twice.add_node("second", lambda state: {"heard": [interrupt("Two?")]})
twice.add_edge(START, "first")
twice.add_edge("first", "second")


def ask_until_yes(state):
    while (answer := interrupt("Yes?")) != "yes":
        pass
    return {"heard": [answer]}


stubborn = StateGraph(State)
stubborn.add_node("ask", ask_until_yes)
stubborn.add_edge(START, "ask")
'''
NAMES = ("review", "batch", "plain", "several", "failing", "twice", "stubborn")


def write_langgraph_json(folder: Path, *names: str) -> str:
    """Write a langgraph.json with the named graphs, or with all, and return its path."""
    (folder / "asking_graphs.py").write_text(GRAPHS)
    file = folder / "langgraph.json"
    graphs = {name: f"./asking_graphs.py:{name}" for name in names or NAMES}
    file.write_text(json.dumps({"graphs": graphs}))
    return str(file)


@contextmanager
def open_graph(db: str, file: str, name: str) -> Iterator[CompiledStateGraph[Any, Any, Any, Any]]:
    """Yield a graph of the file over a database, as a program of the user runs it."""
    graph = LanggraphFile.read(file).import_graphs()[name]
    with open_checkpointer(db) as saver, open_store(db) as store:
        compiled = graph.compile() if hasattr(graph, "compile") else graph.copy()
        compiled.checkpointer, compiled.store = saver, store
        yield compiled


def run_to_question(
    db: str, file: str, name: str, thread: str, user: str | None = "dora", **metadata: Any
) -> None:
    """Run a graph on a thread up to its question."""
    with open_graph(db, file, name) as graph:
        configurable = {"thread_id": thread, **({} if user is None else {"user_id": user})}
        graph_input: Any = {
            "messages": [{"role": "user", "content": f"I want a refund on {thread}"}]
        }
        config: Any = {"configurable": configurable, "metadata": {"graph_id": name, **metadata}}
        graph.invoke(graph_input, config)


def read_answers(db: str, file: str, name: str, thread: str) -> Any:
    """Return the answers that a graph has received on a thread."""
    with open_graph(db, file, name) as graph:
        return graph.get_state({"configurable": {"thread_id": thread}}).values.get("heard", [])
