"""What tests of collections, tools and the gate do: call, list, judge, keep."""

from __future__ import annotations

import asyncio
from typing import Any

from langchain_core.messages import ToolMessage

from perdure.effects import run
from perdure.memory.collection import Collection
from perdure.memory.gate import Gate
from perdure.memory.records import Candidate, StoreAdapter, Verdict, build_put

ANN: Any = {"configurable": {"user_id": "ann", "thread_id": "t1"}}
BO: Any = {"configurable": {"user_id": "bo", "thread_id": "t2"}}
NAMESPACE = ("memories", "ann")
TEA, COFFEE, GHENT = "Ann drinks tea", "Ann drinks coffee", "Ann lives in Ghent"


def done(colour: str, owner: Any, name: str, *args: Any, **named: Any) -> Any:
    """What a method gives, in either form."""
    if colour == "sync":
        return getattr(owner, name)(*args, **named)
    return asyncio.run(getattr(owner, f"a{name}")(*args, **named))


def asked(colour: str, tool: Any, config: Any = ANN, /, **arguments: Any) -> ToolMessage:
    """What a model is told that calls a tool."""
    call = {"name": tool.name, "args": arguments, "id": "c1", "type": "tool_call"}
    found = done(colour, tool, "invoke", call, config)
    assert isinstance(found, ToolMessage)
    assert len(found.text) < 700
    return found


def texts(collection: Collection, config: Any = ANN) -> list[str]:
    """The texts of a user's memories, in order."""
    return sorted(memory.text for memory in collection.list(config=config))


def judged(gate: Gate, adapter: StoreAdapter, *candidates: Candidate) -> list[Verdict]:
    """The verdicts on candidates for memories of Ann's."""
    return run(gate.judge(candidates, adapter, NAMESPACE))


def verdict(gate: Gate, adapter: StoreAdapter, text: str, **fields: Any) -> Verdict:
    """The verdict on one candidate."""
    [only] = judged(gate, adapter, Candidate(text, **fields))
    return only


def remember(adapter: StoreAdapter, key: str, text: str, kind: str = "fact") -> None:
    """Keep a memory of Ann's without a gate."""
    run(adapter.write([build_put(NAMESPACE, key, {"text": text, "kind": kind})]))
