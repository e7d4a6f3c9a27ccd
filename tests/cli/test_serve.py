"""`perdure serve`: its start, the options that it refuses, and its end."""

from __future__ import annotations

import json
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import httpx
import psycopg
import pytest
import uvicorn
from benchmarks.server_faults import database as postgres_database
from psycopg.conninfo import make_conninfo

from perdure.server.http.keys import KeysFileAccess
from tests import postgres_server
from tests.cli.commands import invoke, run, run_and_read_error
from tests.server.http.test_auth_file import GUIDE, write_auth_file
from tests.server.http.test_keys import ANN, render_key_entry


@contextmanager
def start_server(
    *options: str, db: Path, sigint: str = "signal.default_int_handler"
) -> Iterator[tuple[str, str, subprocess.Popen[str]]]:
    """Start `perdure serve`, and yield its URL, its earlier output and its process."""
    # a shell that starts something in the background has it ignore SIGINT, and so do its children
    code = f"import signal; signal.signal(signal.SIGINT, {sigint})"
    code += "; from perdure.cli import main; main()"
    command = [sys.executable, "-c", code, "serve", "--port", "0"]
    with subprocess.Popen(
        [*command, "--db", str(db), *options], stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        output = ""
        try:
            while not (match := re.search(r"^(http://\S+)/$", output, re.M)):
                line = process.stderr.readline()
                assert line, output
                output += line
            yield match[1], output, process
        finally:
            process.kill()


def get_status(url: str, path: str, **headers: str) -> int:
    """Return the status code of a reply; retries while the server starts."""
    with httpx.Client(transport=httpx.HTTPTransport(retries=20)) as client:
        return client.get(url + path, headers=headers, timeout=30).status_code


def try_six_logins(url: str) -> list[int]:
    """Return the status codes of six logins that claim to come through a proxy."""
    with httpx.Client(base_url=url, transport=httpx.HTTPTransport(retries=20)) as client:
        header_sets = [{"x-forwarded-for": f"192.0.2.{number}"} for number in range(6)]
        return [client.post("/ui/login", headers=headers).status_code for headers in header_sets]


def test_ctrl_c_ends_server_that_has_an_unfinished_request(tmp_path: Path) -> None:
    with start_server(db=tmp_path / "memory.db") as (url, _, process):
        assert get_status(url, "/ok") == 200
        assert get_status(url, "/info", host="evil.example") == 421
        assert try_six_logins(url)[-1] == 429  # an address has five
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as client:
            client.sendall(b"GET /ok HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert client.recv(12) == b"HTTP/1.1 200"
            client.sendall(
                b"POST /ui/login HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n"
                b"Content-Type: application/x-www-form-urlencoded\r\n\r\nkey="
            )  # and the rest never comes
            assert get_status(url, "/ok") == 200
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 130


def test_server_keeps_idle_connections_longer_than_clients_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the server closed first, it would fail a request that is sent at the same moment."""
    configs: list[uvicorn.Config] = []
    monkeypatch.setattr(uvicorn.Server, "run", lambda self, sockets: configs.append(self.config))
    result = invoke("serve", "--port", "0", "--db", str(tmp_path / "memory.db"))

    assert result.exit_code == 0, result.output
    assert [config.timeout_keep_alive for config in configs] == [65]


def test_serve_checks_keys_hosts_sites_and_proxies(tmp_path: Path) -> None:
    """SIGTERM ends the server, also in the background, where SIGINT is ignored."""
    keys = tmp_path / "keys.toml"
    keys.write_text(render_key_entry(ANN, "ann"))
    keys.chmod(0o644)
    hosts = ("--allowed-host", "mem.example", "--host", "0.0.0.0", "--proxy", "127.0.0.1")
    sites = ("--cors-origin", "http://a.example", "--cors-origin", "http://b.example")
    options = ("--keys", str(keys), *hosts, *sites)
    background = start_server(*options, db=tmp_path / "memory.db", sigint="signal.SIG_IGN")
    with background as (url, output, process):
        assert f"chmod 600 {keys}" in output
        local = url.replace("0.0.0.0", "127.0.0.1")
        assert get_status(local, "/ui/login", host="mem.example") == 200
        assert get_status(local, "/ui/login", host="evil.example") == 421
        for site in ("http://a.example", "http://b.example"):
            allowed = httpx.get(f"{local}/ok", headers={"host": "mem.example", "origin": site})
            assert allowed.headers["access-control-allow-origin"] == site
        assert try_six_logins(local) == [401] * 6
        assert process.stderr is not None
        assert "log in with an API key" in process.stderr.readline()
        process.terminate()
        assert process.wait(30) == -signal.SIGTERM


def test_new_key_option_prints_valid_keys_file(tmp_path: Path) -> None:
    name = 'A "b" \u00e9\x7f'
    result = invoke("serve", "--new-key", name)
    key = result.stderr.split()[-1]
    assert tomllib.loads(result.stdout)["keys"][0]["user"] == name
    (tmp_path / "keys.toml").write_text(result.stdout)

    assert KeysFileAccess(tmp_path / "keys.toml").tenants == {None}
    assert key.startswith("perdure_")


def test_new_key_option_lists_each_team_once(tmp_path: Path) -> None:
    """The name of a team may have any characters; `--team` without `--new-key` is refused."""
    teams = ["red", 'A "b" \u00e9', "red"]
    options = [part for team in teams for part in ("--team", team)]
    result = invoke("serve", "--new-key", "ann", *options)
    (tmp_path / "keys.toml").write_text(result.stdout)
    refused = [
        invoke("serve", "--team", "red"),
        invoke("serve", "--new-key", "ann", "--team", "*"),
    ]

    assert KeysFileAccess(tmp_path / "keys.toml").find_teams("ann", None) == {*teams}
    assert [refusal.exit_code != 0 for refusal in refused] == [True, True]
    assert "can only be used with --new-key" in str(refused[0].exception)
    assert "the team name '*' is not allowed" in str(refused[1].exception)
    assert refused[1].stdout == ""


def test_serve_refuses_invalid_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], taken_port: int
) -> None:
    def read_refusal(*options: str) -> str:
        return run_and_read_error("serve", "--db", str(tmp_path / "m.db"), *options, capsys=capsys)

    keys_file, auth_file = tmp_path / "keys.toml", write_auth_file(tmp_path, GUIDE)
    keys_file.write_text(render_key_entry(ANN, "ann"))
    for host in ("0.0.0.0", "::", "192.168.1.7", "memory.example", ""):
        assert "pass --keys or --auth" in read_refusal("--host", host)
    for name in ("*", ""):
        assert f"the user name {name!r} is not allowed" in read_refusal("--new-key", name)
    assert "Invalid value for '--proxy'" in read_refusal("--proxy", "proxy.example")
    assert "remove one of them" in read_refusal("--keys", str(keys_file), "--auth", auth_file)
    assert "cannot be read" in read_refusal("--keys", "none.toml")
    assert "cannot be imported" in read_refusal("--auth", "none.py:auth")
    assert "does not exist" in read_refusal("--graphs", "none.json")
    assert "Address already in use" in read_refusal("--port", str(taken_port))
    for origin in ("*", "http://a.example/", "a.example"):
        message = read_refusal("--port", "0", "--cors-origin", origin)
        assert f"the origin is {origin!r}; expected a single origin" in message
    assert "pass another --host" in read_refusal(
        "--host", "no-such-host.invalid", "--keys", str(keys_file)
    )


@pytest.fixture
def taken_port() -> Iterator[int]:
    """Yield a port on which a socket listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def test_keys_with_tenants_need_postgres_database(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(render_key_entry(ANN, "ann", 'tenant = "acme"'))

    assert "require a Postgres database" in run_and_read_error(
        "serve", "--db", str(tmp_path / "m.db"), "--keys", str(keys), capsys=capsys
    )


@pytest.mark.postgres
def test_prepare_option_separates_tenants_if_the_keys_have_tenants(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server whose role may not create tables can then serve each tenant."""
    monkeypatch.delenv("PERDURE_DB", raising=False)
    keys = tmp_path / "keys.toml"
    keys.write_text(render_key_entry(ANN, "ann", 'tenant = "acme"'))
    with postgres_database(postgres_server.dsn()) as dsn:
        owner = make_conninfo(dsn, user="an_owner")
        postgres_server.dsn_of_role("an_owner")
        with psycopg.connect(dsn, autocommit=True) as conn:
            conn.execute(f"GRANT CREATE ON DATABASE {conn.info.dbname} TO an_owner")
        run("serve", "--prepare", "--db", owner, "--keys", str(keys))

        with psycopg.connect(dsn) as conn:
            policies = "SELECT DISTINCT tablename FROM pg_policies WHERE schemaname = 'perdure'"
            tables = {name for (name,) in conn.execute(policies)}
    assert {"checkpoints", "items", "runs", "crons"} <= tables


def test_prepare_option_refuses_keys_of_which_only_some_have_tenants(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tables can only serve one of the two kinds. No connection is attempted."""
    keys = tmp_path / "keys.toml"
    other_entry = render_key_entry("another-key-of-bob", "bob")
    keys.write_text(render_key_entry(ANN, "ann", 'tenant = "acme"') + other_entry)
    error = run_and_read_error(
        "serve", "--prepare", "--db", "postgresql://nowhere/x", "--keys", str(keys), capsys=capsys
    )

    assert "some keys in" in error


def test_prepare_option_refuses_authentication_handlers(
    db: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    error = run_and_read_error("serve", "--prepare", "--auth", "auth.py:auth", capsys=capsys)

    assert "'auth.py:auth'" in error
    assert not db.exists()


def test_prepare_option_refuses_authentication_handlers_of_configured_file(
    db: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    configured = tmp_path / "langgraph.json"
    (tmp_path / "graph.py").write_text("")
    content = {"graphs": {"a": "./graph.py:a"}, "auth": {"path": "./auth.py:auth"}}
    configured.write_text(json.dumps(content))
    error = run_and_read_error("serve", "--prepare", "--graphs", str(configured), capsys=capsys)

    assert "auth.py:auth" in error
    assert not db.exists()


def test_prepare_option_creates_all_tables_and_exits(db: Path) -> None:
    """The owner of a Postgres schema runs this for a server whose role may not create tables."""
    run("serve", "--prepare")

    with closing(sqlite3.connect(db)) as conn:
        components = {name for (name,) in conn.execute("SELECT component FROM schemas")}
    assert components == {"checkpointers", "stores", "server"}
