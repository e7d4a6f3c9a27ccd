"""Two people with all kinds of data that perdure stores, with markers in all their texts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any
from uuid import uuid4

from benchmarks.server_faults import database
from langchain_core.messages import AIMessage
from langgraph.graph import START, MessagesState, StateGraph
from pydantic import BaseModel

from perdure.checkpointers import open_checkpointer
from perdure.checkpointers.checkpointer import Checkpointer
from perdure.memory import Collection, Extraction, Instructions, Profile, remember, search_threads
from perdure.memory.long_term.examples import ExampleSelector
from perdure.run_tables.crons import CronTable
from perdure.run_tables.records import CronRow, LiveRun, RunRow
from perdure.run_tables.runs import EventBatch, RunTable
from perdure.run_tables.webhooks import WebhookTable
from perdure.stores import open_store
from perdure.stores.whole_store import WholeStore
from tests import postgres_server
from tests.server_tables import open_table

CARD = "4111 1111 1111 1111"
KINDS = (
    *("question", "answer", "fork", "fact", "correction", "profile", "style", "case", "note"),
    *("chat", "event", "request", "cron", "held", "city", "hook"),
)


class FactsProfile(BaseModel):
    """The schema of a profile."""

    nickname: str = ""


@dataclass(frozen=True)
class People:
    """An open database with two people, `ann` and `bob`."""

    db: str
    saver: Checkpointer
    store: WholeStore


def make_marker(user: str, kind: str) -> str:
    """Return the marker in the texts of one kind that belong to a person."""
    return f"zq{user}{kind}qz"


def list_markers(user: str) -> list[bytes]:
    """Return all markers of a person."""
    return [make_marker(user, kind).encode() for kind in KINDS]


@contextmanager
def empty_database(backend: str, folder: Path, name: str = "people") -> Iterator[str]:
    """Yield the place of a new database of a backend."""
    if backend == "file":
        yield str(folder / f"{name}.db")
        return
    with database(postgres_server.dsn()) as dsn:
        yield dsn


@contextmanager
def open_people(db: str, **options: Any) -> Iterator[People]:
    """Open the database at a place."""
    with open_checkpointer(db, **options) as saver, open_store(db, **options) as store:
        yield People(db, saver, store)


def build_echo_graph(saver: Checkpointer, user: str) -> Any:
    """Return a graph that answers with a marker."""
    answer = f"I heard {make_marker(user, 'answer')}"
    builder = StateGraph(MessagesState)
    builder.add_node("answer", lambda _: {"messages": [AIMessage(answer)]})
    builder.add_edge(START, "answer")
    return builder.compile(checkpointer=saver)


def hold_conversation(people: People, user: str, thread_id: str, **metadata: Any) -> None:
    """Have a conversation of two turns, of which the first has a second branch."""
    graph = build_echo_graph(people.saver, user)
    config: Any = {"configurable": {"thread_id": thread_id, "user_id": user}, "metadata": metadata}
    for text in (f"{make_marker(user, 'question')} one", f"{make_marker(user, 'question')} two"):
        graph.invoke({"messages": [("user", text)]}, config)
    first = [
        state for state in graph.get_state_history(config) if len(state.values["messages"]) == 2
    ]
    fork_config = {**config, "configurable": {**first[0].config["configurable"], "user_id": user}}
    graph.invoke({"messages": [("user", f"{make_marker(user, 'fork')} instead")]}, fork_config)


def store_all_kinds(people: People, user: str, thread_id: str) -> None:
    """Store data of each kind that belongs to a person."""
    saver, store = people.saver, people.store
    config: Any = {"configurable": {"user_id": user}}
    hold_conversation(people, user, thread_id)
    hold_conversation(people, user, f"{thread_id}-2")
    search_threads(saver, store, "heard")
    Extraction(saver, store).extract(thread_id, config)
    remember(f"likes {make_marker(user, 'fact')}", key="taste", store=store, config=config)
    remember(f"likes {make_marker(user, 'correction')}", key="taste", store=store, config=config)
    remember(f"{make_marker(user, 'held')} {CARD}", store=store, config=config)
    Profile(FactsProfile, store).set({"nickname": make_marker(user, "profile")}, config)
    Instructions(store, ("instructions", "{user_id}")).set(
        f"Say {make_marker(user, 'style')}", config
    )
    ExampleSelector(store).add(f"a {make_marker(user, 'case')}", "solved", config=config)
    Collection(store, ("notes", "{user_id}")).insert(
        f"a {make_marker(user, 'note')}", config=config
    )
    store.put(("chat_memory", thread_id), "k", {"text": f"a {make_marker(user, 'chat')}"})
    run = accept_run(saver, user, thread_id)
    asyncio.run(open_table(RunTable, saver).add_events([(run, build_event_batch(user))]))
    webhook_payload = {
        "url": "https://example.com",
        "run": {"values": make_marker(user, "hook")},
        "user": user,
    }
    asyncio.run(
        open_table(WebhookTable, saver).add_webhook(
            run, webhook_payload, webhook_payload, keeps_thread=False
        )
    )
    asyncio.run(open_table(CronTable, saver).create(build_cron_row(user, thread_id)))
    asyncio.run(open_table(CronTable, saver).create(build_cron_row(user, None)))


def build_event_batch(user: str) -> EventBatch:
    """Return a batch with an event that has a marker."""
    return EventBatch(0, 1, [(None, make_marker(user, "event").encode())])


def accept_run(
    saver: Checkpointer,
    user: str,
    thread_id: str,
    *,
    owner: str = "gone",
    delay_s: float = 0.0,
    sender: Mapping[str, Any] = MappingProxyType({}),
) -> LiveRun:
    """Store a run, and return it. Without an `owner`, its process is gone.

    `sender` has the fields of the row that name the sender, if the sender is not the user.
    """
    now = time.time()
    live = LiveRun(thread_id, 0, 0, str(uuid4()), "pending", owner, "echo", 1, None)
    row_fields = {
        "metadata": {},
        "multitask_strategy": "enqueue",
        "user": user,
        "assistant_id": "echo",
    }
    row_fields = {**row_fields, **sender}
    request = {
        "input": {"messages": [["user", make_marker(user, "request")]]},
        "context": {**sender},
    }
    run_request = {"request": request}
    due = now + delay_s if delay_s else None
    row = RunRow(live, now, now, row_fields, request=run_request, not_before=due)
    accepted, _ = asyncio.run(
        open_table(RunTable, saver).accept_run_and_list_live_run_ids(
            row, reject_if_busy=False, cancel_action=None, stores_events=True
        )
    )
    assert accepted is not None
    return accepted


def build_cron_row(user: str, thread_id: str | None) -> CronRow:
    """Return a cron of a person, which is due in an hour."""
    now = time.time()
    payload = {
        "input": {"messages": [["user", make_marker(user, "cron")]]},
        "schedule": "0 9 * * *",
    }
    content = {"payload": payload, "metadata": {}, "user": user, "graph": "echo", "login": None}
    return CronRow(str(uuid4()), thread_id, now + 3600, now, now, content)
