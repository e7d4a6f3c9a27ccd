"""A thread whose messages were all remembered during its runs does not wait for extraction."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage, RemoveMessage

from perdure.checkpointers.checkpointer import Checkpointer
from perdure.graphs import chat_graph
from perdure.memory import Background, Extraction, remember_turns
from perdure.memory.long_term.extraction import DueThreads, Pace
from perdure.stores.whole_store import WholeStore
from tests import store_backends
from tests.backends import BACKENDS


class Chat:
    """A chat graph that remembers turns, and the list of threads that wait for extraction."""

    def __init__(self, saver: Checkpointer, store: WholeStore) -> None:
        self.saver = saver
        self.graph: Any = chat_graph(checkpointer=saver, memory=[remember_turns(store)])
        self.graph_without_memory: Any = chat_graph(checkpointer=saver)
        self.extraction = Extraction(saver, store)

    def say(self, thread: str, text: str, *, remembers: bool = True) -> None:
        graph = self.graph if remembers else self.graph_without_memory
        graph.invoke({"messages": [HumanMessage(text)]}, make_config(thread))

    def update(self, thread: str, *messages: Any) -> None:
        self.graph_without_memory.update_state(
            make_config(thread), {"messages": [*messages]}, as_node="respond"
        )

    def list_waiting_threads(self, **options: Any) -> list[str]:
        due = DueThreads(self.extraction, Pace())
        jobs = {"exclude_read": True, **options}
        first = sorted(job.thread_id for job in due.list_jobs(**jobs))
        assert sorted(job.thread_id for job in due.list_jobs(**jobs)) == first
        return first


def make_config(thread: str) -> Any:
    return {"configurable": {"thread_id": thread, "user_id": "ann"}}


@pytest.fixture(params=["file", "postgres"])
def chat(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Chat]:
    (folder := tmp_path / "store").mkdir()
    stores = store_backends.BACKENDS[request.param]
    with BACKENDS[request.param](tmp_path) as saver, stores(folder) as store:
        yield Chat(saver, store)


def test_fully_remembered_threads_do_not_wait(chat: Chat) -> None:
    """None of 14 threads waits, with or without the check for deleted threads."""
    for number in range(14):
        for turn in range(1 + number % 3):
            chat.say(f"t{number}", f"turn {turn}: I like figs")

    assert chat.list_waiting_threads() == []
    assert chat.list_waiting_threads(exclude_deleted=False) == []
    assert (
        len(chat.list_waiting_threads(exclude_read=False)) == 14
    )  # as a worker takes them, who notes the head


def test_background_jobs_exclude_remembered_threads(chat: Chat, tmp_path: Path) -> None:
    for number in range(3):
        chat.say(f"t{number}", "I like figs")
    chat.say("never", "I like figs", remembers=False)
    background = Background(chat.extraction, work=False, database=tmp_path / "jobs.db")
    try:
        assert [job.thread_id for job in background.jobs()] == ["never"]
    finally:
        background.stop()


def test_threads_with_unremembered_messages_wait(chat: Chat) -> None:
    """Such threads have a later turn without memory, an edit, a branch, or no memory at all."""
    for thread in ("later", "edited", "removed", "rewound", "whole"):
        chat.say(thread, "I like figs")
        chat.say(thread, "and plums")
    chat.say("never", "I like figs", remembers=False)
    chat.say("later", "and pears", remembers=False)
    state = chat.graph.get_state(make_config("edited")).values["messages"]
    chat.update("edited", HumanMessage("I like dates", id=state[0].id))
    state = chat.graph.get_state(make_config("removed")).values["messages"]
    chat.update("removed", RemoveMessage(state[0].id), RemoveMessage(state[1].id))
    first = chat.saver.checkpoints("rewound", checkpoint_ns="")[4].checkpoint_id
    chat.saver.rewind("rewound", first)
    assert chat.list_waiting_threads() == ["edited", "later", "never"]

    chat.update("rewound", AIMessage("on another way"))
    assert chat.list_waiting_threads() == ["edited", "later", "never", "rewound"]
    for thread in chat.list_waiting_threads():
        chat.extraction.extract(thread, make_config(thread))
    assert chat.list_waiting_threads() == []


def test_long_remembered_thread_waits_only_after_new_message(chat: Chat) -> None:
    """The thread has more messages than a watermark names."""
    texts = [HumanMessage(f"message {number}") for number in range(120)]
    chat.graph.invoke({"messages": texts}, make_config("long"))
    assert chat.list_waiting_threads() == []

    chat.update("long", AIMessage("one more"))
    assert chat.list_waiting_threads() == ["long"]


def test_thread_without_messages_does_not_wait(chat: Chat) -> None:
    chat.graph_without_memory.update_state(
        make_config("empty"), {"messages": []}, as_node="respond"
    )

    assert chat.list_waiting_threads() == []
