"""`/memories?team=`, and the page of a person who wrote into the memory of a team."""

from __future__ import annotations

from typing import Any

import httpx

from tests.server.test_teams import (
    Office,
    find_secret_words,
    office,  # noqa: F401 - a fixture
)
from tests.server.test_tenants import dsn  # noqa: F401 - a fixture

MEMORY = "The spare key is in the box Magpie."


def test_members_can_list_search_add_change_and_forget_team_memories(office: Office) -> None:  # noqa: F811
    """Each memory stores as its author the member who last wrote the memory."""
    added = office.send("bob", "/memories?team=red", {"memory": MEMORY, "key": "spare"})
    listed = office.page("ann", "/memories", team="red")
    found = office.send("ann", "/memories/search?team=red", {"query": "key", "min_score": 0})
    changed = office.send("ann", "/memories/spare?team=red", {"memory": f"{MEMORY} Ask."}, "PATCH")
    [item] = [each for each in office.items("teams", "red") if each.key == "spare"]
    authors = [each["provenance"]["author"] for each in listed.json() if each["key"] == "spare"]
    own = office.page("ann", "/memories").text
    forgotten = office.send("bob", "/memories/spare?team=red", None, "DELETE")

    assert added.json()["change"] == "added"
    assert (find_secret_words(listed.text), find_secret_words(found.text)) == (
        ["Magpie", "Toad"],
        ["Magpie", "Toad"],
    )
    assert authors == ["bob"]
    assert (changed.status_code, item.provenance.author) == (200, "ann")
    assert find_secret_words(own) == ["Heron"]
    assert forgotten.json()["items"] == 1
    assert find_secret_words(office.page("ann", "/memories", team="red").text) == ["Toad"]


def test_non_members_are_refused_memories_of_team(office: Office) -> None:  # noqa: F811
    """An admin and a backend that acts for a member may read the memories."""
    asked: list[tuple[str, str, Any]] = [
        ("GET", "/memories", None),
        ("POST", "/memories/search", {"query": "tea"}),
        ("POST", "/memories", {"memory": MEMORY}),
        ("PATCH", "/memories/k", {"memory": MEMORY}),
        ("DELETE", "/memories/k", None),
    ]
    for team, user in (("blue", "bob"), ("red", "red"), ("teams", "teams"), ("ann", "ann")):
        replies = [
            office.send(user, f"{path}?team={team}", body, method) for method, path, body in asked
        ]
        assert [each.status_code for each in replies] == [403] * 5
    assert office.page("bob", "/memories", team="").status_code == 422
    headers = {"x-api-key": "desk", "x-perdure-user": "bob"}
    acting = httpx.get(f"{office.url}/memories?team=red", headers=headers, timeout=60)

    assert find_secret_words(acting.text) == ["Toad"]
    assert find_secret_words(office.page("root", "/memories", team="blue").text) == ["Newt"]
    assert len(office.items("teams")) == 3


def test_person_page_hands_over_team_memories_without_author(office: Office) -> None:  # noqa: F811
    """The button is shown to people who wrote for a team; the text stays without their name."""
    office.send("bob", "/memories?team=red", {"memory": MEMORY}).raise_for_status()
    pages = {user: office.page(user, "/ui/person").text for user in ("bob", "ann")}
    form = {"typed": "bob", "hand_over": "yes"}
    headers = {"x-api-key": "bob"}
    done = httpx.post(f"{office.url}/ui/person", data=form, headers=headers, timeout=60)
    [item] = [each for each in office.items("teams") if each.value["text"] == MEMORY]

    assert ["hand_over" in pages[user] for user in ("bob", "ann")] == [True, False]
    assert done.status_code == 200
    assert "items of teams without the name" in done.text
    assert item.provenance.author is None
    assert find_secret_words(office.page("bob", "/memories").text) == []
