"""Message search on the threads page, limited to the threads that its user may see."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import httpx
import pytest

from perdure.checkpointers import open_checkpointer
from perdure.memory.thread_search import TranscriptSearch
from perdure.server import create_app
from perdure.settings import Settings
from perdure.storage.flow import fetch_rows
from perdure.stores import open_store
from tests.server.running import run_server
from tests.server.test_mcp import HeaderAccess
from tests.talks import store_conversation

HTML = {"Accept": "text/html"}


@pytest.fixture(autouse=True)
def stored_conversations(settings: Settings) -> None:
    with open_checkpointer(settings.db) as saver:
        for user in ("ann", "bob"):
            texts = [f"{user} has a <b>canoe</b>", "It leaks"]
            store_conversation(
                saver, f"of {user}", texts=texts, user_id=user, topic=f"boats of {user}"
            )


def test_threads_page_shows_messages_that_match_search(client: httpx.Client) -> None:
    """Each hit shows the message with the words marked, and links to the message."""
    page = client.get("/ui/threads?q=canoes", headers=HTML).text
    found = client.get("/ui/threads.json?q=leaking").json()
    one = client.get("/ui/threads.json?q=canoes&meta=topic=boats of bob").json()
    none = client.get("/ui/threads?q=zebra", headers=HTML).text

    assert "Matching messages" in page
    assert page.count("<mark><bdi>canoe</bdi></mark>") == 2
    assert "<b>" not in page.split("Matching messages")[1]
    assert {hit["thread_id"] for hit in found["said"]} == {"of bob", "of ann"}
    assert (found["threads"], found["unread"]) == ([], 0)
    assert [hit["thread_id"] for hit in one["said"]] == ["of bob"]
    led = client.get(one["said"][0]["link"], follow_redirects=True)
    assert (led.status_code, led.url.fragment) == (200, "m-0")
    assert "No thread matches." in none


def test_user_finds_only_messages_of_their_own_threads(settings: Settings) -> None:
    with run_server(create_app(settings, access=HeaderAccess())) as url:
        for user in ("ann", "bob", "zoe"):
            with httpx.Client(base_url=url, headers={"x-api-key": user}) as client:
                found = client.get("/ui/threads.json?q=canoe").json()["said"]
                mine = [] if user == "zoe" else [f"of {user}"]
                assert [hit["thread_id"] for hit in found] == mine


def test_message_search_can_be_turned_off(settings: Settings) -> None:
    """Without the search, no message is indexed."""
    with run_server(create_app(replace(settings, search_threads=False))) as url:
        found = httpx.get(f"{url}/ui/threads.json?q=canoe").json()
    with open_checkpointer(settings.db) as saver, open_store(settings.db):
        kept = saver.database.read(lambda: fetch_rows("SELECT * FROM transcript_progress"))
    assert found["said"] == kept == []


def test_threads_page_reloads_while_threads_are_being_indexed(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        TranscriptSearch, "_index_changed_threads_and_count_unindexed", lambda *_: 1_234
    )
    page = client.get("/ui/threads?q=canoe", headers=HTML)
    assert page.headers["refresh"] == "2"
    assert "1,234 threads are still being indexed" in page.text


def test_deleted_thread_is_removed_from_message_search(
    client: httpx.Client, settings: Settings
) -> None:
    assert len(client.get("/ui/threads.json?q=canoe").json()["said"]) == 2
    assert client.delete("/threads/of ann").status_code == 204
    [hit] = client.get("/ui/threads.json?q=canoe").json()["said"]
    with open_checkpointer(settings.db) as saver, open_store(settings.db):
        sql = "SELECT key FROM transcript_items"
        kept: list[Any] = saver.database.read(lambda: fetch_rows(sql))
    assert (hit["thread_id"], len(kept)) == ("of bob", 2)
