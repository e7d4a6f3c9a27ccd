"""Data of one person is not shown to another, whatever approvers, operators and backends do."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from perdure.server.http.access import ACT_PERMISSION, ADMIN_PERMISSION
from perdure.server.http.keys import KeysFileAccess
from perdure.settings import Settings
from tests.server.http.test_acting import open_client_acting_for
from tests.server.http.test_keys import render_key_entry
from tests.server.running import wait_until
from tests.server.talking import build_input
from tests.server.test_person import (
    Desk,
    Model,
    answer_on_the_page,
    call_mcp_tool,
    model,  # noqa: F401 - a fixture
    serve_desk,
    start_thread_awaiting_approval,
)

SECRETS = {
    "dora": "The refund of this customer goes to the account Heron.",
    "kim": "The refund of this customer goes to the account Finch.",
    "boss": "The refund limit of this approver is the number Walrus.",
    "desk": "The refund of this operator goes to the account Badger.",
}
MESSAGES = {"dora": "My refund number is Ocelot.", "kim": "My refund number is Lemur."}
SECRET_WORDS = {
    "dora": ("Heron", "Ocelot", "dora"),
    "kim": ("Finch", "Lemur", "kim"),
    "boss": ("Walrus",),
    "desk": ("Badger",),
}
LISTS: dict[str, Any] = {
    "/threads/search": {},
    "/threads/count": {},
    "/memories/search": {"query": "refund"},
    "/store/namespaces": {},
    "/runs/crons/search": {},
    "/assistants/search": {},
}
PAGES = ["/ui/threads", "/ui/threads?q=refund", "/ui/runs", "/ui/memories", "/ui/store"]


def write_keys(folder: Path) -> KeysFileAccess:
    """Return access by keys of two customers, an admin who approves, and an operator."""
    file = folder / "keys.toml"
    users = [render_key_entry(user, user) for user in ("dora", "kim")]
    users.append(render_key_entry("boss", "boss", f'permissions = ["{ADMIN_PERMISSION}"]'))
    users.append(render_key_entry("desk", "desk", f'permissions = ["{ACT_PERMISSION}"]'))
    file.write_text("".join(users))
    return KeysFileAccess(file)


def act_as_every_user(desk: Desk) -> dict[str, str]:
    """Let each user do all that they may do, and return the threads of the customers."""
    threads = {}
    for user, other in (("dora", "kim"), ("kim", "dora")):
        threads[user] = thread_id = start_thread_awaiting_approval(desk, user)
        answer_on_the_page(desk, "boss", thread_id)
        desk.client(user).runs.wait(thread_id, "desk", input=build_input(MESSAGES[user]))
        open_client_acting_for(desk, "desk", user).runs.wait(
            thread_id, "desk", input=build_input("Is the refund there?")
        )
        desk.client("boss").runs.wait(
            thread_id, "desk", input=build_input("The refund is on its way.")
        )
        context: Any = {"user_id": user}
        desk.client("desk").runs.wait(
            None, "desk", input=build_input("Any refund?"), context=context
        )
        cron: Any = desk.client("boss").crons.create_for_thread(
            thread_id, "desk", schedule="0 0 1 1 *", input=build_input("Sum up the refund.")
        )
        assert cron["thread_id"] == thread_id
        for sender, person in ((other, ""), ("desk", other)):  # what is not theirs to touch
            found = call_mcp_tool(desk, sender, "read_thread", person, thread_id=thread_id)
            assert "there is no thread" in found
    return threads


def read_everything_shown(desk: Desk, user: str, thread_id: str, person: str = "") -> str:
    """Return all that lists, pages and tools show a user, on behalf of `person` if one is named."""
    headers = {"x-api-key": user} | ({"x-perdure-user": person} if person else {})
    shown = []
    with httpx.Client(base_url=desk.url, headers=headers, timeout=60) as http:
        for path, body in LISTS.items():
            shown.append(http.post(path, json=body).raise_for_status().text)
        for path in [*PAGES, f"/ui/thread?id={thread_id}", f"/ui/runs?id={thread_id}"]:
            shown.append(http.get(path).raise_for_status().text)
        for path in (f"/threads/{thread_id}/runs", f"/threads/{thread_id}/state", "/memories"):
            shown.append(http.get(path).raise_for_status().text)
        history = http.post(f"/threads/{thread_id}/history", json={})
        shown.append(history.raise_for_status().text)
    shown.append(call_mcp_tool(desk, user, "recall", person, query="refund"))
    shown.append(call_mcp_tool(desk, user, "search_threads", person, text="refund"))
    shown.append(call_mcp_tool(desk, user, "read_thread", person, thread_id=thread_id))
    return "\n".join(shown)


def read_archives_and_person_pages(desk: Desk, user: str, senders: Sequence[str] = ()) -> str:
    """Return a person's archive, erasure plan and page, as read by the person and `senders`."""
    handed = []
    for sender in (user, *senders):
        person = user if sender == "desk" else ""
        headers = {"x-api-key": sender} | ({"x-perdure-user": person} if person else {})
        with httpx.Client(base_url=desk.url, headers=headers, timeout=60) as http:
            for path in (f"/people/{user}", f"/people/{user}/export"):
                handed.append(http.get(path).raise_for_status().text)
    headers = {"x-api-key": user}
    handed.append(httpx.get(f"{desk.url}/ui/person", headers=headers, timeout=60).text)
    return "\n".join(handed)


def correct_memory_on_page(desk: Desk, user: str) -> None:
    """Change a memory of a person as an admin."""
    headers = {"x-api-key": "boss"}
    with httpx.Client(base_url=desk.url, headers=headers, timeout=60) as http:
        body = {"namespace_prefix": ["memories", user]}
        items = http.post("/store/items/search", json=body).raise_for_status().json()["items"]
        [item] = [each for each in items if SECRETS[user] in each["value"]["text"]]
        place = [("ns", "memories"), ("ns", user), ("key", item["key"])]
        form = {"text": f"{SECRETS[user]} Indeed.", "version": "1", "change": "update"}
        changed = http.post("/ui/memory", params=place, data=form, follow_redirects=False)
        assert changed.status_code == 303


def test_archives_and_erasure_receipts_name_no_other_user(
    db: Settings,
    tmp_path: Path,
    model: Model,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The approver, the operator and the admin who worked on the thread are not named either."""
    monkeypatch.setattr("tests.server.test_person.SECRETS", SECRETS)
    with caplog.at_level(logging.INFO), serve_desk(db, write_keys(tmp_path), model) as desk:
        act_as_every_user(desk)
        for user in ("dora", "kim"):
            correct_memory_on_page(desk, user)
        senders = ("desk", "boss")
        handed = {
            user: read_archives_and_person_pages(desk, user, senders) for user in ("dora", "kim")
        }
        prompt = call_mcp_tool(desk, "dora", "recall", query="refund")
        before = read_archives_and_person_pages(desk, "kim")
        headers = {"x-api-key": "boss"}
        gone = httpx.delete(f"{desk.url}/people/dora", headers=headers, timeout=60)
        after = read_archives_and_person_pages(desk, "kim")
        handed["dora"] += gone.raise_for_status().text
        logs = "\n".join(each.getMessage() for each in caplog.records)

    for user, other in (("dora", "kim"), ("kim", "dora")):
        strange = [
            *SECRET_WORDS[other],
            *SECRET_WORDS["boss"],
            *SECRET_WORDS["desk"],
            "boss",
            '"desk"',
        ]
        text = handed[user].replace('"graph_id":"desk"', "").replace('"graph":"desk"', "")
        assert [mark for mark in strange if mark in text] == []
        assert [mark for mark in SECRET_WORDS[user] if mark not in text] == []
        assert '"sent_by":"somebody else"' in text
        assert '"sent_by":"a backend"' in text
        assert '"made_by":"somebody else"' in text
    assert "boss" not in prompt
    assert "Indeed." in prompt
    without_times = re.compile('"exported_at":"[^"]*"')
    assert without_times.sub("", after) == without_times.sub("", before)
    assert [mark for of in SECRET_WORDS.values() for mark in of[:2] if mark in logs] == []


def test_data_of_one_person_is_not_shown_to_another(
    db: Settings,
    tmp_path: Path,
    model: Model,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Prompts, lists, pages, tool results and logs contain nothing of the other person."""
    monkeypatch.setattr("tests.server.test_person.SECRETS", SECRETS)
    with caplog.at_level(logging.INFO), serve_desk(db, write_keys(tmp_path), model) as desk:
        threads = act_as_every_user(desk)
        wait_until(
            lambda: all(each["status"] != "busy" for each in desk.client("boss").threads.search())
        )
        prompts = [json.dumps(each["messages"]) for each in model.requests]
        logs = "\n".join(each.getMessage() for each in caplog.records)
        audit = [each.getMessage() for each in caplog.records if each.name == "perdure.audit"]
        shown = {user: read_everything_shown(desk, user, threads[user]) for user in ("dora", "kim")}
        for user in ("dora", "kim"):
            for_them = read_everything_shown(desk, "desk", threads[user], user)
            shown[user] = f"{shown[user]}\n{for_them}"
        held = {user: "\n".join(desk.memories(user)) for user in SECRET_WORDS}

    for user, other in (("dora", "kim"), ("kim", "dora")):
        theirs, strange = (
            SECRET_WORDS[user],
            [*SECRET_WORDS[other], *SECRET_WORDS["boss"], *SECRET_WORDS["desk"]],
        )
        assert [mark for mark in strange if mark in shown[user]] == []
        assert [mark for mark in theirs[:2] if mark not in shown[user]] == []
        assert [mark for mark in strange if mark in held[user]] == []
        assert MESSAGES[user] in held[user]
        of_them = [each for each in prompts if theirs[0] in each]
        assert len(of_them) >= 6
        assert [mark for mark in strange if any(mark in each for each in of_them)] == []
    assert not any("Walrus" in each or "Badger" in each for each in prompts)
    assert (held["boss"], held["desk"]) == (SECRETS["boss"], SECRETS["desk"])
    marks = [mark for of in SECRET_WORDS.values() for mark in of[:2]]
    assert [mark for mark in marks if mark in logs] == []
    assert [json.loads(each)["user"] for each in audit] == ["dora", "boss", "kim", "boss"]
