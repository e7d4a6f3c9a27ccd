"""The store by langgraph's SDK, against a real server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from langgraph_sdk import get_sync_client
from langgraph_sdk.client import SyncStoreClient

from perdure.server import create_app
from perdure.server.http.access import Access, Filter, Identity
from perdure.settings import Settings
from tests.server.running import run_server


@pytest.fixture
def store(url: str) -> Iterator[SyncStoreClient]:
    """The SDK's client of the store."""
    with get_sync_client(url=url, api_key=None) as sdk:
        yield sdk.store


def list_keys(reply: Any) -> list[str]:
    return [item["key"] for item in reply["items"]]


def test_store_item_is_put_read_and_deleted(store: SyncStoreClient) -> None:
    store.put_item(["notes", "ünï"], "k/1", {"text": "Hello", "n": 2**60})

    item = store.get_item(["notes", "ünï"], "k/1")

    assert (item["namespace"], item["key"]) == (["notes", "ünï"], "k/1")
    assert item["value"] == {"text": "Hello", "n": 2**60}
    assert item["created_at"] == item["updated_at"]
    store.delete_item(["notes", "ünï"], "k/1")
    assert store.get_item(["notes", "ünï"], "k/1") is None


def test_store_search_supports_prefix_filter_query_and_paging(store: SyncStoreClient) -> None:
    for number, text in enumerate(["red apples", "green pears", "blue cars"]):
        value = {"text": text, "n": number}
        store.put_item(["notes", "a"], f"k{number}", value, index=False if number == 2 else None)
    store.put_item(["notes", "b"], "other", {"text": "pears"})

    assert list_keys(store.search_items(["notes"])) == ["k0", "k1", "k2", "other"]
    assert list_keys(store.search_items(["notes", "a"], limit=1, offset=1)) == ["k1"]
    assert list_keys(store.search_items(["notes"], filter={"n": {"$gte": 1}})) == ["k1", "k2"]
    best_item = store.search_items(["notes", "a"], query="which pears?")["items"][0]
    assert (best_item["key"], best_item["value"]["text"]) == ("k1", "green pears")
    assert best_item["score"]
    assert "k2" not in list_keys(store.search_items(["notes"], query="cars"))


def test_store_item_expires_after_its_ttl(store: SyncStoreClient, client: httpx.Client) -> None:
    store.put_item(["notes"], "k", {"a": 1}, ttl=5)
    assert store.get_item(["notes"], "k", refresh_ttl=True)["value"] == {"a": 1}
    item = {"namespace": ["notes"], "key": "k", "value": {"a": 2}}
    for ttl in (1e300, 1e-9):
        assert client.put("/store/items", json={**item, "ttl": ttl}).status_code == 204
        assert (store.get_item(["notes"], "k") is None) == (ttl < 1)


def test_namespaces_are_listed_by_prefix_suffix_and_depth(store: SyncStoreClient) -> None:
    for namespace in (["a", "b", "c"], ["a", "x"], ["b", "c"]):
        store.put_item(namespace, "k", {})

    assert store.list_namespaces()["namespaces"] == [["a", "b", "c"], ["a", "x"], ["b", "c"]]
    assert store.list_namespaces(prefix=["a"], max_depth=2)["namespaces"] == [
        ["a", "b"],
        ["a", "x"],
    ]
    assert store.list_namespaces(suffix=["c"], limit=1, offset=1)["namespaces"] == [["b", "c"]]


def test_namespace_labels_with_dots_are_passed_as_repeated_parameters(client: httpx.Client) -> None:
    where = {"namespace": ["v1.2", "a"], "key": "k"}
    client.put("/store/items", json={**where, "value": {"a": 1}})

    assert client.get("/store/items", params=where).json()["namespace"] == ["v1.2", "a"]
    assert client.get("/store/items", params={"namespace": "v1.2.a", "key": "k"}).json() is None


PUT: Any = {"namespace": ["a"], "key": "k", "value": {}}
BAD: list[tuple[str, str, Any]] = [
    ("PUT", "/store/items", b""),
    ("PUT", "/store/items", b"{"),
    ("PUT", "/store/items", {}),
    ("PUT", "/store/items", PUT | {"namespace": []}),
    ("PUT", "/store/items", PUT | {"namespace": "a"}),
    ("PUT", "/store/items", PUT | {"namespace": [""]}),
    ("PUT", "/store/items", PUT | {"namespace": ["\0"]}),
    ("PUT", "/store/items", PUT | {"namespace": ["langgraph"]}),
    ("PUT", "/store/items", PUT | {"namespace": ["\ud800"]}),
    ("PUT", "/store/items", PUT | {"key": ""}),
    ("PUT", "/store/items", PUT | {"key": "x" * 5000}),
    ("PUT", "/store/items", PUT | {"value": None}),
    ("PUT", "/store/items", PUT | {"value": [1]}),
    ("PUT", "/store/items", PUT | {"value": {"a": float("inf")}}),
    ("PUT", "/store/items", PUT | {"value": {"a": "\ud800"}}),
    ("PUT", "/store/items", PUT | {"index": True}),
    ("PUT", "/store/items", PUT | {"ttl": -1}),
    ("PUT", "/store/items", PUT | {"ttl": "soon"}),
    ("GET", "/store/items", None),
    ("GET", "/store/items?namespace=&key=k", None),
    ("GET", "/store/items?namespace=a&key=", None),
    ("GET", "/store/items?namespace=a..b&key=k", None),
    ("DELETE", "/store/items", {"namespace": ["a"]}),
    ("POST", "/store/items/search", {"filter": {"a": {"$near": 1}}}),
    ("POST", "/store/items/search", {"filter": [1]}),
    ("POST", "/store/items/search", {"limit": 0}),
    ("POST", "/store/items/search", {"limit": 10**9}),
    ("POST", "/store/items/search", {"offset": -1}),
    ("POST", "/store/items/search", {"namespace_prefix": [5]}),
    ("POST", "/store/items/search", {"query": 5}),
    ("POST", "/store/namespaces", {"max_depth": 0}),
    ("POST", "/store/namespaces", {"prefix": "a"}),
    ("POST", "/store/namespaces", {"suffix": [""]}),
    ("GET", "/memories?limit=0", None),
    ("GET", "/memories?as_of=2026-01-01T00:00:00", None),
    ("GET", "/memories?as_of=yesterday", None),
    ("POST", "/memories", {}),
    ("POST", "/memories", {"memory": {}}),
    ("POST", "/memories", {"memory": ""}),
    ("POST", "/memories", {"memory": {"text": 5}}),
    ("POST", "/memories", {"memory": "x", "kind": " "}),
    ("POST", "/memories", {"memory": "x", "key": ""}),
    ("POST", "/memories/search", {}),
    ("POST", "/memories/search", {"query": "x", "limit": 0}),
    ("POST", "/memories/search", {"query": "x", "kinds": "fact"}),
    ("PATCH", "/memories/unknown", {"memory": "x"}),
    ("PATCH", "/memories/unknown", {"memory": "x", "supersede": True, "at": "then"}),
    ("DELETE", "/memories/unknown", None),
]


@pytest.fixture(scope="module")
def shared_client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """The client of a server that tests share, for requests that change nothing."""
    settings = Settings(db=str(tmp_path_factory.mktemp("server") / "memory.db"), user="ann")
    with run_server(create_app(settings)) as address, httpx.Client(base_url=address) as client:
        yield client


@pytest.mark.parametrize(("method", "path", "body"), BAD)
def test_store_requests_with_invalid_input_are_refused_with_detail(
    shared_client: httpx.Client, method: str, path: str, body: Any
) -> None:
    sent = json.dumps(body).encode() if isinstance(body, dict) else body
    headers = {"content-type": "application/json"}

    answer = shared_client.request(method, path, headers=headers, content=sent)

    assert 400 <= answer.status_code < 500, answer.text
    assert isinstance(answer.json()["detail"], str), answer.text
    assert shared_client.post("/store/namespaces", json={}).json() == {"namespaces": []}


class OwnNamespaceAccess(Access):
    """Access that puts the user's own namespace before the requested one."""

    async def identify(self, connection: Any) -> Identity:
        """Identify everybody as Bob."""
        return Identity("bob")

    async def authorize_and_build_filter(
        self, identity: Identity, action: str, value: dict[str, Any]
    ) -> Filter:
        """Prefix the namespace with the user, unless the namespace contains "as it is"."""
        if "as it is" not in (value["namespace"] or ()):
            value["namespace"] = ["of", identity.user, *(value["namespace"] or ())]
        return {}


def test_access_can_rewrite_namespace_of_store_requests(settings: Settings) -> None:
    app = create_app(settings, access=OwnNamespaceAccess())
    with run_server(app) as url, get_sync_client(url=url, api_key=None) as sdk:
        store = sdk.store
        store.put_item(["a"], "k", {"x": 1})

        assert store.get_item(["a"], "k")["namespace"] == ["of", "bob", "a"]
        assert list_keys(store.search_items([])) == ["k"]
        assert store.list_namespaces()["namespaces"] == [["of", "bob", "a"]]
        store.delete_item(["a"], "k")
        assert store.list_namespaces()["namespaces"] == []
        with httpx.Client(base_url=url) as client:
            client.post("/memories", json={"memory": "I like tea."}).raise_for_status()
            [memory] = client.get("/memories").json()
        assert memory["namespace"] == ["of", "bob", "memories", "bob"]


class WholeStoreAccess(OwnNamespaceAccess):
    """Access to the whole store for a user who is no admin."""

    async def authorize_and_build_filter(
        self, identity: Identity, action: str, value: dict[str, Any]
    ) -> Filter:
        """Allow everything."""
        return {}


def test_store_requests_for_thread_records_of_server_are_refused(settings: Settings) -> None:
    records = ["perdure", "server", "threads"]
    requests: list[tuple[str, str, Any]] = [
        ("PUT", "items", {"namespace": records, "key": "k", "value": {}}),
        ("DELETE", "items", {"namespace": records, "key": "k"}),
        ("POST", "items/search", {"namespace_prefix": records[:1]}),
        ("POST", "namespaces", {"prefix": records[:1]}),
    ]
    app = create_app(settings, access=WholeStoreAccess())
    with run_server(app) as url, httpx.Client(base_url=f"{url}/store/") as client:
        answers = [client.request(method, path, json=body) for method, path, body in requests]
        read = client.get("items", params={"namespace": records, "key": "k"})

        assert [each.status_code for each in (*answers, read)] == [403] * 5
        assert client.post("items/search", json={"offset": 10_000}).json() == {"items": []}
        for path in ("items/search", "namespaces"):
            far = client.post(path, json={"offset": 10_001})
            assert (far.status_code, "an offset of at most 10,000" in far.text) == (422, True)


def test_writes_to_internal_namespaces_are_refused_even_for_admins(client: httpx.Client) -> None:
    """A record of another form would break every list of threads."""
    client.post("/threads", json={"thread_id": "t"})
    for namespace in (["perdure", "server", "threads"], ["perdure", "quarantine"]):
        place = {"namespace": namespace, "key": "t"}
        put = client.put("/store/items", json={**place, "value": {"metadata": 5}})

        assert put.status_code == 403
        assert client.request("DELETE", "/store/items", json=place).status_code == 403
    assert client.post("/threads/search", json={}).status_code == 200
    assert client.patch("/threads/t", json={"metadata": {"n": 1}}).status_code == 200
