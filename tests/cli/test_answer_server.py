"""`perdure answer --url` answers through a server; `perdure runs` and `crons` list its rows."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from langgraph_sdk import get_sync_client
from langgraph_sdk.client import SyncLangGraphClient

from perdure.server import create_app
from perdure.server.graphs import Graphs
from perdure.server.http.keys import KeysFileAccess
from perdure.settings import Settings
from perdure.stores import open_store
from tests.cli.asking import read_answers, write_langgraph_json
from tests.cli.commands import invoke, run, run_and_read_error, run_json, split_rows
from tests.cli.databases import postgres_database
from tests.server.http.test_keys import render_key_entry
from tests.server.running import run_server

KEYS = {"dora": "perdure_dora", "boss": "perdure_boss", "emil": "perdure_emil"}


class RunningServer:
    """A server with keys: dora and emil are users, and boss is an admin."""

    def __init__(self, url: str, db: str, graphs: str) -> None:
        self.url, self.db, self.graphs = url, db, graphs

    def client(self, user: str) -> SyncLangGraphClient:
        """Return a client of a user, which is a context manager."""
        return get_sync_client(url=self.url, api_key=KEYS[user])

    def run_to_question(self, user: str, thread: str, graph: str) -> None:
        """Create a thread of a user, and run a graph on it up to its question."""
        graph_input: Any = {
            "messages": [{"role": "user", "content": f"I want a refund on {thread}"}]
        }
        with self.client(user) as client:
            client.threads.create(thread_id=thread)
            client.runs.wait(thread, graph, input=graph_input, raise_error=False)

    def read_memory_texts_by_user(self) -> dict[str, list[str]]:
        with open_store(self.db) as store:
            return {
                user: sorted(item.value["text"] for item in store.search(("memories", user)))
                for _, user in store.list_namespaces(prefix=("memories",))
            }


@pytest.fixture(params=["file", "postgres"])
def server(
    request: pytest.FixtureRequest, db: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[RunningServer]:
    file = write_langgraph_json(tmp_path)
    keys = tmp_path / "keys.toml"
    admin = 'permissions = ["perdure:admin"]'
    keys.write_text(
        "\n".join(
            render_key_entry(key, user, admin * (user == "boss")) for user, key in KEYS.items()
        )
    )

    def serve(db_address: str) -> Iterator[RunningServer]:
        settings = Settings(db=db_address, user="me")
        app = create_app(
            settings, access=KeysFileAccess(keys), graphs=Graphs.load_langgraph_json(file)
        )
        with run_server(app) as url:
            yield RunningServer(url, db_address, file)

    if request.param == "file":
        yield from serve(str(db))
        return
    with postgres_database() as dsn:
        monkeypatch.setenv("PERDURE_DB", dsn)
        yield from serve(dsn)


@pytest.fixture
def boss_api_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let commands use the API key of the admin."""
    monkeypatch.setenv("PERDURE_API_KEY", KEYS["boss"])


def test_answer_through_server_continues_run_of_another_user(
    server: RunningServer, boss_api_key: None
) -> None:
    """Another person may answer if the key allows it, and the run of the server continues."""
    server.run_to_question("dora", "t", "review")
    report = run_json("answer", "t", "edit", '{"euros": 4}', "--url", server.url)
    decision = {"type": "edit", "edited_action": {"name": "refund", "args": {"euros": 4}}}

    assert report["answer"] == {"decisions": [decision]}
    assert (report["thread_id"], report["status"], report["waits_for_answers_to"]) == (
        "t",
        "idle",
        [],
    )
    assert read_answers(server.db, server.graphs, "review", "t") == [{"decisions": [decision]}]
    assert report["said"].startswith("dora gets {'decisions': [{'type': 'edit'")
    assert set(server.read_memory_texts_by_user()) == {"dora"}
    assert [thread["user"] for thread in run_json("threads")] == ["dora"]


def test_answer_without_server_is_seen_by_server_at_once(server: RunningServer) -> None:
    """A question of a server's run is answered in this process; the server has the new status."""
    server.run_to_question("dora", "t", "plain")
    report = run_json("answer", "t", "respond", "yes", "--graphs", server.graphs)
    with server.client("dora") as client:
        thread = client.threads.get("t")
        interrupted_threads = client.threads.search(status="interrupted")
        graph_input: Any = {"messages": [{"role": "user", "content": "Once more"}]}
        client.runs.wait("t", "plain", input=graph_input, raise_error=False)
        after = client.threads.get("t")

    assert report["status"] == "idle"
    assert (thread["status"], thread["interrupts"], interrupted_threads) == ("idle", {}, [])
    assert (thread["metadata"] or {})["graph_id"] == "plain"
    assert after["status"] == "interrupted"
    assert set(server.read_memory_texts_by_user()) == {"dora"}


def test_numbered_question_is_answered_through_server(
    server: RunningServer, boss_api_key: None
) -> None:
    """The question with the given number is answered, and the other one stays open."""
    server.run_to_question("dora", "t", "several")
    unclear = invoke("answer", "t", "respond", "yes", "--url", server.url)
    first = run("answer", "t", "respond", "one", "--question", "1", "--url", server.url)
    second = run_json("answer", "t", "respond", "two", "--url", server.url)

    assert unclear.exit_code == 1
    assert (
        "the thread has several open questions; choose one with --question N:\n"
        "1. First?\n2. Second?" in unclear.stderr
    )
    assert (
        first == "answered the question of the thread 't'; the thread is waiting for an answer "
        "(Second?)\n"
    )
    assert second["status"] == "idle"
    assert sorted(read_answers(server.db, server.graphs, "several", "t")) == ["one", "two"]


def test_server_refuses_invalid_answer_and_starts_no_run(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An invalid thread, action, value or key is refused, and an unreachable server is reported."""
    server.run_to_question("dora", "t", "review")
    server.run_to_question("emil", "free", "plain")
    monkeypatch.setenv("PERDURE_API_KEY", KEYS["emil"])
    run("answer", "free", "respond", "yes", "--url", server.url)
    run_count = len(run_json("runs"))
    cases = [
        ("t", "approve", "has no thread 't', or the thread"),
        ("none", "approve", "has no thread 'none', or the thread"),
        ("free", "respond", "is not waiting for an answer; it is idle"),
    ]
    for thread, action, expected_message in cases:
        result = invoke("answer", thread, action, "x", "--url", server.url)
        assert (result.exit_code, result.stdout) == (1, ""), result.output
        assert expected_message in result.stderr
    monkeypatch.setenv("PERDURE_API_KEY", KEYS["dora"])
    for arguments, expected_message in (
        (("aprove",), "is 'aprove'; expected one of approve, edit, reject, respond"),
        (("edit", "{"), "is not valid JSON"),
    ):
        result = invoke("answer", "t", *arguments, "--url", server.url)
        assert (result.exit_code, result.stdout) == (1, ""), result.output
        assert expected_message in result.stderr
    monkeypatch.setenv("PERDURE_API_KEY", "perdure_wrong")
    key_error = run_and_read_error("answer", "t", "approve", "--url", server.url, capsys=capsys)
    assert "replied with status 401: " in key_error
    assert "set PERDURE_API_KEY to a valid key" in key_error
    assert "cannot be reached" in run_and_read_error(
        "answer", "t", "approve", "--url", "http://127.0.0.1:1", capsys=capsys
    )
    assert len(run_json("runs")) == run_count


def test_answer_that_graph_ignores_is_refused(server: RunningServer, boss_api_key: None) -> None:
    """A graph that did not ask the question ignores the answer, and the question stays open."""
    server.run_to_question("dora", "t", "plain")
    ignored = invoke("answer", "t", "respond", "yes", "--graph", "several", "--url", server.url)
    answered = run_json("answer", "t", "respond", "yes", "--graph", "plain", "--url", server.url)

    assert (ignored.exit_code, ignored.stdout) == (1, "")
    assert "'t' is still waiting for an answer to the same question" in ignored.stderr
    assert "the graph 'several' did not use the answer" in ignored.stderr
    assert (answered["status"], answered["waits_for_answers_to"]) == ("idle", [])
    assert read_answers(server.db, server.graphs, "plain", "t") == ["yes"]


@pytest.mark.parametrize("question_keeps_id", [False, True], ids=["new id", "same id"])
def test_graph_may_ask_same_question_again(
    server: RunningServer,
    boss_api_key: None,
    question_keeps_id: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The answer counts if the graph asks again, also with the same id, as in langgraph 1.2.0."""
    if question_keeps_id:
        for module in ("langgraph.types", "langgraph.pregel._algo"):
            monkeypatch.setattr(
                f"{module}._interrupt_id",
                lambda ns, answered: sha256(ns.encode()).hexdigest()[:32],
                raising=False,
            )
    server.run_to_question("dora", "t", "stubborn")
    first = run_json("answer", "t", "respond", "no", "--url", server.url)
    second = run_json("answer", "t", "respond", "yes", "--url", server.url)

    assert first["waits_for_answers_to"] == ["Yes?"]
    assert (first["question"] == second["question"]) == question_keeps_id
    assert second["status"] == "idle"
    assert read_answers(server.db, server.graphs, "stubborn", "t") == ["yes"]


def test_empty_thread_id_is_refused() -> None:
    result = invoke("answer", "", "approve", "--url", "http://127.0.0.1:1")

    assert (result.exit_code, result.stdout) == (1, "")
    assert "the thread id is empty; pass the full id" in result.stderr


@pytest.mark.parametrize("key", ["k3y\xfc", "k3y\nx", " k3y", "k3y\r"])
def test_api_key_that_no_header_can_contain_is_refused_and_not_printed(
    key: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PERDURE_API_KEY", key)
    message = run_and_read_error(
        "answer", "t", "approve", "--url", "http://127.0.0.1:1", capsys=capsys
    )

    assert "the API key in PERDURE_API_KEY cannot be sent in an HTTP header" in message
    assert "k3y" not in message


def test_answer_prints_error_of_failed_run_on_server(
    server: RunningServer, boss_api_key: None
) -> None:
    """The exit code is 1, and `perdure runs` lists the run with its error."""
    server.run_to_question("dora", "t", "failing")
    result = invoke("answer", "t", "respond", "yes", "--url", server.url)

    assert result.exit_code == 1
    assert "the run failed" in result.stderr
    assert "no such account" in result.stderr
    (failed, *_) = run_json("runs", "--status", "error")
    assert failed["error"]["message"] == "no such account"


def test_runs_are_listed_newest_first_by_thread_user_and_status(
    server: RunningServer, boss_api_key: None
) -> None:
    """`--thread`, `--user`, `--status` and `--limit` narrow the list."""
    server.run_to_question("dora", "first", "review")
    server.run_to_question("emil", "second", "plain")
    run("answer", "first", "approve", "--url", server.url)
    listed = run_json("runs")
    table = split_rows(run("runs"))

    assert [(row["thread_id"], row["caller"]) for row in listed] == [
        ("first", "boss"),
        ("second", "emil"),
        ("first", "dora"),
    ]
    assert [row["status"] for row in listed] == ["success", "interrupted", "interrupted"]
    assert {row["graph"] for row in listed} == {"review", "plain"}
    assert table[0] == ["id", "thread", "graph", "status", "created", "caller", "error"]
    assert table[1][:6] == [listed[0]["run_id"], "first", "review", "success", "just now", "boss"]
    assert [row["thread_id"] for row in run_json("runs", "--user", "dora")] == ["first", "first"]
    assert [row["thread_id"] for row in run_json("runs", "--thread", "sec")] == ["second"]
    assert len(run_json("runs", "--status", "success")) == 1
    assert len(run_json("runs", "--limit", "2")) == 2
    assert "there are more than 2" in invoke("runs", "--limit", "2").stderr
    assert not any(
        "refund" in str(row) for row in listed
    )  # the messages of a request are not shown
    for options in (("--user", "nobody"), ("--status", "running"), ("--user", "boss")):
        assert invoke("runs", *options).exit_code == 1
    assert invoke("runs", "--user", "").exit_code == 1


def test_crons_are_listed_next_due_first_by_thread_and_user(server: RunningServer) -> None:
    """`--thread` and `--user` narrow the list."""
    server.run_to_question("dora", "t", "review")
    with server.client("boss") as boss:
        boss.crons.create_for_thread("t", "plain", schedule="0 3 * * *", input={})
    with server.client("emil") as emil:
        emil.crons.create("plain", schedule="0 4 1 1 *", timezone="Europe/Oslo", input={})
        disabled: Any = emil.crons.create(
            "twice", schedule="0 5 1 1 *", input={"messages": "secret"}
        )
        emil.crons.update(disabled["cron_id"], enabled=False)
    with get_sync_client(
        url=server.url, api_key=KEYS["boss"], headers={"X-Perdure-User": "kim"}
    ) as acting:
        acting.crons.create("plain", schedule="0 6 2 1 *", input={})
    listed = run_json("crons")
    table = split_rows(run("crons"))

    first = listed[0]
    assert (first["schedule"], first["caller"], first["enabled"]) == ("0 3 * * *", "boss", True)
    assert {cron["cron_id"]: cron["enabled"] for cron in listed}[disabled["cron_id"]] is False
    assert table[0] == ["id", "thread", "graph", "schedule", "timezone", "next", "caller"]
    assert table[1][1:5] == ["t", "plain", "0 3 * * *", "UTC"]
    assert [cron["caller"] for cron in run_json("crons", "--user", "dora")] == ["boss"]
    assert {cron["caller"] for cron in run_json("crons", "--user", "emil")} == {"emil"}
    [for_kim] = run_json("crons", "--user", "kim")
    assert (for_kim["caller"], for_kim["person"]) == ("boss", "kim")
    assert [cron["person"] for cron in run_json("crons", "--user", "dora")] == ["dora"]
    assert [cron["thread_id"] for cron in run_json("crons", "--thread", "t")] == ["t"]
    assert "secret" not in str(listed)
    assert invoke("crons", "--user", "boss").exit_code == 1


def test_database_without_runs_lists_no_runs_and_crons(db: Path) -> None:
    """An empty list is not an error; a file that a chat created has neither runs nor crons."""
    run("chat", "-t", "t", "-m", "hello")
    results = invoke("runs"), invoke("crons")

    assert [result.exit_code for result in results] == [0, 0]
    assert [result.stderr for result in results] == ["there are no runs\n", "there are no crons\n"]
    assert (run_json("runs"), run_json("crons")) == ([], [])
