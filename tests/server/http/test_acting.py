"""A backend acts for a customer: what it may read and create, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from langgraph_sdk import get_sync_client
from langgraph_sdk.client import SyncLangGraphClient
from langgraph_sdk.errors import NotFoundError, PermissionDeniedError

from perdure.errors import ConfigurationError
from perdure.server.http.access import (
    ACT_PERMISSION,
    ADMIN_PERMISSION,
    Forbidden,
    Identity,
    LocalAccess,
)
from perdure.server.http.acting_for import build_identity_acting_for
from perdure.server.http.auth_file import AuthFileAccess
from perdure.server.http.keys import KeysFileAccess
from perdure.settings import Settings
from tests.server.http.test_auth_file import write_auth_file
from tests.server.http.test_keys import render_key_entry
from tests.server.running import wait_until
from tests.server.runs.test_crons import make_due
from tests.server.test_person import (
    FOLLOW_UP,
    REFUND_REQUEST,
    SECRETS,
    YES_COMMAND,
    Desk,
    Model,
    call_mcp_tool,
    model,  # noqa: F401 - a fixture
    serve_desk,
    start_thread_awaiting_approval,
)
from tests.server.test_websockets import build_command, connect_to_thread, receive_json

HANDLERS = """
from langgraph_sdk import Auth

auth = Auth()

@auth.authenticate
async def authenticate(authorization: str | None):
    name = (authorization or "").removeprefix("Bearer ")
    return {"identity": name, "permissions": ["perdure:act"] if name == "desk" else []}

@auth.on
async def everything(ctx, value):
    person = ctx.user["acting_for"] or ctx.user.identity
    assert person != "vip", "not for this one"
    if ctx.resource == "store":
        return None
    value.setdefault("metadata", {})["owner"] = person
    value["metadata"]["sent_by"] = ctx.user.identity
    return {"owner": person}
"""


def write_keys(folder: Path) -> KeysFileAccess:
    """Write the keys of a backend, an admin, a customer, and a user of another tenant."""
    file = folder / "keys.toml"
    file.write_text(
        render_key_entry("desk", "desk", f'permissions = ["{ACT_PERMISSION}"]')
        + render_key_entry("boss", "boss", f'permissions = ["{ADMIN_PERMISSION}"]')
        + render_key_entry("dora", "dora")
        + render_key_entry("zoe", "zoe", 'tenant = "other"')
    )
    return KeysFileAccess(file)


@pytest.fixture
def desk(settings: Settings, tmp_path: Path, model: Model) -> Iterator[Desk]:  # noqa: F811
    """A desk with keys; see `write_keys`."""
    with serve_desk(settings, write_keys(tmp_path), model) as desk:
        yield desk


def open_client_acting_for(desk: Desk, user: str, person: str) -> SyncLangGraphClient:
    """Open the client of a user who acts for a person."""
    headers = {"X-Perdure-User": person, "authorization": f"Bearer {user}"}
    client = get_sync_client(url=desk.url, api_key=user, headers=headers)
    return desk.clients.enter_context(client)


@pytest.mark.parametrize("user", ["desk", "boss"])
def test_person_owns_what_caller_creates_for_them(
    db: Settings,
    tmp_path: Path,
    model: Model,  # noqa: F811
    user: str,
) -> None:
    """Threads, runs, items and memories belong to the person whom the header names."""
    with serve_desk(db, write_keys(tmp_path), model) as desk:
        client = open_client_acting_for(desk, user, "dora")
        thread_id = client.threads.create()["thread_id"]
        client.runs.wait(thread_id, "desk", input=REFUND_REQUEST)
        client.runs.wait(thread_id, "desk", command=YES_COMMAND)
        client.store.put_item(["notes", "dora"], "k", {"text": "likes oars"})
        headers = {"x-api-key": user, "x-perdure-user": "dora"}
        with httpx.Client(base_url=desk.url, headers=headers, timeout=60) as http:
            http.post("/memories", json={"memory": "Dora rows on Mondays."}).raise_for_status()
            texts = [each["text"] for each in http.get("/memories").json()]

        head = desk.head(thread_id)
        assert (head["user_id"], head["owner"]) == ("dora", "dora")
        assert (head["perdure_caller"], head["perdure_deed"]) == (user, "answered")
        assert "Heron" in desk.prompts()
        assert "Dora rows on Mondays." in texts
        assert "user: Please refund my canoe." in texts
        assert desk.memories(user) == ([SECRETS["boss"]] if user == "boss" else [])
        theirs = desk.client("dora")
        assert [each["thread_id"] for each in theirs.threads.search()] == [thread_id]
        assert theirs.store.get_item(["notes", "dora"], "k")["value"] == {"text": "likes oars"}


def test_caller_exports_and_deletes_only_person_acted_for(desk: Desk) -> None:
    """Other people are refused, even if the caller is an admin."""
    start_thread_awaiting_approval(desk, "dora")
    for user in ("desk", "boss"):
        headers = {"x-api-key": user, "x-perdure-user": "dora"}
        with httpx.Client(base_url=desk.url, headers=headers, timeout=60) as http:
            archive = http.get("/people/dora/export")
            assert (archive.status_code, "Heron" in archive.text) == (200, True)
            assert http.get("/people/boss").status_code == 403
    headers = {"x-api-key": "desk", "x-perdure-user": "dora"}
    gone = httpx.delete(f"{desk.url}/people/dora", headers=headers, timeout=60)

    assert gone.status_code == 200, gone.text
    assert desk.memories("dora") == []
    assert desk.client("dora").threads.search() == []


def test_user_header_accepts_non_ascii_name_in_utf_8(desk: Desk) -> None:
    headers = [(b"x-api-key", b"desk"), (b"x-perdure-user", "Åsa".encode())]
    thread = httpx.post(f"{desk.url}/threads", headers=headers, json={}, timeout=60).json()

    assert thread["metadata"]["owner"] == "Åsa"


@pytest.mark.parametrize("user", ["desk", "boss"])
def test_run_belongs_to_person_named_in_its_context(desk: Desk, user: str) -> None:
    """The run may be on a new thread, on an empty thread of the caller, or without a thread."""
    client, context = desk.client(user), {"user_id": "emil"}
    own = client.threads.create()["thread_id"]
    client.runs.wait(own, "desk", input=FOLLOW_UP, context=context)
    client.runs.wait("new", "desk", input=FOLLOW_UP, context=context, if_not_exists="create")
    client.runs.wait(None, "desk", input=FOLLOW_UP, context=context)

    for thread_id in (own, "new"):
        assert desk.head(thread_id)["user_id"] == "emil"
        metadata: Any = open_client_acting_for(desk, user, "emil").threads.get(thread_id)[
            "metadata"
        ]
        assert metadata["owner"] == "emil"
    assert any("Kayak" in each for each in desk.memories("emil"))
    assert desk.memories(user) == ([SECRETS["boss"]] if user == "boss" else [])
    assert not any(secret.split()[-1] in desk.prompts() for secret in SECRETS.values())
    with pytest.raises(NotFoundError):
        desk.client("dora").threads.get(own)


def test_anybody_may_act_for_person_on_server_without_keys(
    settings: Settings,
    model: Model,  # noqa: F811
) -> None:
    with serve_desk(settings, LocalAccess("boss"), model) as desk:
        client: Any = desk.client("anybody")
        thread_id = client.threads.create()["thread_id"]
        client.runs.wait(thread_id, "desk", input=FOLLOW_UP, context={"user_id": "dora"})

        assert desk.head(thread_id)["user_id"] == "dora"
        assert ("Heron" in desk.prompts(), "Walrus" in desk.prompts()) == (True, False)
        theirs = open_client_acting_for(desk, "anybody", "dora")
        assert [each["thread_id"] for each in theirs.threads.search()] == [thread_id]
        assert open_client_acting_for(desk, "anybody", "kim").threads.search() == []


@pytest.mark.parametrize("user", ["desk", "boss"])
def test_caller_acting_for_person_reaches_only_data_of_person(desk: Desk, user: str) -> None:
    """Data of other people are refused, even if the caller is an admin."""
    thread_id = start_thread_awaiting_approval(desk, "dora")
    client = open_client_acting_for(desk, user, "emil")
    headers = {"x-api-key": user, "x-perdure-user": "emil"}

    assert client.threads.search() == []
    with pytest.raises(NotFoundError):
        client.threads.get(thread_id)
    with pytest.raises(httpx.HTTPStatusError, match="404"):
        client.runs.wait(thread_id, "desk", command=YES_COMMAND)
    with pytest.raises(PermissionDeniedError):
        client.store.get_item(["memories", "dora"], "k")
    with pytest.raises(httpx.HTTPStatusError, match="404"):
        desk.client(user).runs.wait(
            thread_id, "desk", command=YES_COMMAND, context={"user_id": "emil"}
        )
    for path in ("/ui/storage", "/ui/memories?user=dora"):
        assert httpx.get(f"{desk.url}{path}", headers=headers, timeout=60).status_code == 403
    assert "Nothing is known" in call_mcp_tool(
        desk, user, "recall", "emil", query="account of Dora"
    )
    assert "Heron" in call_mcp_tool(desk, user, "recall", "dora", query="account of Dora")


PATHS = ["/threads/search", "/memories/search", "/store/items/search", "/runs/wait", "/mcp"]
BODIES: dict[str, Any] = {
    "/threads/search": {},
    "/memories/search": {"query": "tea"},
    "/store/items/search": {"namespace_prefix": ["memories", "dora"]},
    "/runs/wait": {"assistant_id": "desk", "input": FOLLOW_UP},
    "/mcp": {"jsonrpc": "2.0", "id": 1, "method": "tools/list"},
}


@pytest.mark.parametrize("path", PATHS)
def test_invalid_or_forbidden_user_headers_are_refused(desk: Desk, path: str) -> None:
    """Blank, repeated and non-UTF-8 names, other tenants, and a missing permission answer 403."""

    def post_with_user_headers(user: str, *names: bytes) -> int:
        sent = [(b"x-perdure-user", name) for name in names]
        headers = [
            (b"x-api-key", user.encode()),
            (b"accept", b"application/json, text/event-stream"),
        ]
        body = BODIES[path]
        return httpx.post(
            f"{desk.url}{path}", headers=[*headers, *sent], json=body, timeout=60
        ).status_code

    assert post_with_user_headers("dora", b"dora") == 200
    for user in ("desk", "boss"):
        assert post_with_user_headers(user, b"") == post_with_user_headers(user, b"*") == 403
        assert post_with_user_headers(user, b"zoe") == 403
        assert post_with_user_headers(user, b"dora", b"emil") == 403
        assert post_with_user_headers(user, b"\xff") == 403
    assert post_with_user_headers("dora", b"emil") == 403
    assert len(desk.model.requests) == (1 if path == "/runs/wait" else 0)


def test_invalid_or_forbidden_user_in_context_is_refused(desk: Desk) -> None:
    def post_with_context(user: str, context: Any, **headers: str) -> int:
        body = {"assistant_id": "desk", "input": FOLLOW_UP, "context": context}
        headers = {"x-api-key": user, **headers}
        return httpx.post(
            f"{desk.url}/runs/wait", json=body, headers=headers, timeout=60
        ).status_code

    for name in ("", "  ", "zoe", 5, ["emil"]):
        assert post_with_context("desk", {"user_id": name}) == 403
    assert post_with_context("dora", {"user_id": "emil"}) == 403
    assert post_with_context("desk", {"user_id": "emil"}, **{"x-perdure-user": "dora"}) == 403
    assert post_with_context("desk", {"user_id": "emil", "owner": "dora"}) == 422
    assert desk.model.requests == []


def test_run_on_thread_of_another_person_is_refused(
    settings: Settings,
    tmp_path: Path,
    model: Model,  # noqa: F811
) -> None:
    """The handler allows the caller to reach the thread, but its person is another."""
    open_to_all = HANDLERS.replace('return {"owner": person}', "return None")
    with serve_desk(
        settings, AuthFileAccess(write_auth_file(tmp_path, open_to_all)), model
    ) as desk:
        thread_id = start_thread_awaiting_approval(desk, "dora")

        with pytest.raises(httpx.HTTPStatusError, match="403"):
            open_client_acting_for(desk, "desk", "emil").runs.wait(
                thread_id, "desk", command=YES_COMMAND
            )


def test_auth_handlers_receive_caller_and_person(
    settings: Settings,
    tmp_path: Path,
    model: Model,  # noqa: F811
) -> None:
    with serve_desk(settings, AuthFileAccess(write_auth_file(tmp_path, HANDLERS)), model) as desk:
        thread: Any = open_client_acting_for(desk, "desk", "dora").threads.create()
        own: Any = desk.client("dora").threads.create()

        assert (thread["metadata"]["owner"], thread["metadata"]["sent_by"]) == ("dora", "desk")
        assert (own["metadata"]["owner"], own["metadata"]["sent_by"]) == ("dora", "dora")
        for user, person in (("desk", "vip"), ("dora", "emil")):
            with pytest.raises(PermissionDeniedError):
                open_client_acting_for(desk, user, person).threads.create()
        open_client_acting_for(desk, "desk", "dora").runs.wait(
            thread["thread_id"], "desk", input=FOLLOW_UP
        )
        assert "Heron" in desk.prompts()


def test_tenant_from_handler_is_refused_on_sqlite_file(
    settings: Settings,
    tmp_path: Path,
    model: Model,  # noqa: F811
) -> None:
    """The handler returns a tenant, but an SQLite file has no tenants."""
    handlers = HANDLERS.replace('{"identity": name,', '{"identity": name, "tenant": "acme",')
    with serve_desk(settings, AuthFileAccess(write_auth_file(tmp_path, handlers)), model) as desk:
        for person in ("desk", "dora"):
            headers = {"authorization": "Bearer desk", "x-perdure-user": person}
            url = f"{desk.url}/memories/search"
            replied = httpx.post(url, headers=headers, json={"query": "refund"}, timeout=60)
            assert (replied.status_code, "require a Postgres database" in replied.text) == (
                422,
                True,
            )


def test_auth_handlers_receive_person_with_custom_user_class(
    settings: Settings,
    tmp_path: Path,
    model: Model,  # noqa: F811
) -> None:
    """The attributes and methods of the user class stay available to handlers."""
    returned = 'return {"identity": name, "permissions": ["perdure:act"] if name == "desk" else []}'
    handlers = HANDLERS.replace(returned, "return Staff(name)").replace(
        "auth = Auth()\n",
        """
auth = Auth()

class Staff:
    is_authenticated, permissions, team = True, ["perdure:act"], "red"

    def __init__(self, identity):
        self.identity = identity

    def __getitem__(self, name):
        return getattr(self, name, None)
""",
    )
    handlers = handlers.replace(
        'value["metadata"]["sent_by"]',
        'value["metadata"]["team"] = ctx.user["team"] + ctx.user.team'
        '\n    value["metadata"]["sent_by"]',
    )
    with serve_desk(settings, AuthFileAccess(write_auth_file(tmp_path, handlers)), model) as desk:
        theirs: Any = open_client_acting_for(desk, "desk", "dora").threads.create()["metadata"]
        own: Any = desk.client("desk").threads.create()["metadata"]

    assert theirs == {"owner": "dora", "sent_by": "desk", "team": "redred"}
    assert own == {"owner": "desk", "sent_by": "desk", "team": "redred"}


def test_audit_log_names_caller_and_person(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "perdure.audit"):
        open_client_acting_for(desk, "desk", "dora").threads.create(thread_id="t")

    audit = [each.message for each in caplog.records if each.name == "perdure.audit"]
    [record] = map(json.loads, audit)
    assert (record["user"], record["acting_for"]) == ("desk", "dora")


def read_audit_records(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """Return the records of the audit log, without those of earlier calls of this function.

    The server writes a record after it has sent its reply, so this function waits for a record.
    """
    wait_until(lambda: any(log.name == "perdure.audit" for log in caplog.records))
    records = [json.loads(log.message) for log in caplog.records if log.name == "perdure.audit"]
    caplog.clear()
    return records


@pytest.mark.parametrize("user", ["desk", "boss"])
@pytest.mark.parametrize("by_context", [False, True])
def test_cron_made_for_person_belongs_to_person(
    desk: Desk, user: str, by_context: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A name in the context has the same effects as a name in the header."""
    acting = open_client_acting_for(desk, user, "emil")
    client, context = (desk.client(user), {"user_id": "emil"}) if by_context else (acting, None)
    caplog.set_level("INFO", "perdure.audit")
    cron: Any = client.crons.create(
        "desk", schedule="0 0 1 1 *", input=FOLLOW_UP, context=context, metadata={"n": 1}
    )
    [record] = read_audit_records(caplog)

    assert (cron["user_id"], cron["metadata"]) == ("emil", {"n": 1, "owner": "emil"})
    assert [found["cron_id"] for found in acting.crons.search()] == [cron["cron_id"]]
    assert [found["cron_id"] for found in desk.client("desk").crons.search()] == []
    assert (record["action"], record["user"]) == ("crons:create", user)
    assert (record["acting_for"], record["about"]) == ("emil", [{"cron_id": cron["cron_id"]}])
    changed: Any = acting.crons.update(cron["cron_id"], schedule="0 1 1 1 *")
    assert (changed["user_id"], changed["metadata"]) == ("emil", {"n": 1, "owner": "emil"})
    assert read_audit_records(caplog)[0]["acting_for"] == "emil"


@pytest.mark.parametrize("user", ["desk", "boss"])
def test_cron_belongs_to_person_whom_changed_context_names(
    desk: Desk, user: str, caplog: pytest.LogCaptureFixture
) -> None:
    client: Any = desk.client(user)
    caplog.set_level("INFO", "perdure.audit")
    cron = client.crons.create("desk", schedule="0 0 1 1 *", input=FOLLOW_UP, metadata={"n": 1})
    read_audit_records(caplog)
    changed: Any = client.crons.update(cron["cron_id"], context={"user_id": "emil"})
    [record] = read_audit_records(caplog)
    acting = open_client_acting_for(desk, user, "emil")

    assert (changed["user_id"], changed["metadata"]) == ("emil", {"n": 1, "owner": "emil"})
    assert [found["cron_id"] for found in acting.crons.search()] == [cron["cron_id"]]
    assert (record["action"], record["user"]) == ("crons:update", user)
    assert record["acting_for"] == "emil"


def test_admin_changes_cron_that_backend_made_for_person(desk: Desk) -> None:
    """The context of the cron still names the person, so the cron still belongs to the person."""
    cron: Any = desk.client("desk").crons.create(
        "desk", schedule="0 0 1 1 *", input=FOLLOW_UP, context={"user_id": "emil"}
    )
    changed: Any = desk.client("boss").crons.update(cron["cron_id"], schedule="0 1 1 1 *")

    assert (changed["user_id"], changed["metadata"]["owner"]) == ("emil", "emil")


def test_cron_made_without_keys_belongs_to_person_named_in_context(
    settings: Settings,
    model: Model,  # noqa: F811
) -> None:
    with serve_desk(settings, LocalAccess("boss"), model) as desk:
        client: Any = desk.client("anybody")
        own = client.crons.create("desk", schedule="0 0 1 1 *", input=FOLLOW_UP)
        client.crons.create(
            "desk", schedule="0 0 1 1 *", input=FOLLOW_UP, context={"user_id": "emil"}
        )
        client.crons.update(own["cron_id"], context={"user_id": "emil"})
        acting = open_client_acting_for(desk, "anybody", "emil")

        crons: Any = acting.crons.search()
        assert [cron["user_id"] for cron in crons] == ["emil", "emil"]


def test_auth_handlers_decide_on_cron_for_person_named_in_context(
    settings: Settings,
    tmp_path: Path,
    model: Model,  # noqa: F811
) -> None:
    with serve_desk(settings, AuthFileAccess(write_auth_file(tmp_path, HANDLERS)), model) as desk:
        client: Any = desk.client("desk")
        job: Any = {"schedule": "0 0 1 1 *", "input": FOLLOW_UP}
        cron = client.crons.create("desk", **job, context={"user_id": "emil"})
        own = client.crons.create("desk", **job)
        for person in ("vip", ""):
            with pytest.raises(PermissionDeniedError):
                client.crons.create("desk", **job, context={"user_id": person})
            with pytest.raises(PermissionDeniedError):
                client.crons.update(own["cron_id"], context={"user_id": person})

        assert cron["metadata"] == {"owner": "emil", "sent_by": "desk"}
        assert [found["cron_id"] for found in client.crons.search()] == [own["cron_id"]]


@pytest.mark.parametrize("by_context", [False, True])
@pytest.mark.parametrize("path", ["/runs/wait", "/threads/new/runs/wait", "/runs", "/runs/batch"])
def test_thread_made_by_run_belongs_to_person(desk: Desk, path: str, by_context: bool) -> None:
    """A name in the context has the same effects as a name in the header."""
    context: Any = {"user_id": "emil"} if by_context else {}
    headers = {"x-api-key": "desk"} | ({} if by_context else {"x-perdure-user": "emil"})
    run = {"assistant_id": "desk", "input": FOLLOW_UP, "context": context}
    run |= {"on_completion": "keep", "if_not_exists": "create"}
    body: Any = [run] if path == "/runs/batch" else run
    httpx.post(f"{desk.url}{path}", headers=headers, json=body, timeout=60).raise_for_status()
    acting: Any = open_client_acting_for(desk, "desk", "emil")
    [thread] = acting.threads.search()
    wait_until(lambda: acting.threads.get(thread["thread_id"])["status"] == "idle")

    assert thread["metadata"]["owner"] == "emil"
    head = desk.head(thread["thread_id"])
    assert (head["user_id"], head["owner"], head["perdure_caller"]) == ("emil", "emil", "desk")
    assert desk.client("desk").threads.search() == []


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/threads"),
        ("POST", "/threads/search"),
        ("GET", "/memories"),
        ("POST", "/runs/wait"),
        ("POST", "/mcp"),
    ],
)
def test_audit_log_names_caller_and_person_of_refused_header(
    desk: Desk, method: str, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Requests that read something and requests for runs are recorded, too."""
    caplog.set_level("INFO", "perdure.audit")
    sent: list[tuple[str, list[bytes], str]] = [
        ("dora", [b"emil"], "emil"),
        ("desk", [b"zoe"], "zoe"),
        ("desk", [b"*"], "'*'"),
        ("desk", [b""], "''"),
        ("boss", [b"dora", b"emil"], "['dora', 'emil']"),
        ("boss", [b"\xff"], r"['\xff']"),
    ]
    for user, names, person in sent:
        headers = [(b"x-api-key", user.encode()), *((b"x-perdure-user", name) for name in names)]
        body = None if method == "GET" else BODIES.get(path, {})
        reply = httpx.request(method, f"{desk.url}{path}", headers=headers, json=body, timeout=60)
        [record] = read_audit_records(caplog)

        assert reply.status_code == record["status"] == 403
        assert (record["user"], record["acting_for"]) == (user, person)
        assert record["outcome"] == "denied"


@pytest.mark.parametrize("path", ["/runs/crons", "/runs/wait", "/threads/t/runs", "/runs/batch"])
def test_audit_log_names_caller_and_person_of_refused_context(
    desk: Desk, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "perdure.audit")
    sent: list[tuple[str, Any, dict[str, str], str]] = [
        ("dora", "emil", {}, "emil"),
        ("desk", "zoe", {}, "zoe"),
        ("desk", ["emil"], {}, "['emil']"),
        ("desk", "\u200b", {}, r"'\u200b'"),
        ("desk", "x" * 5000, {}, f"'{'x' * 79}"),
        ("dora", "e\ud800", {}, "e\ud800"),
        ("boss", "emil", {"x-perdure-user": "dora"}, "emil"),
    ]
    for user, name, headers, person in sent:
        run = {"assistant_id": "desk", "input": FOLLOW_UP, "context": {"user_id": name}}
        body: Any = [run] if path == "/runs/batch" else run
        body = run | {"schedule": "0 0 1 1 *"} if path == "/runs/crons" else body
        headers = {"x-api-key": user, "content-type": "application/json", **headers}
        reply = httpx.post(
            f"{desk.url}{path}", headers=headers, content=json.dumps(body), timeout=60
        )
        [record] = read_audit_records(caplog)

        assert reply.status_code == record["status"] == 403, reply.text
        assert (record["user"], record["acting_for"]) == (user, person)


def test_audit_log_names_caller_and_person_of_refused_websocket_command(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    desk.client("dora").threads.create(thread_id="t")
    caplog.set_level("INFO", "perdure.audit")
    caplog.clear()
    params = {"assistant_id": "desk", "input": FOLLOW_UP, "context": {"user_id": "emil"}}
    with connect_to_thread(desk.url, key="dora") as sock:
        sock.send(build_command("run.start", **params))
        reply = receive_json(sock)
    [record] = read_audit_records(caplog)

    assert (reply["type"], reply["error"]) == ("error", "permission_denied")
    assert (record["user"], record["acting_for"], record["status"]) == ("dora", "emil", 403)
    assert record["about"] == [{"thread_id": "t"}]


def test_audit_log_has_no_record_of_permitted_runs_and_reads(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "perdure.audit")
    open_client_acting_for(desk, "desk", "dora").threads.search()
    desk.client("desk").runs.wait(None, "desk", input=FOLLOW_UP, context={"user_id": "dora"})
    with pytest.raises(PermissionDeniedError):
        desk.client("dora").store.get_item(["memories", "emil"], "k")

    open_client_acting_for(desk, "desk", "dora").crons.create(
        "desk", schedule="0 0 1 1 *", input=FOLLOW_UP
    )
    assert [record["action"] for record in read_audit_records(caplog)] == ["crons:create"]


@pytest.mark.parametrize("by_context", [False, True])
def test_deleting_person_deletes_crons_made_for_them(desk: Desk, by_context: bool) -> None:
    """The cron creates a new thread for each run, so only the cron itself names the person."""
    context: Any = {"user_id": "dora"} if by_context else None
    client = desk.client("desk") if by_context else open_client_acting_for(desk, "desk", "dora")
    client.crons.create("desk", schedule="0 0 1 1 *", input=FOLLOW_UP, context=context)
    desk.client("desk").crons.create("desk", schedule="0 0 1 1 *", input=FOLLOW_UP)
    own: Any = {"headers": {"x-api-key": "dora"}, "timeout": 60}
    archive = httpx.get(f"{desk.url}/people/dora/export", **own).raise_for_status().text
    report = httpx.delete(f"{desk.url}/people/dora", **own).raise_for_status().json()
    remaining_crons: Any = desk.client("boss").crons.search()

    crons = [line["cron"] for line in map(json.loads, archive.splitlines()) if "cron" in line]
    assert [each["made_by"] for each in crons] == ["a backend"]
    assert [each["count"] for each in report["erased"] if each["what"] == "crons"] == [1]
    assert [each["user_id"] for each in remaining_crons] == ["desk"]


def test_cron_for_person_stops_when_caller_loses_permission_to_act(
    desk: Desk, settings: Settings, tmp_path: Path
) -> None:
    client: Any = open_client_acting_for(desk, "desk", "dora")
    thread_id = client.threads.create()["thread_id"]
    cron = client.crons.create_for_thread(thread_id, "desk", schedule="0 0 1 1 *", input=FOLLOW_UP)
    make_due(settings, cron["cron_id"])
    wait_until(lambda: [each["status"] for each in client.runs.list(thread_id)] == ["success"])

    assert (cron["user_id"], cron["metadata"]["owner"]) == ("dora", "dora")
    assert desk.head(thread_id)["user_id"] == "dora"
    assert "Heron" in desk.prompts()

    file = tmp_path / "keys.toml"
    file.write_text(file.read_text().replace(f'permissions = ["{ACT_PERMISSION}"]', ""))
    wait_until(
        lambda: httpx.get(f"{desk.url}/memories", headers=HEADERS, timeout=60).status_code == 403
    )
    make_due(settings, cron["cron_id"])
    theirs: Any = desk.client("dora")
    wait_until(lambda: theirs.crons.search()[0]["next_run_date"] > cron["next_run_date"][:4])
    assert len(theirs.runs.list(thread_id)) == 1


HEADERS = {"x-api-key": "desk", "x-perdure-user": "dora"}


def test_keys_file_refuses_acting_for_person_of_another_tenant(tmp_path: Path) -> None:
    access = write_keys(tmp_path)
    caller = Identity("x", "other", frozenset({ACT_PERMISSION}))

    assert build_identity_acting_for(access, caller, "zoe").person == "zoe"
    assert (
        build_identity_acting_for(access, caller, "emil").person == "emil"
    )  # no key, so of any tenant
    assert build_identity_acting_for(access, caller, "x") is caller
    with pytest.raises(Forbidden, match="has no API key in your tenant"):
        build_identity_acting_for(access, caller, "dora")
    file = tmp_path / "keys.toml"
    file.write_text(render_key_entry("x", "x", 'permissions = ["perdure:all"]'))
    with pytest.raises(ConfigurationError, match=r"keys\.0\.permissions"):
        KeysFileAccess(file)
