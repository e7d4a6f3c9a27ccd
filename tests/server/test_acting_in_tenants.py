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
from perdure.server.auth_file import AuthFileAccess
from perdure.server.graphs import Graphs
from perdure.settings import Settings
from perdure.stores import open_store
from tests.server.running import run_server
from tests.server.test_auth_file import written
from tests.server.test_person import (
    MORE,
    Model,
    agent,
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
KNOWING = HANDLERS.replace(
    "    if ctx.resource",
    '    assert TENANTS.get(person, ctx.user["tenant"]) == ctx.user["tenant"], "another tenant"\n'
    "    if ctx.resource",
)
"""The same, of a service that knows the tenants of its users."""
SECRET = "The refund of Zoe goes to the account Zebra."


class Site:
    """A served agent with tenants, and clients of its users."""

    def __init__(self, url: str) -> None:
        self.url = url

    def headers(self, user: str, person: str = "") -> dict[str, str]:
        """The headers of a user, who may act for a person."""
        acting = {"X-Perdure-User": person} if person else {}
        return {"authorization": f"Bearer {user}", **acting}

    def sdk(self, user: str, person: str = "") -> SyncLangGraphClient:
        """langgraph's client of a user."""
        return get_sync_client(url=self.url, headers=self.headers(user, person))

    def ask(self, user: str, person: str, method: str, path: str, **sent: Any) -> httpx.Response:
        """The reply to a request of a user who acts for a person."""
        headers = self.headers(user, person) | {"accept": "application/json, text/event-stream"}
        return httpx.request(method, f"{self.url}{path}", headers=headers, timeout=60, **sent)


@contextmanager
def served(db: str, handlers: str, folder: Path, model: Model) -> Iterator[Site]:  # noqa: F811
    """A server with an Auth file, over tables that tenants share."""
    with open_checkpointer(db, tenant="acme") as saver, open_store(db, tenant="acme") as store:
        saver.setup()
        store.setup()
    access, graphs = AuthFileAccess(written(folder, handlers)), Graphs({"desk": agent(model)})
    with run_server(create_app(Settings(db=db), access=access, graphs=graphs)) as url:
        yield Site(url)


def zoes(site: Site) -> list[Any]:
    """All that Zoe of the tenant globex sees of herself."""
    with site.sdk("zoe") as client:
        return [
            client.threads.search(),
            client.threads.get_state("of-zoe")["values"],
            client.runs.list("of-zoe"),
            client.crons.search(),
            client.store.search_items(["memories", "zoe"], limit=100),
            site.ask("zoe", "", "GET", "/people/zoe").json(),
        ]


def filled(site: Site) -> list[Any]:
    """Have Zoe of the tenant globex say something and keep something; returns what she sees."""
    with site.sdk("zoe") as client:
        if not client.threads.search():
            site.ask("zoe", "", "POST", "/memories", json={"memory": SECRET}).raise_for_status()
            client.threads.create(thread_id="of-zoe")
            client.runs.wait("of-zoe", "desk", input=MORE)
            client.crons.create_for_thread("of-zoe", "desk", schedule="0 0 1 1 *", input=MORE)
    return zoes(site)


@pytest.mark.parametrize("user", ["desk", "root"])
def test_acting_for_user_id_of_another_tenant_does_not_reach_their_data(
    dsn: str,  # noqa: F811
    tmp_path: Path,
    model: Model,  # noqa: F811
    user: str,
) -> None:
    """A caller of acme who acts for "zoe" reads and writes nothing of the Zoe of globex."""
    with served(dsn, HANDLERS, tmp_path, model) as site, site.sdk(user, "zoe") as acting:
        before, asked = filled(site), len(model.requests)
        call = {"name": "recall", "arguments": {"query": "refund of Zoe", "min_score": 0}}
        rpc = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": call}
        reads = [
            site.ask(user, "zoe", "POST", "/memories/search", json={"query": "refund of Zoe"}),
            site.ask(user, "zoe", "GET", "/memories"),
            site.ask(user, "zoe", "GET", "/people/zoe"),
            site.ask(user, "zoe", "GET", "/people/zoe/export"),
            site.ask(user, "zoe", "GET", "/ui/memories"),
            site.ask(user, "zoe", "GET", "/ui/threads"),
            site.ask(user, "zoe", "GET", "/threads/of-zoe"),
            site.ask(user, "zoe", "GET", "/threads/of-zoe/state"),
            site.ask(user, "zoe", "POST", "/mcp", json=rpc),
        ]
        assert acting.threads.search() == []
        assert acting.crons.search() == []
        assert acting.store.search_items(["memories", "zoe"])["items"] == []
        acting.runs.wait("of-zoe", "desk", input=MORE, if_not_exists="create")
        with site.sdk(user) as own:
            own.runs.wait(None, "desk", input=MORE, context={"user_id": "zoe"})
        acting.store.put_item(["memories", "zoe"], "k", {"text": "Zoe of acme rows."})
        texts = [each["text"] for each in site.ask(user, "zoe", "GET", "/memories").json()]
        erased = site.ask(user, "zoe", "DELETE", "/people/zoe")
        after = zoes(site)

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
    """With 403, for the header and for the context of a run. People of the tenant are reached."""
    with served(dsn, KNOWING, tmp_path, model) as site:
        filled(site)
        run = {"assistant_id": "desk", "input": MORE}
        named = run | {"context": {"user_id": "zoe"}}
        refused = [
            site.ask("desk", "zoe", "POST", "/threads/search", json={}),
            site.ask("desk", "zoe", "POST", "/memories/search", json={"query": "tea"}),
            site.ask("desk", "zoe", "GET", "/people/zoe"),
            site.ask("desk", "zoe", "POST", "/runs/wait", json=run),
            site.ask("desk", "", "POST", "/runs/wait", json=named),
        ]
        reached = site.ask("desk", "emil", "POST", "/threads/search", json={})

    assert [each.status_code for each in refused] == [403] * len(refused)
    assert (reached.status_code, reached.json()) == (200, [])


def test_acting_requires_permission_and_tenant(
    dsn: str,  # noqa: F811
    tmp_path: Path,
    model: Model,  # noqa: F811
) -> None:
    """A caller whom the handler gives no tenant reaches no database that has tenants."""
    with served(dsn, HANDLERS, tmp_path, model) as site:
        filled(site)
        without_right = site.ask("boss", "zoe", "POST", "/threads/search", json={})
        without_tenant = [
            site.ask("loose", person, "POST", "/threads/search", json={}) for person in ("", "zoe")
        ]

    assert without_right.status_code == 403
    assert "permission" in without_right.text
    assert {each.status_code for each in without_tenant} == {422}
    assert all("tenant" in each.text for each in without_tenant)
