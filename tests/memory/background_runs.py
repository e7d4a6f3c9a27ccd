"""Threads, memories, and an extractor that can be told to fail, for background extraction."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from langchain_core.messages import AIMessage, HumanMessage
from langgraph.graph import START, MessagesState, StateGraph

from perdure.checkpointers import SQLiteCheckpointer
from perdure.memory.long_term.background import Background
from perdure.memory.long_term.extraction import Extraction, ExtractionJob, Pace
from perdure.memory.long_term.extractors import Batch, Proposal, Scope, TurnExtractor
from perdure.stores import SQLiteStore

PATIENCE_S = 20.0


class FailingExtractor(TurnExtractor):
    """Extracts turns. For threads in `failures`, raises these errors first, one per attempt."""

    def __init__(self) -> None:
        super().__init__()
        self.failures: dict[str, list[BaseException]] = {}
        self.started, self.may_finish = threading.Event(), threading.Event()
        self.may_finish.set()

    async def propose_changes(self, batch: Batch, around: Scope) -> Proposal:
        self.started.set()
        self.may_finish.wait(PATIENCE_S)
        if self.failures.get(batch.thread_id):
            raise self.failures[batch.thread_id].pop(0)
        return await super().propose_changes(batch, around)


class BackgroundRuns:
    """Threads, memories, and the extraction that connects them."""

    def __init__(self, folder: Path) -> None:
        self.saver = SQLiteCheckpointer.open(folder / "memory.db", synchronous="normal")
        self.store = SQLiteStore.open(folder / "memory.db", synchronous="normal", index=None)
        builder = StateGraph(MessagesState)
        builder.add_node("reply", lambda state: {"messages": [AIMessage("I will remember that.")]})
        builder.add_edge(START, "reply")
        self.graph = builder.compile(checkpointer=self.saver)
        self.extractor = FailingExtractor()
        self.extraction = Extraction(self.saver, self.store, self.extractor)
        self.reported_jobs: list[ExtractionJob] = []

    def send_message(self, thread_id: str, text: str = "My sister lives in Ghent.") -> None:
        self.graph.invoke({"messages": [HumanMessage(text)]}, thread_config(thread_id))

    def make_background(self, **options: Any) -> Background:
        pace_options: dict[str, Any] = {"delay_s": 0.05, "backoff_s": 0.1}
        fields = Pace.__dataclass_fields__.keys()
        pace_options |= {name: options.pop(name) for name in [*options] if name in fields}
        background_options: dict[str, Any] = {"on_job": self.reported_jobs.append, **options}
        return Background(self.extraction, pace=Pace(**pace_options), **background_options)

    def read_memory_texts(self, thread_id: str) -> list[str]:
        items = self.store.search(("memories", "ann"), provenance={"thread_id": thread_id})
        return sorted(str(item.value["text"]) for item in items)

    def close(self) -> None:
        self.saver.close()
        self.store.close()


def thread_config(thread_id: str) -> Any:
    return {"configurable": {"thread_id": thread_id, "user_id": "ann"}}


def wait_until(condition: Callable[[], Any]) -> Any:
    """Wait until `condition()` returns a true value, and return this value."""
    end = time.monotonic() + PATIENCE_S
    while not (value := condition()) and time.monotonic() < end:
        time.sleep(0.02)
    assert value
    return value


def read_job_state(background: Background, thread_id: str) -> str | None:
    return next((job.state for job in background.jobs() if job.thread_id == thread_id), None)
