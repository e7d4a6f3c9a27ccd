"""The audit log: every route that changes something writes a record, whatever its outcome."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute, iter_route_contexts
from starlette.requests import HTTPConnection

from perdure.checkpointers import open_checkpointer
from perdure.errors import ConfigurationError, InvalidPatch
from perdure.server import create_app
from perdure.server.http.access import (
    Access,
    Action,
    Filter,
    Forbidden,
    Identity,
    LocalAccess,
    Unauthenticated,
    set_required_action,
)
from perdure.server.http.call import CurrentCall
from perdure.server.http.logs import Audit, is_audited_change
from perdure.settings import Settings
from tests.server.running import run_server
from tests.talks import store_conversation

CANARY = "canary-of-content"


class ForbiddingAccess:
    """Access of a user who may do nothing."""

    async def identify(self, connection: HTTPConnection) -> Identity:
        return Identity("eve", tenant="t2")

    async def authorize_and_build_filter(
        self, identity: Identity, action: Action, value: dict[str, Any]
    ) -> Filter:
        raise Forbidden("eve may do nothing")


class UnauthenticatedAccess(ForbiddingAccess):
    """Access that authenticates nobody."""

    async def identify(self, connection: HTTPConnection) -> Identity:
        raise Unauthenticated("give a key")


def build_app(settings: Settings, file: Path, access: Access | None = None) -> FastAPI:
    """Build the application with probe routes that change something, fail, or read."""
    app = create_app(settings, access=access, audit=Audit(file))

    @app.patch("/probe/{thread_id}")
    @set_required_action("threads:update")
    async def update_probe(call: CurrentCall, thread_id: str, body: dict[str, Any]) -> None:
        await call.authorize_action_arguments({"thread_id": thread_id, "metadata": body})

    @app.delete("/probe/{thread_id}")
    @set_required_action("store:delete")
    async def erase_probe(call: CurrentCall, thread_id: str) -> None:
        await call.authorize_action_arguments({"namespace": ("memories", "ann"), "key": thread_id})
        call.record_for_audit(hashes=["0f"])

    @app.post("/probe/{thread_id}")
    @set_required_action("admin")
    async def fail_probe(call: CurrentCall, thread_id: str) -> None:
        await call.authorize_action_arguments({"thread_id": thread_id})
        raise InvalidPatch(CANARY) if thread_id == "refused" else KeyError(CANARY)

    @app.get("/probe/{thread_id}")
    @set_required_action("admin")
    async def read_probe(call: CurrentCall, thread_id: str) -> None:
        await call.authorize_action_arguments({"thread_id": thread_id})

    return app


def read_records(file: Path) -> list[dict[str, Any]]:
    assert CANARY not in file.read_text()
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_audit_record_names_user_action_outcome_and_object(
    settings: Settings, tmp_path: Path
) -> None:
    with (
        run_server(build_app(settings, tmp_path / "audit")) as url,
        httpx.Client(base_url=url, headers={"x-request-id": "r-1"}) as client,
    ):
        assert client.patch("/probe/a", json={"text": CANARY}).status_code == 200
        assert client.delete("/probe/b").status_code == 200
        assert client.post("/probe/refused").status_code == 422
        assert client.get("/probe/a").status_code == 200
        assert client.post("/probe/broken").status_code == 500  # uvicorn may close after it
    records = read_records(tmp_path / "audit")
    assert all(each.pop("at") and each.pop("request_id") == "r-1" for each in records)
    assert all(each.pop("user") == "ann" for each in records)
    assert records == [
        {"action": "threads:update", "outcome": "ok", "status": 200, "about": [{"thread_id": "a"}]},
        {
            "action": "store:delete",
            "outcome": "ok",
            "status": 200,
            "about": [
                {"thread_id": "b"},
                {"namespace": ["memories", "ann"], "key": "b", "hashes": ["0f"]},
            ],
        },
        {
            "action": "admin",
            "outcome": "failed",
            "status": 422,
            "about": [{"thread_id": "refused"}],
        },
        {"action": "admin", "outcome": "failed", "status": 500, "about": [{"thread_id": "broken"}]},
    ]


@pytest.mark.parametrize(
    "access", [LocalAccess("ann"), ForbiddingAccess(), UnauthenticatedAccess()], ids=type
)
def test_every_changing_route_writes_audit_record(
    settings: Settings, tmp_path: Path, access: Access
) -> None:
    file = tmp_path / "audit"
    app = build_app(settings, file, access)
    every = [each.original_route for each in iter_route_contexts(app.routes)]
    routes: Any = [route for route in every if isinstance(route, APIRoute)]
    changing_routes = [
        (method, re.sub(r"{[^}]*}", "x", route.path), route.endpoint.action)
        for route in routes
        for method in sorted(route.methods)
        if is_audited_change(route.endpoint.action, method)
    ]
    assert len(changing_routes) >= 3
    with run_server(app) as url:
        for number, (method, path, name) in enumerate(changing_routes, 1):
            reply = httpx.request(method, url + path, json={"text": CANARY}, timeout=30)
            records = read_records(file)
            assert len(records) == number, (method, path)
            assert (records[-1]["action"], records[-1]["status"]) == (name, reply.status_code)
            if isinstance(access, UnauthenticatedAccess):
                assert "user" not in records[-1]
                assert records[-1]["outcome"] == "denied"
            elif isinstance(access, ForbiddingAccess):
                assert (records[-1]["user"], records[-1]["tenant"]) == ("eve", "t2")
                assert records[-1]["outcome"] in ("denied", "failed")


def test_changes_by_rest_are_recorded_without_content(settings: Settings, tmp_path: Path) -> None:
    app = create_app(settings, audit=Audit(tmp_path / "audit"))
    with run_server(app) as url, httpx.Client(base_url=url, timeout=30) as client:
        client.post("/threads", json={"thread_id": "t", "metadata": {"title": CANARY}})
        copied = client.post("/threads/t/copy").json()["thread_id"]
        client.post("/threads/prune", json={"thread_ids": ["t", copied], "strategy": "delete"})
        item = {"namespace": ["a"], "key": "k"}
        client.put("/store/items", json={**item, "value": {"text": CANARY}})
        key = client.post("/memories", json={"memory": f"Ann likes {CANARY}."}).json()["key"]
        client.delete(f"/memories/{key}")
    memory = {"namespace": ["memories", "ann"], "key": key}
    found = [
        (each["action"], each["status"], each["about"]) for each in read_records(tmp_path / "audit")
    ]
    hashes = found[-1][2][0].pop("hashes")
    assert len(hashes) == 1
    assert found == [
        ("threads:create", 200, [{"thread_id": "t"}]),
        ("threads:create", 200, [{"thread_id": "t"}, {"thread_id": copied}]),
        ("threads:delete", 200, [{"thread_id": "t"}, {"thread_id": copied}]),
        ("store:put", 204, [item]),
        ("store:put", 200, [memory]),
        ("store:delete", 200, [memory]),
    ]


def test_request_fails_with_500_if_audit_record_cannot_be_written(
    settings: Settings,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "perdure.requests")
    app = build_app(settings, tmp_path / "audit")

    def raise_disk_full(*args: Any) -> None:
        raise OSError("no space left")

    with run_server(app) as url:
        monkeypatch.setattr(app.state.audit, "_append_line", raise_disk_full)
        failed = httpx.patch(f"{url}/probe/a", json={}, headers={"x-request-id": "r-1"})
        assert (failed.status_code, failed.headers["x-request-id"]) == (500, "r-1")
        assert failed.headers["x-content-type-options"] == "nosniff"
        assert failed.json() == {"detail": "the server failed; see its log for the error"}
        assert httpx.post(f"{url}/probe/broken").headers["x-content-type-options"] == "nosniff"
        assert httpx.get(f"{url}/probe/a").status_code == 200
    logged = [
        each.fields  # type: ignore[attr-defined]
        for each in caplog.records
        if each.name == "perdure.requests" and each.levelname == "INFO"
    ]
    assert [(each["method"], each["route"], each["status"]) for each in logged] == [
        ("PATCH", "/probe/{thread_id}", 500),
        ("POST", "/probe/{thread_id}", 500),
        ("GET", "/probe/{thread_id}", 200),
    ]


def test_ids_with_slash_are_recorded_in_audit_and_request_logs(
    settings: Settings, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An id with a slash is complete in the audit log, and the request log has the right route."""
    caplog.set_level(logging.INFO, "perdure.requests")
    app = build_app(settings, tmp_path / "audit")
    with run_server(app) as url, httpx.Client(base_url=url) as client:
        client.post("/threads", json={"thread_id": "a/b"}).raise_for_status()
        assert client.delete("/threads/a%2Fb").status_code == 204
        assert client.delete("/memories/k%2F1").status_code == 404
    routes = {each.fields["route"] for each in caplog.records if each.name == "perdure.requests"}  # type: ignore[attr-defined]
    assert routes == {"/threads", "/threads/{thread_id}", "/memories/{key}"}
    found = [
        (each["action"], each["status"], each["about"]) for each in read_records(tmp_path / "audit")
    ]
    memory = {"namespace": ["memories", "ann"], "key": "k/1"}
    assert found[1:] == [
        ("threads:delete", 204, [{"thread_id": "a/b"}]),
        ("store:delete", 404, [memory]),
    ]


def test_stranger_is_refused_before_body_is_read_for_id_with_slash(
    settings: Settings, tmp_path: Path
) -> None:
    """The body is not JSON, so it would be refused with another status if it were read."""
    app = build_app(settings, tmp_path / "audit", UnauthenticatedAccess())
    with run_server(app) as url:
        sent = {"content": b"{", "headers": {"content-type": "application/json"}}
        assert httpx.patch(f"{url}/threads/a%2Fb", **sent).status_code == 401  # type: ignore[arg-type]


def test_change_is_refused_with_507_if_disk_is_almost_full(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_checkpointer(settings.db) as saver:
        store_conversation(saver, "t", user_id="ann")
    app = create_app(settings, audit=Audit(tmp_path / "audit"))
    with run_server(app) as url, httpx.Client(base_url=url) as client:
        monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=999_999))
        reply = client.delete("/threads/t")
        assert reply.status_code == 507
        assert "999,999 bytes" in reply.json()["detail"]
        assert client.get("/threads/t").status_code == 200
        monkeypatch.undo()
        assert client.delete("/threads/t").status_code == 204
    assert [each["status"] for each in read_records(tmp_path / "audit")] == [507, 204]


def test_partly_written_audit_record_raises_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`os.write` writes part of a line on a disk that is almost full."""
    audit = Audit(tmp_path / "audit")
    monkeypatch.setattr("os.write", lambda file, line: len(line) - 1)
    with pytest.raises(OSError, match="part of a record"):
        audit._append_line(b"{}\n")
    audit.close()


def test_audit_file_is_appended_to_and_readable_by_owner_only(tmp_path: Path) -> None:
    file = tmp_path / "audit"
    for _ in range(2):
        audit = Audit(file)
        audit._append_line(b"{}\n")
        audit.close()
    assert file.read_text() == "{}\n{}\n"
    assert file.stat().st_mode & 0o777 == 0o600
    for wrong in (tmp_path, tmp_path / "no" / "audit", Path("/dev/null")):
        with pytest.raises(ConfigurationError, match="choose another file"):
            Audit(wrong)
