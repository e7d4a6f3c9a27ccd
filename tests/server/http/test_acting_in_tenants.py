"""Acting for a person under an Auth file stays within the tenant of the caller."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from langgraph_sdk import get_sync_client
from langgraph_sdk.client import SyncLangGraphClient

from perdure.checkpointers import open_checkpointer
from perdure.server import create_app
from perdure.server.graphs import Graphs
from perdure.server.http.auth_file import AuthFileAccess
from perdure.settings import Settings
from perdure.stores import open_store
from tests.server.http.test_auth_file import write_auth_file
from tests.server.running import run_server
from tests.server.test_person import (
    FOLLOW_UP,
    Model,
    build_agent,
    model,  # noqa: F401 - a fixture
)
from tests.server.test_tenants import dsn  # noqa: F401 - a fixture

pytestmark = pytest.mark.postgres
HANDLERS = """
from langgraph_sdk import Auth

auth = Auth()
TENANTS = {"zoe": "globex", "boss": "globex", "desk": "acme", "root": "acme"}
RIGHTS = {"desk": ["perdure:act"], "root": ["perdure:admin"], "loose": ["perdure:act"]}

@auth.authenticate
async def authenticate(authorization: str | None):
    name = (authorization or "").removeprefix("Bearer ")
    user = {"identity": name, "permissions": RIGHTS.get(name, [])}
    return user | ({"tenant": TENANTS[name]} if name in TENANTS else {})

@auth.on
async def everything(ctx, value):
    person = ctx.user["acting_for"] or ctx.user.identity
    if ctx.resource == "store":
        return None
    value.setdefault("metadata", {})["owner"] = person
    return {"owner": person}
"""
TENANT_AWARE_HANDLERS = HANDLERS.replace(
    "    if ctx.resource",
    '    assert TENANTS.get(person, ctx.user["tenant"]) == ctx.user["tenant"], "another tenant"\n'
    "    if ctx.resource",
)
"""The same handlers, of a service that knows the tenants of its users."""
SECRET = "The refund of Zoe goes to the account Zebra."


class Site:
    """A served agent with tenants, and clients of its users."""

    def __init__(self, url: str) -> None:
        self.url = url

    def build_headers(self, user: str, person: str = "") -> dict[str, str]:
        """Build the headers of a user; with `person`, the user acts for that person."""
        acting = {"X-Perdure-User": person} if person else {}
        return {"authorization": f"Bearer {user}", **acting}

    def open_client(self, user: str, person: str = "") -> SyncLangGraphClient:
        """Open the langgraph client of a user, who may act for a person."""
        return get_sync_client(url=self.url, headers=self.build_headers(user, person))

    def send_request(
        self, user: str, person: str, method: str, path: str, **sent: Any
    ) -> httpx.Response:
        """Send a request of a user who acts for a person, and return the reply."""
        headers = self.build_headers(user, person) | {
            "accept": "application/json, text/event-stream"
        }
        return httpx.request(method, f"{self.url}{path}", headers=headers, timeout=60, **sent)


@contextmanager
def serve_agent(db: str, handlers: str, folder: Path, model: Model) -> Iterator[Site]:  # noqa: F811
    """Run a server with an Auth file, over tables that tenants share."""
    with open_checkpointer(db, tenant="acme") as saver, open_store(db, tenant="acme") as store:
        saver.setup()
        store.setup()
    access, graphs = (
        AuthFileAccess(write_auth_file(folder, handlers)),
        Graphs({"desk": build_agent(model)}),
    )
    with run_server(create_app(Settings(db=db), access=access, graphs=graphs)) as url:
        yield Site(url)


def read_data_of_zoe(site: Site) -> list[Any]:
    """Return all that Zoe of the tenant globex can read about herself."""
    with site.open_client("zoe") as client:
        return [
            client.threads.search(),
            client.threads.get_state("of-zoe")["values"],
            client.runs.list("of-zoe"),
            client.crons.search(),
            client.store.search_items(["memories", "zoe"], limit=100),
            site.send_request("zoe", "", "GET", "/people/zoe").json(),
        ]


def store_data_of_zoe(site: Site) -> list[Any]:
    """Store a conversation, a cron and a memory of Zoe of globex, and return what she reads."""
    with site.open_client("zoe") as client:
        if not client.threads.search():
            site.send_request(
                "zoe", "", "POST", "/memories", json={"memory": SECRET}
            ).raise_for_status()
            client.threads.create(thread_id="of-zoe")
            client.runs.wait("of-zoe", "desk", input=FOLLOW_UP)
            client.crons.create_for_thread("of-zoe", "desk", schedule="0 0 1 1 *", input=FOLLOW_UP)
    return read_data_of_zoe(site)


@pytest.mark.parametrize("user", ["desk", "root"])
def test_acting_for_user_id_of_another_tenant_does_not_reach_their_data(
    dsn: str,  # noqa: F811
    tmp_path: Path,
    model: Model,  # noqa: F811
    user: str,
) -> None:
    """A caller of acme who acts for "zoe" reads and writes no data of the Zoe of globex."""
    with (
        serve_agent(dsn, HANDLERS, tmp_path, model) as site,
        site.open_client(user, "zoe") as acting,
    ):
        before, asked = store_data_of_zoe(site), len(model.requests)
        call = {"name": "recall", "arguments": {"query": "refund of Zoe", "min_score": 0}}
        rpc = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": call}
        reads = [
            site.send_request(
                user, "zoe", "POST", "/memories/search", json={"query": "refund of Zoe"}
            ),
            site.send_request(user, "zoe", "GET", "/memories"),
            site.send_request(user, "zoe", "GET", "/people/zoe"),
            site.send_request(user, "zoe", "GET", "/people/zoe/export"),
            site.send_request(user, "zoe", "GET", "/ui/memories"),
            site.send_request(user, "zoe", "GET", "/ui/threads"),
            site.send_request(user, "zoe", "GET", "/threads/of-zoe"),
            site.send_request(user, "zoe", "GET", "/threads/of-zoe/state"),
            site.send_request(user, "zoe", "POST", "/mcp", json=rpc),
        ]
        assert acting.threads.search() == []
        assert acting.crons.search() == []
        assert acting.store.search_items(["memories", "zoe"])["items"] == []
        acting.runs.wait("of-zoe", "desk", input=FOLLOW_UP, if_not_exists="create")
        with site.open_client(user) as own:
            own.runs.wait(None, "desk", input=FOLLOW_UP, context={"user_id": "zoe"})
        acting.store.put_item(["memories", "zoe"], "k", {"text": "Zoe of acme rows."})
        texts = [each["text"] for each in site.send_request(user, "zoe", "GET", "/memories").json()]
        erased = site.send_request(user, "zoe", "DELETE", "/people/zoe")
        after = read_data_of_zoe(site)

    assert not [each.text for each in reads if "Zebra" in each.text]
    assert "of-zoe" not in reads[5].text
    assert [each.status_code for each in reads[-3:-1]] == [404, 404]
    assert "Zoe of acme rows." in texts
    assert erased.status_code == 200, erased.text
    assert "Zebra" not in str(model.requests[asked:])
    assert after == before


def test_auth_handlers_can_refuse_acting_for_people_of_other_tenants(
    dsn: str,  # noqa: F811
    tmp_path: Path,
    model: Model,  # noqa: F811
) -> None:
    """The header and the context of a run answer 403. People of the own tenant can be reached."""
    with serve_agent(dsn, TENANT_AWARE_HANDLERS, tmp_path, model) as site:
        store_data_of_zoe(site)
        run = {"assistant_id": "desk", "input": FOLLOW_UP}
        named = run | {"context": {"user_id": "zoe"}}
        refused = [
            site.send_request("desk", "zoe", "POST", "/threads/search", json={}),
            site.send_request("desk", "zoe", "POST", "/memories/search", json={"query": "tea"}),
            site.send_request("desk", "zoe", "GET", "/people/zoe"),
            site.send_request("desk", "zoe", "POST", "/runs/wait", json=run),
            site.send_request("desk", "", "POST", "/runs/wait", json=named),
        ]
        reached = site.send_request("desk", "emil", "POST", "/threads/search", json={})

    assert [each.status_code for each in refused] == [403] * len(refused)
    assert (reached.status_code, reached.json()) == (200, [])


def test_acting_requires_permission_and_tenant(
    dsn: str,  # noqa: F811
    tmp_path: Path,
    model: Model,  # noqa: F811
) -> None:
    """A caller without a tenant cannot reach a database that has tenants."""
    with serve_agent(dsn, HANDLERS, tmp_path, model) as site:
        store_data_of_zoe(site)
        without_right = site.send_request("boss", "zoe", "POST", "/threads/search", json={})
        without_tenant = [
            site.send_request("loose", person, "POST", "/threads/search", json={})
            for person in ("", "zoe")
        ]

    assert without_right.status_code == 403
    assert "permission" in without_right.text
    assert {each.status_code for each in without_tenant} == {422}
    assert all("tenant" in each.text for each in without_tenant)
