"""`perdure answer --url` asks a server, `perdure runs` and `crons` list what it runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from langgraph_sdk import get_sync_client
from langgraph_sdk.client import SyncLangGraphClient

from perdure.server import create_app
from perdure.server.graphs import Graphs
from perdure.server.keys import KeysFileAccess
from perdure.settings import Settings
from perdure.stores import open_store
from tests.cli.asking import heard, langgraph_json
from tests.cli.commands import attempt, error, read, rows, run
from tests.cli.databases import postgres_database
from tests.server.running import running
from tests.server.test_keys import entry

KEYS = {"dora": "perdure_dora", "boss": "perdure_boss", "emil": "perdure_emil"}


class Served:
    """A server with keys: dora and emil are users, and boss is an admin."""

    def __init__(self, url: str, db: str, graphs: str) -> None:
        self.url, self.db, self.graphs = url, db, graphs

    def client(self, user: str) -> SyncLangGraphClient:
        """A client of a user, for `with`."""
        return get_sync_client(url=self.url, api_key=KEYS[user])

    def ask(self, user: str, thread: str, graph: str) -> None:
        """Begin a thread of a user, and run a graph up to its question."""
        said: Any = {"messages": [{"role": "user", "content": f"I want a refund on {thread}"}]}
        with self.client(user) as client:
            client.threads.create(thread_id=thread)
            client.runs.wait(thread, graph, input=said, raise_error=False)

    def remembered(self) -> dict[str, list[str]]:
        with open_store(self.db) as store:
            return {
                user: sorted(item.value["text"] for item in store.search(("memories", user)))
                for _, user in store.list_namespaces(prefix=("memories",))
            }


@pytest.fixture(params=["file", "postgres"])
def served(
    request: pytest.FixtureRequest, db: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Served]:
    file = langgraph_json(tmp_path)
    keys = tmp_path / "keys.toml"
    admin = 'permissions = ["perdure:admin"]'
    keys.write_text(
        "\n".join(entry(key, user, admin * (user == "boss")) for user, key in KEYS.items())
    )

    def serve(where: str) -> Iterator[Served]:
        settings = Settings(db=where, user="me")
        app = create_app(settings, access=KeysFileAccess(keys), graphs=Graphs.load(file))
        with running(app) as url:
            yield Served(url, where, file)

    if request.param == "file":
        yield from serve(str(db))
        return
    with postgres_database() as dsn:
        monkeypatch.setenv("PERDURE_DB", dsn)
        yield from serve(dsn)


@pytest.fixture
def as_boss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERDURE_API_KEY", KEYS["boss"])


def test_an_answer_through_a_server(served: Served, as_boss: None) -> None:
    """Another person may answer, if the key allows it; the run of the server goes on."""
    served.ask("dora", "t", "review")
    done = read("answer", "t", "edit", '{"euros": 4}', "--url", served.url)
    decision = {"type": "edit", "edited_action": {"name": "refund", "args": {"euros": 4}}}

    assert done["answer"] == {"decisions": [decision]}
    assert (done["thread_id"], done["status"], done["waits_for_answers_to"]) == ("t", "idle", [])
    assert heard(served.db, served.graphs, "review", "t") == [{"decisions": [decision]}]
    assert done["said"].startswith("dora gets {'decisions': [{'type': 'edit'")
    assert set(served.remembered()) == {"dora"}
    assert [each["user"] for each in read("threads")] == ["dora"]


def test_an_answer_beside_a_server(served: Served) -> None:
    """A question of a run of the server is answered here, and the server knows that at once."""
    served.ask("dora", "t", "plain")
    done = read("answer", "t", "respond", "yes", "--graphs", served.graphs)
    with served.client("dora") as client:
        thread = client.threads.get("t")
        found = client.threads.search(status="interrupted")
        said: Any = {"messages": [{"role": "user", "content": "Once more"}]}
        client.runs.wait("t", "plain", input=said, raise_error=False)
        after = client.threads.get("t")

    assert done["status"] == "idle"
    assert (thread["status"], thread["interrupts"], found) == ("idle", {}, [])
    assert (thread["metadata"] or {})["graph_id"] == "plain"
    assert after["status"] == "interrupted"
    assert set(served.remembered()) == {"dora"}


def test_several_questions_through_a_server(served: Served, as_boss: None) -> None:
    """The one that is numbered is answered, and the other goes on waiting."""
    served.ask("dora", "t", "several")
    unclear = attempt("answer", "t", "respond", "yes", "--url", served.url)
    first = run("answer", "t", "respond", "one", "--question", "1", "--url", served.url)
    second = read("answer", "t", "respond", "two", "--url", served.url)

    assert unclear.exit_code == 1
    assert (
        "several questions wait; choose one with --question N:\n1. First?\n2. Second?"
        in unclear.stderr
    )
    assert first == "'t' is answered; it waits for an answer (Second?)\n"
    assert second["status"] == "idle"
    assert sorted(heard(served.db, served.graphs, "several", "t")) == ["one", "two"]


def test_what_a_server_refuses(
    served: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A thread of another user or an unknown one, nothing open, an action, JSON, and no key."""
    served.ask("dora", "t", "review")
    served.ask("emil", "free", "plain")
    monkeypatch.setenv("PERDURE_API_KEY", KEYS["emil"])
    run("answer", "free", "respond", "yes", "--url", served.url)
    runs = len(read("runs"))
    refused = [
        ("t", "approve", "there is no thread 't' at http"),
        ("none", "approve", "there is no thread 'none' at http"),
        ("free", "respond", "waits for no answer; it is idle"),
    ]
    for thread, action, said in refused:
        result = attempt("answer", thread, action, "x", "--url", served.url)
        assert (result.exit_code, result.stdout) == (1, ""), result.output
        assert said in result.stderr
    monkeypatch.setenv("PERDURE_API_KEY", KEYS["dora"])
    for given, said in (
        (("aprove",), "is 'aprove'; expected one of approve, edit, reject, respond"),
        (("edit", "{"), "is not JSON"),
    ):
        result = attempt("answer", "t", *given, "--url", served.url)
        assert (result.exit_code, result.stdout) == (1, ""), result.output
        assert said in result.stderr
    monkeypatch.setenv("PERDURE_API_KEY", "perdure_wrong")
    wrong = error("answer", "t", "approve", "--url", served.url, into=capsys)
    assert "replies with status 401: " in wrong
    assert "set PERDURE_API_KEY to a valid key" in wrong
    assert "cannot be reached" in error(
        "answer", "t", "approve", "--url", "http://127.0.0.1:1", into=capsys
    )
    assert len(read("runs")) == runs


def test_a_run_that_fails_on_a_server(served: Served, as_boss: None) -> None:
    """Its error is shown, with exit code 1."""
    served.ask("dora", "t", "failing")
    result = attempt("answer", "t", "respond", "yes", "--url", served.url)

    assert result.exit_code == 1
    assert "the run failed" in result.stderr
    assert "no such account" in result.stderr
    (failed, *_) = read("runs", "--status", "error")
    assert failed["error"]["message"] == "no such account"


def test_runs_are_listed(served: Served, as_boss: None) -> None:
    """Newest first, of all, of a thread, of the person of threads, and by status."""
    served.ask("dora", "first", "review")
    served.ask("emil", "second", "plain")
    run("answer", "first", "approve", "--url", served.url)
    listed = read("runs")
    shown = rows(run("runs"))

    assert [(each["thread_id"], each["caller"]) for each in listed] == [
        ("first", "boss"),
        ("second", "emil"),
        ("first", "dora"),
    ]
    assert [each["status"] for each in listed] == ["success", "interrupted", "interrupted"]
    assert {each["graph"] for each in listed} == {"review", "plain"}
    assert shown[0] == ["id", "thread", "graph", "status", "created", "caller", "error"]
    assert shown[1][:6] == [listed[0]["run_id"], "first", "review", "success", "just now", "boss"]
    assert [each["thread_id"] for each in read("runs", "--user", "dora")] == ["first", "first"]
    assert [each["thread_id"] for each in read("runs", "--thread", "sec")] == ["second"]
    assert len(read("runs", "--status", "success")) == 1
    assert len(read("runs", "--limit", "2")) == 2
    assert "there are more than 2" in attempt("runs", "--limit", "2").stderr
    assert not any("refund" in str(each) for each in listed)  # what was asked is not shown
    for given in (("--user", "nobody"), ("--status", "running"), ("--user", "boss")):
        assert attempt("runs", *given).exit_code == 1
    assert attempt("runs", "--user", "").exit_code == 1


def test_crons_are_listed(served: Served) -> None:
    """The one due next first, of all, of a thread, and of a person."""
    served.ask("dora", "t", "review")
    with served.client("boss") as boss:
        boss.crons.create_for_thread("t", "plain", schedule="0 3 * * *", input={})
    with served.client("emil") as emil:
        emil.crons.create("plain", schedule="0 4 1 1 *", timezone="Europe/Oslo", input={})
        off: Any = emil.crons.create("twice", schedule="0 5 1 1 *", input={"messages": "secret"})
        emil.crons.update(off["cron_id"], enabled=False)
    with get_sync_client(
        url=served.url, api_key=KEYS["boss"], headers={"X-Perdure-User": "kim"}
    ) as acting:
        acting.crons.create("plain", schedule="0 6 2 1 *", input={})
    listed = read("crons")
    shown = rows(run("crons"))

    first = listed[0]
    assert (first["schedule"], first["caller"], first["enabled"]) == ("0 3 * * *", "boss", True)
    assert {each["cron_id"]: each["enabled"] for each in listed}[off["cron_id"]] is False
    assert shown[0] == ["id", "thread", "graph", "schedule", "timezone", "next", "caller"]
    assert shown[1][1:5] == ["t", "plain", "0 3 * * *", "UTC"]
    assert [each["caller"] for each in read("crons", "--user", "dora")] == ["boss"]
    assert {each["caller"] for each in read("crons", "--user", "emil")} == {"emil"}
    [for_kim] = read("crons", "--user", "kim")
    assert (for_kim["caller"], for_kim["person"]) == ("boss", "kim")
    assert [each["person"] for each in read("crons", "--user", "dora")] == ["dora"]
    assert [each["thread_id"] for each in read("crons", "--thread", "t")] == ["t"]
    assert "secret" not in str(listed)
    assert attempt("crons", "--user", "boss").exit_code == 1


def test_a_database_without_runs(db: Path) -> None:
    """Nothing is no error; a file that a chat began has neither."""
    run("chat", "-t", "t", "-m", "hello")
    result = attempt("runs"), attempt("crons")

    assert [each.exit_code for each in result] == [0, 0]
    assert [each.stderr for each in result] == ["there are no runs\n", "there are no crons\n"]
    assert (read("runs"), read("crons")) == ([], [])
