"""Health checks: of the process, and of the database."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from perdure.server import create_app
from perdure.server.http import health
from perdure.settings import Settings
from tests.server.running import run_server, wait_until


@pytest.fixture(autouse=True)
def no_reuse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the database at each request."""
    monkeypatch.setattr(health, "_MAX_AGE_S", 0.0)


def read_check(url: str) -> tuple[int, object]:
    reply = httpx.get(f"{url}/ok", params={"check_db": 1}, timeout=30)
    return reply.status_code, reply.json()


def test_database_that_can_be_written_is_ready(db: Settings) -> None:
    with run_server(create_app(db)) as url:
        assert read_check(url) == (200, {"ok": True})
        assert httpx.get(f"{url}/ok", params={"check_db": 0}).json() == {"ok": True}


def test_deleted_database_file_is_alive_but_not_ready(
    settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    with run_server(create_app(settings)) as url:
        Path(settings.db).unlink()

        def is_unready() -> bool:
            return read_check(url) == (503, {"ok": False})

        wait_until(is_unready)  # a file is checked once a second
        assert httpx.get(f"{url}/ok").json() == {"ok": True}
        assert is_unready()
    messages = [record.getMessage() for record in caplog.records if "cannot be used" in record.msg]
    assert len(messages) == 1
    assert "was moved, deleted or replaced" in messages[0]


def test_database_that_does_not_answer_is_not_ready(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "_MAX_WAIT_S", 0.05)
    app = create_app(settings)
    with run_server(app) as url:
        database = asyncio.run(app.state.databases.get_or_open_database(None))
        with database.saver.database._connect_once().write_lock:
            assert read_check(url) == (503, {"ok": False})
        wait_until(lambda: read_check(url) == (200, {"ok": True}))


def test_health_checks_are_accepted_for_any_host(settings: Settings) -> None:
    """A kubelet sends the address of the pod as host name."""
    with run_server(create_app(replace(settings))) as url:
        headers = {"host": "10.1.2.3:8000"}
        assert httpx.get(f"{url}/ok", headers=headers).status_code == 200
        assert httpx.head(f"{url}/ok", headers=headers).status_code == 200
        assert httpx.post(f"{url}/ok", headers=headers).status_code == 421
        assert httpx.get(f"{url}/info", headers=headers).status_code == 421
