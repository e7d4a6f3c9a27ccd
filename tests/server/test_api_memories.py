"""Memories by REST, against a real server."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from urllib.parse import quote

import httpx

from perdure import SQLiteStore
from perdure.settings import MIN_SCORE, Settings


def list_memory_texts(client: httpx.Client, **params: str) -> list[str]:
    reply = client.get("/memories", params=params).raise_for_status()
    return [memory["text"] for memory in reply.json()]


def add_memory(client: httpx.Client, text: str, **more: str) -> str:
    answer = client.post("/memories", json={"memory": text, **more}).raise_for_status().json()
    assert answer["change"] == "added", answer
    return str(answer["key"])


def test_memory_search_explains_scores_of_added_memories(
    client: httpx.Client, settings: Settings
) -> None:
    key = add_memory(client, "I am allergic to peanuts.")
    add_memory(client, "I live in Lyon.")
    add_memory(client, "Likes green.", kind="taste")

    asked = {"query": "Which food is dangerous for me, peanuts?", "max_tokens": 500}
    found = client.post("/memories/search", json=asked).json()

    assert (found["memories"][0]["key"], found["left_out"]) == (key, 0)
    assert found["memories"][0]["namespace"] == ["memories", settings.user]
    assert found["memories"][0]["score"]
    assert found["memories"][0]["parts"]
    assert "peanuts" in found["text"]
    assert found["tokens"] > 0
    nothing = {"query": "quantum chromodynamics"}
    quiet, why, every = (
        client.post("/memories/search", json=nothing | more).json()
        for more in ({}, {"explain": True}, {"min_score": 0})
    )
    assert (quiet["memories"], quiet["below"], quiet["text"]) == ([], [], "")
    assert quiet["floor"] == MIN_SCORE
    assert (len(why["memories"]), len(why["below"]), len(every["memories"])) == (0, 3, 3)
    assert all(each["score"] < why["floor"] and "parts" in each for each in why["below"])
    assert list_memory_texts(client, kind="taste") == ["Likes green."]
    assert list_memory_texts(client, limit="1", offset="1") == ["I live in Lyon."]
    with SQLiteStore.open(settings.db) as store:
        assert len(store.search(("memories", "ann"))) == 3


def test_adding_memory_reports_duplicates_and_rejected_secrets(client: httpx.Client) -> None:
    key = add_memory(client, "I live in Lyon.")

    again = client.post("/memories", json={"memory": "i live in  Lyon"}).json()
    secret = client.post("/memories", json={"memory": "My card is 4111 1111 1111 1111."}).json()

    assert (again["change"], again["key"]) == ("unchanged", key)
    assert secret["change"] in ("quarantined", "refused")
    assert secret["reason"]
    assert list_memory_texts(client) == ["I live in Lyon."]


def test_memory_is_corrected_superseded_and_erased_by_key(
    client: httpx.Client, settings: Settings
) -> None:
    add_memory(client, "I live in Lyon.", key="home")
    past = datetime.now(UTC)

    corrected = client.patch("/memories/home", json={"memory": "I live in Lyons."}).json()
    replaced = {"memory": "I live in Rome.", "supersede": True}
    moved = client.patch("/memories/home", json=replaced).json()
    stale = client.patch("/memories/home", json={"memory": "I live in Bonn.", "if_version": 2})
    with SQLiteStore.open(settings.db) as store:
        versions = store.history(("memories", "ann"), "home")

    assert (stale.status_code, "at version 3, not 2" in stale.text) == (409, True)
    assert (corrected["change"], moved["change"]) == ("updated", "superseded")
    assert [each.value["text"][10:] for each in versions if each.value] == [
        "Lyon.",
        "Lyons.",
        "Rome.",
    ]
    assert list_memory_texts(client, as_of=past.isoformat()) == ["I live in Lyon."]
    assert list_memory_texts(client, as_of=(past - timedelta(days=1)).isoformat()) == []

    receipt = client.delete("/memories/home").json()

    assert (receipt["items"], receipt["versions"], receipt["clean"]) == (1, 2, True)
    assert list_memory_texts(client) == []
    with SQLiteStore.open(settings.db) as store:
        assert store.history(("memories", "ann"), "home") == []


def test_memory_key_in_path_may_be_any_text(client: httpx.Client) -> None:
    for number, key in enumerate(["a/b", "..", "ü 💬", "a?b#c", "history"]):
        path = "/memories/" + quote(key, safe="").replace(".", "%2E")
        add_memory(client, f"My friend number {number} is called {key!r}.", key=key)

        change = {"memory": f"My friend number {number} is called {key!r} now."}
        assert client.patch(path, json=change).raise_for_status().json()["change"] == "updated"
        assert client.delete(path).raise_for_status().json()["items"] == 1
