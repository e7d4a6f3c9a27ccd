"""Tenants of one Postgres database: separation, and closing of idle tenants."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest
from langgraph_sdk import get_sync_client
from langgraph_sdk.errors import NotFoundError
from psycopg.conninfo import make_conninfo

from perdure.checkpointers import open_checkpointer
from perdure.errors import StorageUnavailable
from perdure.server import create_app
from perdure.server.databases import Databases
from perdure.server.graphs import Graphs
from perdure.server.http.keys import KeysFileAccess
from perdure.settings import Settings
from tests import postgres_server
from tests.server.http.test_keys import render_key_entry
from tests.server.probe import add_probe_routes
from tests.server.running import run_server
from tests.server.talking import Gate, build_input, build_talk_graph
from tests.talks import store_conversation

pytestmark = pytest.mark.postgres

TENANTS = ("acme", "globex")


@pytest.fixture(scope="module")
def dsn() -> Iterator[str]:
    """A new database, because the server uses the default schema."""
    name, owner = f"tenants_{uuid.uuid4().hex}", postgres_server.dsn_of_role("an_owner")
    with psycopg.connect(postgres_server.dsn(), autocommit=True) as conn:
        conn.execute(f"CREATE DATABASE {name} OWNER an_owner")
        yield f"postgresql:///?{_query(make_conninfo(owner, dbname=name))}"
        conn.execute(f"DROP DATABASE {name} WITH (FORCE)")


def _query(conninfo: str) -> str:
    return str(httpx.QueryParams(psycopg.conninfo.conninfo_to_dict(conninfo)))


def test_users_of_same_name_in_two_tenants_are_separate(dsn: str, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(
        "".join(render_key_entry(f"key-{of}", "ann", f'tenant = "{of}"') for of in TENANTS)
    )
    for tenant in TENANTS:
        with open_checkpointer(dsn, tenant=tenant) as saver:
            store_conversation(saver, "both", texts=[tenant], user_id="ann")
            store_conversation(saver, f"of-{tenant}", texts=[tenant], user_id="ann")

    def status(url: str, tenant: str, thread: str) -> int:
        headers = {"x-api-key": f"key-{tenant}"}
        return httpx.get(f"{url}/probe/thread/{thread}", headers=headers).status_code

    with run_server(
        add_probe_routes(create_app(Settings(db=dsn), access=KeysFileAccess(keys)))
    ) as url:
        found = {
            (tenant, thread): status(url, tenant, thread)
            for tenant in TENANTS
            for thread in ("both", "of-acme", "of-globex")
        }
        asked = httpx.post(
            f"{url}/probe/store:get",
            json={"namespace": ["memories", "ann"], "tenant": "globex"},
            headers={"x-api-key": "key-acme", "x-tenant": "globex"},
        )

    assert {place for place, code in found.items() if code == 200} == {
        ("acme", "both"),
        ("acme", "of-acme"),
        ("globex", "both"),
        ("globex", "of-globex"),
    }
    assert set(found.values()) == {200, 404}
    assert asked.json()["tenant"] == "acme"


def test_background_run_keeps_database_of_its_tenant_open(
    dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both tenants have a thread with the same id at the same time."""
    monkeypatch.setattr("perdure.server.databases._MAX_OPEN_TENANTS", 1)
    keys, gate = tmp_path / "keys.toml", Gate()
    keys.write_text(
        "".join(render_key_entry(f"key-{of}", "ann", f'tenant = "{of}"') for of in TENANTS)
    )
    app = create_app(
        Settings(db=dsn),
        access=KeysFileAccess(keys),
        graphs=Graphs({"talk": build_talk_graph(gate)}),
    )
    with (
        run_server(app) as url,
        get_sync_client(url=url, api_key="key-acme") as acme,
        get_sync_client(url=url, api_key="key-globex") as globex,
    ):
        run = acme.runs.create("t", "talk", input=build_input("boats"), if_not_exists="create")
        assert gate.reached.wait(60)
        globex.threads.create(thread_id="t")
        with pytest.raises(NotFoundError):
            globex.runs.get("t", run["run_id"])
        statuses = [client.threads.get("t")["status"] for client in (acme, globex)]
        gate.open.set()
        theirs: Any = globex.runs.wait("t", "talk", input=build_input("kites"))
        ours: Any = acme.runs.join("t", run["run_id"])

    assert statuses == ["busy", "idle"]
    assert (ours["heard"], theirs["heard"]) == (["boats"], ["kites"])


def test_assistants_with_same_id_in_two_tenants_are_separate(dsn: str, tmp_path: Path) -> None:
    """Each tenant may use an id, and nobody reaches the assistants of another tenant."""
    keys, at = tmp_path / "keys.toml", str(uuid.uuid4())
    admins = """tenant = "{}"\npermissions = ["perdure:admin"]"""
    keys.write_text(
        "".join(render_key_entry(f"key-{of}", "ann", admins.format(of)) for of in TENANTS)
    )
    graphs = Graphs({"talk": build_talk_graph(Gate())})
    with (
        run_server(create_app(Settings(db=dsn), access=KeysFileAccess(keys), graphs=graphs)) as url,
        get_sync_client(url=url, api_key="key-acme") as acme,
        get_sync_client(url=url, api_key="key-globex") as globex,
    ):
        acme.assistants.create("talk", assistant_id=at, name="ours")
        with pytest.raises(NotFoundError):
            globex.assistants.get(at)
        assert [each["name"] for each in globex.assistants.search()] == ["talk"]
        globex.assistants.create("talk", assistant_id=at, name="theirs")
        globex.assistants.update(at, metadata={"n": 1})
        globex.assistants.delete(at)
        found = acme.assistants.get(at)

    assert (found["name"], found["version"]) == ("ours", 1)


def test_databases_of_idle_tenants_are_closed(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perdure.server.databases._MAX_OPEN_TENANTS", 2)

    async def opened() -> list[Any]:
        databases = Databases(Settings(db=dsn))
        parts = {}
        with databases.keep_open("a"):
            for tenant in "abca":
                parts[tenant] = await databases.get_or_open_database(tenant)
            lives = [await is_open(parts[each].saver) for each in "abc"]
        await databases.get_or_open_database("d")
        later = [await is_open(parts[each].saver) for each in "ac"]
        await databases.aclose()
        return [lives, later, await is_open(parts["a"].saver)]

    async def is_open(saver: Any) -> bool:
        try:
            await saver.aheads(limit=1)
        except StorageUnavailable:
            return False
        return True

    assert asyncio.run(opened()) == [[True, False, True], [True, False], False]
