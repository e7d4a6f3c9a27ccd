"""Pages of threads in a browser: read, compare, go on from, fork, prune; hostile text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from playwright.sync_api import Page, expect

from perdure.checkpointers import SQLiteCheckpointer
from perdure.graphs.chat import chat_graph
from perdure.memory import record_views, trim
from perdure.settings import Settings
from tests.contracts.puts import checkpoint_id_of, config_at, put
from tests.exports import EXPORT, run_command
from tests.server.every_page import ID, build_link, store_questions
from tests.server.hostile import (
    LONG_LINE,
    SURROGATE,
    TEXTS,
    TOGETHER,
    check_page_is_harmless,
    open_harmless_page,
)

HTML = {"Accept": "text/html"}


@pytest.fixture
def saver(settings: Settings) -> Iterator[SQLiteCheckpointer]:
    """The checkpointer of the server's database."""
    with SQLiteCheckpointer.open(settings.db) as made:
        yield made


@pytest.fixture
def garden(saver: SQLiteCheckpointer) -> str:
    """The id of a thread with two turns and their views."""
    return run_conversation(
        saver, "garden", "What grows on a balcony?", "Is it warm enough for lettuce?"
    )


def run_conversation(saver: SQLiteCheckpointer, thread: str, *texts: str) -> str:
    model = GenericFakeChatModel(messages=iter([AIMessage(f"Answer: {text}") for text in texts]))
    graph = chat_graph(model, memory=[trim(max_tokens=500)], checkpointer=saver)
    config: Any = {**config_at(thread), "callbacks": [record_views(saver)]}
    config["configurable"]["user_id"] = "ann"
    for text in texts:
        graph.invoke({"messages": [("user", text)]}, config)
    return thread


# -- the list


def test_thread_list_is_searched_by_text(tab: Page, saver: SQLiteCheckpointer, garden: str) -> None:
    run_conversation(saver, "bread", "Why is my bread moist?")
    tab.goto("/ui/threads")
    rows = tab.locator("tbody tr")
    assert [row.split("\t")[1:3] for row in rows.all_inner_texts()] == [["ann", "2"], ["ann", "4"]]
    tab.get_by_label("Text in title, id or messages").fill("GARD")
    tab.get_by_role("button", name="Search").click()
    expect(rows).to_have_count(1)
    tab.get_by_role("link", name="What grows on a balcony?").click()
    expect(tab.locator("h1")).to_have_text("What grows on a balcony?")


def test_thread_list_supports_filters_and_paging(
    client: httpx.Client, saver: SQLiteCheckpointer
) -> None:
    for number in range(52):
        topic = {"topic": "a" if number % 2 else "b"}
        put(saver, {"messages": []}, thread=f"t{number}", metadata=topic)

    def listed(**values: Any) -> list[str]:
        answer = client.get(build_link("/ui/threads.json", **values))
        assert answer.status_code == 200, answer.text
        return [each["thread_id"] for each in answer.json()["threads"]]

    assert listed() == [f"t{number}" for number in range(51, 1, -1)]
    assert listed(start=50) == ["t1", "t0"]
    assert listed(meta="topic=a") == [f"t{number}" for number in range(51, 0, -2)]
    assert listed(since="2999-01-01") == listed(until="1999-01-01") == []
    for wrong in ({"meta": "topic"}, {"since": "soon"}, {"start": -1}):
        answer = client.get(build_link("/ui/threads", **wrong), headers=HTML)
        assert answer.status_code == 422
        assert "The request failed" in answer.text


def test_thread_list_shows_titles_with_ids_beside_them(
    tab: Page, saver: SQLiteCheckpointer
) -> None:
    """Threads without a title are listed by the first question; the id stands beside it."""
    first, second = ID, "0b7d3c1a-8d0f-4b6e-9a55-2f1c6a7e9d10"
    ann = {"user_id": "ann"}
    tea = {"messages": [HumanMessage("hi", id="m")]}
    put(saver, tea, thread=first, metadata={"title": "Tea", **ann})
    asks = {"messages": [HumanMessage("What grows here?", id="m")]}
    put(saver, asks, thread=second, metadata=ann)
    for path in ("/ui/storage", "/ui/jobs", "/ui/threads"):
        tab.goto(path)
        for title, id in (("Tea", first), ("What grows here?", second)):
            row = tab.locator("tr", has_text=id)
            expect(row.get_by_role("link", name=title, exact=True)).to_be_visible()
    expect(row.locator(".unit").first).to_have_text("message")  # it has one


# -- a thread


def test_thread_page_shows_messages_views_and_steps_in_columns(tab: Page, garden: str) -> None:
    tab.goto(build_link("/ui/thread", id=garden))
    turns = tab.locator("section.turn")
    expect(turns).to_have_count(2)
    here = tab.get_by_role("link", name="Threads")
    expect(here).to_have_attribute("aria-current", "true")
    said, seen, changed = turns.last.locator(".column").all()
    expect(said.locator(".said")).to_have_count(2)
    expect(said).to_contain_text("Answer: Is it warm enough for lettuce?")
    expect(seen.locator(".bar rect")).to_have_count(1)
    expect(seen).to_contain_text("3 messages")
    expect(changed.locator(".step")).to_have_count(3)
    expect(changed).to_contain_text("head")
    seen.get_by_role("link", name="3 messages").click()
    expect(tab.locator(".said")).to_have_count(3)
    tab.go_back()
    changed.get_by_role("link", name="step 3").click()
    expect(tab.locator("h1")).to_have_text("Step 3")


def test_thread_page_loads_earlier_turns_and_jumps_to_message(
    tab: Page, saver: SQLiteCheckpointer
) -> None:
    run_conversation(saver, "long", *(f"Question {number}?" for number in range(70)))
    tab.goto(build_link("/ui/thread", id="long"))
    turns = tab.locator("section.turn")
    expect(turns).to_have_count(30)
    expect(turns.first.locator(".step")).to_have_count(3)
    tab.get_by_role("link", name="Earlier turns").click()
    expect(turns).to_have_count(60)
    tab.get_by_role("link", name="Earlier turns").click()
    expect(turns).to_have_count(70)
    expect(tab.get_by_role("link", name="Earlier turns")).to_have_count(0)
    for turn in turns.all()[::9]:
        expect(turn.locator(".step")).to_have_count(3)
        expect(turn.locator(".view")).to_have_count(1)
    wanted = saver.history("long")[20]
    tab.goto(build_link("/ui/thread", id="long", message=wanted.value.id))
    expect(tab.locator("article:target")).to_contain_text("Question 10?")


def test_thread_page_gives_lengths_of_views_it_does_not_read(
    tab: Page, saver: SQLiteCheckpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the views of a page are too long to read, earlier turns show only their lengths."""
    run_conversation(saver, "long", "One?", "Two?", "Three?")
    monkeypatch.setattr("perdure.server.pages.thread_pages._MAX_VIEW_MESSAGES", 4)
    tab.goto(build_link("/ui/thread", id="long"))
    seen = tab.locator("section.turn > .column:nth-child(2)").all_inner_texts()
    assert [text.splitlines()[0] for text in seen] == [
        "1 message open it to see its tokens",
        "3 messages open it to see its tokens",
        seen[2].splitlines()[0],
    ]
    assert re.match(r"5 messages, \d+ tokens", seen[2])
    tab.get_by_role("link", name="3 messages").click()
    expect(tab.locator(".said")).to_have_count(3)
    expect(tab.locator(".bar rect")).to_have_count(1)


def test_thread_page_shows_content_blocks_tool_calls_and_marks(
    tab: Page, saver: SQLiteCheckpointer
) -> None:
    call = {"name": "look_up", "args": {"word": "moss"}, "id": "c1"}
    answer: Any = [
        {"type": "reasoning", "reasoning": "It is about plants."},
        {"type": "text", "text": "Let me see."},
        {"type": "image", "base64": "AAAA", "mime_type": "image/png"},
        {"type": "tool_call", **call},
    ]
    first = [HumanMessage("moss?", id="h"), AIMessage(answer, tool_calls=[call], id="a")]
    second = ToolMessage("a plant " * 100, tool_call_id="c1", name="look_up", id="r")
    config = put(saver, {"messages": first, "n": 1}, thread="t")
    config = put(saver, {"messages": [*first, second], "n": 1}, config)
    put(saver, {"messages": [second], "n": 2}, config)

    tab.goto(build_link("/ui/thread", id="t"))
    user, assistant, tool = tab.locator(".said").all()
    expect(user).to_contain_text("history only")
    expect(assistant).to_contain_text("[image]")
    expect(assistant.locator("details")).to_have_count(2)
    assistant.locator(".call summary").click()
    expect(assistant.locator(".call pre")).to_have_text('{"word":"moss"}')
    expect(tool.locator("details")).to_have_count(1)
    expect(tab.locator(".column").nth(1)).to_contain_text("Not recorded")
    changed = tab.locator(".step").last
    expect(changed).to_contain_text("messages \u22122")
    expect(changed.locator(".line.minus .what").last).to_have_text("1")


@pytest.fixture
def imported(settings: Settings) -> None:
    """Import conversations before the server starts."""
    assert run_command(Path(settings.db), "import", str(EXPORT)).exit_code == 0


def test_thread_pages_show_imported_conversations(imported: None, tab: Page) -> None:
    tab.goto("/ui/threads")
    titles = tab.locator("tbody td:first-child a").all_inner_texts()
    assert len(titles) > 1
    moments = tab.locator("tbody td.when").all_inner_texts()
    assert moments == [f"2025-06-15 15:{minute}" for minute in ("40", "24", "08")]
    for title in titles:
        tab.goto("/ui/threads")
        tab.get_by_role("link", name=title, exact=True).first.click()
        expect(tab.locator(".said").first).to_be_visible()


# -- checkpoints


def test_checkpoints_page_shows_tree_and_compares_checkpoints(
    tab: Page, saver: SQLiteCheckpointer
) -> None:
    root = put(saver, {"messages": ["a"], "n": 1}, thread="t")
    put(saver, {"messages": ["a", "b"], "n": 1}, root)
    put(saver, {"messages": ["a", "c"], "n": 2}, root, metadata={"source": "fork"})

    tab.goto(build_link("/ui/checkpoints", id="t"))
    rows = tab.locator("tbody tr")
    expect(rows).to_have_count(3)
    expect(rows.nth(2).locator("path")).to_have_count(2)  # two lanes join
    expect(tab.locator("tr.head")).to_have_count(1)
    expect(tab.locator("tr.branch")).to_have_count(1)
    tab.get_by_label("A: 2").check()
    tab.get_by_role("button", name="Compare").click()
    expect(tab.locator(".card").first).to_contain_text("+1 \u22121")
    expect(tab.locator(".card").last).to_contain_text("n changed")
    tab.get_by_role("link", name="full value").first.click()
    expect(tab.locator("pre")).to_have_text(re.compile(r'\[\s*"a",\s*"c"\s*\]'))


def test_checkpoint_pages_fold_ids_and_node_triggers(tab: Page, saver: SQLiteCheckpointer) -> None:
    """Generated ids are folded; the values beside them stay visible."""
    ids = ["3aac069e-5ca2-4ef0-9869-86e0ead89d7a", f"lc_run--{ID}-0", "call_Xq2b7TnR0aLz81"]
    root = put(saver, {"messages": [HumanMessage("hi", id="h")]}, thread="t")
    values: Any = {
        "messages": [HumanMessage("hi", id="h")],
        "summarized": ids,
        "names": ["ann", ids[0]],
        "one": ids[1],
    }
    config = put(saver, values, root)
    saver.put_writes(config, [("branch:to:respond", None), ("names", "bob")], ids[0])
    page = build_link("/ui/checkpoint", id="t", checkpoint=checkpoint_id_of(config))
    compared = build_link(
        "/ui/compare", id="t", a=checkpoint_id_of(root), b=checkpoint_id_of(config)
    )
    for path in (page, build_link("/ui/thread", id="t"), compared):
        tab.goto(path)
        folded = tab.locator("details", has_text="3 ids")
        expect(folded.get_by_text(ids[2])).to_be_hidden()
        folded.locator("summary").click()
        expect(folded.get_by_text(ids[2])).to_be_visible()
        expect(tab.locator("main").get_by_text("ann", exact=True)).to_be_visible()
    tab.goto(page)
    expect(tab.get_by_text("branch:to:respond")).to_be_hidden()
    expect(tab.get_by_text("bob")).to_be_visible()
    tab.get_by_text("1 that trigger nodes").click()
    expect(tab.get_by_text("branch:to:respond")).to_be_visible()


def test_thread_is_rewound_forked_and_deleted_from_pages(
    tab: Page, saver: SQLiteCheckpointer, garden: str
) -> None:
    tab.goto(build_link("/ui/checkpoints", id=garden))
    tab.get_by_role("link", name="step 1", exact=True).click()
    tab.get_by_role("button", name="Continue from here").click()
    expect(tab.locator("tr.head")).to_contain_text("step 1")
    assert len(saver.get_tuple(config_at(garden)).checkpoint["channel_values"]["messages"]) == 2  # type: ignore[union-attr]
    tab.get_by_role("link", name="step 1", exact=True).click()
    tab.get_by_label("Id of the new thread").fill("a copy / of it")
    tab.get_by_role("button", name="Fork").click()
    expect(tab.locator(".said")).to_have_count(2)
    tab.get_by_role("link", name="Delete").click()
    tab.get_by_role("button", name="Delete the thread").click()
    expect(tab.locator("tbody tr")).to_have_count(1)
    assert [each.thread_id for each in saver.threads()] == [garden]


def test_prune_page_previews_and_prunes_checkpoints(
    tab: Page, saver: SQLiteCheckpointer, garden: str
) -> None:
    tab.goto(build_link("/ui/prune", id=garden))
    tab.get_by_label("Newest checkpoints").fill("1")
    tab.get_by_role("button", name="Preview").click()
    expect(tab.locator(".card")).to_contain_text("checkpoints")
    assert len(saver.checkpoints(garden, checkpoint_ns="")) == 6
    tab.get_by_role("button", name="Prune").click()
    expect(tab.locator("tbody tr")).to_have_count(1)
    assert len(saver.history(garden)) == 4


def test_page_changes_are_refused_while_run_holds_thread(
    client: httpx.Client, saver: SQLiteCheckpointer, garden: str
) -> None:
    (first, *_) = saver.checkpoints(garden, checkpoint_ns="")[::-1]
    with saver.lock(garden):
        for path in (
            build_link("/ui/rewind", id=garden, checkpoint=first.checkpoint_id),
            build_link("/ui/delete", id=garden),
            build_link("/ui/prune", id=garden),
        ):
            answer = client.post(path, data={"last": "1"})
            assert (answer.status_code, "still active" in answer.text) == (409, True), path
    assert len(saver.checkpoints(garden, checkpoint_ns="")) == 6


def test_opening_old_checkpoint_does_not_change_head(
    client: httpx.Client, saver: SQLiteCheckpointer
) -> None:
    first = put(saver, {"n": 1}, thread="t")
    second = put(saver, {"n": 2}, first)
    assert (
        client.get(
            build_link("/ui/checkpoint", id="t", checkpoint=checkpoint_id_of(first))
        ).status_code
        == 200
    )
    assert saver.checkpoints("t")[0].checkpoint_id == checkpoint_id_of(second)
    assert saver.checkpoints("t")[0].is_head


def test_pages_and_their_json_answer_404_for_unknown_ids(client: httpx.Client, garden: str) -> None:
    for path in (
        "/ui/thread?id=no",
        "/ui/checkpoints?id=no",
        "/ui/checkpoint?id=garden&checkpoint=no",
        "/ui/checkpoint?id=garden&checkpoint=no&channel=x",
        "/ui/compare?id=garden&a=no&b=no",
        "/ui/thread?id=garden&message=no",
        "/ui/seen?id=garden&view=no",
        "/ui/message?id=garden&position=99",
        "/ui/prune?id=no",
        "/ui/delete?id=no",
    ):
        page, twin = client.get(path, headers=HTML), client.get(path.replace("?", ".json?", 1))
        assert (page.status_code, "Not found" in page.text) == (404, True), path
        assert twin.status_code == 404
        assert "detail" in twin.json()


def test_each_page_has_json_version_with_same_content(
    client: httpx.Client, saver: SQLiteCheckpointer, garden: str
) -> None:
    """The path with `.json` returns the data of each page."""
    thread = client.get(build_link("/ui/thread.json", id=garden)).json()
    (view,) = thread["turns"][-1]["views"]
    assert view["parts"][0]["tokens"] > 0
    steps = thread["turns"][-1]["steps"]
    assert [each["ran"] for each in steps][-1] == ["respond"]
    a, b = (each["checkpoint_id"] for each in steps[:2])
    for path in (
        build_link("/ui/threads.json"),
        build_link("/ui/seen.json", id=garden, view=view["id"]),
        build_link("/ui/message.json", id=garden, position=0),
        build_link("/ui/checkpoints.json", id=garden),
        build_link("/ui/checkpoint.json", id=garden, checkpoint=a),
        build_link("/ui/checkpoint.json", id=garden, checkpoint=a, channel="messages"),
        build_link("/ui/compare.json", id=garden, a=a, b=b),
        build_link("/ui/prune.json", id=garden, last=1),
    ):
        answer = client.get(path)
        assert answer.status_code == 200, path
        assert answer.headers["content-type"] == "application/json"
        page = client.get(path.replace(".json", "", 1))
        assert page.status_code == 200
        assert "script-src 'self'" in page.headers["content-security-policy"]


# -- as it is used


def test_thread_pages_can_be_used_by_keyboard(tab: Page, garden: str) -> None:
    """Tab reaches all links, the focus is visible, and Enter follows a link."""
    tab.goto(build_link("/ui/thread", id=garden))
    reached = set()
    for _ in range(60):
        tab.keyboard.press("Tab")
        found = tab.evaluate(
            "() => { const at = document.activeElement; const how = getComputedStyle(at);"
            " return at === document.body ? null :"
            " [at.innerText, at.matches(':focus-visible') ? how.outlineStyle : 'none'] }"
        )
        if found is None:
            break
        assert found[1] == "solid", found
        reached.add(found[0])
    assert {"Checkpoints", "Prune", "Delete", "step 3"} <= reached
    assert any(each.startswith("3 messages") for each in reached)
    tab.get_by_role("link", name="Checkpoints").focus()
    tab.keyboard.press("Enter")
    expect(tab.get_by_role("button", name="Compare")).to_be_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_contrast_in_light_and_dark_schemes(tab: Page, garden: str, scheme: Any) -> None:
    tab.emulate_media(color_scheme=scheme)
    tab.goto(build_link("/ui/thread", id=garden))
    ground, ink = tab.evaluate(
        "() => { const s = getComputedStyle(document.body); return [s.backgroundColor, s.color] }"
    )
    assert (sum_color_channels(ground) > sum_color_channels(ink)) == (scheme == "light")


def sum_color_channels(color: str) -> int:
    return sum(map(int, re.findall(r"\d+", color)[:3]))


# -- hostile text


def test_thread_pages_show_hostile_text_as_text(
    tab: Page, client: httpx.Client, saver: SQLiteCheckpointer
) -> None:
    """Every place of a thread that can hold text has hostile text."""
    text = TOGETHER
    call = {"name": text, "args": {text: [text]}, "id": text}
    said = [
        SystemMessage(text, id=f"s{text}"),
        HumanMessage(text, id=text, name=text),
        AIMessage([{"type": text, text: text}, {"type": "text", "text": text}], tool_calls=[call]),
        ToolMessage(text, tool_call_id=text, name=text, status="error"),
        *(HumanMessage(each) for each in TEXTS.values()),
    ]
    known: Any = {"title": text, "user_id": text, "titled": True, text: text, "step": text}
    values: Any = {"messages": said[:2], text: text, "mapping": {text: text}}
    first = put(saver, values, thread=text, uid=f"c{text}", metadata=known)
    values = {"messages": said, text: [text], "mapping": {}, "branch:to:" + text: None}
    second = put(saver, values, first, uid=text, metadata=known)
    saver.put_writes(second, [(text, text)], text)
    put(saver, values, thread=text, ns=text, uid=text, metadata=known)

    for path in (
        "/ui/threads",
        build_link("/ui/threads", q=TEXTS["attribute"], meta=f"x={TEXTS['closing']}"),
        build_link("/ui/thread", id=text),
        build_link("/ui/thread", id=text, ns=text),
        *store_questions(saver, text),
        build_link("/ui/message", id=text, position=0),
        build_link("/ui/checkpoints", id=text),
        build_link("/ui/checkpoints", id=text, ns=text),
        build_link("/ui/checkpoint", id=text, checkpoint=text),
        build_link("/ui/checkpoint", id=text, checkpoint=text, channel=text),
        build_link("/ui/compare", id=text, a=f"c{text}", b=text),
        build_link("/ui/prune", id=text, last=1),
        build_link("/ui/delete", id=text),
    ):
        open_harmless_page(tab, client, path)
    assert client.get(build_link("/ui/thread", id=f"no {text}")).status_code == 404
    check_page_is_harmless(client.get(build_link("/ui/thread", id=f"no {text}"), headers=HTML).text)
    tab.goto(build_link("/ui/checkpoint", id=text, checkpoint=text))
    tab.get_by_role("button", name="Continue from here").click()
    tab.get_by_role("button", name="Compare").click()
    expect(tab.locator("h1")).to_have_text("Comparison of two checkpoints")


def test_thread_pages_show_long_lines_and_lone_surrogates(
    tab: Page, client: httpx.Client, saver: SQLiteCheckpointer
) -> None:
    said = [HumanMessage(LONG_LINE, id="h"), AIMessage(SURROGATE, id="a")]
    config = put(saver, {"messages": said, "n": SURROGATE}, thread="t")
    open_harmless_page(tab, client, build_link("/ui/thread", id="t"))
    assert len(client.get(build_link("/ui/thread", id="t")).text) < 50_000
    for path in (
        build_link("/ui/message", id="t", position=0),
        build_link("/ui/checkpoint", id="t", checkpoint=checkpoint_id_of(config)),
        build_link(
            "/ui/checkpoint", id="t", checkpoint=checkpoint_id_of(config), channel="messages"
        ),
    ):
        check_page_is_harmless(client.get(path).text)
