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
from perdure.memory.extraction import DueThreads, Pace
from perdure.stores.whole_store import WholeStore
from tests import store_backends
from tests.backends import BACKENDS


class Chat:
    """A chat that remembers its turns, and the threads that wait for extraction."""

    def __init__(self, saver: Checkpointer, store: WholeStore) -> None:
        self.saver = saver
        self.graph: Any = chat_graph(checkpointer=saver, memory=[remember_turns(store)])
        self.plain: Any = chat_graph(checkpointer=saver)
        self.extraction = Extraction(saver, store)

    def say(self, thread: str, text: str, *, remembers: bool = True) -> None:
        graph = self.graph if remembers else self.plain
        graph.invoke({"messages": [HumanMessage(text)]}, config_of(thread))

    def update(self, thread: str, *messages: Any) -> None:
        self.plain.update_state(config_of(thread), {"messages": [*messages]}, as_node="respond")

    def waiting(self, **options: Any) -> list[str]:
        due = DueThreads(self.extraction, Pace())
        jobs = {"exclude_read": True, **options}
        first = sorted(job.thread_id for job in due.list_jobs(**jobs))
        assert sorted(job.thread_id for job in due.list_jobs(**jobs)) == first
        return first


def config_of(thread: str) -> Any:
    return {"configurable": {"thread_id": thread, "user_id": "ann"}}


@pytest.fixture(params=["file", "postgres"])
def chat(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Chat]:
    (folder := tmp_path / "store").mkdir()
    stores = store_backends.BACKENDS[request.param]
    with BACKENDS[request.param](tmp_path) as saver, stores(folder) as store:
        yield Chat(saver, store)


def test_remembered_threads_do_not_wait(chat: Chat) -> None:
    """Of 14 threads none waits, whether asked with or without a look for deleted ones."""
    for number in range(14):
        for turn in range(1 + number % 3):
            chat.say(f"t{number}", f"turn {turn}: I like figs")

    assert chat.waiting() == []
    assert chat.waiting(exclude_deleted=False) == []
    assert len(chat.waiting(exclude_read=False)) == 14  # as a worker takes them, who notes the head


def test_lists_of_jobs_leave_remembered_threads_out(chat: Chat, tmp_path: Path) -> None:
    """Neither `Background.jobs()`, which the page shows, nor a job that waits for a worker."""
    for number in range(3):
        chat.say(f"t{number}", "I like figs")
    chat.say("never", "I like figs", remembers=False)
    background = Background(chat.extraction, work=False, database=tmp_path / "jobs.db")
    try:
        assert [job.thread_id for job in background.jobs()] == ["never"]
    finally:
        background.stop()


def test_a_message_that_was_not_remembered_waits(chat: Chat) -> None:
    """A later turn without memory, an edit, a message before the first memory, a thread without."""
    for thread in ("later", "edited", "removed", "rewound", "whole"):
        chat.say(thread, "I like figs")
        chat.say(thread, "and plums")
    chat.say("never", "I like figs", remembers=False)
    chat.say("later", "and pears", remembers=False)
    state = chat.graph.get_state(config_of("edited")).values["messages"]
    chat.update("edited", HumanMessage("I like dates", id=state[0].id))
    state = chat.graph.get_state(config_of("removed")).values["messages"]
    chat.update("removed", RemoveMessage(state[0].id), RemoveMessage(state[1].id))
    first = chat.saver.checkpoints("rewound", checkpoint_ns="")[4].checkpoint_id
    chat.saver.rewind("rewound", first)
    assert chat.waiting() == ["edited", "later", "never"]

    chat.update("rewound", AIMessage("on another way"))
    assert chat.waiting() == ["edited", "later", "never", "rewound"]
    for thread in chat.waiting():
        chat.extraction.extract(thread, config_of(thread))
    assert chat.waiting() == []


def test_long_threads_do_not_wait(chat: Chat) -> None:
    """Nor does one with more messages than a watermark names, until one is not remembered."""
    texts = [HumanMessage(f"message {number}") for number in range(120)]
    chat.graph.invoke({"messages": texts}, config_of("long"))
    assert chat.waiting() == []

    chat.update("long", AIMessage("one more"))
    assert chat.waiting() == ["long"]


def test_a_thread_without_messages_does_not_wait(chat: Chat) -> None:
    """There is nothing to extract in it."""
    chat.plain.update_state(config_of("empty"), {"messages": []}, as_node="respond")

    assert chat.waiting() == []
