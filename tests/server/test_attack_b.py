"""Attacks on the server: one user against another, hostile requests, logs. Each found a defect."""

from __future__ import annotations

import io
import json
import logging
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from playwright.sync_api import Browser
from typer.testing import CliRunner

from perdure.checkpointers import open_checkpointer
from perdure.cli.app import app
from perdure.errors import ConfigurationError
from perdure.graphs import chat_graph
from perdure.server import create_app, pages_items
from perdure.server.access import ADMIN
from perdure.server.auth_file import AuthFile
from perdure.server.graphs import Graphs
from perdure.server.keys import Keys
from perdure.server.logs import Audit, log_to_stderr
from perdure.server.reply import encoded
from perdure.settings import Settings
from tests.server.running import running
from tests.server.talking import Gate, says
from tests.server.talking import talk as talking
from tests.server.test_auth_file import written
from tests.server.test_keys import ANN, BOB, ROOT, entry
from tests.talks import talk

pytestmark = pytest.mark.filterwarnings("ignore:The v3 streaming protocol")
SECRET = "SECRET of ann"
RUN = {"assistant_id": "talk", "input": says(SECRET)}
START = {"id": 1, "method": "run.start", "params": RUN}
ADMINS = f'permissions = ["{ADMIN}"]'


class As(NamedTuple):
    """Clients of the users of a server."""

    ann: httpx.Client
    bob: httpx.Client
    root: httpx.Client


@contextmanager
def clients(url: str) -> Iterator[As]:
    with ExitStack() as stack:
        made = [
            httpx.Client(base_url=url, headers={"x-api-key": key}, timeout=30)
            for key in (ANN, BOB, ROOT)
        ]
        yield As(*map(stack.enter_context, made))


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """A keys file of two users and an admin."""
    file = tmp_path / "keys.toml"
    file.write_text(entry(ANN, "ann") + entry(BOB, "bob") + entry(ROOT, "root", ADMINS))
    return file


@pytest.fixture
def gate() -> Gate:
    """A gate that is open."""
    made = Gate()
    made.open.set()
    return made


@pytest.fixture
def graphs(gate: Gate) -> Graphs:
    return Graphs({"talk": talking(gate), "chat": chat_graph()})


@pytest.fixture
def url(settings: Settings, keys: Path, graphs: Graphs) -> Iterator[str]:
    with running(create_app(settings, access=Keys(keys), graphs=graphs)) as address:
        yield address


@pytest.fixture
def users(url: str) -> Iterator[As]:
    with clients(url) as made:
        yield made


def ok(reply: httpx.Response) -> Any:
    assert reply.status_code < 300, reply.text
    return reply.json() if reply.content else None


def fails(client: httpx.Client, method: str, path: str, **sent: Any) -> bool:
    """Whether a request ends in an error of the server; which closes its connection."""
    headers = {**client.headers, "connection": "close", **sent.pop("headers", {})}
    return client.request(method, path, headers=headers, **sent).status_code >= 500


# -- a thread's id that passes from one user to another


@pytest.mark.xfail(strict=True, reason="the owner of a record is believed before that of the head")
def test_a_thread_that_was_made_first_gives_no_way_to_what_another_says_on_it(
    users: As, settings: Settings
) -> None:
    """Bob reserves the id that Ann's agent, which is no client of the server, will use."""
    ok(users.bob.post("/threads", json={"thread_id": "ann-daily"}))
    with open_checkpointer(settings.db) as saver:
        talk(saver, "ann-daily", said=[SECRET, "yes"], user_id="ann")

    assert SECRET not in users.bob.get("/threads/ann-daily").text
    assert users.ann.get("/threads/ann-daily").status_code == 200


@pytest.mark.xfail(strict=True, reason="a run of an admin makes an agent's thread the admin's")
def test_a_run_of_an_admin_leaves_a_thread_to_its_owner(users: As, settings: Settings) -> None:
    with open_checkpointer(settings.db) as saver:
        talk(saver, "agent", said=["hi", "yes"], user_id="ann")
    ok(users.ann.get("/threads/agent"))

    ok(users.root.post("/threads/agent/runs/wait", json={**RUN, "input": says("look")}))

    assert users.ann.get("/threads/agent").status_code == 200


# -- namespaces of perdure's own


TEAM = """
from langgraph_sdk import Auth

auth = Auth()

@auth.authenticate
async def user(headers): return headers[b"x-api-key"].decode().removeprefix("key-of-")

@auth.on.threads
async def threads(ctx, value):
    value.setdefault("metadata", {})["owner"] = ctx.user.identity
    return {"owner": ctx.user.identity}

@auth.on.store
async def store(ctx, value): return True
"""
"""Threads are their owners', the store is a team's."""


@pytest.mark.xfail(strict=True, reason="the check of the first label passes what has no label")
def test_a_search_of_everything_has_nothing_of_perdures_own(
    settings: Settings, graphs: Graphs, tmp_path: Path
) -> None:
    access = AuthFile(written(tmp_path, TEAM, "team.py"))
    served = create_app(settings, access=access, graphs=graphs)
    with running(served) as url, clients(url) as users:
        ok(users.ann.post("/threads", json={"thread_id": "t", "metadata": {"topic": SECRET}}))
        direct = {"namespace_prefix": ["perdure.server", "threads"]}
        assert users.bob.post("/store/items/search", json=direct).status_code == 403
        found = users.bob.post("/store/items/search", json={"namespace_prefix": []})
        page = users.bob.get("/ui/store/items.json")
        names = [users.bob.post("/store/namespaces", json=each) for each in ({}, {"prefix": ["*"]})]

    assert SECRET not in found.text + page.text
    assert not [each for each in names if "perdure" in each.text]


@pytest.mark.xfail(strict=True, reason="keys.py's list of labels lacks the server's second one")
def test_no_user_is_called_like_a_label_of_perdures_own(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(entry(ANN, "unstarted"))
    with pytest.raises(ConfigurationError, match="no user can be called 'unstarted'"):
        Keys(file)


# -- pages


@pytest.mark.xfail(strict=True, reason="Referrer-Policy no-referrer makes a form's Origin null")
def test_forms_work_at_an_address_without_tls_that_is_not_this_machine(
    browser: Browser, settings: Settings, keys: Path, graphs: Graphs
) -> None:
    """There browsers send no Sec-Fetch-Site; http://0.0.0.0 stands for such an address."""
    served = create_app(settings, access=Keys(keys), graphs=graphs, hosts=None)
    with running(served) as url:
        context = browser.new_context()
        tab = context.new_page()
        tab.goto(url.replace("127.0.0.1", "0.0.0.0") + "/ui/login")
        tab.fill("#key", ANN)
        tab.click("button[type=submit]")
        tab.wait_for_load_state()
        shown = tab.locator("main").inner_text()
        context.close()

    assert "page of another site" not in shown
    assert "There are no threads yet" in shown


@pytest.mark.xfail(strict=True, reason="only HTML pages have Cache-Control")
def test_what_is_private_is_not_kept_by_caches(users: As) -> None:
    ok(users.ann.post("/threads", json={"thread_id": "t"}))
    for path in ("/ui/threads.json", "/threads/t", "/memories"):
        assert "no-store" in users.ann.get(path).headers.get("cache-control", ""), path


# -- requests that end in a 500


LARGE = 10**25


@pytest.mark.xfail(strict=True, reason="numbers of queries have no upper bound")
def test_large_numbers(users: As) -> None:
    ok(users.ann.post("/threads", json={"thread_id": "t"}))
    ok(users.ann.post("/threads/t/runs/wait", json=RUN))
    ok(users.ann.post("/memories", json={"memory": "Ann likes tea.", "key": "k"}))
    paths = (
        f"/ui/checkpoints?id=t&before={LARGE}",
        f"/ui/thread?id=t&before=1&order={LARGE}",
        f"/ui/memory?ns=memories&ns=ann&key=k&start={LARGE}",
        "/ui/threads?until=9999-12-31",
    )

    assert not [path for path in paths if fails(users.ann, "GET", path)]


def test_large_numbers_in_forms_and_headers(users: As) -> None:
    ok(users.ann.post("/threads", json={"thread_id": "t"}))
    run = ok(users.ann.post("/threads/t/runs", json=RUN))["run_id"]
    ok(users.ann.get(f"/threads/t/runs/{run}/join"))
    streamed = f"/threads/t/runs/{run}/stream"
    for digits in ("9" * 25, "9" * 5000):
        assert not fails(users.ann, "POST", "/ui/compare?id=t", data={"a": digits, "b": "1"})
        assert not fails(users.ann, "GET", streamed, headers={"last-event-id": digits})


@pytest.mark.xfail(strict=True, reason="the address in HX-Current-URL is not checked")
def test_an_address_that_is_none(url: str) -> None:
    sent = {"hx-request": "true", "hx-current-url": "http://["}

    assert httpx.get(f"{url}/ui/threads", headers=sent).status_code == 401


def test_a_command_may_say_what_is_so_anyway(users: As) -> None:
    order = {**START, "params": {**RUN, "if_not_exists": "create"}}

    assert users.ann.post("/threads/t/commands", json=order).status_code < 500


# -- what a request leaves


@pytest.mark.xfail(strict=True, reason="the thread is made before the graph is looked up")
def test_a_run_of_no_graph_leaves_no_thread(users: As) -> None:
    wrong = {"assistant_id": "nope", "input": {}}
    assert users.ann.post("/runs/wait", json=wrong).status_code == 404

    assert users.ann.post("/threads/search", json={}).json() == []


@pytest.mark.xfail(strict=True, reason="each of 100 paths of 20 versions is compared word by word")
def test_a_page_of_versions_compares_no_more_than_it_can(
    users: As, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two texts of 1,990 words of two kinds take 0.3 s; a page may ask for 2,000 such pairs."""
    compared: list[int] = []

    class Counting:
        def __init__(self, junk: None, one: list[str], other: list[str], **options: bool) -> None:
            compared.append(len(one) * len(other))

        def get_opcodes(self) -> list[Any]:
            return []

    monkeypatch.setattr(pages_items, "SequenceMatcher", Counting)
    for words in ("." * 1000 + "," * 990, "," * 1000 + "." * 990):
        value = {f"field {number}": words for number in range(100)}
        item = {"namespace": ["memories", "ann"], "key": "k", "value": value}
        assert users.ann.put("/store/items", json=item).status_code == 204
    ok(users.ann.get("/ui/memory.json", params={"ns": ["memories", "ann"], "key": "k"}))

    assert sum(compared) <= 20_000_000


# -- logs


FORGED = '2026-01-01 00:00:00,000 INFO perdure.audit: {"user":"root","action":"threads:delete"}'


@pytest.mark.xfail(strict=True, reason="logs as text have line ends and escapes of their arguments")
def test_no_line_of_the_log_is_forged(users: As, monkeypatch: pytest.MonkeyPatch) -> None:
    root, stderr = logging.getLogger(), io.StringIO()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(sys, "stderr", stderr)
    log_to_stderr("text")
    ok(users.bob.post("/threads", json={"thread_id": "t"}))
    order = {"goto": f"x\n{FORGED}\x1b[2J"}
    users.bob.post("/threads/t/runs/wait", json={"assistant_id": "talk", "command": order})
    logged = stderr.getvalue()

    assert not [line for line in logged.splitlines() if line.startswith(FORGED)]
    assert "\x1b" not in logged


@pytest.mark.xfail(strict=True, reason="orjson leaves U+0085, U+2028 and U+2029 as they are")
def test_a_record_is_one_line() -> None:
    line = encoded({"thread_id": "a\x85b\u2028c\u2029d"}).decode()

    assert json.loads(line) == {"thread_id": "a\x85b\u2028c\u2029d"}
    assert len(line.splitlines()) == 1


class Full(Audit):
    """The audit log of a disk that is full."""

    def _write(self, line: bytes) -> None:
        raise OSError(28, "No space left on device")


@pytest.mark.xfail(strict=True, reason="the record is written after the change was made")
def test_a_change_that_cannot_be_recorded_is_refused(
    settings: Settings, keys: Path, graphs: Graphs
) -> None:
    """As docs/server.md says."""
    with open_checkpointer(settings.db) as saver:
        talk(saver, "t", user_id="ann")
    served = create_app(settings, access=Keys(keys), graphs=graphs, audit=Full())
    with running(served) as url, clients(url) as users:
        reply = users.ann.delete("/threads/t")
    with open_checkpointer(settings.db) as saver:
        left = [head.thread_id for head in saver.heads()]

    assert reply.status_code >= 500
    assert left == ["t"]


# -- start-up


@pytest.mark.xfail(strict=True, reason="--new-key does not check the name")
def test_a_new_key_is_of_a_user_whom_the_file_may_have() -> None:
    made = CliRunner().invoke(app, ["serve", "--new-key", "quarantine"])

    assert made.exit_code != 0
    assert "sha256" not in made.output
