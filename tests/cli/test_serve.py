"""`perdure serve`: how it starts, what it refuses, how it ends."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import uvicorn

from perdure.server.keys import KeysFileAccess
from tests.cli.commands import invoke, run_and_read_error
from tests.server.test_auth_file import GUIDE, written
from tests.server.test_keys import ANN, entry


@contextmanager
def served(
    *options: str, db: Path, sigint: str = "signal.default_int_handler"
) -> Iterator[tuple[str, str, subprocess.Popen[str]]]:
    """The address of a running `perdure serve`, what else it said, and its process."""
    # a shell that starts something in the background has it ignore SIGINT, and so do its children
    code = f"import signal; signal.signal(signal.SIGINT, {sigint})"
    code += "; from perdure.cli import main; main()"
    command = [sys.executable, "-c", code, "serve", "--port", "0"]
    with subprocess.Popen(
        [*command, "--db", str(db), *options], stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        said = ""
        try:
            while not (found := re.search(r"^(http://\S+)/$", said, re.M)):
                line = process.stderr.readline()
                assert line, said
                said += line
            yield found[1], said, process
        finally:
            process.kill()


def answers(url: str, path: str, **headers: str) -> int:
    """The status of an answer; the server may still start."""
    with httpx.Client(transport=httpx.HTTPTransport(retries=20)) as client:
        return client.get(url + path, headers=headers, timeout=30).status_code


def logins(url: str) -> list[int]:
    """The answers to six logins, of which each says that it comes through a proxy."""
    with httpx.Client(base_url=url, transport=httpx.HTTPTransport(retries=20)) as client:
        sent = [{"x-forwarded-for": f"192.0.2.{number}"} for number in range(6)]
        return [client.post("/ui/login", headers=each).status_code for each in sent]


def test_it_serves_until_ctrl_c_with_a_request_under_way(tmp_path: Path) -> None:
    with served(db=tmp_path / "memory.db") as (url, _, process):
        assert answers(url, "/ok") == 200
        assert answers(url, "/ok", host="evil.example") == 421
        assert logins(url)[-1] == 429  # an address has five
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as client:
            client.sendall(b"GET /ok HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert client.recv(12) == b"HTTP/1.1 200"
            client.sendall(
                b"POST /ui/login HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n"
                b"Content-Type: application/x-www-form-urlencoded\r\n\r\nkey="
            )  # and the rest never comes
            assert answers(url, "/ok") == 200
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 130


def test_connections_are_kept_for_longer_than_clients_keep_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that closes first fails a request that is sent meanwhile."""
    configs: list[uvicorn.Config] = []
    monkeypatch.setattr(uvicorn.Server, "run", lambda self, sockets: configs.append(self.config))
    result = invoke("serve", "--port", "0", "--db", str(tmp_path / "memory.db"))

    assert result.exit_code == 0, result.output
    assert [config.timeout_keep_alive for config in configs] == [65]


def test_keys_and_names(tmp_path: Path) -> None:
    """They are checked; SIGTERM ends it, also in the background, where SIGINT is ignored."""
    keys = tmp_path / "keys.toml"
    keys.write_text(entry(ANN, "ann"))
    keys.chmod(0o644)
    hosts = ("--allowed-host", "mem.example", "--host", "0.0.0.0", "--proxy", "127.0.0.1")
    sites = ("--cors-origin", "http://a.example", "--cors-origin", "http://b.example")
    options = ("--keys", str(keys), *hosts, *sites)
    background = served(*options, db=tmp_path / "memory.db", sigint="signal.SIG_IGN")
    with background as (url, said, process):
        assert f"chmod 600 {keys}" in said
        local = url.replace("0.0.0.0", "127.0.0.1")
        assert answers(local, "/ui/login", host="mem.example") == 200
        assert answers(local, "/ui/login", host="evil.example") == 421
        for site in ("http://a.example", "http://b.example"):
            allowed = httpx.get(f"{local}/ok", headers={"host": "mem.example", "origin": site})
            assert allowed.headers["access-control-allow-origin"] == site
        assert logins(local) == [401] * 6
        assert process.stderr is not None
        assert "log in with an API key" in process.stderr.readline()
        process.terminate()
        assert process.wait(30) == -signal.SIGTERM


def test_a_new_key(tmp_path: Path) -> None:
    name = 'A "b" \u00e9\x7f'
    result = invoke("serve", "--new-key", name)
    key = result.stderr.split()[-1]
    assert tomllib.loads(result.stdout)["keys"][0]["user"] == name
    (tmp_path / "keys.toml").write_text(result.stdout)

    assert KeysFileAccess(tmp_path / "keys.toml").tenants == {None}
    assert key.startswith("perdure_")


def test_a_new_key_with_teams(tmp_path: Path) -> None:
    """Each `--team` is listed once, whatever its name; without `--new-key` it is refused."""
    teams = ["red", 'A "b" \u00e9', "red"]
    options = [part for team in teams for part in ("--team", team)]
    result = invoke("serve", "--new-key", "ann", *options)
    (tmp_path / "keys.toml").write_text(result.stdout)
    refused = [
        invoke("serve", "--team", "red"),
        invoke("serve", "--new-key", "ann", "--team", "*"),
    ]

    assert KeysFileAccess(tmp_path / "keys.toml").find_teams("ann", None) == {*teams}
    assert [each.exit_code != 0 for each in refused] == [True, True]
    assert "applies only to --new-key" in str(refused[0].exception)
    assert "no team can be called '*'" in str(refused[1].exception)
    assert refused[1].stdout == ""


def test_what_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], taken_port: int
) -> None:
    def says(*options: str) -> str:
        return run_and_read_error("serve", "--db", str(tmp_path / "m.db"), *options, capsys=capsys)

    keys, auth = tmp_path / "keys.toml", written(tmp_path, GUIDE)
    keys.write_text(entry(ANN, "ann"))
    for host in ("0.0.0.0", "::", "192.168.1.7", "memory.example", ""):
        assert "pass --keys or --auth" in says("--host", host)
    for name in ("*", ""):
        assert "no user can be called" in says("--new-key", name)
    assert "Invalid value for '--proxy'" in says("--proxy", "proxy.example")
    assert "remove one of them" in says("--keys", str(keys), "--auth", auth)
    assert "cannot be read" in says("--keys", "none.toml")
    assert "cannot be imported" in says("--auth", "none.py:auth")
    assert "cannot be read" in says("--graphs", "none.json")
    assert "Address already in use" in says("--port", str(taken_port))
    for origin in ("*", "http://a.example/", "a.example"):
        said = says("--port", "0", "--cors-origin", origin)
        assert f"the origin is {origin!r}; expected the origin of one site" in said
    assert "pass another --host" in says("--host", "no-such-host.invalid", "--keys", str(keys))


@pytest.fixture
def taken_port() -> Iterator[int]:
    """A port that is taken."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        yield taken.getsockname()[1]


def test_tenants_need_postgres(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(entry(ANN, "ann", 'tenant = "acme"'))

    assert "need a Postgres database" in run_and_read_error(
        "serve", "--db", str(tmp_path / "m.db"), "--keys", str(keys), capsys=capsys
    )
