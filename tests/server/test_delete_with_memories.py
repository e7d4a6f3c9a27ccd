"""Deleting a thread by REST and on a page keeps or erases the memories that were made of it."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from perdure.checkpointers import open_checkpointer
from perdure.memory import Extraction
from perdure.server import create_app
from perdure.server.http.keys import KeysFileAccess
from perdure.settings import Settings
from perdure.stores import open_store
from tests.server.http.test_keys import ANN, BOB, render_key_entry
from tests.server.running import run_server
from tests.talks import store_conversation


def store_thread_with_memories(settings: Settings) -> None:
    """Store thread `t` of Ann, and extract memories of it for Ann and Bob."""
    with open_checkpointer(settings.db) as saver, open_store(settings.db) as store:
        store_conversation(saver, "t", user_id="ann", owner="ann")
        for user in ("ann", "bob"):
            Extraction(saver, store).extract("t", {"configurable": {"user_id": user}})


def count_memories(settings: Settings, user: str) -> int:
    """Return the number of memories of a user."""
    with open_store(settings.db) as store:
        return len(store.search(("memories", user), limit=50))


@pytest.mark.parametrize(
    ("query", "status", "expected_memories"),
    [
        ("", 204, 4),
        ("?memories=keep", 204, 4),
        ("?memories=erase", 204, 0),
        ("?memories=x", 422, 4),
    ],
)
def test_thread_deletion_by_rest_erases_memories_only_on_request(
    db: Settings, query: str, status: int, expected_memories: int
) -> None:
    store_thread_with_memories(db)
    with run_server(create_app(db)) as url, httpx.Client(base_url=url) as client:
        deleted = client.delete(f"/threads/t{query}")
        after = client.get("/threads/t")

    assert deleted.status_code == status
    assert after.status_code == (404 if status == 204 else 200)
    assert (count_memories(db, "ann"), count_memories(db, "bob")) == (
        expected_memories,
        expected_memories,
    )


def test_delete_page_erases_memories_of_thread_by_default(db: Settings) -> None:
    store_thread_with_memories(db)
    with run_server(create_app(db)) as url, httpx.Client(base_url=url) as client:
        page = client.get("/ui/delete?id=t").text
        data = {"memories": "keep"}
        kept = client.post("/ui/delete?id=t", data=data), count_memories(db, "ann")
        store_thread_with_memories(db)
        erased = client.post("/ui/delete?id=t"), count_memories(db, "ann")

    assert 'value="erase" checked' in page
    assert "Erase the 8 memories from this thread" in page
    assert [reply.status_code for reply, _ in (kept, erased)] == [303, 303]
    assert (kept[1], erased[1]) == (4, 0)


def test_deleting_thread_erases_memories_of_own_user_only(
    settings: Settings, tmp_path: Path
) -> None:
    """A user cannot erase memories of another user by deleting a thread of the same id."""
    store_thread_with_memories(settings)
    keys = tmp_path / "keys.toml"
    keys.write_text(render_key_entry(ANN, "ann") + render_key_entry(BOB, "bob"))
    keys.chmod(0o600)
    app = create_app(settings, access=KeysFileAccess(keys))
    headers = {"x-api-key": ANN}
    with run_server(app) as url, httpx.Client(base_url=url, headers=headers) as client:
        deleted = client.delete("/threads/t?memories=erase")

    assert deleted.status_code == 204
    assert (count_memories(settings, "ann"), count_memories(settings, "bob")) == (0, 4)
