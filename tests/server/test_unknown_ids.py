"""A request with an id of somebody else gets the same reply as one with an id that nobody has."""

from __future__ import annotations

import json
import re
from typing import Any
from uuid import uuid4

import httpx
import pytest

from tests.server.examples import ASSISTANT, BODIES, CRON, FORMS, KEPT, OWN, RUN, THREAD
from tests.server.http.test_access import (
    PROTECTED_ROUTES,
    Route,
    SeededServers,
    read_body,
    restore_data_of_ann,
    send_example,
    servers,  # noqa: F401 - a fixture
)
from tests.server.http.test_keys import BOB

IDS = ("thread_id", "id", "thread", "assistant_id", "run_id", "cron_id")
CREATES = {"POST /threads/{thread_id}/runs/stream", "POST /threads/{thread_id}/commands"}
"""Routes that create a thread if its id is unknown."""
COMPARED_ROUTES = [
    each
    for each in PROTECTED_ROUTES
    if re.search(r"\{(thread|run|cron|assistant)_id\}", each.path) or each.name in FORMS
    if each.name not in CREATES | OWN
]
BEGIN = RUN | {"if_not_exists": "create"}
ANSWER = {"interrupt_id": "0" * 32, "response": "yes"}
BODIES_BELOW_THREAD: dict[str, Any] = {
    "runs": RUN,
    "runs/stream": BEGIN,
    "runs/wait": BEGIN,
    "runs/crons": CRON,
    "commands": {"id": 1, "method": "run.start", "params": RUN},
    "state": {"values": {"messages": []}},
    "stream/events": {"channels": ["values"]},
    "copy": {},
}
"""Bodies of POST requests, by their path below that of a thread."""


def replace_known_ids(value: Any, known: dict[str, Any], unknown: dict[str, str]) -> Any:
    """Return a value in which Ann's ids are replaced by ids that nobody has."""
    text = json.dumps(value)
    for name, id in unknown.items():
        text = text.replace(str(known[name]), id)
    return json.loads(text.replace(KEPT, f"kept-{uuid4()}"))


def mask_ids(reply: httpx.Response, named: dict[str, Any]) -> tuple[int, str]:
    """Return the status and the text of a reply, with each id replaced by its kind."""
    text = read_body(reply)
    for name in ("run_id", "cron_id", "assistant_id", "thread_id"):
        text = text.replace(str(named[name]), f"<{name}>")
    return reply.status_code, text


@pytest.mark.parametrize("access", ["keys", "guide"])
@pytest.mark.parametrize("route", COMPARED_ROUTES, ids=lambda route: route.name)
def test_id_of_other_user_gets_same_reply_as_unknown_id(
    servers: SeededServers,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    route: Route,
    access: str,
) -> None:
    restore_data_of_ann(servers)
    url, known = getattr(servers, access), dict(servers.named)
    foreign = mask_ids(send_example(servers, url, route, BOB), known)
    named = {"thread_id": f"thread-{uuid4()}"} | {name: str(uuid4()) for name in IDS[3:]}
    named |= {"id": named["thread_id"], "thread": named["thread_id"]}
    for examples in (BODIES, FORMS):
        if route.name in examples:
            unknown = replace_known_ids(examples[route.name], known, named)
            monkeypatch.setitem(examples, route.name, unknown)
    absent = mask_ids(
        send_example(servers._replace(named=known | named), url, route, BOB), known | named
    )

    assert foreign == absent
    assert foreign[0] >= 400


@pytest.mark.parametrize("access", ["keys", "guide"])
@pytest.mark.parametrize("path", BODIES_BELOW_THREAD)
def test_post_to_thread_of_other_user_is_refused_as_unknown(
    servers: SeededServers,  # noqa: F811
    path: str,
    access: str,
) -> None:
    """This includes requests that would create the thread if its id were free."""
    restore_data_of_ann(servers)
    for thread_id in (THREAD, KEPT):
        url = f"{getattr(servers, access)}/threads/{thread_id}/{path}"
        reply = servers.client.post(url, json=BODIES_BELOW_THREAD[path], headers={"x-api-key": BOB})

        if (path, access) == ("runs/crons", "guide"):  # its handlers deny all crons
            assert reply.status_code == 403
            continue
        assert reply.status_code == 404, reply.text
        assert reply.json() == {"detail": f"there is no thread {thread_id!r}"}


def test_answer_command_to_thread_of_other_user_is_refused_as_unknown(
    servers: SeededServers,  # noqa: F811
) -> None:
    restore_data_of_ann(servers)
    sent = {"id": 1, "method": "input.respond", "params": ANSWER}
    with httpx.Client(base_url=servers.keys, headers={"x-api-key": BOB}, timeout=30) as bob:
        replies = [bob.post(f"/threads/{id}/commands", json=sent) for id in (THREAD, "none")]

    assert [each.status_code for each in replies] == [404, 404]


def test_runs_and_assistants_of_other_user_are_unknown_on_own_thread(
    servers: SeededServers,  # noqa: F811
) -> None:
    restore_data_of_ann(servers)
    runs, assistants = (servers.named["run_id"], str(uuid4())), (ASSISTANT, str(uuid4()))
    with httpx.Client(base_url=servers.keys, headers={"x-api-key": BOB}, timeout=30) as bob:
        own = f"own-{uuid4()}"
        bob.post("/threads", json={"thread_id": own}).raise_for_status()
        found = [bob.get(f"/threads/{own}/runs/{id}") for id in runs]
        cancel = [{"thread_id": own, "run_ids": [id]} for id in runs]
        cancelled = [bob.post("/runs/cancel", json=each) for each in cancel]
        bodies = [{"assistant_id": id} for id in assistants]
        begun = [bob.post(f"/threads/{own}/runs", json=RUN | each) for each in bodies]
        planned = [bob.post("/runs/crons", json=CRON | each) for each in bodies]

    for foreign, absent in (found, cancelled, begun, planned):
        assert foreign.status_code == absent.status_code >= 400


def test_new_thread_cannot_have_id_that_is_taken(
    servers: SeededServers,  # noqa: F811
) -> None:
    """LangGraph's clients expect 409, which reveals that the id is taken."""
    restore_data_of_ann(servers)
    headers = {"x-api-key": BOB}
    taken = servers.client.post(
        f"{servers.keys}/threads", json={"thread_id": KEPT}, headers=headers
    )
    kept = {"thread_id": KEPT, "if_exists": "do_nothing"}
    unknown = servers.client.post(f"{servers.keys}/threads", json=kept, headers=headers)

    assert (taken.status_code, unknown.status_code) == (409, 404)
