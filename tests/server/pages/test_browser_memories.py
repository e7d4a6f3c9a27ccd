"""Pages of memories, items, the store, storage and jobs, as a browser shows them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import httpx
import pytest
from langchain_core.messages import HumanMessage
from playwright.sync_api import Page, expect
from starlette.requests import HTTPConnection

from perdure.checkpointers import SQLiteCheckpointer, open_checkpointer
from perdure.effects import run_operation
from perdure.memory import Collection, Extraction, Quarantine
from perdure.memory.thread_messages import read_watermark
from perdure.server import create_app
from perdure.server.http.access import Filter, Identity, LocalAccess
from perdure.server.pages import item_pages
from perdure.server.pages.item_pages import find_value_changes
from perdure.settings import Rules, Settings
from perdure.stores import Provenance, SQLiteStore, open_store
from tests.contracts.puts import put
from tests.server.running import run_server

ANN: Any = {"configurable": {"user_id": "ann"}}
HOSTILE = [
    "<script>alert(1)</script>\"><img src=x onerror=alert(2)> ' onfocus=alert(3) autofocus x='",
    "javascript:alert(4){{ 7 * 7 }} ${alert(5)} &lt;b&gt;../../a?b=1&c=2#d%00%2f",
    "pay \u202e0001\u202c \u2066to\u2069 \u200fann\u200b\x1b[2J\x1b]0;owned\x07\x9b31m",
    '</textarea></title><svg onload=alert(6)><div hx-get="/ok" hx-trigger="load">',
]


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """Settings of a new file, with rules of retention."""
    return Settings(db=str(tmp_path / "memory.db"), user="ann", retention=Rules(versions_last=0))


@pytest.fixture
def store(settings: Settings) -> Iterator[SQLiteStore]:
    """The store that the server shows."""
    with open_store(settings.db) as opened:
        yield opened  # type: ignore[misc]


@pytest.fixture
def saver(settings: Settings) -> Iterator[SQLiteCheckpointer]:
    """The checkpointer that the server shows."""
    with open_checkpointer(settings.db) as opened:
        yield opened  # type: ignore[misc]


@pytest.fixture
def ann(store: SQLiteStore) -> Collection:
    """Ann's memories of a drink (superseded once), of a move, and of an allergy."""
    memories = Collection(store, ("memories", "{user_id}"))
    said = Provenance(thread_id="trip", message_ids=("m1",), actor="user", trust="user")
    memories.insert("Ann drinks green tea", key="drink", provenance=said, config=ANN)
    memories.supersede("drink", "Ann drinks black coffee", config=ANN)
    memories.insert("Ann moved to Porto", key="move", config=ANN)
    memories.insert({"text": "Ann is allergic to nuts"}, key="nuts", config=ANN)
    return memories


def build_namespace_query(*ns: str, **more: str) -> str:
    """Build the query of a namespace, with other parameters such as a key."""
    return urlencode({"ns": ns, **more}, doseq=True)


# -- memories


@pytest.mark.usefixtures("ann")
def test_memory_search_page_explains_scores_of_results(tab: Page, client: httpx.Client) -> None:
    """Results are sorted by score, and the page explains the parts of each score in words."""
    tab.goto("/ui/memories")
    tab.get_by_label("Ask as the agent would").fill("what does ann drink")
    tab.get_by_role("button", name="Search").click()

    first = tab.locator(".memories > li").first
    expect(first).to_contain_text("Ann drinks black coffee")
    expect(first).to_contain_text("words in common")
    expect(tab.get_by_role("status")).to_contain_text("tokens in the prompt")
    found = client.get("/ui/memories.json?q=what+does+ann+drink").json()["found"]
    assert found[0]["key"] == "drink"
    assert sum(found[0]["parts"].values()) == pytest.approx(found[0]["score"], abs=0.01)


@pytest.mark.usefixtures("ann")
def test_memory_search_page_explains_why_memory_is_not_recalled(tab: Page) -> None:
    """The page shows the rank of a memory that is not among the results, and the reason."""
    tab.goto("/ui/memories?q=what+does+ann+drink&limit=1")
    tab.get_by_label("Why is a memory not recalled?").fill("move")
    tab.get_by_role("button", name="Explain").click()

    expect(tab.locator("#why-not")).to_contain_text(re.compile(r"Why move is at rank [23]"))
    expect(tab.locator("#why-not")).to_contain_text("of 3 items score higher")
    tab.goto(f"/ui/memory?{build_namespace_query('memories', 'ann', key='nuts')}")
    tab.get_by_label("How does this memory rank").fill("allergies")
    tab.get_by_role("button", name="Explain").click()
    expect(tab.locator("#why-not")).to_contain_text("Why nuts is at rank 1")


@pytest.mark.usefixtures("ann")
def test_memory_search_page_separates_results_below_minimum_score(
    tab: Page, client: httpx.Client
) -> None:
    """Results below the minimum score stand below a line; with the minimum 0 there is no line."""
    tab.goto("/ui/memories?q=coffee+from+volcanoes&min_score=0.01")
    tab.get_by_label("Minimum score").fill("1")
    tab.get_by_role("button", name="Search").click()

    line = tab.locator(".memories > li.floor")
    expect(line).to_contain_text("Below the minimum score 1.00")
    expect(line.locator("xpath=following-sibling::li[1]")).to_contain_text("black coffee")
    found = client.get("/ui/memories.json?q=coffee+from+volcanoes&min_score=1").json()
    assert (found["found"], len(found["below"])) == ([], 3)
    tab.get_by_label("Minimum score").fill("0")
    tab.get_by_role("button", name="Search").click()
    expect(tab.locator(".memories > li").first).to_contain_text("black coffee")
    expect(line).to_have_count(0)
    assert client.get("/ui/memories?q=coffee&min_score=high").status_code == 422


def test_memories_are_listed_newest_first_by_kind_and_time(
    client: httpx.Client, store: SQLiteStore, ann: Collection
) -> None:
    """Without a query, pages list memories newest first, optionally of one kind or a past time."""
    before = datetime.now(UTC).isoformat()
    for number in range(120):
        value = {"text": f"turn {number}", "kind": "turn"}
        store.put(("memories", "ann"), f"t{number:03}", value, index=False)

    pages = [client.get(f"/ui/memories.json?start={start}").json() for start in (0, 50, 100)]
    keys = [each["key"] for page in pages for each in page["found"]]
    assert keys == [*(f"t{n:03}" for n in reversed(range(120))), "nuts", "move", "drink"]
    assert [page["more"] for page in pages] == [True, True, False]
    facts = client.get("/ui/memories.json?kind=fact").json()["found"]
    assert [each["key"] for each in facts] == ["nuts", "move", "drink"]
    past = client.get("/ui/memories.json", params={"as_of": before}).json()["found"]
    assert [each["key"] for each in past] == ["nuts", "move", "drink"]
    assert ann.search("tea", as_of=datetime.fromisoformat(before), config=ANN)
    params = {"as_of": before, "q": "coffee", "min_score": "0"}
    assert len(client.get("/ui/memories.json", params=params).json()["found"]) == 3
    assert client.get("/ui/memories?as_of=soon").status_code == 422


def test_admin_chooses_user_whose_memories_are_shown(
    tab: Page, client: httpx.Client, store: SQLiteStore
) -> None:
    """Searches keep the chosen user. If there are many users, the admin types the name."""
    tab.goto("/ui/memories")
    expect(tab.get_by_label("User")).to_have_count(0)  # there is no choice
    bobs = Collection(store, ("memories", "{user_id}"))
    bobs.insert("Bob drinks cocoa", key="cocoa", config={"configurable": {"user_id": "bob & co"}})
    store.put(("memories", "\u202eeve"), "k", {"text": "of Eve"})
    tab.reload()
    tab.get_by_label("User").select_option("bob & co")
    tab.get_by_role("button", name="Search").click()
    expect(tab.locator("h1")).to_have_text("Memories of bob & co")
    expect(tab.locator(".memories > li")).to_contain_text("Bob drinks cocoa")
    tab.get_by_label("Ask as the agent would").fill("cocoa")
    tab.get_by_role("button", name="Search").click()
    expect(tab.locator(".memories > li")).to_contain_text("words in common")
    expect(tab.get_by_label("User")).to_have_value("bob & co")
    tab.get_by_role("link", name="Quarantine").click()
    expect(tab.locator("h1")).to_have_text("Quarantine of bob & co")

    assert client.get("/ui/memories.json?user=bob+%26+co").json()["users"] == ["ann", "bob & co"]
    deeper = client.get(f"/ui/memories?{build_namespace_query('memories', 'ann', 'trips')}").text
    assert "<select" not in deeper
    for number in range(500):
        store.put(("memories", f"user {number}"), "k", {"text": "any"}, index=False)
    tab.goto("/ui/memories")
    tab.get_by_label("User").fill("user 7")
    tab.get_by_role("button", name="Search").click()
    expect(tab.locator(".memories > li")).to_contain_text("any")


@pytest.mark.usefixtures("ann")
def test_memory_page_shows_differences_between_versions(tab: Page, client: httpx.Client) -> None:
    """Each version shows its changes, and links to the message that it is based on."""
    tab.goto(f"/ui/memory?{build_namespace_query('memories', 'ann', key='drink')}")

    newest = tab.locator(".versions > li").first
    assert newest.locator("del").all_inner_texts() == ["green", "tea"]
    assert newest.locator("ins").all_inner_texts() == ["black", "coffee"]
    link = tab.locator(".versions > li").last.get_by_role("link")
    expect(link).to_have_attribute("href", "/ui/thread?id=trip&message=m1")
    versions = client.get(
        f"/ui/memory.json?{build_namespace_query('memories', 'ann', key='drink')}"
    ).json()
    at = versions["versions"][1]["valid_from"]
    tab.goto(f"/ui/memory?{build_namespace_query('memories', 'ann', key='drink', as_of=at)}")
    expect(tab.locator(".text.large")).to_have_text("Ann drinks green tea")
    assert (
        client.get(f"/ui/memory?{build_namespace_query('memories', 'ann', key='none')}").status_code
        == 404
    )


def test_memory_page_corrects_and_supersedes_memory(tab: Page, ann: Collection) -> None:
    """A version that was saved after the page was opened is not overwritten."""
    path = f"/ui/memory?{build_namespace_query('memories', 'ann', key='move')}"
    tab.goto(path)
    tab.get_by_label("Text").fill("Ann moved to Lisbon")
    tab.get_by_role("button", name="Correct").click()
    expect(tab.get_by_role("status")).to_have_text("Corrected.")
    tab.get_by_label("Text").fill("Ann moved to Rome")
    tab.get_by_role("button", name="Supersede").click()
    expect(tab.get_by_role("status")).to_have_text("Superseded by the new text.")
    memory = ann.get("move", config=ANN)
    assert memory is not None
    assert [(p.text, p.change) for p in memory.previous] == [
        ("Ann moved to Lisbon", "superseded"),
        ("Ann moved to Porto", "updated"),
    ]

    ann.update("move", "Ann moved to Oslo", config=ANN)
    reply = tab.request.post(path, form={"text": "Ann moved to Paris", "version": 3})
    assert (reply.status, "saved as version 4 while you" in reply.text()) == (409, True)
    assert "Ann moved to Paris" in reply.text()


def test_memory_page_shows_refused_text_with_reason(client: httpx.Client, ann: Collection) -> None:
    """The page shows the typed text again with the reason for the refusal."""
    text = "the password is hunter2hunter2 and the key sk-live-51Habcdefghijklmnop0123456789"
    reply = client.post(
        f"/ui/memory?{build_namespace_query('memories', 'ann', key='move')}",
        data={"text": text, "version": "1"},
    )

    assert reply.status_code == 422
    assert "quarantined" in reply.text
    assert text in reply.text
    memory = ann.get("move", config=ANN)
    assert memory is not None
    assert memory.text == "Ann moved to Porto"


def test_forget_page_erases_memory_and_shows_receipt(tab: Page, ann: Collection) -> None:
    """A preview shows what will be erased; the receipt counts it and lists hashes."""
    tab.goto(f"/ui/memory?{build_namespace_query('memories', 'ann', key='drink')}")
    tab.get_by_role("link", name="Forget…").click()
    expect(tab.locator("main")).to_contain_text("Ann drinks black coffee")
    assert ann.get("drink", config=ANN) is not None
    tab.get_by_role("button", name="Erase permanently").click()

    expect(tab.get_by_role("heading", level=1)).to_contain_text("Erased: drink")
    expect(tab.get_by_role("status")).to_contain_text("hashes of erased data")
    expect(tab.locator("dl").first).to_contain_text("Items")
    assert ann.history("drink", config=ANN) == []


def test_forget_all_page_erases_memories_after_typed_confirmation(
    tab: Page, ann: Collection
) -> None:
    """The profile of the user is erased too. Data of other users stay."""
    store: Any = ann.store
    store.put(("profiles", "ann"), "profile", {"name": "Ann"})
    store.put(("memories", "bob"), "k", {"text": "of Bob"})
    wrong = tab.request.post("/ui/forget-all", form={"typed": "forget something"})
    assert (wrong.status, "nothing was erased" in wrong.text()) == (422, True)
    tab.goto("/ui/memories")
    tab.get_by_role("link", name="Forget everything…").click()
    tab.get_by_label("Type").fill("forget everything")
    tab.get_by_role("button", name="Forget everything").click()

    expect(tab.get_by_role("heading", level=1)).to_have_text("Erased")
    assert store.list_namespaces() == [("memories", "bob")]


def test_quarantine_page_releases_and_discards_entries(tab: Page, ann: Collection) -> None:
    """An entry is shown redacted at first, and in full on request."""
    for number, secret in enumerate(("hunter2hunter2", "correcthorsebattery")):
        ann.insert(f"My password is {secret}", key=f"s{number}", config=ANN)
    held = Quarantine(ann.store)
    assert len(held.list(ANN)) == 2
    tab.goto("/ui/memories")
    tab.get_by_role("link", name="Quarantine").click()

    assert "hunter2" not in tab.content()
    tab.get_by_role("link", name="Show the original text").last.click()
    expect(tab.locator(".memories > li").last).to_contain_text("hunter2hunter2")
    tab.get_by_role("button", name="Release").last.click()
    expect(tab.locator(".text.large")).to_have_text("My password is hunter2hunter2")
    tab.goto("/ui/quarantine")
    tab.get_by_role("button", name="Erase permanently").click()
    expect(tab.locator(".memories")).to_have_text("The quarantine is empty.")
    assert ann.get("s0", config=ANN) is not None
    assert ann.get("s1", config=ANN) is None


# -- the store


def test_store_page_edits_item_and_refuses_to_overwrite_newer_version(
    tab: Page, store: SQLiteStore
) -> None:
    """The page shows the version that was saved after it was opened."""
    store.put(("notes",), "plan", {"steps": [1, 2], "title": "Plan"}, ttl=60)
    tab.goto(f"/ui/memory?{build_namespace_query('notes', key='plan')}")
    tab.get_by_label("Value").fill('{"steps": [1, 3], "title": "Plan"}')
    tab.get_by_role("button", name="Save").click()
    expect(tab.get_by_role("status")).to_have_text("Saved.")
    item = store.get(("notes",), "plan")
    assert item is not None
    assert (item.value["steps"], item.version) == ([1, 3], 2)
    assert item.expires_at is not None
    assert item.expires_at - item.valid_from < timedelta(minutes=60)

    store.put(("notes",), "plan", {"title": "Another"})
    tab.get_by_label("Value").fill('{"title": "Mine"}')
    html = tab.request.post(
        f"/ui/memory?{build_namespace_query('notes', key='plan')}",
        form={"value": '{"title": "Mine"}', "version": 2},
    )
    assert html.status == 409
    assert "saved as version 3 while you were editing" in html.text()
    assert "&#34;Mine&#34;" in html.text()
    wrong = tab.request.post(
        f"/ui/memory?{build_namespace_query('notes', key='plan')}",
        form={"value": "{", "version": 3},
    )
    assert (wrong.status, "is not valid JSON" in wrong.text()) == (422, True)
    last = store.get(("notes",), "plan")
    assert last is not None
    assert last.value == {"title": "Another"}


def test_store_pages_add_filter_and_delete_items(tab: Page, store: SQLiteStore) -> None:
    """The page of a namespace filters its items, and adds, deletes and erases an item."""
    store.put(("notes", "team"), "old", {"n": 1})
    tab.goto(f"/ui/store/items?{build_namespace_query('notes')}")
    tab.get_by_text("Add an item").click()
    tab.get_by_label("Key").fill("new")
    tab.locator("textarea").fill('{"n": 2}')
    tab.get_by_role("button", name="Add").click()
    expect(tab.get_by_role("status")).to_have_text("Saved.")
    filtered = build_namespace_query("notes", filter='{"n": {"$gte": 2}}')
    tab.goto(f"/ui/store/items?{filtered}")
    assert tab.locator("tbody tr").count() == 1
    wrong = tab.request.get(f"/ui/store/items?{build_namespace_query('notes', filter='{}x')}")
    assert (wrong.status, "is not valid JSON" in wrong.text()) == (422, True)
    unknown = build_namespace_query("notes", filter='{"n": {"$many": 2}}')
    assert "$many" in tab.request.get(f"/ui/store/items?{unknown}").text()


def test_store_page_marks_deleted_item_and_keeps_versions(
    client: httpx.Client, store: SQLiteStore
) -> None:
    """The versions stay until the item is erased. Internal notes of perdure are read-only."""
    where = ("notes",)
    store.put(where, "k", {"n": 1})
    path = build_namespace_query("notes", key="k")
    store.delete(where, "k")
    assert "deleted or expired" in client.get(f"/ui/memory?{path}").text
    assert "1" in client.post(f"/ui/forget?{path}").text
    assert store.history(where, "k") == []
    store.put(("perdure", "server", "threads"), "k", {"n": 1})
    path = build_namespace_query("perdure", "server", "threads", key="k")
    assert client.post(f"/ui/forget?{path}").status_code == 403
    assert store.get(("perdure", "server", "threads"), "k") is not None


@pytest.mark.usefixtures("ann")
def test_store_page_shows_namespaces_as_tree_with_counts(
    tab: Page, client: httpx.Client, store: SQLiteStore
) -> None:
    """Each namespace shows counts and sizes, and loads its children when it is opened."""
    for labels in (("notes", "team", "a"), ("notes", "team", "b"), ("notes",), ("*", "x")):
        store.put(labels, "k", {"n": 1})
    tab.goto("/ui/store")
    notes = tab.locator(".spaces > li", has_text="notes")
    expect(notes).to_contain_text("3 items")
    notes.locator("summary").first.click()
    team = notes.locator(".spaces > li", has_text="team")
    expect(team).to_contain_text("2 items · 14 bytes · 2 namespaces")

    team.locator("summary").first.press("Enter")
    expect(team.locator(".spaces .name")).to_have_text(["a", "b"])
    rows = client.get(f"/ui/store.json?{build_namespace_query('memories')}").json()["rows"]
    assert [(row["size"]["namespace"], row["has_more"]) for row in rows] == [
        (["memories", "ann"], False)
    ]
    rows = client.get(f"/ui/store.json?{build_namespace_query('*')}").json()["rows"]
    assert [row["size"]["namespace"] for row in rows] == [["*", "x"]]


# -- storage and jobs


def test_retention_page_removes_versions_after_typed_confirmation(
    tab: Page, ann: Collection
) -> None:
    """The page lists sizes and a preview of what the rules would remove."""
    tab.goto("/ui/storage")
    expect(tab.locator("main")).to_contain_text("memories/ann")
    expect(tab.locator(".growth")).to_contain_text(f"{datetime.now(UTC):%Y-%m}")
    tab.get_by_role("link", name="Retention").click()
    expect(tab.locator("main")).to_contain_text("versions_last")
    row = tab.locator("tr", has_text="old versions")
    expect(row.locator("td").nth(1)).not_to_have_text("0")
    assert len(ann.history("drink", config=ANN)) == 2
    tab.get_by_label("Type").fill("remove")
    tab.get_by_role("button", name="Remove permanently").click()

    expect(tab.get_by_role("status")).to_have_text("Removed.")
    assert len(ann.history("drink", config=ANN)) == 1


def test_jobs_page_lists_failed_extraction_and_queues_it_again(
    tab: Page, store: SQLiteStore, saver: SQLiteCheckpointer
) -> None:
    """A thread whose extraction failed for good is listed with the reason."""
    known = {"user_id": "ann"}
    put(saver, {"messages": [HumanMessage("hi", id="m1")]}, thread="t1", metadata=known)
    extraction = Extraction(saver, store)
    adapter, name = extraction.get_adapter(), extraction.extractor.name
    [head] = saver.checkpoints("t1")
    mark = run_operation(read_watermark(adapter, ("memories", "ann"), "t1", name))
    mark = mark.with_failure("the model is gone", datetime.now(UTC), head.checkpoint_id, final=True)
    run_operation(adapter.write([mark.build_put(("memories", "ann"), "t1")]))
    tab.goto("/ui/jobs")

    expect(tab.locator("tbody tr")).to_contain_text("dead")
    expect(tab.locator("tbody tr")).to_contain_text("1 attempt: the model is gone")
    tab.get_by_role("button", name="Try again").click()
    expect(tab.get_by_role("status")).to_contain_text("t1 is queued")


# -- on every page


class Stranger(LocalAccess):
    """Access of a user without special permissions."""

    async def identify(self, connection: HTTPConnection) -> Identity:
        """Identify everybody as Eve, who is no admin."""
        return Identity("eve")

    async def authorize_and_build_filter(
        self, identity: Identity, action: Any, value: dict[str, Any]
    ) -> Filter:
        """Allow everything."""
        return {}


@pytest.mark.usefixtures("ann")
def test_memory_pages_refuse_memories_of_other_users(settings: Settings) -> None:
    """The user comes from the identity, and pages about all users are for admins only."""
    other = build_namespace_query("memories", "ann", key="drink")
    with (
        run_server(create_app(settings, access=Stranger("eve"))) as url,
        httpx.Client(base_url=url) as client,
    ):
        own = client.get("/ui/memories.json").json()
        assert (own["found"], own["users"]) == ([], [])
        assert client.get("/ui/memories.json?user=eve").json() == own
        for path in ("memories", "quarantine", "forget-all"):
            assert client.get(f"/ui/{path}?{other}").status_code == 403
            assert client.get(f"/ui/{path}?user=ann").status_code == 403
            assert client.get(f"/ui/{path}?within={other}").status_code in (403, 200)
        for path in ("quarantine/release", "quarantine/discard", "forget-all"):
            data = {"typed": "forget everything"}
            assert client.post(f"/ui/{path}?{other}", data=data).status_code == 403
        for path in ("jobs", "storage", "storage/retention"):
            assert client.get(f"/ui/{path}").status_code == 403
        for path in ("jobs?thread=t", "storage/retention"):
            assert client.post(f"/ui/{path}", data={"typed": "remove"}).status_code == 403


class Prefixing(Stranger):
    """Access that prefixes namespaces with the user, as a handler of langgraph's guide does."""

    async def authorize_and_build_filter(
        self, identity: Identity, action: Any, value: dict[str, Any]
    ) -> Filter:
        """Put the user's name before the namespace."""
        value["namespace"] = (identity.user, *value["namespace"])
        return {}


@pytest.mark.usefixtures("ann")
def test_store_pages_follow_namespaces_rewritten_by_access(
    settings: Settings, store: SQLiteStore
) -> None:
    """Links of pages lead only to namespaces that the access permits."""
    store.put(("eve", "notes"), "k", {"n": 1})
    with (
        run_server(create_app(settings, access=Prefixing("eve"))) as url,
        httpx.Client(base_url=url) as client,
    ):
        names = [
            row["size"]["namespace"]
            for path in ("store", f"store?{build_namespace_query('eve')}")
            for row in client.get(f"/ui/{path}", headers={"accept": "application/json"}).json()[
                "rows"
            ]
        ]
        assert names == [["eve"], ["eve", "notes"]]
        for ns in (("eve", "notes"), ("notes",)):
            listed = client.get(f"/ui/store/items.json?{build_namespace_query(*ns)}").json()[
                "items"
            ]
            assert [(item["namespace"], item["key"]) for item in listed] == [
                (["eve", "notes"], "k")
            ]
            assert (
                client.get(f"/ui/memory?{build_namespace_query(*ns, key='k')}").status_code == 200
            )
        assert (
            client.get(
                f"/ui/memory?{build_namespace_query('memories', 'ann', key='nuts')}"
            ).status_code
            == 404
        )
        assert (
            client.get(f"/ui/store/items.json?{build_namespace_query('memories')}").json()["items"]
            == []
        )


@pytest.fixture
def hostile(store: SQLiteStore, saver: SQLiteCheckpointer) -> list[str]:
    """The paths of all pages, each of which shows hostile text."""
    paths = ["/ui/store", "/ui/storage", "/ui/storage/retention", "/ui/jobs", "/ui/memories"]
    ann = Collection(store, ("memories", "{user_id}"))
    for number, text in enumerate(HOSTILE):
        label = text[:90]
        said = Provenance(
            thread_id=label, checkpoint_id=label, message_ids=(label,), actor=label, trust=label
        )
        ann.insert(f"likes {text}", key=label, provenance=said, config=ANN)
        ann.update(label, f"likes not {text} {number}", provenance=said, config=ANN)
        ann.insert(f"password is {text} hunter2hunter2", key=f"s{number}", config=ANN)
        store.put(("notes", label, label), label, {label: {text: [text]}}, provenance=said)
        store.put(("notes", label, label), label, {label: {text: [text, text]}})
        put(saver, {"messages": [HumanMessage(text, id="m")]}, thread=label)
        of_memory, of_item = (
            urlencode({"ns": ns, "key": label}, doseq=True)
            for ns in (("memories", "ann"), ("notes", label, label))
        )
        for of in (of_memory, of_item):
            paths += [f"/ui/memory?{of}", f"/ui/forget?{of}"]
        paths += [f"/ui/store?{of_item}", f"/ui/store/items?{of_item}"]
        paths += [f"/ui/{name}?{of_item}" for name in ("memories", "quarantine", "forget-all")]
        paths.append("/ui/memories?" + urlencode({"q": f"likes {text}", "why": label}))
        paths.append("/ui/store/items?" + urlencode({"ns": "notes", "q": text, "filter": "{}"}))
    for entry in Quarantine(store).list(ANN):
        paths.append("/ui/quarantine?" + urlencode({"key": entry.key}))
    return paths


def test_memory_pages_show_hostile_text_without_running_it(
    tab: Page, client: httpx.Client, hostile: list[str]
) -> None:
    """No page runs hostile text or contains it as markup, and long texts fit a phone screen."""
    kinds: dict[str, str] = {}
    for path in hostile:
        kinds[path.partition("?")[0]] = path
        html = client.get(path)
        assert html.status_code == 200, (path, html.text[:300])
        assert not re.search(
            "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b\u200e\u200f\u202a-\u202e\u2066-\u2069]", html.text
        ), path
        assert not re.search(r"<script>|<(img|svg|div)[^>]*\son\w+=", html.text), path
        assert not re.search(r'(href|src|action)="?\s*javascript:', html.text), path
    tab.set_viewport_size({"width": 390, "height": 800})
    for path in kinds.values():
        tab.goto(path)
        for summary in tab.locator("details > summary").all()[:8]:
            summary.click()
        assert tab.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0, path
    tab.goto(f"/ui/memory?{build_namespace_query('memories', 'ann', key=HOSTILE[2])}")
    expect(tab.locator(".text.large")).to_contain_text("U+202E0001U+202C")


@pytest.mark.usefixtures("ann")
def test_memory_pages_can_be_used_by_keyboard(tab: Page) -> None:
    """Tab and Enter lead from the search to a memory and its form."""
    tab.goto("/ui/memories")
    tab.keyboard.type("coffee")
    tab.keyboard.press("Enter")
    expect(tab.get_by_role("status")).to_contain_text("1 memory, ")
    for _ in range(30):
        tab.keyboard.press("Tab")
        if tab.evaluate("document.activeElement.matches('.memories a.text')"):
            break
    assert tab.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    tab.keyboard.press("Enter")
    expect(tab.locator(".text.large")).to_have_text("Ann drinks black coffee")


@pytest.mark.parametrize(
    ("before", "after", "parts"),
    [
        ({"a": 1}, {"a": 1}, []),
        ({"a": {"b": 1}}, {"a": {"b": 2}}, [("a.b", (("removed", "1"), ("added", "2")))]),
        ({"a": []}, {}, [("a", (("removed", "[]"),))]),
        (
            {"a": [1, 2]},
            {"a": [1, 3, 2]},
            [("a", (("same", "[1, "), ("added", "3, "), ("same", "2]")))],
        ),
        ({}, {"a": None}, [("a", (("added", "null"),))]),
        (
            {"t": "b " * 3_000},
            {"t": "c"},
            [("t", (("removed", "b " * 1_000 + "… (6,000 characters)"), ("added", "c")))],
        ),
        (
            {"t": "b" * 25_000},
            {"t": "b" * 25_001},
            [
                (
                    "t",
                    (
                        ("removed", "b" * 2_000 + "… (25,000 characters)"),
                        ("added", "b" * 2_000 + "… (25,001 characters)"),
                    ),
                )
            ],
        ),
    ],
)
def test_version_diff_compares_values_path_by_path(
    before: dict[str, Any], after: dict[str, Any], parts: list[Any]
) -> None:
    """Long texts are not compared word by word."""
    assert [(change.path, change.parts) for change in find_value_changes(before, after)] == parts


def test_versions_page_limits_number_of_text_comparisons(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page may request up to 2,000 comparisons of texts."""
    compared: list[int] = []

    class Counting(SequenceMatcher[str]):
        # without autojunk=False, with which common words take up to a minute
        def __init__(self, junk: None, one: list[str], other: list[str]) -> None:
            compared.append(len(one) + len(other))
            super().__init__(junk, one, other)

    monkeypatch.setattr(item_pages, "SequenceMatcher", Counting)
    for text in ("." * 1000 + "," * 990, "," * 1000 + "." * 990):
        value = {f"field {number}": text for number in range(100)}
        item = {"namespace": ["memories", "ann"], "key": "k", "value": value}
        assert client.put("/store/items", json=item).status_code == 204
    shown = client.get("/ui/memory.json", params={"ns": ["memories", "ann"], "key": "k"}).json()

    assert 0 < sum(compared) <= 10_000
    assert [len(each["parts"]) for each in shown["versions"][0]["changes"]] == [2] * 100
