"""Behaviour that all pages share: rendering of text, errors, sizes, and status of threads."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from langgraph.graph import START, StateGraph
from langgraph.types import Command, Send

from perdure.checkpointers import open_checkpointer
from perdure.server.pages.rendering import HEADERS, render_text_with_hidden_characters_shown
from perdure.settings import Settings
from perdure.stores import open_store
from tests.server.graphs import run_asking_graph
from tests.talks import store_conversation

HTML = {"Accept": "text/html"}


@pytest.mark.parametrize(
    ("text", "expected_html"),
    [
        ("plain <b>", "plain &lt;b&gt;"),
        ("a\u202eb", 'a<i class="ctl">U+202E</i>b'),
        ("\x1b[2J", '<i class="ctl">U+001B</i>[2J'),
        ("two\nlines\t", "two\nlines\t"),
    ],
)
def test_stored_text_is_escaped_and_hidden_characters_are_shown(
    text: str, expected_html: str
) -> None:
    assert render_text_with_hidden_characters_shown(text) == f"<bdi>{expected_html}</bdi>"
    assert render_text_with_hidden_characters_shown(text, adds_bdi=False) == expected_html


def test_store_page_shows_sizes_with_units(client: httpx.Client) -> None:
    for n, length in enumerate((988, 1489, 2_499_989)):
        item = {"namespace": [f"n{n}"], "key": "k", "value": {"text": "x" * length}}
        client.put("/store/items", json=item).raise_for_status()
    page = client.get("/ui/store", headers=HTML).text

    for size in ("999 bytes", "1.5 kB", "2.5 MB"):
        assert f"1 item · {size}" in page


def test_pages_refuse_numbers_and_dates_out_of_range(
    client: httpx.Client, settings: Settings
) -> None:
    with open_checkpointer(settings.db) as saver:
        store_conversation(saver, "t", user_id="ann")
    client.post("/memories", json={"memory": "Ann likes tea.", "key": "k"})
    memory, large = "/ui/memory?ns=memories&ns=ann&key=k", 10**25
    for path in (
        f"/ui/checkpoints?id=t&before={large}",
        f"/ui/thread?id=t&before=1&order={large}",
        f"/ui/message?id=t&position={large}",
        f"{memory}&start={large}",
        f"/ui/prune?id=t&last={large}",
        "/ui/prune?id=t&days=nan",
        "/ui/threads?until=9999-12-31",
    ):
        assert client.get(path).status_code == 422, path
    for path, sent in ((memory, {"version": str(large)}), ("/ui/prune?id=t", {"days": "nan"})):
        assert client.post(path, data=sent).status_code == 422, path
    for digits in ("9" * 25, "9" * 5000):
        asked = client.post("/ui/compare?id=t", data={"a": digits, "b": "1"}, follow_redirects=True)
        assert asked.status_code == 404
    assert client.get(f"{memory}&start=50").status_code == 200  # there are fewer versions


def test_pages_show_question_that_waits_for_answer(
    client: httpx.Client, settings: Settings
) -> None:
    """The pages show the status of the thread, the question, and the node that runs next."""
    run_asking_graph(settings, "t")
    for path in ("/ui/thread?id=t", "/ui/checkpoints?id=t"):
        page = client.get(path, headers=HTML).text
        assert '<span class="tag">interrupted</span>' in page
        assert "Waits for an answer, at <b><bdi>part</bdi></b>: <bdi>Sure?</bdi>" in page
    listed = client.get("/ui/threads", headers=HTML).text
    [row] = client.get("/ui/threads.json").json()["threads"]
    head = client.get("/ui/checkpoints.json?id=t").json()["checkpoints"][0]["checkpoint_id"]
    checkpoint = client.get(f"/ui/checkpoint.json?id=t&checkpoint={head}").json()

    assert '<span class="tag">interrupted</span>' in listed
    assert (row["waits"], row["next"]) == ([{"node": "part", "text": "Sure?"}], ["part"])
    assert checkpoint["next"] == ["part"]


def test_pages_show_thread_of_failed_run_as_unfinished(
    client: httpx.Client, settings: Settings
) -> None:
    with open_checkpointer(settings.db) as saver:
        builder: Any = StateGraph(dict)
        builder.add_node("fails", lambda state: 1 / 0)
        builder.add_edge(START, "fails")
        with pytest.raises(ZeroDivisionError):
            builder.compile(checkpointer=saver).invoke({}, {"configurable": {"thread_id": "t"}})

    for path in ("/ui/thread?id=t", "/ui/threads"):
        assert (
            '<span class="tag">unfinished</span> <span class="quiet">next: <bdi>fails</bdi>'
            in client.get(path, headers=HTML).text
        )


def test_checkpoint_list_names_node_of_superstep_with_sends(
    client: httpx.Client, settings: Settings
) -> None:
    builder: Any = StateGraph(dict)
    builder.add_node("plan", lambda state: Command(goto=[Send("tools", n) for n in range(2)]))
    builder.add_node("tools", lambda n: None)
    builder.add_edge(START, "plan")
    with open_checkpointer(settings.db) as saver:
        config: Any = {"configurable": {"thread_id": "t"}}
        for _ in range(2):
            builder.compile(checkpointer=saver).invoke({"said": "hello"}, config)
    rows = client.get("/ui/checkpoints.json?id=t").json()["checkpoints"]

    turn = [["tools"], ["plan"], [], []]  # the newest first
    assert [row["ran"] for row in rows] == [*turn, *turn]


@pytest.mark.parametrize(
    "name", ["nonsense", "<b>nonsense</b>", "\u202enonsense", "compare/nonsense"]
)
def test_unknown_page_is_answered_by_html_page_without_request_text(
    client: httpx.Client, name: str
) -> None:
    """Clients that accept only JSON, and paths outside the pages, receive JSON instead."""
    for accept in ("text/html,*/*;q=0.8", "*/*"):
        shown = client.get(f"/ui/{name}", headers={"Accept": accept})
        assert (shown.status_code, "This page does not exist." in shown.text) == (404, True)
        assert "nonsense" not in shown.text
        assert shown.headers["content-security-policy"] == HEADERS["Content-Security-Policy"]
    for path, accept in (
        (f"/ui/{name}", "application/json"),
        (f"/ui/{name}.json", "text/html"),
        (f"/{name}", "text/html"),
        (f"/threads/{name}/history/nonsense", "text/html"),
    ):
        answer = client.get(path, headers={"Accept": accept})
        assert (answer.status_code, answer.json()) == (404, {"detail": "Not Found"}), path


def test_invalid_method_or_parameter_is_answered_by_html_page(client: httpx.Client) -> None:
    for path, status in (("/ui/rewind?id=t", 405), ("/ui/threads?start=-1", 422)):
        answer = client.get(path, headers={"Accept": "*/*"})
        assert (answer.status_code, "<h1>The request failed</h1>" in answer.text) == (status, True)
    assert client.get("/ui", follow_redirects=False).headers["location"] == "/ui/threads"


@pytest.mark.parametrize(
    "path",
    [
        "/ui/memories?ns=memories&ns=ann",
        "/ui/memories?ns=memories&ns=ann&q=bees&min_score=0&why=k",
        "/ui/memory?ns=memories&ns=ann&key=k",
        "/ui/store?ns=memories&ns=ann",
        "/ui/storage",
    ],
)
def test_viewing_page_does_not_refresh_time_to_live(
    client: httpx.Client, settings: Settings, path: str
) -> None:
    with open_store(settings.db) as store:
        item = {"text": "Ann keeps bees.", "kind": "fact"}
        store.put(("memories", "ann"), "k", item, index=["text"], ttl=60)
        before = store.get(("memories", "ann"), "k", refresh_ttl=False)

    client.get(path, headers=HTML).raise_for_status()

    with open_store(settings.db) as store:
        after = store.get(("memories", "ann"), "k", refresh_ttl=False)
    assert before is not None
    assert after is not None
    assert after.expires_at == before.expires_at


def test_store_pages_leave_out_notes_on_memories(client: httpx.Client, settings: Settings) -> None:
    """An admin sees notes on memories under their own namespace only."""
    with open_store(settings.db) as store:
        store.put(("notes",), "mine", {"text": "bees"})
        store.put(("perdure", "buried", "memories", "ann"), "tombstone", {"n": 1})

    for path in ("/ui/store", "/ui/store/items", "/ui/store.json", "/ui/store/items.json"):
        assert "buried" not in client.get(path, headers=HTML).text, path
    assert "mine" in client.get("/ui/store/items", headers=HTML).text
    assert "tombstone" in client.get("/ui/store/items?ns=perdure&ns=buried", headers=HTML).text
