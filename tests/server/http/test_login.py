"""Logging in: a session cookie stands for a key, and ends when the key is revoked."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect

from perdure.server import create_app
from perdure.server.http import sessions
from perdure.server.http.auth_file import AuthFileAccess
from perdure.server.http.keys import KeysFileAccess
from perdure.server.http.sessions import Sessions
from perdure.settings import Settings
from tests.server.http.test_auth_file import GUIDE, write_auth_file
from tests.server.http.test_keys import ANN, BOB, render_key_entry
from tests.server.probe import add_probe_routes
from tests.server.running import run_server

PAGE = {"accept": "text/html,*/*"}
SAME = {"sec-fetch-site": "same-origin"}


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    """A keys file."""
    path = tmp_path / "keys.toml"
    path.write_text(render_key_entry(ANN, "ann") + render_key_entry(BOB, "b<i>ob\u202e"))
    return path


@pytest.fixture
def url(settings: Settings, keys_file: Path) -> Iterator[str]:
    """The address of a server that asks for keys."""
    with run_server(
        add_probe_routes(create_app(settings, access=KeysFileAccess(keys_file)))
    ) as address:
        yield address


def post_login(client: httpx.Client, key: str, **more: str) -> httpx.Response:
    return client.post("/ui/login", data={"key": key, **more}, headers=SAME)


def test_page_redirects_to_login_and_back(client: httpx.Client) -> None:
    refused = client.get("/ui/probe?q=a&q=b%2F", headers=PAGE)
    assert refused.status_code == 303
    location = httpx.URL(refused.headers["location"])
    assert (location.path, location.params["next"]) == ("/ui/login", "/ui/probe?q=a&q=b%2F")
    shown = client.get(refused.headers["location"])
    assert 'value="/ui/probe?q=a&amp;q=b%2F"' in shown.text

    done = post_login(client, ANN, next="/ui/probe?q=a")
    assert (done.status_code, done.headers["location"]) == (303, "/ui/probe?q=a")
    cookie = done.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert "Max-Age=43200" in cookie
    assert "Secure" not in cookie
    assert ANN not in cookie
    assert client.get("/ui/probe", headers=PAGE).json() == {"user": "ann"}


def test_requests_that_are_not_pages_answer_401_without_redirect(client: httpx.Client) -> None:
    assert client.get("/probe/thread/t", headers=PAGE).status_code == 401
    assert client.get("/ui/probe.json").status_code == 401
    shown = f"{client.base_url}/ui/shown?q=1"
    part = client.get("/ui/probe", headers={"hx-request": "true", "hx-current-url": shown})
    assert part.status_code == 401
    assert httpx.URL(part.headers["hx-redirect"]).params["next"] == "/ui/shown?q=1"


@pytest.mark.parametrize(
    "place", ["//evil.example", "https://evil.example/", "/ui", "", "/ui/\r\nx: y", "javascript:0"]
)
def test_login_redirects_only_to_pages_of_server(client: httpx.Client, place: str) -> None:
    assert post_login(client, ANN, next=place).headers["location"] == "/ui/threads"


def test_login_with_wrong_key_fails_and_is_rate_limited(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    for wrong in ("", "wrong", "k\u00e9y", "a\nb: c"):
        reply = post_login(client, wrong)
        assert reply.status_code == 401
        assert 'role="alert"' in reply.text
        assert "set-cookie" not in reply.headers
    assert post_login(client, ANN).status_code == 303
    guessed = post_login(client, ANN)  # the sixth
    assert guessed.status_code == 429
    assert 0 < int(guessed.headers["retry-after"]) <= 10


def test_change_with_cookie_requires_same_origin(client: httpx.Client) -> None:
    post_login(client, ANN)

    def post_change(headers: dict[str, str]) -> int:
        return client.post("/ui/probe", data={"n": "1"}, headers=headers).status_code

    assert post_change(SAME) == 200
    assert post_change({"origin": str(client.base_url).rstrip("/")}) == 200
    assert post_change({}) == 403
    assert post_change({"origin": "http://evil.example"}) == 403
    assert post_change({"x-api-key": BOB}) == 200  # it has no need of the cookie


def test_key_in_request_takes_precedence_over_session(client: httpx.Client) -> None:
    post_login(client, ANN)

    assert client.get("/ui/probe.json", headers={"x-api-key": "wrong"}).status_code == 401


def test_logout_ends_session_and_removes_cookie(client: httpx.Client) -> None:
    post_login(client, ANN)
    session = dict(client.cookies)
    done = client.post("/ui/logout", headers=SAME)

    assert (done.status_code, done.headers["location"]) == (303, "/ui/login")
    assert dict(client.cookies) == {}
    client.cookies.update(session)
    assert client.get("/ui/probe.json").status_code == 401


def test_revoking_key_ends_its_sessions(
    client: httpx.Client, keys_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("perdure.server.http.keys._RELOAD_INTERVAL_S", 0.0)
    post_login(client, ANN)
    assert client.get("/ui/probe.json").status_code == 200
    time.sleep(0.02)  # the time of the file changes
    keys_file.write_text(render_key_entry(BOB, "bob"))

    assert client.get("/ui/probe.json").status_code == 401


def test_sessions_end_by_age_and_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(sessions, "monotonic", lambda: now)
    monkeypatch.setattr(sessions, "_MAX_SESSIONS", 3)
    sessions_of_server = Sessions()

    def is_valid(session: str) -> bool:
        cookie = f"perdure_session={session}".encode()
        return sessions_of_server.try_to_add_session_credentials(
            {"type": "http", "headers": [(b"cookie", cookie)]}
        )

    ids = [sessions_of_server.start_session("key") for _ in range(4)]
    assert len(set(ids)) == 4
    assert min(map(len, ids)) >= 43
    assert [is_valid(each) for each in ids] == [False, True, True, True]
    now += 12 * 3600
    assert not any(map(is_valid, ids))
    assert is_valid(sessions_of_server.start_session("key"))
    assert len(sessions_of_server._keys_by_session_id) == 1


def test_session_cookie_is_secure_behind_https_proxy(settings: Settings, keys_file: Path) -> None:
    """A proxy on this machine sets the header X-Forwarded-Proto to https."""
    with run_server(create_app(settings, access=KeysFileAccess(keys_file))) as url:
        headers = {"x-forwarded-proto": "https", **SAME}
        done = httpx.post(f"{url}/ui/login", data={"key": ANN}, headers=headers)

    assert "; Secure" in done.headers["set-cookie"]


def test_login_accepts_token_that_auth_handlers_check(settings: Settings, tmp_path: Path) -> None:
    access = AuthFileAccess(write_auth_file(tmp_path, GUIDE))
    with (
        run_server(add_probe_routes(create_app(settings, access=access))) as url,
        httpx.Client(base_url=url) as client,
    ):
        assert post_login(client, "wrong").status_code == 401
        assert post_login(client, "Bearer ann-token").status_code == 303
        assert post_login(client, "bob-token").status_code == 303
        assert client.get("/ui/probe.json").json()["user"] == "bob"


def test_login_page_redirects_to_threads_on_server_without_keys(settings: Settings) -> None:
    with run_server(create_app(settings)) as url:
        assert httpx.get(f"{url}/ui/login").headers["location"] == "/ui/threads"


def test_login_and_logout_work_in_browser(tab: Page, client: httpx.Client) -> None:
    tab.goto("/ui/login?next=/ui/login")
    tab.keyboard.type(BOB)
    tab.keyboard.press("Enter")
    expect(tab.get_by_role("button", name="Log out")).to_be_visible()
    assert tab.evaluate("document.cookie") == ""
    tab.goto("/ui/probe")
    assert "b<i>ob" in tab.content().replace("&lt;", "<").replace("&gt;", ">")
    tab.goto("/ui/login")
    tab.get_by_role("button", name="Log out").click()
    expect(tab.get_by_role("heading", name="Log in")).to_be_visible()
    expect(tab.get_by_role("button", name="Log out")).to_have_count(0)


def test_login_form_works_at_remote_address_without_tls(
    browser: Browser, settings: Settings, keys_file: Path
) -> None:
    """Browsers send no Sec-Fetch-Site there; http://0.0.0.0 stands for such an address."""
    with run_server(create_app(settings, access=KeysFileAccess(keys_file), hosts=None)) as url:
        context = browser.new_context()
        tab = context.new_page()
        tab.goto(url.replace("127.0.0.1", "0.0.0.0") + "/ui/login")
        tab.fill("#key", ANN)
        tab.click("button[type=submit]")
        expect(tab.locator("main")).to_contain_text("There are no threads yet")
        context.close()


def test_invalid_current_url_header_answers_401(client: httpx.Client) -> None:
    sent = {"hx-request": "true", "hx-current-url": "http://["}

    assert client.get("/ui/threads", headers=sent).status_code == 401
