"""Two people, an approver and an operator in one database: nothing of one is found with another."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import HumanMessage
from langchain_core.runnables import RunnableLambda

from perdure import people
from perdure.checkpointers.crons import CronTable
from perdure.checkpointers.labels import CALLER, DEED
from perdure.memory import Collection, Instructions, Profile, memories, recall
from perdure.memory.adapters import VectorStoreChatMemoryAdvisor
from tests.people import (
    Facts,
    People,
    accept_run,
    cron_row,
    echo_graph,
    empty_database,
    fill,
    mark,
    marks,
    opened,
)

OTHERS = {"ann": "bob", "bob": "ann"}


def config_of(user: str) -> Any:
    """The config of a run of a user, who is in a team."""
    return {"configurable": {"user_id": user, "team": "red"}}


def share(both: People, user: str) -> None:
    """Have a person use what others use too: a team, a conversation, an approver, an operator."""
    saver, store = both.saver, both.store
    Collection(store, ("teams", "{team}")).insert(mark(user, "case"), config=config_of(user))
    model: Any = RunnableLambda(lambda _: "")
    said = HumanMessage(f"{mark(user, 'chat')} together")
    VectorStoreChatMemoryAdvisor(model, store).remember("shared", [said], user)
    store.put(("notes", "carl", user), "k", {"text": "Carl met somebody"})
    about = {"configurable": {"thread_id": f"{user}s", "user_id": user}}
    named: Any = {**about, "metadata": {CALLER: "boss", DEED: "answered"}}
    echo_graph(saver, user).invoke({"messages": [("user", "It is approved by us.")]}, named)
    accept_run(saver, user, f"{user}s", sender={"user": "boss", "metadata": {"by": "boss"}})
    cron = cron_row(user, f"{user}s")
    cron.content.update(user="desk", acting_for=user, metadata={"by": "desk"})
    asyncio.run(CronTable(saver).create(cron))


def read_all(both: People, user: str) -> str:
    """Return everything that prompts, lists, the archive and the plan of a person contain."""
    saver, store, config = both.saver, both.store, config_of(user)
    lines = [*people.export(user, saver, store)]
    assert {line["cron"]["made_by"] for line in lines if "cron" in line} == {"self", "a backend"}
    found = [
        recall("What is liked?", store=store, config=config, min_score=0, limit=50),
        memories(store=store, config=config, limit=50),
        Instructions(store, ("instructions", "{user_id}")).current(config),
        Profile(Facts, store).get(config),
        people.plan(user, saver, store, looks_elsewhere=False).erased,
    ]
    return json.dumps(lines) + "".join(map(str, found))


@pytest.mark.parametrize("backend", ["file", "postgres"])
def test_nothing_of_one_person_shows_up_with_another(backend: str, tmp_path: Path) -> None:
    """In prompts, lists, archives and receipts; also once the other person is forgotten."""
    with empty_database(backend, tmp_path) as db, opened(db) as both:
        for user in OTHERS:
            fill(both, user, f"{user}s")
        for user in OTHERS:
            share(both, user)
        shown = {user: read_all(both, user) for user in OTHERS}
        receipt = str(people.forget("ann", both.saver, both.store, looks_elsewhere=False).erased)
        after = read_all(both, "bob")
        left = json.dumps([*both.store.export()])

    for user, other in OTHERS.items():
        strange = [*(each.decode() for each in marks(other)), other, "boss", "desk", "carl", "Carl"]
        assert [each for each in strange if each in shown[user]] == []
        assert f"{mark(user, 'chat')} together" in shown[user]
        assert mark(user, "case") in shown[user]
    assert [each for each in ("bob", "boss", "desk") if each in receipt] == []
    assert mark("ann", "chat") not in left
    assert mark("ann", "case") not in left
    assert f"{mark('bob', 'chat')} together" in left
    assert mark("bob", "case") in left
    assert _without_time(after) == _without_time(shown["bob"])


def _without_time(text: str) -> str:
    """Return an archive without the time of the export."""
    head, _, rest = text.partition('"exported_at": "')
    return head + rest.partition('"')[2]
