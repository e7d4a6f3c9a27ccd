"""A server refuses users without a name, from clients, keys and handlers of authentication."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from langgraph_sdk.client import SyncLangGraphClient

from perdure.errors import ConfigurationError
from perdure.memory.namespace_templates import PERSONAL_LABELS
from perdure.server import create_app
from perdure.server.http.access import ADMIN_PERMISSION
from perdure.server.http.auth_file import AuthFileAccess
from perdure.server.http.keys import KeysFileAccess
from perdure.settings import Settings
from tests.server.http.test_keys import render_key_entry
from tests.server.running import run_server

BLANKS = ["", " ", "\u200b", "\u2060\u3164\ufe0f \xad", "."]
"""An empty name, a space, invisible characters, and names that are special in paths."""
AUTH = """
from langgraph_sdk import Auth

auth = Auth()


@auth.authenticate
async def authenticate(authorization):
    return authorization.removeprefix("Bearer").replace("_", " ")


@auth.on
async def allow(ctx, value):
    return True
"""


@pytest.mark.parametrize("blank", BLANKS, ids=repr)
def test_requests_with_blank_user_are_refused_and_write_nothing(
    blank: str, sdk: SyncLangGraphClient, client: httpx.Client
) -> None:
    """The rule holds for requests about runs, threads, crons and assistants."""
    run: dict[str, Any] = {"assistant_id": "chat", "input": {}}
    with_context: dict[str, Any] = {**run, "context": {"user_id": blank}}
    with_config: dict[str, Any] = {**run, "config": {"configurable": {"user_id": blank}}}
    cron: dict[str, Any] = {**with_context, "schedule": "0 3 * * *"}
    refused: list[tuple[int, str, str, dict[str, Any]]] = [(403, "POST", "/runs/crons", cron)]
    for path in ("/threads/t/runs/wait", "/threads/t/runs/stream", "/runs/wait"):
        refused += [(403, "POST", path, with_context), (422, "POST", path, with_config)]
    for name in ("owner", "user_id"):
        metadata = {"metadata": {name: blank}}
        refused += [
            (422, "POST", "/threads", metadata),
            (422, "PATCH", "/threads/t", metadata),
            (422, "POST", "/assistants", {"graph_id": "chat", **metadata}),
        ]
    for status, method, path, body in refused:
        reply = client.request(method, path, json=body)
        assert reply.status_code == status, (method, path, body, reply.text)
    header = b"X-Perdure-User", blank.strip().encode()  # a header has no spaces around it
    reply = client.get("/memories", headers=[header])
    assert reply.status_code == 403, reply.text
    assert [thread["thread_id"] for thread in sdk.threads.search()] == ["t"]
    assert sdk.crons.search() == []
    assert sdk.runs.list("t") == []


@pytest.mark.parametrize("label", PERSONAL_LABELS)
@pytest.mark.parametrize("user", [None, "boss"], ids=["without keys", "admin"])
def test_store_requests_with_blank_user_in_namespace_are_refused(
    user: str | None, label: str, settings: Settings, tmp_path: Path
) -> None:
    """An empty name and a blank one are refused in the same words."""
    file = tmp_path / "keys.toml"
    file.write_text(render_key_entry("boss", "boss", f'permissions = ["{ADMIN_PERMISSION}"]'))
    access = None if user is None else KeysFileAccess(file)
    headers = {} if user is None else {"x-api-key": user}
    app = create_app(settings, access=access)
    with run_server(app) as url, httpx.Client(base_url=url, headers=headers) as client:
        for blank in (*BLANKS, "\0", "\t\n", ".."):
            for more in ([], ["more"]):
                namespace = [label, blank, *more]
                item: dict[str, Any] = {"namespace": namespace, "key": "k"}
                found = {"namespace_prefix": namespace}
                replies = [
                    client.put("/store/items", json={**item, "value": {}}),
                    client.request("DELETE", "/store/items", json=item),
                    client.get("/store/items", params=item),
                    client.post("/store/items/search", json=found),
                    client.post("/store/namespaces", json={"prefix": namespace}),
                ]
                for reply in replies:
                    assert reply.status_code == 422, (blank, reply.text)
                    assert reply.json()["detail"] == (
                        f"the second label of the namespace {tuple(namespace)!a:.80} is "
                        f"{blank!a}; expected a user name that is not blank, '.' or '..'; pass the "
                        "name of the user to whom the items belong"
                    )
        assert client.post("/store/namespaces", json={}).json() == {"namespaces": []}


def test_store_requests_accept_namespaces_with_user_names_and_other_labels(
    client: httpx.Client,
) -> None:
    """Names that other requests accept and labels of other namespaces are accepted."""
    accepted = [
        ["memories", " ann"],
        ["profiles", "\u00c5sa"],
        ["memories", "*"],
        ["instructions", "a\u200db"],
        ["examples", "..."],
        ["notes", " "],
        ["memories"],
        ["notes", "memories", "\u200b"],
    ]
    for namespace in accepted:
        item = {"namespace": namespace, "key": "k", "value": {"n": 1}}
        reply = client.put("/store/items", json=item)
        assert reply.status_code == 204, (namespace, reply.text)
    found = client.post("/store/namespaces", json={"prefix": ["memories", "*"]}).json()
    assert found["namespaces"] == [["memories", " ann"], ["memories", "*"]]


@pytest.mark.parametrize("blank", BLANKS, ids=repr)
def test_memory_pages_refuse_blank_user_parameter(blank: str, client: httpx.Client) -> None:
    """An empty `user` in the query does not stand for the caller."""
    for path in ("/ui/memories", "/ui/quarantine", "/ui/forget-all"):
        reply = client.get(path, params={"user": blank})
        assert (path, reply.status_code) == (path, 422), reply.text
        assert "expected a user name" in reply.text
    client.post("/memories", json={"memory": "likes tea"})
    posted = client.post(
        "/ui/forget-all",
        params={"user": blank},
        data={"typed": "forget everything"},
        headers={"Origin": str(client.base_url).rstrip("/")},
    )
    assert posted.status_code == 422, posted.text
    assert [each["text"] for each in client.get("/memories").json()] == ["likes tea"]


@pytest.mark.parametrize("blank", BLANKS, ids=repr)
def test_keys_file_with_blank_user_is_refused(blank: str, tmp_path: Path) -> None:
    """Every user in a keys file needs a visible name."""
    file = tmp_path / "keys.toml"
    file.write_text(f'[[keys]]\nuser = "{blank}"\nsha256 = "{"0" * 64}"\n')
    with pytest.raises(ConfigurationError, match=r"the user name .* is not allowed"):
        KeysFileAccess(file)


@pytest.mark.parametrize("identity", ["", "_", "\xad", ".."], ids=repr)
def test_handler_identity_without_name_answers_401(
    identity: str, tmp_path: Path, settings: Settings
) -> None:
    """A handler that returns an identity without a name has not authenticated anybody."""
    (tmp_path / "nameless.py").write_text(AUTH)
    access = AuthFileAccess(f"{tmp_path}/nameless.py:auth")
    with run_server(create_app(settings, access=access)) as url:
        headers = {b"Authorization": f"Bearer{identity}".encode("latin-1")}
        replies = [httpx.get(f"{url}/memories", headers=headers).status_code]
        replies += [
            httpx.get(f"{url}/memories", headers={"Authorization": "Bearerann"}).status_code
        ]
    assert replies == [401, 200]


@pytest.mark.parametrize("path", ["/people/%2E", "/people/%2e%2e/export", "/ui/person?user=.."])
def test_paths_refuse_dots_as_user_names(path: str, client: httpx.Client) -> None:
    """Clients resolve dots as parts of a path, so dots cannot be user names."""
    reply = client.get(path)

    assert (reply.status_code, "user name that is not blank" in reply.text) == (422, True), (
        reply.text
    )
