"""API keys: the user that each key identifies, and what the user reaches."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from langgraph_sdk import get_client, get_sync_client
from starlette.requests import HTTPConnection

from perdure.checkpointers import open_checkpointer
from perdure.errors import ConfigurationError
from perdure.memory.long_term.records import NOTE_KINDS, build_namespace_of_notes_about_memories
from perdure.server import create_app
from perdure.server.http import keys as module
from perdure.server.http.access import (
    ADMIN_PERMISSION,
    Filter,
    Forbidden,
    Identity,
    Unauthenticated,
)
from perdure.server.http.keys import KeysFileAccess, create_api_key_and_hash
from perdure.settings import Settings
from perdure.stores import SQLiteStore
from tests.server.probe import add_probe_routes
from tests.server.running import run_server
from tests.talks import store_conversation

ANN, BOB, ROOT = (f"key-of-{name}" for name in ("ann", "bob", "root"))


def render_key_entry(key: str, user: str, more: str = "") -> str:
    digest = hashlib.sha256(key.encode()).hexdigest()
    return f'[[keys]]\nuser = "{user}"\nsha256 = "{digest}"\n{more}\n'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the database and of the keys file."""
    return tmp_path_factory.mktemp("keys")


@pytest.fixture(scope="module")
def keys_file(folder: Path) -> Path:
    """A keys file of two users and an admin."""
    path = folder / "keys.toml"
    path.write_text(
        render_key_entry(ANN, "ann")
        + render_key_entry(BOB, "bob")
        + render_key_entry(ROOT, "root", f'permissions = ["{ADMIN_PERMISSION}"]')
    )
    path.chmod(0o600)
    return path


@pytest.fixture(scope="module")
def url(folder: Path, keys_file: Path) -> Iterator[str]:
    """The address of a server that asks for keys."""
    settings = Settings(db=str(folder / "memory.db"))
    with run_server(
        add_probe_routes(create_app(settings, access=KeysFileAccess(keys_file)))
    ) as address:
        yield address


def post_probe(url: str, action: str, key: str, value: Any = None) -> httpx.Response:
    return httpx.post(f"{url}/probe/{action}", json=value or {}, headers={"x-api-key": key})


def test_key_is_accepted_in_either_header(url: str) -> None:
    for headers in (
        {"x-api-key": ANN},
        {"authorization": f"Bearer {ANN}"},
        {"authorization": f"bearer  {ANN}"},
    ):
        reply = httpx.post(f"{url}/probe/threads:read", json={}, headers=headers)
        assert reply.json() == {"user": "ann", "tenant": None, "value": {}}


@pytest.mark.parametrize(
    "headers",
    [{}, {"x-api-key": ""}, {"x-api-key": "wrong"}, {"authorization": f"Basic {ANN}"}],
)
def test_request_without_valid_key_answers_401(url: str, headers: dict[str, str]) -> None:
    reply = httpx.post(f"{url}/probe/threads:read", json={}, headers=headers)

    assert reply.status_code == 401
    assert reply.headers["www-authenticate"] == "Bearer"
    assert "send one in the header x-api-key" in reply.json()["detail"]


def test_key_sent_by_sdk_clients_identifies_user(url: str) -> None:
    with get_sync_client(url=url, api_key=BOB) as client:
        assert client.http.post("/probe/threads:read", json={})["user"] == "bob"

    async def post_with_async_client() -> Any:
        async with get_client(url=url, api_key=BOB) as client:
            return await client.http.post("/probe/threads:read", json={})

    assert asyncio.run(post_with_async_client())["user"] == "bob"


@pytest.mark.parametrize(
    ("action", "value", "authorized_value"),
    [
        ("threads:create", {}, {"metadata": {"owner": "ann"}}),
        (
            "threads:create",
            {"metadata": {"owner": "bob", "n": 1}},
            {"metadata": {"owner": "ann", "n": 1}},
        ),
        ("threads:update", {"metadata": {"owner": "bob"}}, {"metadata": {"owner": "ann"}}),
        (
            "threads:create_run",
            {"thread_id": "t"},
            {"thread_id": "t", "metadata": {"owner": "ann"}},
        ),
        ("store:put", {"namespace": ["memories", "ann"]}, {"namespace": ["memories", "ann"]}),
        ("store:search", {"namespace": ["a", "ann", "b"]}, {"namespace": ["a", "ann", "b"]}),
        ("store:list_namespaces", {"namespace": None}, {"namespace": ["*", "ann"]}),
        ("store:list_namespaces", {"namespace": ["a"]}, {"namespace": ["a", "ann"]}),
    ],
)
def test_user_is_limited_to_own_threads_and_namespaces(
    url: str, action: str, value: Any, authorized_value: Any
) -> None:
    assert post_probe(url, action, ANN, value).json()["value"] == authorized_value


@pytest.mark.parametrize(
    ("action", "value"),
    [
        ("store:put", {"namespace": ["memories", "bob"]}),
        ("store:get", {"namespace": ["ann", "bob"]}),
        ("store:search", {"namespace": []}),
        ("store:search", {"namespace": ["memories"]}),
        ("store:search", {}),
        ("store:delete", {"namespace": ["memories", "*"]}),
        ("store:list_namespaces", {"namespace": ["*", "bob"]}),
        ("store:list_namespaces", {"namespace": ["*", "*"]}),
        ("store:put", {"namespace": ["perdure", "ann"]}),
        ("store:put", {"namespace": ["perdure", "server", "ann"]}),
        ("admin", {}),
    ],
)
def test_user_is_refused_namespaces_of_others_and_admin_actions(
    url: str, action: str, value: Any
) -> None:
    assert post_probe(url, action, ANN, value).status_code == 403


def test_admin_key_allows_everything_unfiltered(url: str) -> None:
    for action in ("store:search", "admin", "threads:create"):
        assert post_probe(url, action, ROOT).json()["value"] == {}


def test_threads_of_other_users_are_not_found(url: str, folder: Path) -> None:
    with open_checkpointer(str(folder / "memory.db")) as saver:
        for name in ("ann", "bob"):
            store_conversation(saver, f"of-{name}", user_id=name)
    found = [
        httpx.get(f"{url}/probe/thread/{thread}", headers={"x-api-key": key}).status_code
        for key in (ANN, BOB, ROOT)
        for thread in ("of-ann", "of-bob", "of-nobody")
    ]

    assert found == [200, 404, 404, 404, 200, 404, 200, 200, 404]


def test_reserving_thread_id_gives_no_access_to_later_conversation_of_another(
    url: str, folder: Path
) -> None:
    """Bob reserves the id that Ann's agent will use without the server."""
    of_ann, of_bob = {"x-api-key": ANN}, {"x-api-key": BOB}
    assert httpx.post(f"{url}/threads", json={"thread_id": "daily"}, headers=of_bob).is_success
    with open_checkpointer(str(folder / "memory.db")) as saver:
        store_conversation(saver, "daily", texts=["SECRET of ann", "yes"], user_id="ann")

    assert httpx.get(f"{url}/threads/daily", headers=of_bob).status_code == 404
    assert httpx.get(f"{url}/threads/daily", headers=of_ann).status_code == 200


def test_thread_of_program_without_user_is_not_given_to_who_reserved_id(
    url: str, folder: Path
) -> None:
    """The program names no user, so the thread has no owner, whichever of the two came first."""
    of_bob, of_root = ({"x-api-key": key} for key in (BOB, ROOT))
    metadata_body = {"metadata": {"topic": "plans"}}
    with open_checkpointer(str(folder / "memory.db")) as saver:
        reserved = httpx.post(
            f"{url}/threads", json={"thread_id": "night", **metadata_body}, headers=of_bob
        )
        before = httpx.get(f"{url}/threads/night", headers=of_bob)
        store_conversation(saver, "night", texts=["SECRET of a program", "yes"])
        store_conversation(saver, "day", texts=["SECRET of a program", "yes"])
    late = httpx.post(
        f"{url}/threads", json={"thread_id": "day", "if_exists": "do_nothing"}, headers=of_bob
    )

    assert (reserved.status_code, before.status_code, late.status_code) == (200, 200, 404)
    for thread in ("night", "day"):
        assert httpx.get(f"{url}/threads/{thread}/state", headers=of_bob).status_code == 404
        assert (
            httpx.patch(f"{url}/threads/{thread}", json=metadata_body, headers=of_bob).status_code
            == 404
        )
        thread_of_root = httpx.get(f"{url}/threads/{thread}", headers=of_root).json()
        assert "owner" not in thread_of_root["metadata"]
    for query in ({}, {"metadata": {"owner": "bob"}}, {"ids": ["night", "day"]}):
        found = httpx.post(f"{url}/threads/search", json=query, headers=of_bob).json()
        assert not {"night", "day"} & {each["thread_id"] for each in found}

    changed = httpx.patch(f"{url}/threads/night", json={"metadata": {"n": 1}}, headers=of_root)
    assert changed.json()["metadata"] == {"n": 1}
    assert httpx.get(f"{url}/threads/night", headers=of_bob).status_code == 404


@pytest.mark.parametrize("of_ann", [{}, {"user_id": "ann"}])
def test_thread_of_program_with_assistant_id_is_not_given_to_who_reserved_id(
    url: str, folder: Path, of_ann: Any
) -> None:
    """Programs of langgraph's platform store `assistant_id` in metadata, as this server does."""
    bob, root = ({"x-api-key": key} for key in (BOB, ROOT))
    thread = f"assistant-{len(of_ann)}"
    reserved = {"thread_id": thread, "metadata": {"topic": "plans"}}
    assert httpx.post(f"{url}/threads", json=reserved, headers=bob).is_success
    with open_checkpointer(str(folder / "memory.db")) as saver:
        names: Any = {"assistant_id": "agent", **of_ann}
        store_conversation(saver, thread, texts=["SECRET of a program", "yes"], **names)

    assert httpx.get(f"{url}/threads/{thread}", headers=bob).status_code == 404
    metadata = httpx.get(f"{url}/threads/{thread}", headers=root).json()["metadata"]
    assert metadata.get("owner") == of_ann.get("user_id")


def test_reserved_thread_belongs_to_user_who_first_uses_it_on_server(
    url: str, folder: Path
) -> None:
    """The first use is a run, a state update or a copy. Later turns of a program change nothing."""
    run_request: Any = {"input": {"messages": [{"role": "user", "content": "hi"}]}}
    edit = {"values": run_request["input"], "as_node": "respond"}
    with get_sync_client(url=url, api_key=BOB) as bob:
        threads: Any = bob.threads
        for thread in ("run", "edited"):
            threads.create(thread_id=thread, graph_id="chat", metadata={"topic": "plans"})
        bob.runs.wait("run", "chat", **run_request)
        threads.update_state("edited", **edit)
        copied = threads.copy("run")["thread_id"]
        with open_checkpointer(str(folder / "memory.db")) as saver:
            for thread in ("run", "edited", copied):
                store_conversation(saver, thread, texts=["more", "yes"])

        for thread in ("run", "edited", copied):
            known = threads.get(thread)["metadata"]
            assert (known["owner"], known["topic"]) == ("bob", "plans")


def test_keys_filter_threads_by_owner_except_for_admin(keys_file: Path) -> None:
    keys = KeysFileAccess(keys_file)

    def build_filter(user: str, *permissions: str) -> Filter:
        identity = Identity(user, permissions=frozenset(permissions))
        return asyncio.run(keys.authorize_and_build_filter(identity, "threads:search", {}))

    assert build_filter("ann") == {"owner": "ann"}
    assert build_filter("root", ADMIN_PERMISSION) == {}
    with pytest.raises(
        Forbidden, match="expected a namespace that consists of a label and the user"
    ):
        asyncio.run(
            keys.authorize_and_build_filter(
                Identity("ann"), "store:get", {"namespace": ("memories",)}
            )
        )


@pytest.fixture
def editable_keys_file(tmp_path: Path) -> Path:
    """A keys file that a test may change."""
    path = tmp_path / "keys.toml"
    path.write_text(render_key_entry(ANN, "ann") + render_key_entry(BOB, "bob"))
    return path


def test_revoked_key_stops_working_without_restart(
    editable_keys_file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_RELOAD_INTERVAL_S", 0.0)
    file, keys = editable_keys_file, KeysFileAccess(editable_keys_file)

    def read_statuses() -> list[int]:
        return [read_status(key) for key in (ANN, BOB)]

    def read_status(key: str) -> int:
        connection = HTTPConnection({"type": "http", "headers": [(b"x-api-key", key.encode())]})
        try:
            asyncio.run(keys.identify(connection))
        except Unauthenticated as exc:
            return exc.status
        return 200

    def write_with_new_time(text: str) -> None:
        file.write_text(text)
        at = file.stat().st_mtime_ns + 1_000_000
        os.utime(file, ns=(at, at))

    assert read_statuses() == [200, 200]
    write_with_new_time(render_key_entry(BOB, "bob"))
    assert read_statuses() == [401, 200]
    write_with_new_time("[[keys]")  # as it may look while it is edited
    assert read_statuses() == [401, 401]
    write_with_new_time(render_key_entry(ANN, "ann"))
    assert read_statuses() == [200, 401]
    file.unlink()
    assert read_statuses() == [401, 401]
    assert "no API key is valid until the keys file is repaired" in caplog.text


@pytest.mark.parametrize(
    ("text", "expected_message"),
    [
        ("[[keys]\n", "line 1"),
        ("", "keys: Field required"),
        ('[[keys]]\nuser = "ann"\n', r"keys\.0\.sha256: Field required"),
        (
            render_key_entry(ANN, "ann") + '[[keys]]\nuser = "bob"\nsha256 = "ab"',
            r"keys\.1\.sha256: String",
        ),
        (render_key_entry(ANN, "ann", 'role = "x"'), r"keys\.0\.role: Extra inputs"),
        (
            render_key_entry(ANN, "ann", 'permissions = ["admin"]'),
            r"keys\.0\.permissions\.0: .*perdure:admin",
        ),
        (render_key_entry(ANN, "*"), r"keys\.0\.user"),
        (render_key_entry(ANN, ""), "expected a name that has a visible character"),
    ],
)
def test_malformed_keys_file_raises_configuration_error(
    tmp_path: Path, text: str, expected_message: str
) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=expected_message) as raised:
        KeysFileAccess(path)

    assert ANN not in str(raised.value)
    assert str(path) in str(raised.value)


def test_missing_keys_file_raises_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="No such file"):
        KeysFileAccess(tmp_path / "none.toml")


@pytest.mark.parametrize("user", [*NOTE_KINDS, "server", "threads"])
def test_user_named_like_internal_label_cannot_see_internal_namespaces(
    tmp_path: Path, user: str
) -> None:
    """Users may have names that are labels of perdure's internal namespaces."""
    (file := tmp_path / "keys.toml").write_text(render_key_entry(ANN, user))
    settings = Settings(db=str(tmp_path / "memory.db"))
    with SQLiteStore.open(settings.db) as store:
        for kind in NOTE_KINDS:
            store.put(
                build_namespace_of_notes_about_memories(kind, ("memories", "bob")),
                "k",
                {"text": "bob's"},
            )
            store.put(
                build_namespace_of_notes_about_memories(kind, ("memories", user)),
                "k",
                {"text": "a note"},
            )
    headers = {"x-api-key": ANN}
    app = create_app(settings, access=KeysFileAccess(file))
    with run_server(app) as url, httpx.Client(base_url=url, headers=headers) as client:
        client.post("/threads", json={"thread_id": "t"})
        client.put("/store/items", json={"namespace": ["own", user], "key": "k", "value": {}})
        for prefix in (None, [], ["*"], ["*", user]):
            listed = client.post("/store/namespaces", json={"prefix": prefix})
            assert listed.json() == {"namespaces": [["own", user]]}
        for namespace in (["perdure", user], ["perdure", user, "memories", "bob"]):
            search = {"namespace_prefix": namespace}
            assert client.post("/store/items/search", json=search).status_code == 403
            assert client.post("/store/namespaces", json={"prefix": namespace}).status_code == 403


def test_created_keys_are_random_and_match_their_hash() -> None:
    (one, digest), (other, _) = create_api_key_and_hash("ann"), create_api_key_and_hash("ann")

    assert one != other
    assert len(one) > 40
    assert digest == hashlib.sha256(one.encode()).hexdigest()
