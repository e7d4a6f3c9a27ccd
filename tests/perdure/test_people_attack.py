"""Nothing of a person is shown to another person, an approver or an operator."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import HumanMessage
from langchain_core.runnables import RunnableLambda

from perdure import people
from perdure.checkpointers.labels import CALLER, CALLER_ACTION
from perdure.memory import Collection, Instructions, Profile, memories, recall
from perdure.memory.adapters import VectorStoreChatMemoryAdvisor
from perdure.run_tables.crons import CronTable
from tests.people import (
    FactsProfile,
    People,
    accept_run,
    build_cron_row,
    build_echo_graph,
    empty_database,
    list_markers,
    make_marker,
    open_people,
    store_all_kinds,
)
from tests.server_tables import open_table

OTHERS = {"ann": "bob", "bob": "ann"}


def build_config(user: str) -> Any:
    """Build the config of a run of a user, who is in a team."""
    return {"configurable": {"user_id": user, "team": "red"}}


def write_shared_rows(both: People, user: str) -> None:
    """Write rows of a person that others use too, such as those of a team and an approver."""
    saver, store = both.saver, both.store
    Collection(store, ("teams", "{team}")).insert(
        make_marker(user, "case"), config=build_config(user)
    )
    model: Any = RunnableLambda(lambda _: "")
    message = HumanMessage(f"{make_marker(user, 'chat')} together")
    VectorStoreChatMemoryAdvisor(model, store).remember("shared", [message], user)
    store.put(("notes", "carl", user), "k", {"text": "Carl met somebody"})
    run_config = {"configurable": {"thread_id": f"{user}s", "user_id": user}}
    config: Any = {**run_config, "metadata": {CALLER: "boss", CALLER_ACTION: "answered"}}
    build_echo_graph(saver, user).invoke({"messages": [("user", "It is approved by us.")]}, config)
    accept_run(saver, user, f"{user}s", sender={"user": "boss", "metadata": {"by": "boss"}})
    cron = build_cron_row(user, f"{user}s")
    cron.content.update(user="desk", acting_for=user, metadata={"by": "desk"})
    asyncio.run(open_table(CronTable, saver).create(cron))


def read_all(both: People, user: str) -> str:
    """Return everything that prompts, lists, the archive and the plan of a person contain."""
    saver, store, config = both.saver, both.store, build_config(user)
    lines = [*people.export(user, saver, store)]
    assert {line["cron"]["made_by"] for line in lines if "cron" in line} == {"self", "a backend"}
    found = [
        recall("What is liked?", store=store, config=config, min_score=0, limit=50),
        memories(store=store, config=config, limit=50),
        Instructions(store, ("instructions", "{user_id}")).current(config),
        Profile(FactsProfile, store).get(config),
        people.plan(user, saver, store, looks_elsewhere=False).erased,
    ]
    return json.dumps(lines) + "".join(map(str, found))


@pytest.mark.parametrize("backend", ["file", "postgres"])
def test_nothing_of_one_person_is_shown_to_another(backend: str, tmp_path: Path) -> None:
    """Prompts, lists, archives and receipts are checked, also after the other is forgotten."""
    with empty_database(backend, tmp_path) as db, open_people(db) as both:
        for user in OTHERS:
            store_all_kinds(both, user, f"{user}s")
        for user in OTHERS:
            write_shared_rows(both, user)
        texts_by_user = {user: read_all(both, user) for user in OTHERS}
        receipt = str(people.forget("ann", both.saver, both.store, looks_elsewhere=False).erased)
        after = read_all(both, "bob")
        remaining = json.dumps([*both.store.export()])

    for user, other in OTHERS.items():
        forbidden = [
            *(text.decode() for text in list_markers(other)),
            other,
            "boss",
            "desk",
            "carl",
            "Carl",
        ]
        assert [text for text in forbidden if text in texts_by_user[user]] == []
        assert f"{make_marker(user, 'chat')} together" in texts_by_user[user]
        assert make_marker(user, "case") in texts_by_user[user]
    assert [text for text in ("bob", "boss", "desk") if text in receipt] == []
    assert make_marker("ann", "chat") not in remaining
    assert make_marker("ann", "case") not in remaining
    assert f"{make_marker('bob', 'chat')} together" in remaining
    assert make_marker("bob", "case") in remaining
    assert _without_time(after) == _without_time(texts_by_user["bob"])


def _without_time(text: str) -> str:
    """Return an archive without the time of the export."""
    head, _, rest = text.partition('"exported_at": "')
    return head + rest.partition('"')[2]
