"""Checks that each request passes: host name, origin, content type, size and rate."""

from __future__ import annotations

import resource
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from fastapi import APIRouter

from perdure.errors import ConfigurationError
from perdure.server import create_app
from perdure.server.http.app import _check_endpoints_declare_actions
from perdure.server.http.keys import KeysFileAccess
from perdure.server.http.limits import _MAX_CLIENTS, Limits, RequestLimiter, TooManyRequests
from perdure.settings import Settings
from tests.server.http.test_keys import render_key_entry
from tests.server.probe import add_probe_routes
from tests.server.running import run_server

BODY = 1_000_000


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server with small limits."""
    settings = Settings(db=str(tmp_path_factory.mktemp("guard") / "memory.db"))
    limits = Limits(body_bytes=BODY, body_wait_s=0.3, max_concurrent_requests=3)
    with run_server(add_probe_routes(create_app(settings, limits=limits))) as address:
        yield address


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LOCALHOST:99", 200),
        ("127.0.0.1", 200),
        ("[::1]:2024", 200),
        ("evil.example", 421),
        ("localhost.evil.example", 421),
        ("127.0.0.1@evil.example", 421),
        ("127.0.0.1.", 421),
        ("", 421),
        ("[::1", 421),
        ("0.0.0.0", 421),
    ],
)
def test_loopback_server_refuses_other_host_names(
    client: httpx.Client, host: str, status: int
) -> None:
    """Otherwise a site whose name resolves to 127.0.0.1 could read everything (DNS rebinding)."""
    reply = client.get("/info", headers={"host": host})

    assert reply.status_code == status
    assert status == 200 or "--allowed-host" in reply.json()["detail"]


def test_configured_host_names_are_accepted(settings: Settings) -> None:
    with run_server(create_app(settings, hosts=["Mem.example"])) as url:
        statuses = [
            httpx.get(f"{url}/info", headers={"host": host}).status_code
            for host in ("mem.example", "mem.example:443", "localhost", "x.mem.example")
        ]
    with run_server(create_app(settings, hosts=None)) as url:
        status_without_check = httpx.get(f"{url}/info", headers={"host": "whatever"}).status_code

    assert statuses == [200, 200, 421, 421]
    assert status_without_check == 200


@pytest.mark.parametrize(
    ("headers", "allowed"),
    [
        ({}, True),  # curl, the SDK
        ({"sec-fetch-site": "same-origin"}, True),
        ({"sec-fetch-site": "none"}, True),
        ({"sec-fetch-site": "cross-site"}, False),
        ({"sec-fetch-site": "same-site"}, False),
        ({"sec-fetch-site": ""}, False),
        ({"sec-fetch-site": "cross-site", "origin": "SELF"}, False),
        ({"origin": "SELF"}, True),
        ({"origin": "http://evil.example"}, False),
        ({"origin": "null"}, False),
        ({"origin": "http://["}, False),
        ({"origin": ""}, False),
        ({"origin": "http://127.0.0.1:1"}, False),
    ],
)
def test_changes_from_other_sites_are_refused(
    url: str, headers: dict[str, str], allowed: bool
) -> None:
    sent = {name: url if value == "SELF" else value for name, value in headers.items()}
    changes = httpx.post(f"{url}/ui/probe", data={"x": "1"}, headers=sent)
    reads = httpx.get(f"{url}/ui/probe.json", headers=sent)

    assert changes.status_code == (200 if allowed else 403)
    assert reads.status_code == 200
    assert "access-control-allow-origin" not in reads.headers


SITE = "http://localhost:3000"
PREFLIGHT = {
    "access-control-request-method": "PATCH",
    "access-control-request-headers": "content-type,x-api-key,last-event-id",
    "access-control-request-private-network": "true",
}


@pytest.fixture(scope="module")
def open_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server with keys and two allowed origins."""
    folder = tmp_path_factory.mktemp("cors")
    keys = folder / "keys.toml"
    keys.write_text(render_key_entry("ann-key", "ann"))
    settings, origins = Settings(db=str(folder / "memory.db")), [SITE, "https://two.example"]
    app = create_app(settings, access=KeysFileAccess(keys), origins=origins)
    with run_server(add_probe_routes(app)) as address:
        yield address


@pytest.mark.parametrize(
    ("origin", "allowed"),
    [
        (SITE, True),
        ("https://two.example", True),
        ("http://localhost:3001", False),
        ("https://localhost:3000", False),
        ("http://two.example", False),
        ("https://x.two.example", False),
        ("https://two.example.evil", False),
        ("null", False),
        ("*", False),
        ("", False),
    ],
)
def test_only_scripts_of_allowed_origins_may_call_server(
    open_url: str, origin: str, allowed: bool
) -> None:
    """Scripts of an allowed origin read all replies and send changes; other scripts cannot."""
    sent = {"origin": origin, "sec-fetch-site": "same-site", "x-api-key": "ann-key"}
    preflight = httpx.options(f"{open_url}/threads/t", headers={**PREFLIGHT, "origin": origin})
    changed = httpx.post(f"{open_url}/threads", json={}, headers=sent)
    read = httpx.get(f"{open_url}/ok", headers=sent)
    refused = httpx.get(f"{open_url}/threads/none", headers={"origin": origin})
    wrong_host = httpx.get(f"{open_url}/info", headers={"origin": origin, "host": "evil.example"})

    assert changed.status_code == (200 if allowed else 403)
    assert (read.status_code, refused.status_code, wrong_host.status_code) == (200, 401, 421)
    for reply in (preflight, changed, read, refused, wrong_host):
        assert reply.headers.get("access-control-allow-origin") == (origin if allowed else None)
        assert "access-control-allow-credentials" not in reply.headers  # no cookies
    if allowed:
        assert preflight.status_code == 200
        assert "PATCH" in preflight.headers["access-control-allow-methods"]
        assert "last-event-id" in preflight.headers["access-control-allow-headers"]
        assert preflight.headers["access-control-allow-private-network"] == "true"
        assert "Origin" in read.headers["vary"]
        for name in ("Content-Location", "Location", "X-Pagination-Next", "X-Request-ID"):
            assert name in read.headers["access-control-expose-headers"]


def test_allowed_origin_cannot_use_login_session(open_url: str) -> None:
    """The origin would act as the user who logged in with the same browser."""
    with httpx.Client(base_url=open_url) as client:
        client.post("/ui/login", data={"key": "ann-key"})
        own = client.post("/ui/probe", data={"x": "1"}, headers={"origin": open_url})
        other = client.post("/ui/probe", data={"x": "1"}, headers={"origin": SITE})

    assert (own.status_code, other.status_code) == (200, 403)


def test_server_without_allowed_origins_sends_no_cors_headers(url: str) -> None:
    headers = {"origin": SITE, **PREFLIGHT}
    preflight = httpx.options(f"{url}/threads/t", headers=headers)
    read = httpx.get(f"{url}/ok", headers=headers)

    assert preflight.status_code == 405
    for reply in (preflight, read):
        assert not [name for name in reply.headers if name.startswith("access-control")]


@pytest.mark.parametrize(
    "origin",
    ["*", "null", "", "localhost:3000", "http://", f"{SITE}/", f"{SITE}/x", "http://*.x.org",
     "HTTP://x.org", "http://X.org", "ftp://x.org", "file://", "http://a@b", "http://a b"],
)  # fmt: skip
def test_invalid_origin_raises_configuration_error(settings: Settings, origin: str) -> None:
    with pytest.raises(ConfigurationError, match="the origin is") as caught:
        create_app(settings, origins=[SITE, origin])
    assert repr(origin) in str(caught.value)


@pytest.mark.parametrize(
    ("content_type", "status"),
    [
        ("application/json", 200),
        ("application/json; charset=utf-8", 200),
        ("text/plain", 415),  # with x-www-form-urlencoded, what a form can send
        ("application/x-www-form-urlencoded", 415),
        ("multipart/form-data; boundary=x", 415),
        (None, 415),
    ],
)
def test_body_without_json_content_type_is_refused(
    url: str, content_type: str | None, status: int
) -> None:
    headers = {"content-type": content_type} if content_type else {}
    whole = httpx.post(f"{url}/probe/length", content=b"{}", headers=headers)
    parts = httpx.post(f"{url}/probe/length", content=iter([b"{", b"}"]), headers=headers)
    empty = httpx.post(f"{url}/probe/admin", headers=headers)

    assert (whole.status_code, parts.status_code, empty.status_code) == (status, status, 200)


def test_all_replies_have_nosniff_and_content_security_policy_headers(url: str) -> None:
    paths = ("/ok", "/assets/style.css", "/nothing", "/probe/thread/x", "/openapi.json")
    replies = [httpx.get(url + path) for path in paths]
    replies += [httpx.get(f"{url}/info", headers={"host": "evil"})]

    assert [each.status_code for each in replies] == [200, 200, 404, 404, 200, 421]
    for each in replies:
        assert each.headers["x-content-type-options"] == "nosniff"
        assert "default-src 'none'" in each.headers["content-security-policy"]


def test_private_replies_have_cache_control_no_store(url: str) -> None:
    def read_cache_control(path: str) -> str | None:
        found: str | None = httpx.get(url + path).headers.get("cache-control")
        return found

    for path in ("/ui/threads", "/ui/threads.json", "/threads/t", "/memories"):
        assert read_cache_control(path) == "no-store", path
    assert read_cache_control("/assets/style.css") is None


# -- limits


@pytest.mark.parametrize("chunked", [False, True])
def test_body_larger_than_limit_is_refused(url: str, chunked: bool) -> None:
    def send_body(size: int) -> httpx.Response:
        body = b'"' + b"x" * (size - 2) + b'"'
        parts = (body[at : at + 65536] for at in range(0, size, 65536))
        headers = {"content-type": "application/json"}
        content = parts if chunked else body
        return httpx.post(f"{url}/probe/length", content=content, headers=headers, timeout=30)

    assert (send_body(BODY).status_code, send_body(BODY).json()) == (200, BODY - 2)
    assert send_body(BODY + 1).status_code == 413


def test_oversized_body_is_refused_without_buffering_it(url: str) -> None:
    """The server runs in this process, and the body is generated while it is sent."""
    memory_sizes: list[int] = []

    def read_resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    def iter_body() -> Iterator[bytes]:
        yield b'"'
        for _ in range(800):
            yield b"x" * 65536
            memory_sizes.append(read_resident_bytes())

    headers = {"content-type": "application/json"}
    httpx.post(f"{url}/probe/length", content=b"1", headers=headers)
    before = read_resident_bytes()
    try:
        status = httpx.post(f"{url}/probe/length", content=iter_body(), headers=headers).status_code
    except httpx.TransportError:  # it was cut off while it was sent
        status = 413

    assert status == 413
    assert max(memory_sizes) - before < 8_000_000
    assert httpx.get(f"{url}/ok").status_code == 200


def test_incomplete_body_times_out_with_408(url: str) -> None:
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as sent:
        sent.sendall(
            f"POST /probe/length HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
            "Content-Length: 10\r\n\r\n123".encode()
        )
        reply = sent.recv(4096)

    assert reply.startswith(b"HTTP/1.1 408")


def test_stranger_is_refused_before_body_is_read(settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "keys.toml").write_text("keys = []")
    with run_server(
        add_probe_routes(create_app(settings, access=KeysFileAccess(tmp_path / "keys.toml")))
    ) as url:
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=20) as sent:
            sent.sendall(
                f"POST /probe/length HTTP/1.1\r\nHost: {host}\r\nX-Api-Key: x\r\n"
                "Content-Type: application/json\r\nContent-Length: 9000000\r\n\r\n123".encode()
            )
            reply = sent.recv(4096)

    assert reply.startswith(b"HTTP/1.1 401")


def test_slow_response_stream_is_not_timed_out_as_body(url: str) -> None:
    with httpx.stream("GET", f"{url}/probe/stream") as reply:
        lines = reply.iter_lines()
        for _ in range(20):
            next(lines)

    assert reply.status_code == 200


def test_concurrent_requests_of_client_are_limited(url: str) -> None:
    with httpx.Client(base_url=url) as client, ExitStack() as stack:
        for _ in range(3):
            stream = stack.enter_context(client.stream("GET", "/probe/stream"))
            assert stream.status_code == 200
        refused = client.get("/ui/probe.json")
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "5"
        assert "3 requests are in progress" in refused.json()["detail"]
        assert client.get("/ok").status_code == 200
        stack.close()
        deadline = time.monotonic() + 30
        while client.get("/ui/probe.json").status_code != 200:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_request_rate_of_address_is_limited(settings: Settings) -> None:
    with (
        run_server(
            add_probe_routes(create_app(settings, limits=Limits(requests_per_s=0.001, burst=5)))
        ) as url,
        httpx.Client(base_url=url) as client,
    ):
        statuses = [client.get("/ok").status_code for _ in range(7)]
        refused = client.get("/ui/probe.json")

    assert statuses == [200] * 5 + [429] * 2
    assert int(refused.headers["retry-after"]) > 900


def test_request_limiter_refills_by_time_and_bounds_number_of_clients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr("perdure.server.http.limits.monotonic", lambda: now)
    rate = RequestLimiter(Limits(requests_per_s=2, burst=3))

    def count_accepted_requests(client: str, times: int) -> int:
        done = 0
        for _ in range(times):
            try:
                rate.count_request(client)
            except TooManyRequests:
                continue
            done += 1
        return done

    assert (count_accepted_requests("a", 10), count_accepted_requests("b", 2)) == (3, 2)
    now += 1
    assert (count_accepted_requests("a", 10), count_accepted_requests("b", 10)) == (2, 3)
    now += 1000
    assert count_accepted_requests("a", 10) == 3
    for number in range(3 * _MAX_CLIENTS):
        rate.count_request(number)
    assert len(rate._next_due) <= _MAX_CLIENTS


def test_endpoint_without_action_is_refused_at_startup(settings: Settings) -> None:
    app, routes = create_app(settings), APIRouter()

    @routes.get("/forgotten")
    async def forgotten() -> None:
        """It names no action."""

    app.include_router(routes)
    with pytest.raises(TypeError, match="/forgotten declares no required action"):
        _check_endpoints_declare_actions(app)
