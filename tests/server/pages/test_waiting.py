"""The page of waiting questions, its count in the navigation, and filters of the thread list."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from langgraph_sdk import get_sync_client
from langgraph_sdk.client import SyncLangGraphClient
from playwright.sync_api import Browser, Page, expect

from perdure.server import create_app
from perdure.server.graphs import Graphs
from perdure.server.http.access import ADMIN_PERMISSION
from perdure.server.http.auth_file import AuthFileAccess
from perdure.server.http.keys import KeysFileAccess
from perdure.settings import Settings
from tests.server.http.test_auth_file import write_auth_file
from tests.server.http.test_keys import ANN, BOB, ROOT, render_key_entry
from tests.server.pages.test_pages import HTML
from tests.server.running import run_server, wait_until
from tests.server.talking import (
    build_asking_graph,
    build_failing_graph,
    build_graph_asking_twice,
    build_input,
    build_reviewed_agent,
)

LETTER = ("send", {"to": "bob", "text": "hi"})


@pytest.fixture
def graphs() -> Graphs | None:
    return Graphs(
        {
            "ask": build_asking_graph(),
            "twice": build_graph_asking_twice(),
            "mail": build_reviewed_agent(LETTER),
            "failing": build_failing_graph(),
        }
    )


def ask(sdk: SyncLangGraphClient, thread_id: str, graph: str) -> None:
    """Run a graph in a thread until it asks."""
    sdk.threads.create(thread_id=thread_id, if_exists="do_nothing")
    sdk.runs.wait(thread_id, graph, input=build_input("go"))


def list_waiting(client: httpx.Client) -> list[tuple[str, list[Any]]]:
    """Return the thread and the values of the questions of each row."""
    rows = client.get("/ui/waiting.json").raise_for_status().json()["threads"]
    return [
        (row["thread_id"], [question["value"] for question in row["questions"]]) for row in rows
    ]


def test_waiting_page_lists_questions_oldest_first(
    client: httpx.Client, sdk: SyncLangGraphClient
) -> None:
    """The navigation has the number of questions. Threads without a question are left out."""
    assert "No question waits for an answer." in client.get("/ui/waiting", headers=HTML).text
    for thread_id, graph in (("second", "twice"), ("first", "ask")):
        ask(sdk, thread_id, graph)
    sdk.runs.wait("t", "failing", input=build_input("go"), raise_error=False)

    assert list_waiting(client) == [
        ("second", ["Ann, are you sure?", "Bob, are you sure?"]),
        ("first", ["Are you sure?"]),
    ]
    for path in ("/ui/waiting", "/ui/threads", "/ui/storage"):
        assert '<span class="count">(3)</span>' in client.get(path, headers=HTML).text, path


def test_question_is_answered_on_waiting_page_without_scripts(
    client: httpx.Client, sdk: SyncLangGraphClient
) -> None:
    ask(sdk, "t", "mail")
    page = client.get("/ui/waiting", headers=HTML).text
    [row] = client.get("/ui/waiting.json").json()["threads"]
    form = {
        "of": row["questions"][0]["id"],
        "assistant": "mail",
        "args-0": json.dumps({"to": "eve", "text": "hi"}),
        "decision-0": "edit",
    }
    refused = client.post(
        "/ui/answer?id=t&listed=yes", data=form | {"decision-0": "approve"}, headers=HTML
    )
    sent = client.post("/ui/answer?id=t&listed=yes", data=form, headers=HTML)
    wait_until(lambda: sdk.threads.get("t")["status"] == "idle")
    answered = client.get(sent.headers["location"], headers=HTML).text

    assert "eve" not in page
    for text in ("send", "Approve", "Send as edited", "Reject", "Respond", "graph: "):
        assert text in page
    assert (refused.status_code, "choose &#39;edit&#39;" in refused.text) == (422, True)
    assert (sent.status_code, sent.headers["location"]) == (303, "/ui/waiting?answered=t")
    assert "The answer was sent." in answered
    assert list_waiting(client) == []
    messages: Any = sdk.threads.get_state("t")["values"]
    assert "sent hi to eve" in str(messages["messages"])


def test_waiting_page_keeps_refused_answer_in_form(
    browser: Browser, url: str, sdk: SyncLangGraphClient
) -> None:
    ask(sdk, "t", "mail")
    tab, problems = browser.new_page(base_url=url), list[str]()
    tab.on("pageerror", lambda error: problems.append(str(error)))
    tab.goto("/ui/waiting")
    tab.get_by_label("Arguments, JSON").fill('{"to": "eve"')
    tab.get_by_role("button", name="Send as edited").click()

    expect(tab.get_by_role("alert")).to_contain_text("is not valid JSON")
    assert tab.get_by_label("Arguments, JSON").input_value() == '{"to": "eve"'
    assert sdk.threads.get("t")["status"] == "interrupted"
    assert problems == []
    tab.close()


def test_waiting_page_sends_answers_in_place(tab: Page, sdk: SyncLangGraphClient) -> None:
    """The answered question is replaced by a message, and the focus moves to the next question."""
    ask(sdk, "letter", "mail")
    ask(sdk, "other", "ask")
    tab.goto("/ui/waiting")
    letter, other = (
        tab.get_by_role("group", name=f"Waits for an answer, at {node}")
        for node in ("HumanInTheLoopMiddleware", "hear")
    )
    letter.get_by_label("Arguments, JSON").fill('{"to": "eve", "text": "hi"}')
    letter.get_by_role("button", name="Send as edited").click()
    expect(letter.get_by_role("status")).to_have_text("Sent: Send as edited. The run continues.")
    expect(other.get_by_label("Answer", exact=True)).to_be_focused()
    expect(tab.get_by_role("link", name="Waiting")).to_have_text("Waiting (1)")

    other.get_by_label("Answer", exact=True).fill("yes")
    other.get_by_role("button", name="Answer with this text").click()
    expect(tab.get_by_role("link", name="Waiting")).to_have_text("Waiting ")
    wait_until(lambda: sdk.threads.get("other")["status"] == "idle")
    tab.reload()
    expect(tab.get_by_text("No question waits for an answer.")).to_be_visible()


@contextmanager
def serve_to_users(settings: Settings, folder: Path, graphs: Graphs | None) -> Iterator[str]:
    """Serve the database to Ann, Bob and an admin, who have keys."""
    keys = folder / "keys.toml"
    admin = f'permissions = ["{ADMIN_PERMISSION}"]'
    entries = [render_key_entry(ANN, "ann"), render_key_entry(BOB, "bob")]
    keys.write_text("".join([*entries, render_key_entry(ROOT, "root", admin)]))
    with run_server(create_app(settings, access=KeysFileAccess(keys), graphs=graphs)) as url:
        yield url


def test_person_sees_only_own_questions_threads_and_sections(
    settings: Settings, graphs: Graphs | None, tmp_path: Path
) -> None:
    """An admin sees the questions and threads of all users, and may list those of one user."""
    with serve_to_users(settings, tmp_path, graphs) as url:
        for key, thread_id in ((ANN, "of-ann"), (BOB, "of-bob")):
            with get_sync_client(url=url, api_key=key) as sdk:
                ask(sdk, thread_id, "ask")
        seen = {}
        for key in (ANN, BOB, ROOT):
            with httpx.Client(base_url=url, headers={"x-api-key": key}) as client:
                page = client.get("/ui/threads", headers=HTML).text
                filtered = client.get("/ui/threads.json", params={"user": "ann"})
                seen[key] = (
                    [thread_id for thread_id, _ in list_waiting(client)],
                    [row["thread_id"] for row in filtered.json().get("threads", ())],
                    "/ui/storage" in page,
                )
                if key == BOB:
                    assert filtered.status_code == 403
                    assert "not allowed to list the threads of 'ann'" in filtered.json()["detail"]

    assert seen == {
        ANN: (["of-ann"], ["of-ann"], False),
        BOB: (["of-bob"], [], False),
        ROOT: (["of-ann", "of-bob"], ["of-ann"], True),
    }


READERS = """
from langgraph_sdk import Auth

auth = Auth()

@auth.authenticate
async def user(headers): return headers.get(b"x-api-key", b"nobody").decode()

@auth.on.threads
async def read_threads(ctx, value): return True

@auth.on.threads.create_run
async def run(ctx, value): return ctx.user.identity == "ann"

@auth.on.store
async def fail(ctx, value): raise LookupError("canary")
"""


def test_reader_sees_question_without_form_and_no_section_that_fails(
    settings: Settings, graphs: Graphs | None, tmp_path: Path
) -> None:
    """A handler that fails hides the sections that it guards, and no other page."""
    access = AuthFileAccess(write_auth_file(tmp_path, READERS))
    with run_server(create_app(settings, access=access, graphs=graphs)) as url:
        with get_sync_client(url=url, api_key="ann") as sdk:
            ask(sdk, "t", "ask")
        pages = {
            user: httpx.get(f"{url}/ui/waiting", headers=HTML | {"x-api-key": user}).text
            for user in ("ann", "guest")
        }

    assert 'action="/ui/answer?id=t&amp;listed=yes"' in pages["ann"]
    assert "/ui/answer" not in pages["guest"]
    assert "You may read this question, but you may not answer it." in pages["guest"]
    for page in pages.values():
        assert 'href="/ui/threads"' in page
        assert not any(path in page for path in ("/ui/store", "/ui/memories", "/ui/storage"))


def test_thread_list_filters_by_status_and_counts_threads(
    client: httpx.Client, sdk: SyncLangGraphClient
) -> None:
    ask(sdk, "asks", "ask")
    sdk.runs.wait("t", "failing", input=build_input("go"), raise_error=False)
    listed = {
        status: [
            row["thread_id"]
            for row in client.get("/ui/threads.json", params={"status": status}).json()["threads"]
        ]
        for status in ("", "idle", "busy", "interrupted", "error")
    }
    page = client.get("/ui/threads", headers=HTML).text
    filtered = client.get("/ui/threads?status=error", headers=HTML).text

    assert listed == {
        "": ["t", "asks"],
        "idle": [],
        "busy": [],
        "interrupted": ["asks"],
        "error": ["t"],
    }
    assert "2 threads." in page
    assert "1 thread matches." in filtered
    assert client.get("/ui/threads?status=lost").status_code == 422


def test_thread_list_counts_threads_of_all_pages(client: httpx.Client) -> None:
    for number in range(52):
        client.post("/threads", json={"thread_id": f"t{number}", "metadata": {"topic": "x"}})
    exact = client.get("/ui/threads", headers=HTML).text
    searched = client.get("/ui/threads?meta=topic%3Dx&start=50", headers=HTML).text

    assert "52 threads; 1 to 50 are shown." in exact
    assert "52 threads match; 51 to 52 are shown." in searched
