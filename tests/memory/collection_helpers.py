"""Helpers for tests of collections, tools and the gate: call, list, judge and store memories."""

from __future__ import annotations

import asyncio
from typing import Any

from langchain_core.messages import ToolMessage

from perdure.effects import run_operation
from perdure.memory.long_term.collection import Collection
from perdure.memory.long_term.gate import Gate
from perdure.memory.long_term.records import Candidate, StoreAdapter, Verdict, build_put

ANN: Any = {"configurable": {"user_id": "ann", "thread_id": "t1"}}
BO: Any = {"configurable": {"user_id": "bo", "thread_id": "t2"}}
NAMESPACE = ("memories", "ann")
TEA, COFFEE, GHENT = "Ann drinks tea", "Ann drinks coffee", "Ann lives in Ghent"


def call_method(call_mode: str, target: Any, method: str, *args: Any, **options: Any) -> Any:
    """Call a method in its synchronous or asynchronous form and return the result."""
    if call_mode == "sync":
        return getattr(target, method)(*args, **options)
    return asyncio.run(getattr(target, f"a{method}")(*args, **options))


def call_tool(call_mode: str, tool: Any, config: Any = ANN, /, **arguments: Any) -> ToolMessage:
    """Call a tool as a model does, and return the message that the model gets."""
    call = {"name": tool.name, "args": arguments, "id": "c1", "type": "tool_call"}
    answer = call_method(call_mode, tool, "invoke", call, config)
    assert isinstance(answer, ToolMessage)
    assert len(answer.text) < 700
    return answer


def list_memory_texts(collection: Collection, config: Any = ANN) -> list[str]:
    """Return the texts of a user's memories, sorted."""
    return sorted(memory.text for memory in collection.list(config=config))


def judge_candidates(gate: Gate, adapter: StoreAdapter, *candidates: Candidate) -> list[Verdict]:
    """Return the verdicts on candidates for Ann's memories."""
    return run_operation(gate.judge(candidates, adapter, NAMESPACE))


def judge_text(gate: Gate, adapter: StoreAdapter, text: str, **fields: Any) -> Verdict:
    """Return the verdict on one candidate."""
    [only] = judge_candidates(gate, adapter, Candidate(text, **fields))
    return only


def write_memory(adapter: StoreAdapter, key: str, text: str, kind: str = "fact") -> None:
    """Store a memory of Ann's without a gate."""
    run_operation(adapter.write([build_put(NAMESPACE, key, {"text": text, "kind": kind})]))
