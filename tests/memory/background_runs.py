"""Threads, memories, and an extractor that fails when it is told to, for background extraction."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from langchain_core.messages import AIMessage, HumanMessage
from langgraph.graph import START, MessagesState, StateGraph

from perdure.checkpointers import SQLiteCheckpointer
from perdure.memory.background import Background
from perdure.memory.extraction import Extraction, ExtractionJob, Pace
from perdure.memory.extractors import Batch, Proposal, Scope, TurnExtractor
from perdure.stores import SQLiteStore

PATIENCE_S = 20.0


class Stubborn(TurnExtractor):
    """Extracts turns, but for threads of which it was told to fail, so many times."""

    def __init__(self) -> None:
        super().__init__()
        self.failures: dict[str, list[BaseException]] = {}
        self.began, self.hold = threading.Event(), threading.Event()
        self.hold.set()

    async def propose_changes(self, batch: Batch, around: Scope) -> Proposal:
        self.began.set()
        self.hold.wait(PATIENCE_S)
        if self.failures.get(batch.thread_id):
            raise self.failures[batch.thread_id].pop(0)
        return await super().propose_changes(batch, around)


class Runs:
    """Threads, memories, and what extracts these."""

    def __init__(self, folder: Path) -> None:
        self.saver = SQLiteCheckpointer.open(folder / "memory.db", synchronous="normal")
        self.store = SQLiteStore.open(folder / "memory.db", synchronous="normal", index=None)
        builder = StateGraph(MessagesState)
        builder.add_node("reply", lambda state: {"messages": [AIMessage("I will remember that.")]})
        builder.add_edge(START, "reply")
        self.graph = builder.compile(checkpointer=self.saver)
        self.extractor = Stubborn()
        self.extraction = Extraction(self.saver, self.store, self.extractor)
        self.told: list[ExtractionJob] = []

    def say(self, thread_id: str, text: str = "My sister lives in Ghent.") -> None:
        self.graph.invoke({"messages": [HumanMessage(text)]}, config_of(thread_id))

    def background(self, **options: Any) -> Background:
        pace: dict[str, Any] = {"delay_s": 0.05, "backoff_s": 0.1}
        fields = Pace.__dataclass_fields__.keys()
        pace |= {name: options.pop(name) for name in [*options] if name in fields}
        given: dict[str, Any] = {"on_job": self.told.append, **options}
        return Background(self.extraction, pace=Pace(**pace), **given)

    def memories(self, thread_id: str) -> list[str]:
        found = self.store.search(("memories", "ann"), provenance={"thread_id": thread_id})
        return sorted(str(item.value["text"]) for item in found)

    def close(self) -> None:
        self.saver.close()
        self.store.close()


def config_of(thread_id: str) -> Any:
    return {"configurable": {"thread_id": thread_id, "user_id": "ann"}}


def until(true: Callable[[], Any]) -> Any:
    """What is true in the end."""
    end = time.monotonic() + PATIENCE_S
    while not (found := true()) and time.monotonic() < end:
        time.sleep(0.02)
    assert found
    return found


def state_of(background: Background, thread_id: str) -> str | None:
    return next((job.state for job in background.jobs() if job.thread_id == thread_id), None)
