"""Files that the first version wrote: how they were made, and how what is in them is told.

They were made by that version (schema 1, the last commit with it is 7b4dfdf), with its packages and
this repository's `tests` on the path: `python -m tests.first_version tests/data/v1`.
"""

from __future__ import annotations

import json
import sqlite3
import sys
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any, TypedDict

from langchain.agents import create_agent
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AnyMessage, BaseMessage, HumanMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import tool
from langgraph.checkpoint.base import empty_checkpoint
from langgraph.graph import START, MessagesState, StateGraph, add_messages
from langgraph.types import interrupt

from perdure.checkpointers import SQLiteCheckpointer

KEY = bytes(range(32))
FILES = {"plain": None, "sealed": KEY}  # by name, the key


def at(thread: str, uid: str | None = None) -> RunnableConfig:
    where = {"thread_id": thread, "checkpoint_ns": ""}
    return {"configurable": where if uid is None else {**where, "checkpoint_id": uid}}


# -- programs


class Scripted(BaseChatModel):
    """Calls a tool as often as it is asked to, and answers in words once it has the results."""

    @property
    def _llm_type(self) -> str:
        return "scripted"

    def bind_tools(self, tools: Any, **_: Any) -> Scripted:
        return self

    def _generate(
        self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **_: Any
    ) -> ChatResult:
        asked = int(messages[-1].text) if messages[-1].type == "human" else 0
        call = {"name": "look_up", "args": {"word": "heron"}, "type": "tool_call"}
        calls = [{**call, "id": f"{len(messages)}-{n}"} for n in range(asked)]
        message = AIMessage("" if asked else "a bird", tool_calls=calls)
        return ChatResult(generations=[ChatGeneration(message=message)])


@tool
def look_up(word: str) -> str:
    """Look a word up."""
    return f"{word}: a bird that stands in water"


def agent(saver: SQLiteCheckpointer) -> Any:
    return create_agent(Scripted(), [look_up], checkpointer=saver)


def chat(saver: SQLiteCheckpointer) -> Any:
    """One answer a turn; the first question has no id, and the answers have none either."""

    def answer(state: MessagesState) -> dict[str, Any]:
        return {"messages": [AIMessage(f"answer to {state['messages'][-1].text}")]}

    builder = StateGraph(MessagesState).add_node("answer", answer)
    return builder.add_edge(START, "answer").compile(checkpointer=saver)


class Notes(TypedDict):
    messages: Annotated[list[AnyMessage], add_messages]
    facts: dict[str, Any]


def asking(saver: SQLiteCheckpointer) -> Any:
    """A subgraph that keeps its own state asks before it is done."""

    def ask(state: Notes) -> dict[str, Any]:
        return {"messages": [AIMessage(f"told {interrupt('go on?')}")]}

    def note(state: Notes) -> dict[str, Any]:
        count = len(state["messages"])
        return {"facts": {**state.get("facts", {}), f"turn {count}": {"seen": "x" * 150}}}

    inner = StateGraph(Notes).add_node("ask", ask).add_edge(START, "ask")
    outer = StateGraph(Notes).add_node("note", note)
    outer.add_node("sub", inner.compile(checkpointer=True))
    return outer.add_edge(START, "note").add_edge("note", "sub").compile(checkpointer=saver)


def put(
    saver: SQLiteCheckpointer, thread: str, messages: list[Any], parent: RunnableConfig | None
) -> RunnableConfig:
    checkpoint = empty_checkpoint()
    checkpoint["channel_values"] = {"messages": messages}
    checkpoint["channel_versions"] = {"messages": len(messages)}
    versions = dict(checkpoint["channel_versions"])
    step = 0 if parent is None else 1
    return saver.put(parent or at(thread), checkpoint, {"source": "loop", "step": step}, versions)


def fill(saver: SQLiteCheckpointer) -> None:
    """An agent's thread, with three tools at once; and a list of more than 64 ranges."""
    for number in (0, 3, 1):
        agent(saver).invoke({"messages": [("human", str(number))]}, at("agent"))
    everything = [HumanMessage(f"{n}", id=f"{n}") for n in range(132)]
    first = put(saver, "blocks", everything, None)
    put(saver, "blocks", everything[::2], first)


def fill_more(saver: SQLiteCheckpointer) -> None:
    """Threads with a fork, with another head, and with a question that is open."""
    graph = chat(saver)
    for text in "abc":
        graph.invoke({"messages": [("human", text)]}, at("forked"))
        graph.invoke({"messages": [HumanMessage(text)]}, at("rewound"))
    old = next(s for s in graph.get_state_history(at("forked")) if len(s.values["messages"]) == 2)
    graph.invoke({"messages": [("human", "of the fork")]}, old.config)
    old = next(s for s in graph.get_state_history(at("rewound")) if len(s.values["messages"]) == 4)
    saver.rewind("rewound", old.config["configurable"]["checkpoint_id"])
    asking(saver).invoke({"messages": [("human", "a")]}, at("asking"))


# -- what is in a file


def described(value: Any) -> Any:
    """A value as JSON that does not depend on the version of langchain."""
    if isinstance(value, BaseMessage):
        known = {"type": value.type, "id": value.id, "content": value.content}
        if isinstance(value, AIMessage):
            known["tool_calls"] = value.tool_calls
        return {**known, "tool_call_id": getattr(value, "tool_call_id", None)}
    if isinstance(value, dict):
        return {str(key): described(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [described(inner) for inner in value]
    if value is None or isinstance(value, str | int | float):
        return value
    return type(value).__name__


def contents(saver: SQLiteCheckpointer, thread: str) -> dict[str, Any]:
    """A thread: its checkpoints, the last put first, its heads, and the history of each."""
    info = saver.thread(thread)
    every: RunnableConfig = {"configurable": {"thread_id": thread}}
    found = {str(t.checkpoint["id"]): t for t in saver.list(every)}
    checkpoints = []
    for known in saver.checkpoints(thread):
        each = found[known.checkpoint_id]
        history = saver.history(
            thread, checkpoint_id=known.checkpoint_id, checkpoint_ns=known.checkpoint_ns
        )
        checkpoints.append(
            {
                "id": known.checkpoint_id,
                "ns": known.checkpoint_ns,
                "parent": known.parent_id,
                "order": known.order,
                "head": known.is_head,
                "counts": dict(known.counts),
                "metadata": described(dict(known.metadata)),
                "values": described(each.checkpoint["channel_values"]),
                "versions": described(dict(each.checkpoint["channel_versions"])),
                "seen": described(dict(each.checkpoint["versions_seen"])),
                "writes": described(each.pending_writes),
                "history": [[item.position, item.seen, described(item.value)] for item in history],
            }
        )
    return {"items": info.items, "checkpoints": checkpoints}


def _main(folder: Path) -> None:
    for name, key in FILES.items():
        path = folder / f"{name}.db"
        path.unlink(missing_ok=True)
        with SQLiteCheckpointer.open(path, key=key) as saver:
            fill(saver)
            if key is None:
                fill_more(saver)
            told = {info.thread_id: contents(saver, info.thread_id) for info in saver.threads()}
        with closing(sqlite3.connect(path)) as db:
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            db.execute("VACUUM")
        path.with_name(path.name + ".lock").unlink()
        text = json.dumps(told, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
        path.with_suffix(".json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
