"""Crons that other users made on a person's thread: the person may see and delete them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from langgraph_sdk import get_sync_client
from langgraph_sdk.errors import NotFoundError, PermissionDeniedError

from perdure.server import api_crons
from perdure.server.http.auth_file import AuthFileAccess
from perdure.server.runs.webhooks import Webhooks
from perdure.settings import Settings
from tests.server.http.test_auth_file import write_auth_file
from tests.server.running import wait_until
from tests.server.runs.test_crons import YEARLY, make_due
from tests.server.test_person import (
    FOLLOW_UP,
    Desk,
    Model,
    keys,
    model,  # noqa: F401 - a fixture
    serve_desk,
)

HANDLERS = """
from langgraph_sdk import Auth

auth = Auth()

@auth.authenticate
async def who(authorization: str | None):
    name, _, rights = (authorization or "").removeprefix("Bearer ").partition("+")
    return {"identity": name, "org": "acme" if name != "zoe" else "other", "rights": rights}

@auth.on.threads
async def threads(ctx, value):
    assert ctx.action != "update" or ctx.user["rights"] != "reads"
    assert ctx.action != "search" or ctx.user["rights"] != "blind"
    value.setdefault("metadata", {})["owner"] = ctx.user["org"]
    return {"owner": ctx.user["org"]}

@auth.on.crons
async def crons(ctx, value):
    assert ctx.user["rights"] != "none"
    value.setdefault("metadata", {})["made_by"] = ctx.user.identity
    return {"made_by": ctx.user.identity}

@auth.on.assistants
async def assistants(ctx, value):
    return True
"""
SECRET: Any = {
    "config": {"configurable": {"token": "s3cret"}},
    "context": {"note": "s3cret"},
    "webhook": "https://hooks.example.com/s3cret",
}


@pytest.fixture
def desk(settings: Settings, tmp_path: Path, model: Model) -> Iterator[Desk]:  # noqa: F811
    """A desk with keys of dora, kim and boss, an admin."""
    with serve_desk(settings, keys(tmp_path), model) as desk:
        yield desk


@pytest.fixture
def team(settings: Settings, tmp_path: Path, model: Model) -> Iterator[Desk]:  # noqa: F811
    """A desk with an Auth file: threads belong to the organisation, and crons to their authors."""
    with serve_desk(settings, AuthFileAccess(write_auth_file(tmp_path, HANDLERS)), model) as desk:
        yield desk


def run_turn_on_new_thread(desk: Desk, user: str) -> str:
    """Create a thread of a user, run a turn on it, and return its id."""
    client = desk.client(user)
    thread_id: str = client.threads.create()["thread_id"]
    client.runs.wait(thread_id, "desk", input=FOLLOW_UP)
    return thread_id


def create_cron(desk: Desk, user: str, thread_id: str, **options: Any) -> str:
    """Create a cron of a user on a thread and return its id."""
    client, options = desk.client(user), {"schedule": YEARLY, "input": FOLLOW_UP, **options}
    cron: Any = client.crons.create_for_thread(thread_id, "desk", **options)
    return str(cron["cron_id"])


def list_cron_ids(desk: Desk, user: str, **query: Any) -> list[str]:
    """Return the ids of the crons that a user sees; check that the count route agrees."""
    client = desk.client(user)
    cron_ids = [each["cron_id"] for each in client.crons.search(**query)]
    assert client.crons.count(**query) == len(cron_ids)
    return cron_ids


def test_person_sees_and_deletes_crons_that_others_made_on_own_thread(
    db: Settings,
    tmp_path: Path,
    model: Model,  # noqa: F811
) -> None:
    """Other users do not see the crons. The person may not change a cron of another author."""
    with serve_desk(db, keys(tmp_path), model) as desk:
        thread, other = run_turn_on_new_thread(desk, "dora"), run_turn_on_new_thread(desk, "kim")
        nightly = create_cron(desk, "boss", thread, metadata={"job": "nightly"})
        of_kim = create_cron(desk, "boss", other)
        own = create_cron(desk, "dora", thread, metadata={"job": "own"})
        loose: Any = desk.client("boss").crons.create("desk", schedule=YEARLY, input=FOLLOW_UP)

        assert list_cron_ids(desk, "dora") == [own, nightly]
        assert list_cron_ids(desk, "dora", thread_id=thread) == [own, nightly]
        assert list_cron_ids(desk, "dora", thread_id=other) == []
        assert list_cron_ids(desk, "dora", metadata={"job": "nightly"}) == [nightly]
        assert list_cron_ids(desk, "kim") == [of_kim]
        assert list_cron_ids(desk, "boss") == [loose["cron_id"], own, of_kim, nightly]
        for user, cron_id in [("kim", nightly), ("dora", of_kim), ("dora", loose["cron_id"])]:
            with pytest.raises(NotFoundError, match="there is no cron"):
                desk.client(user).crons.delete(cron_id)
            with pytest.raises(NotFoundError, match="there is no cron"):
                desk.client(user).crons.update(cron_id, enabled=False)
        with pytest.raises(PermissionDeniedError, match="you can delete the cron"):
            desk.client("dora").crons.update(nightly, enabled=False)
        make_due(db, nightly)
        runs = desk.client("dora").runs
        wait_until(lambda: [each["status"] for each in runs.list(thread)] == ["success"] * 2)
        desk.client("dora").crons.delete(nightly)

        assert list_cron_ids(desk, "dora") == [own]
        assert list_cron_ids(desk, "boss") == [loose["cron_id"], own, of_kim]


def test_fields_of_cron_that_may_hold_secrets_are_shown_to_author_only(
    settings: Settings,
    tmp_path: Path,
    model: Model,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The person does not see the config, the context and the webhook of the cron."""
    monkeypatch.setattr(Webhooks, "check_url", lambda self, url: None)
    with serve_desk(settings, keys(tmp_path), model) as desk:
        thread = run_turn_on_new_thread(desk, "dora")
        create_cron(desk, "boss", thread, **SECRET)
        [hers], [his] = (desk.client(user).crons.search() for user in ("dora", "boss"))

    assert his["payload"].keys() - hers["payload"].keys() == {"config", "context", "webhook"}
    assert "s3cret" not in str(hers)
    assert (hers["payload"]["input"], hers["schedule"], hers["user_id"]) == (
        FOLLOW_UP,
        YEARLY,
        "boss",
    )
    assert {**hers, "payload": None} == {**his, "payload": None}


def test_caller_acting_for_person_sees_crons_of_person(desk: Desk) -> None:
    thread, _ = (
        run_turn_on_new_thread(desk, "dora"),
        create_cron(desk, "boss", run_turn_on_new_thread(desk, "kim")),
    )
    nightly = create_cron(desk, "boss", thread)
    headers = {"X-Perdure-User": "dora"}
    with get_sync_client(url=desk.url, api_key="boss", headers=headers) as acting:
        assert [each["cron_id"] for each in acting.crons.search()] == [nightly]
        acting.crons.delete(nightly)

    assert list_cron_ids(desk, "dora") == []


def test_crons_on_thread_without_turn_are_shown_to_its_owner(desk: Desk) -> None:
    """With keys, the person is the owner. A `user_id` in the metadata does not change that."""
    named = {"user_id": "dora"}
    thread = desk.client("kim").threads.create(metadata=named)["thread_id"]
    empty = desk.client("dora").threads.create()["thread_id"]
    crons = [create_cron(desk, "boss", each) for each in (thread, empty)]

    assert list_cron_ids(desk, "kim") == crons[:1]
    assert list_cron_ids(desk, "dora") == crons[1:]


def test_crons_are_listed_for_more_threads_than_fit_in_one_query(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_crons, "_THREADS_PER_QUERY", 1)
    threads = [run_turn_on_new_thread(desk, "dora") for _ in range(2)]
    crons = [create_cron(desk, "boss", each) for each in threads]

    assert sorted(list_cron_ids(desk, "dora")) == sorted(crons)


def test_crons_are_shown_to_person_of_thread_not_to_owning_organisation(team: Desk) -> None:
    """Mia and Tom can reach the same threads, because their organisation owns the threads."""
    thread = run_turn_on_new_thread(team, "mia")
    cron = create_cron(team, "tom", thread)

    assert list_cron_ids(team, "mia") == [cron]  # it would use her memories
    assert list_cron_ids(team, "tom") == [cron]
    assert list_cron_ids(team, "jim") == []
    assert list_cron_ids(team, "zoe") == []
    with pytest.raises(NotFoundError):
        team.client("jim").crons.delete(cron)
    team.client("mia").crons.delete(cron)
    assert list_cron_ids(team, "tom") == []


def test_auth_handlers_decide_whether_person_sees_and_deletes_cron(team: Desk) -> None:
    thread = run_turn_on_new_thread(team, "mia")
    cron = create_cron(team, "tom", thread)

    assert list_cron_ids(team, "mia+blind") == []  # threads:search is denied
    with pytest.raises(NotFoundError):
        team.client("mia+reads").crons.delete(cron)  # threads:update is denied
    for call in (team.client("mia+none").crons.search, team.client("mia+none").crons.count):
        with pytest.raises(PermissionDeniedError):
            call()
    with pytest.raises(PermissionDeniedError):
        team.client("mia+none").crons.delete(cron)
    assert list_cron_ids(team, "mia+reads") == [cron]
