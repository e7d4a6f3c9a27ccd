"""To talk to a graph in a browser: its questions are answered, it is written to and stopped."""

from __future__ import annotations

import dataclasses
import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from langgraph.graph import START, MessagesState, StateGraph
from langgraph_sdk import get_sync_client
from langgraph_sdk.client import SyncLangGraphClient
from playwright.sync_api import Browser, Page, expect

from perdure.server import create_app
from perdure.server.graphs import Graphs
from perdure.server.http.auth_file import AuthFileAccess
from perdure.server.http.keys import KeysFileAccess
from perdure.settings import Settings
from tests.server.browser import tab  # noqa: F401 - a fixture
from tests.server.every_page import build_link
from tests.server.graphs import run_asking_graph as ask_from_elsewhere
from tests.server.hostile import TOGETHER, open_harmless_page
from tests.server.http.test_auth_file import write_auth_file
from tests.server.http.test_keys import ANN, BOB, render_key_entry
from tests.server.pages.test_browser_layout import LONG, OVER
from tests.server.running import run_server
from tests.server.talking import (
    Gate,
    build_asking_graph,
    build_failing_graph,
    build_graph_asking_twice,
    build_graph_failing_once,
    build_halting_graph,
    build_input,
    build_late_graph_factory,
    build_reviewed_agent,
    build_talk_graph,
)

PAGE = "/ui/thread?id=t"
LETTER = ("send", {"to": "bob", "text": "hi \u202eann"})
FILE = ("drop", {"path": "old.txt"})


@pytest.fixture
def url(settings: Settings, gate: Gate) -> Iterator[str]:
    graphs = Graphs(
        {
            "ask": build_asking_graph(),
            "twice": build_graph_asking_twice(),
            "one": build_reviewed_agent(LETTER),
            "two": build_reviewed_agent(LETTER, FILE),
            "each": build_reviewed_agent(LETTER, FILE, mode="per_call"),
            "talk": build_talk_graph(gate),
            "halting": build_halting_graph(gate),
            "failing": build_graph_failing_once(),
            "late": build_late_graph_factory(),
        }
    )
    with run_server(create_app(settings, graphs=graphs)) as address:
        yield address


@pytest.fixture
def plain(browser: Browser, url: str) -> Iterator[Page]:
    """A tab without scripts."""
    context = browser.new_context(base_url=url, java_script_enabled=False)
    yield context.new_page()
    context.close()


def read_values(sdk: SyncLangGraphClient) -> dict[str, Any]:
    found: Any = sdk.threads.get_state("t")["values"]
    return dict(found)


def list_tool_results(sdk: SyncLangGraphClient) -> list[str]:
    """Return the contents of all tool messages."""
    return [each["content"] for each in read_values(sdk)["messages"] if each["type"] == "tool"]


# -- a question is answered


@pytest.mark.parametrize(("button", "answer"), [("text", "[1, 2]"), ("JSON", [1, 2])])
def test_interrupt_is_answered_by_text_or_json(
    plain: Page, sdk: SyncLangGraphClient, button: str, answer: Any
) -> None:
    sdk.runs.wait("t", "ask", input=build_input("go"))
    plain.goto(PAGE)
    question = plain.get_by_role("group", name="Waits for an answer, at hear: Are you sure?")
    question.get_by_label("Answer", exact=True).fill("[1, 2]")
    question.get_by_role("button", name=f"Answer with this {button}").click()

    expect(plain.get_by_role("group", name="Waits")).to_have_count(0)
    assert plain.url.endswith("/ui/thread?id=t#talk")
    assert read_values(sdk)["heard"] == [answer]


def test_several_interrupts_are_answered_one_by_one(plain: Page, sdk: SyncLangGraphClient) -> None:
    sdk.runs.wait("t", "twice", input=build_input("go"))
    plain.goto(PAGE)
    for name, left in (("Bob", 1), ("Ann", 0)):
        question = plain.get_by_role("group", name=f"{name}, are you sure?")
        question.get_by_label("Answer", exact=True).fill(f"{name} is")
        question.get_by_role("button", name="Answer with this text").click()
        expect(plain.get_by_role("group", name="are you sure?")).to_have_count(left)

    assert read_values(sdk)["heard"] == ["Ann: 'Ann is'", "Bob: 'Bob is'"]


@pytest.mark.parametrize(
    ("button", "result"),
    [
        ("Approve", "sent hi \u202eann to bob"),
        ("Reject", "User rejected the tool call for `send` with reason: not to Bob"),
        ("Respond", "not to Bob"),
    ],
)
def test_tool_call_is_approved_rejected_or_answered(
    plain: Page, sdk: SyncLangGraphClient, button: str, result: str
) -> None:
    """Hidden characters in arguments are shown by their code points."""
    sdk.runs.wait("t", "one", input=build_input("write to Bob"))
    plain.goto(PAGE)
    shown = plain.get_by_label("Arguments, JSON").input_value()
    assert "\\u202e" in shown
    assert json.loads(shown) == LETTER[1]
    if button != "Approve":
        plain.get_by_label("Reason").fill("not to Bob")
    plain.get_by_role("button", name=button).click()

    expect(plain.get_by_text("It is done.").first).to_be_visible()
    assert list_tool_results(sdk) == [result]


def test_arguments_of_tool_call_are_edited(plain: Page, sdk: SyncLangGraphClient) -> None:
    """The page refuses an edit together with a decision that would discard the edit."""
    sdk.runs.wait("t", "one", input=build_input("write to Bob"))
    plain.goto(PAGE)
    for sent, button, refused in (
        ('{"to": "cy", "text": "hi"}', "Approve", "were changed, but the decision is 'approve'"),
        ('{"to": ', "Send as edited", "is not valid JSON"),
        ("[" * 100_000, "Send as edited", "is not valid JSON"),
        ('["cy"]', "Send as edited", "the arguments of tool call 1 ('send') are ['cy']"),
        ('{"to": "cy", "text": "hi"}', "Send as edited", ""),
    ):
        plain.get_by_label("Arguments, JSON").fill(sent)
        plain.get_by_role("button", name=button).click()
        if refused:
            expect(plain.locator("main")).to_contain_text(refused)
            plain.goto(PAGE)

    expect(plain.get_by_text("It is done.").first).to_be_visible()
    [result] = list_tool_results(sdk)
    assert "sent hi to cy" in result


def test_several_tool_calls_of_message_are_reviewed_together(
    plain: Page, sdk: SyncLangGraphClient
) -> None:
    """Each call offers the decisions that its tool allows, and all are sent at once."""
    sdk.runs.wait("t", "two", input=build_input("write to Bob, drop the file"))
    plain.goto(PAGE)
    letter, file = (plain.get_by_role("group", name=name, exact=True) for name in ("send", "drop"))
    expect(letter.get_by_role("radio")).to_have_count(4)
    expect(file.get_by_role("radio")).to_have_count(2)
    letter.get_by_label("Approve").check()
    file.get_by_label("Reject").check()
    file.get_by_label("Reason").fill("keep it")
    plain.get_by_role("button", name="Send the decisions").click()

    expect(plain.get_by_text("It is done.").first).to_be_visible()
    assert list_tool_results(sdk) == [
        "User rejected the tool call for `drop` with reason: keep it",
        "sent hi \u202eann to bob",
    ]


def test_tool_calls_with_separate_interrupts_are_reviewed_one_by_one(
    plain: Page, sdk: SyncLangGraphClient
) -> None:
    sdk.runs.wait("t", "each", input=build_input("write to Bob, drop the file"))
    plain.goto(PAGE)
    file = plain.get_by_role("group", name="drop", exact=True)
    assert file.get_by_role("button").all_inner_texts() == ["Approve", "Reject"]
    file.get_by_role("button", name="Approve").click()
    letter = plain.get_by_role("group", name="send", exact=True)
    expect(file).to_have_count(0)
    letter.get_by_role("button", name="Approve").click()

    expect(plain.get_by_text("It is done.").first).to_be_visible()
    assert list_tool_results(sdk) == ["sent hi \u202eann to bob", "dropped old.txt"]


def test_invalid_or_outdated_answers_are_refused(url: str, sdk: SyncLangGraphClient) -> None:
    """Refused are forbidden decisions, answers to old interrupts, and requests of other sites."""
    sdk.runs.wait("t", "each", input=build_input("write to Bob, drop the file"))
    task = next(
        each for each in sdk.threads.get_state("t")["tasks"] if "old.txt" in json.dumps(each)
    )
    form = {"assistant": "each", "of": task["interrupts"][0]["id"], "decision-0": "edit"}
    path = build_link(f"{url}/ui/answer", id="t")
    allowed = httpx.post(path, data=form)
    form["decision-0"] = "approve"
    foreign = httpx.post(path, data=form, headers={"Sec-Fetch-Site": "cross-site"})
    other = httpx.post(path, data=form, headers={"Origin": "http://127.0.0.1:9"})
    unknown = httpx.post(path, data=form | {"of": "0" * 32})
    elsewhere = httpx.post(build_link(f"{url}/ui/answer", id="no"), data=form)

    assert (allowed.status_code, "expected one of approve, reject" in allowed.text) == (422, True)
    assert (unknown.status_code, "no longer waiting" in unknown.text) == (409, True)
    assert [each.status_code for each in (foreign, other, elsewhere)] == [403, 403, 404]
    assert list_tool_results(sdk) == []


# -- something is said


def test_talk_page_shows_answer_while_it_is_streamed(
    tab: Page,  # noqa: F811 - the fixture
    sdk: SyncLangGraphClient,
    gate: Gate,
) -> None:
    """The focus and the text that is typed meanwhile stay in the box."""
    sdk.threads.update("t", metadata={"graph_id": "halting"})
    tab.goto(PAGE)
    box, said = tab.get_by_label("Message"), tab.get_by_role("log", name="Output of the run")
    box.focus()
    tab.keyboard.type("go on")
    tab.keyboard.press("Control+Enter")
    expect(said.locator(".human")).to_have_text("usergo on")
    expect(said.locator(".ai .text")).to_have_text("One <U+202E>half")
    look = "head => [getComputedStyle(head).font, getComputedStyle(head).margin]"
    while_said = said.locator("h3").first.evaluate(look)
    expect(tab.get_by_role("status")).to_have_text("A run is in progress.")
    expect(box).to_have_value("")
    tab.keyboard.type("and then")
    gate.open.set()

    expect(tab.get_by_role("status")).to_have_text("The run has ended.")
    turns = tab.locator("#turns .said")
    expect(turns).to_have_count(2)
    expect(turns.last).to_contain_text("half and the other <b>half</b>")
    assert while_said == turns.locator("h3").first.evaluate(look)
    expect(said).to_be_empty()
    expect(box).to_be_focused()
    expect(box).to_have_value("and then")
    assert read_values(sdk)["messages"][0]["content"] == "go on"


def test_talk_page_shows_and_stops_run_of_another_client(
    tab: Page,  # noqa: F811 - the fixture
    sdk: SyncLangGraphClient,
    gate: Gate,
) -> None:
    """The page shows and stops the run, and "Continue" resumes it."""
    run = sdk.runs.create("t", "talk", input=build_input("hello"))
    gate.reached.wait(30)
    tab.goto(PAGE)
    tab.get_by_role("button", name="Stop").click()
    go_on = tab.get_by_role("button", name="Continue")
    expect(go_on).to_be_visible()
    assert sdk.runs.get("t", run["run_id"])["status"] == "interrupted"
    gate.open.set()
    go_on.click()

    expect(tab.get_by_text("heard 1").first).to_be_visible()
    expect(go_on).to_have_count(0)
    assert read_values(sdk)["heard"] == ["hello"]


def test_stopped_answer_is_not_stored(
    tab: Page,  # noqa: F811 - the fixture
    sdk: SyncLangGraphClient,
) -> None:
    """The part that was streamed before the stop is not stored."""
    sdk.threads.update("t", metadata={"graph_id": "halting"})
    tab.goto(PAGE)
    stop = tab.get_by_role("button", name="Stop")
    expect(stop).to_be_hidden()
    tab.get_by_label("Message").fill("go on")
    tab.get_by_role("button", name="Send").click()
    expect(tab.get_by_role("log")).to_contain_text("half")
    stop.click()

    expect(tab.get_by_role("status")).to_have_text("The run has ended.")
    expect(stop).to_be_hidden()
    expect(tab.get_by_role("button", name="Continue")).to_be_visible()
    expect(tab.get_by_label("Message")).to_be_focused()
    [run] = sdk.runs.list("t")
    assert run["status"] == "interrupted"
    assert [each["content"] for each in read_values(sdk)["messages"]] == ["go on"]


def test_interrupt_during_run_is_shown_and_answered_on_talk_page(
    tab: Page,  # noqa: F811 - the fixture
    sdk: SyncLangGraphClient,
) -> None:
    """The focus moves from the message box to the question."""
    sdk.threads.update("t", metadata={"graph_id": "one"})
    tab.goto(PAGE)
    tab.get_by_label("Message").fill("write to Bob")
    tab.get_by_label("Message").press("Control+Enter")
    status = tab.get_by_role("status")
    expect(status).to_have_text("The graph waits for an answer.")
    expect(tab.get_by_role("region", name="Talk")).to_be_focused()
    tab.keyboard.press("Tab")
    expect(tab.get_by_label("Arguments, JSON")).to_be_focused()
    tab.get_by_role("button", name="Approve").click()

    expect(status).to_have_text("The run has ended.")
    expect(tab.locator("#turns .said").last).to_contain_text("It is done.")
    assert list_tool_results(sdk) == ["sent hi \u202eann to bob"]


def test_message_is_sent_and_answered_without_scripts(
    plain: Page, sdk: SyncLangGraphClient, gate: Gate
) -> None:
    """The assistant is chosen once for the thread."""
    gate.open.set()
    plain.goto(PAGE)
    plain.get_by_label("Message").fill("hello\nthere")
    plain.get_by_label("Assistant").select_option("talk")
    plain.get_by_role("button", name="Send").click()

    expect(plain.locator("#turns .said")).to_have_count(2)
    expect(plain.get_by_label("Assistant")).to_have_count(0)
    assert read_values(sdk)["heard"] == ["hello\nthere"]


def test_new_conversation_is_started_from_page(
    plain: Page, sdk: SyncLangGraphClient, gate: Gate
) -> None:
    gate.open.set()
    plain.goto("/ui/threads")
    plain.get_by_role("button", name="New conversation").click()
    plain.get_by_label("Message").fill("hello")
    plain.get_by_label("Assistant").select_option("talk")
    plain.get_by_role("button", name="Send").click()

    expect(plain.locator("#turns .said")).to_have_count(2)
    assert [each["title"] for each in sdk.threads.search(metadata={"graph_id": "talk"})] == [  # type: ignore[typeddict-item]
        "hello"
    ]


def test_page_hides_form_from_users_who_may_not_start_conversation(
    settings: Settings, tmp_path: Path
) -> None:
    """The user needs permission to create a thread and to run a graph on the thread."""
    access = AuthFileAccess(write_auth_file(tmp_path, START_HANDLERS, "beginners.py"))
    seen = []
    with run_server(
        create_app(settings, graphs=Graphs({"ask": build_asking_graph()}), access=access)
    ) as url:
        for user in ("ann", "bob", "cy"):
            headers = {"x-api-key": user}
            listed = httpx.get(f"{url}/ui/threads", headers={**headers, "accept": "text/html"})
            made = httpx.post(f"{url}/ui/new", headers=headers)
            found = httpx.post(f"{url}/threads/search", json={}, headers=headers).json()
            seen.append(("New conversation" in listed.text, made.status_code, len(found)))
            if user == "ann":
                foreign = httpx.post(
                    f"{url}/ui/new", headers=headers | {"Sec-Fetch-Site": "cross-site"}
                )

    assert seen == [(True, 303, 1), (False, 403, 0), (False, 403, 0)]
    assert foreign.status_code == 403


START_HANDLERS = """
from langgraph_sdk import Auth

auth = Auth()

@auth.authenticate
async def user(headers): return headers[b"x-api-key"].decode()

@auth.on.threads
async def threads(ctx, value):
    value.setdefault("metadata", {})["owner"] = ctx.user.identity
    return {"owner": ctx.user.identity}

@auth.on.threads.create
async def create(ctx, value):
    value.setdefault("metadata", {})["owner"] = ctx.user.identity
    return {"owner": ctx.user.identity} if ctx.user.identity != "bob" else False

@auth.on.threads.create_run
async def runs(ctx, value): return {"owner": "ann"}
"""


def test_talk_page_shows_error_of_failed_run_and_retries_it(
    plain: Page, sdk: SyncLangGraphClient
) -> None:
    sdk.threads.update("t", metadata={"graph_id": "failing"})
    plain.goto(PAGE)
    plain.get_by_label("Message").fill("hello")
    plain.get_by_role("button", name="Send").click()
    failed = plain.get_by_text("The last run failed: ZeroDivisionError: one <b>by</b> none")
    expect(failed).to_be_visible()
    plain.get_by_role("button", name="Continue").click()

    expect(plain.get_by_text("now it worked").first).to_be_visible()
    expect(failed).to_have_count(0)


def test_message_of_run_that_failed_to_start_is_sent_again(
    plain: Page, sdk: SyncLangGraphClient
) -> None:
    """Retries work on the talk page and on the page of runs."""
    sdk.threads.update("t", metadata={"graph_id": "late"})
    for path, button in ((PAGE, "Try again"), ("/ui/runs", "Try again")):
        plain.goto(PAGE)
        plain.get_by_label("Message").fill(f"hello {path}")
        plain.get_by_role("button", name="Send").click()
        expect(plain.get_by_text("The last run failed: ConnectionError: not yet")).to_be_visible()
        plain.goto(path)
        plain.get_by_role("button", name=button).first.click()
        expect(plain.get_by_text("The last run failed")).to_have_count(0)
        expect(plain.get_by_role("button", name="Try again")).to_have_count(0)

    assert read_values(sdk)["heard"] == [f"hello {PAGE}", "hello /ui/runs"]
    assert [run["status"] for run in sdk.runs.list("t")] == ["success", "error"] * 2


def test_talk_page_shows_refusal_and_keeps_typed_text(browser: Browser, url: str) -> None:
    """The typed text stays in the box."""
    with get_sync_client(url=url) as sdk, browser.new_context(base_url=url) as context:
        page = context.new_page()
        sdk.threads.create(thread_id="t", metadata={"graph_id": "talk"})
        page.goto(PAGE)
        sdk.threads.delete("t")
        page.get_by_label("Message").fill("hello")
        page.get_by_role("button", name="Send").click()

        expect(page.get_by_role("status")).to_have_text("there is no thread 't'")
        expect(page.get_by_label("Message")).to_have_value("hello")


# -- runs


def test_runs_page_lists_stops_and_retries_runs(
    tab: Page,  # noqa: F811 - the fixture
    sdk: SyncLangGraphClient,
    gate: Gate,
) -> None:
    sdk.runs.create("t", "talk", input=build_input("hello"))
    gate.reached.wait(30)
    sdk.threads.create(thread_id="u")
    sdk.runs.wait("u", "failing", input=build_input("please"), raise_error=False)
    tab.goto("/ui/runs")
    rows = tab.locator("tbody tr")
    expect(rows).to_have_count(2)
    expect(rows.first).to_contain_text("ZeroDivisionError: one <b>by</b> none")
    tab.get_by_label("Status").select_option("running")
    tab.get_by_role("button", name="Filter").click()
    expect(rows).to_have_count(1)
    tab.get_by_role("button", name="Cancel").click()
    expect(rows).to_have_count(2)
    expect(tab.get_by_role("row", name="hello").locator(".tag")).to_have_text("interrupted")
    failed = tab.get_by_role("row", name="please")
    failed.get_by_role("button", name="Try again").click()

    expect(tab.get_by_text("now it worked").first).to_be_visible()
    statuses = tab.locator(".runs .tag").all_inner_texts()
    assert statuses == ["success", "error"]
    tab.get_by_role("link", name="All runs of this thread").click()
    expect(rows).to_have_count(2)
    expect(tab.get_by_role("button", name="Try again")).to_have_count(0)


def test_runs_page_lists_only_runs_of_reachable_threads(settings: Settings, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(render_key_entry(ANN, "ann") + render_key_entry(BOB, "bob"))
    keys.chmod(0o600)
    app = create_app(
        settings, graphs=Graphs({"ask": build_asking_graph()}), access=KeysFileAccess(keys)
    )
    with run_server(app) as url:
        ann, bob = ({"x-api-key": key, "accept": "application/json"} for key in (ANN, BOB))
        asked = {"assistant_id": "ask", "input": build_input("of Ann"), "if_not_exists": "create"}
        httpx.post(f"{url}/threads/t/runs/wait", json=asked, headers=ann).raise_for_status()
        [run] = httpx.get(f"{url}/ui/runs", headers=ann).json()["runs"]
        seen = httpx.get(f"{url}/ui/runs", headers=bob).json()["runs"]
        stop = build_link(f"{url}/ui/stop", id="t", run_id=run["run_id"])
        denied = [
            httpx.get(build_link(f"{url}/ui/runs", id="t"), headers=bob),
            httpx.post(stop, headers=bob),
            httpx.post(
                build_link(f"{url}/ui/again", id="t"), data={"assistant": "ask"}, headers=bob
            ),
        ]
        foreign = httpx.post(stop, headers=ann | {"Sec-Fetch-Site": "cross-site"})

    assert (run["status"], seen) == ("interrupted", [])
    assert [reply.status_code for reply in [*denied, foreign]] == [404, 404, 404, 403]


@pytest.mark.parametrize("key", [None, "ab" * 32], ids=["plain", "sealed"])
def test_runs_page_lists_own_runs_beyond_many_runs_of_others(
    settings: Settings, tmp_path: Path, key: str | None
) -> None:
    """A thousand newer runs of other users do not hide the own runs."""
    keys = tmp_path / "keys.toml"
    keys.write_text(render_key_entry(ANN, "ann") + render_key_entry(BOB, "bob"))
    keys.chmod(0o600)
    sealed = dataclasses.replace(settings, key=key)
    app = create_app(
        sealed,
        graphs=Graphs({"ask": build_asking_graph(), "fail": build_failing_graph()}),
        access=KeysFileAccess(keys),
    )
    with run_server(app) as url, httpx.Client(base_url=url, timeout=60) as client:
        ann, bob = ({"x-api-key": key, "accept": "application/json"} for key in (ANN, BOB))
        asked = {"input": build_input("hello"), "if_not_exists": "create"}
        for thread, graph, of in (("t", "fail", ann), ("t", "ask", ann), ("u", "ask", bob)):
            body = {**asked, "assistant_id": graph}
            client.post(f"/threads/{thread}/runs/wait", json=body, headers=of)
        path, statuses = "/ui/runs.json", ["interrupted", "error"]
        with closing(sqlite3.connect(settings.db, isolation_level=None)) as conn:
            conn.execute(INSERT_MANY_RUNS)
            seen = [client.get(path, headers=ann).json()["runs"]]
            seen += [
                client.get(path, params={"status": each}, headers=ann).json()["runs"]
                for each in statuses
            ]
            first = client.get(path, headers=bob).json()
            last = client.get(path, params={"start": 1000}, headers=bob).json()

    assert [[(run["status"], run["is_open"]) for run in each] for each in seen] == [
        [("interrupted", False), ("error", False)],
        [("interrupted", False)],
        [("error", False)],
    ]
    assert (len(first["runs"]), first["more"]) == (50, True)
    assert ([run["thread_id"] for run in last["runs"]], last["more"]) == (["u"], False)


INSERT_MANY_RUNS = """
WITH RECURSIVE many (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM many WHERE n < 1000)
INSERT INTO runs (
    thread_key, seq, run_id, status, owner, graph_id, created_at, updated_at, details
)
SELECT r.thread_key, r.seq + n, run_id, r.status, owner, graph_id, r.created_at + n, 1, details
FROM runs r JOIN threads t ON t.thread_key = r.thread_key, many WHERE t.thread_id = 'u'
"""


def test_runs_page_with_long_names_and_errors_fits_screen(
    browser: Browser, settings: Settings
) -> None:
    """Names and errors of runs are shown as text."""

    def stumble(state: Any) -> Any:
        raise ValueError(f"{TOGETHER} {LONG}")

    builder: Any = StateGraph(MessagesState)
    builder.add_node(LONG, stumble)
    builder.add_edge(START, LONG)
    name = LONG[:150]
    graphs = Graphs({name: builder, "other": builder})
    with (
        run_server(create_app(settings, graphs=graphs)) as url,
        get_sync_client(url=url) as sdk,
        browser.new_context(base_url=url) as context,
        httpx.Client(base_url=url) as client,
    ):
        page = context.new_page()
        sdk.threads.create(thread_id="t")
        sdk.runs.wait("t", name, input=build_input(LONG), raise_error=False)
        for path in (PAGE, "/ui/runs", build_link("/ui/runs", id="t", status="error")):
            open_harmless_page(page, client, path)
            for width in (390, 1280):
                page.set_viewport_size({"width": width, "height": 860})
                assert page.evaluate(OVER) <= 0, (path, width)


READER_HANDLERS = """
from langgraph_sdk import Auth

auth = Auth()

@auth.authenticate
async def user(headers): return headers[b"x-api-key"].decode()

@auth.on.threads
async def threads(ctx, value): return {"owner": "ann"}

@auth.on.threads.create_run
async def runs(ctx, value): return {"owner": ctx.user.identity}
"""


def test_talk_page_has_no_forms_for_read_only_users(
    settings: Settings, tmp_path: Path, gate: Gate
) -> None:
    """A server without graphs shows no forms to anybody."""
    ask_from_elsewhere(settings, "t")
    forms = []
    access = AuthFileAccess(write_auth_file(tmp_path, READER_HANDLERS, "reader.py"))
    for graphs, allowed in (({"ask": build_asking_graph()}, access), ({}, None)):
        with run_server(create_app(settings, graphs=Graphs(graphs), access=allowed)) as url:
            for user in ("ann", "bob"):
                headers = {"x-api-key": user, "accept": "text/html"}
                shown = httpx.get(f"{url}{PAGE}", headers=headers).text
                assert "Waits for an answer, at <b><bdi>part</bdi></b>: <bdi>Sure?</bdi>" in shown
                forms.append("/ui/answer" in shown)

    assert forms == [True, False, False, False]
