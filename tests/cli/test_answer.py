"""`perdure answer`: a question of a graph is answered, and its run goes on."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from perdure.checkpointers import open_checkpointer
from perdure.checkpointers.owner_record import record_organisation_owners
from perdure.stores import open_store
from tests.cli.asking import ask, heard, langgraph_json
from tests.cli.commands import attempt, error, read, run
from tests.cli.databases import postgres_database

DORA = "I want a refund on t"


@pytest.fixture(params=["file", "postgres"])
def where(
    request: pytest.FixtureRequest, db: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """The database that commands work on."""
    if request.param == "file":
        yield str(db)
        return
    with postgres_database() as dsn:
        monkeypatch.setenv("PERDURE_DB", dsn)
        yield dsn


@pytest.fixture
def graphs(tmp_path: Path) -> str:
    """A langgraph.json with the graphs that ask."""
    return langgraph_json(tmp_path)


def remembered(where: str) -> dict[str, list[str]]:
    """The texts of all memories, by user."""
    with open_store(where) as store:
        return {
            user: sorted(item.value["text"] for item in store.search(("memories", user)))
            for _, user in store.list_namespaces(prefix=("memories",))
        }


def checkpoints(where: str, thread: str) -> int:
    """How many checkpoints a thread has, with the writes that its head waits with."""
    with open_checkpointer(where) as saver:
        return saver.thread(thread).size_bytes


REVIEWS: list[tuple[tuple[str, ...], dict[str, Any]]] = [
    (("approve",), {"type": "approve"}),
    (
        ("edit", '{"euros": 4}'),
        {"type": "edit", "edited_action": {"name": "refund", "args": {"euros": 4}}},
    ),
    (("reject",), {"type": "reject"}),
    (("reject", "too much"), {"type": "reject", "message": "too much"}),
    (("respond", "ask again"), {"type": "respond", "message": "ask again"}),
    (("--answer", '{"decisions": [{"type": "approve"}]}'), {"type": "approve"}),
    (("--answer", '{"type": "reject", "message": "no"}'), {"type": "reject", "message": "no"}),
]


@pytest.mark.parametrize(("given", "decision"), REVIEWS, ids=lambda value: str(value)[:24])
def test_a_call_is_decided(
    given: tuple[str, ...], decision: dict[str, Any], db: Path, graphs: str
) -> None:
    """Approve, edit, reject and respond have the form that langchain's middleware expects."""
    ask(str(db), graphs, "review", "t")
    done = read("answer", "t", *given, "--graphs", graphs)

    assert (done["thread_id"], done["status"]) == ("t", "idle")
    assert done["answer"] == {"decisions": [decision]}
    assert heard(str(db), graphs, "review", "t") == [{"decisions": [decision]}]


def test_the_person_of_the_thread_stays(where: str, graphs: str) -> None:
    """Dora's turn goes into her memories, and her thread stays hers, whoever answers."""
    ask(where, graphs, "review", "t", title="A refund")
    before = remembered(where)
    said = run("answer", "t", "approve", "--graphs", graphs, typed="")

    assert said == (
        "'t' is answered; its run has ended\ndora gets {'decisions': [{'type': 'approve'}]}\n"
    )
    assert before == {}
    assert remembered(where) == {
        "dora": [
            "assistant: dora gets {'decisions': [{'type': 'approve'}]}",
            f"user: {DORA}",
        ]
    }
    with open_checkpointer(where) as saver:
        head = saver.head("t")
        assert head is not None
        about = {name: head.metadata[name] for name in ("user_id", "graph_id", "title")}
    assert about == {"user_id": "dora", "graph_id": "review", "title": "A refund"}
    assert attempt("threads", "--waiting").exit_code == 1


@pytest.mark.parametrize(
    ("user", "are_organisations", "expected_person"),
    [("emil", False, "emil"), ("emil", True, "emil"), (None, False, "org"), (None, True, None)],
)
def test_answer_uses_owner_as_person_unless_owners_are_organisations(
    user: str | None, are_organisations: bool, expected_person: str | None, db: Path, graphs: str
) -> None:
    """The person is the `user_id` of the head, or else an `owner` that is not an organisation."""
    ask(str(db), graphs, "twice", "t", user=user, owner="org")
    if are_organisations:
        with open_checkpointer(db) as saver:
            record_organisation_owners(saver)
    run("answer", "t", "respond", "yes", "--graphs", graphs)
    with open_checkpointer(db) as saver:
        head = saver.head("t")

    assert head is not None
    assert head.metadata.get("user_id") == expected_person
    assert head.metadata["owner"] == "org"


def test_any_question_is_answered_by_text_or_json(where: str, graphs: str) -> None:
    """`respond` gives a text, and `--answer` any JSON."""
    for thread, given, value in (
        ("text", ("respond", "yes, all"), "yes, all"),
        ("json", ("--answer", '{"sure": [1, null]}'), {"sure": [1, None]}),
    ):
        ask(where, graphs, "plain", thread)
        done = read("answer", thread, *given, "--graphs", graphs)
        assert done["answer"] == value
        assert heard(where, graphs, "plain", thread) == [value]


def test_the_beginning_of_an_id_and_a_configured_file_do(
    db: Path, graphs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for other commands; `PERDURE_GRAPHS` counts as --graphs."""
    ask(str(db), graphs, "plain", "thread-with-a-long-id")
    monkeypatch.setenv("PERDURE_GRAPHS", graphs)

    assert read("answer", "thread-w", "respond", "yes")["thread_id"] == "thread-with-a-long-id"


def test_several_questions_are_answered_one_by_one(where: str, graphs: str) -> None:
    """Which one is to be said; the others go on waiting."""
    ask(where, graphs, "several", "t")
    unclear = attempt("answer", "t", "respond", "yes", "--graphs", graphs)
    first = read("answer", "t", "respond", "one", "--question", "1", "--graphs", graphs)
    (thread,) = read("threads", "--waiting")
    second = read("answer", "t", "respond", "two", "--graphs", graphs)

    assert unclear.exit_code == 1
    assert "several questions wait; choose one with --question N:\n1. " in unclear.stderr
    assert first["status"] == "waiting"
    assert first["waits_for_answers_to"] == thread["waits_for_answers_to"]
    assert (second["status"], second["waits_for_answers_to"]) == ("idle", [])
    assert sorted(heard(where, graphs, "several", "t")) == ["one", "two"]


def test_the_next_question_is_shown(db: Path, graphs: str) -> None:
    """An answer after which the graph asks again says what."""
    ask(str(db), graphs, "twice", "t")
    said = run("answer", "t", "respond", "yes", "--graphs", graphs)
    assert said == "'t' is answered; it waits for an answer (at 'second': Two?)\n"
    run("answer", "t", "respond", "no", "--graphs", graphs)

    assert heard(str(db), graphs, "twice", "t") == ["yes", "no"]


def test_several_calls_are_decided_at_once(db: Path, graphs: str) -> None:
    """One action counts for all of a message; --answer has a decision on each."""
    ask(str(db), graphs, "batch", "all")
    ask(str(db), graphs, "batch", "each")
    run("answer", "all", "reject", "not now", "--graphs", graphs)
    answer = {"decisions": [{"type": "edit", "args": {"euros": 1}}, {"type": "approve"}]}
    run("answer", "each", "--answer", json.dumps(answer), "--graphs", graphs)

    assert heard(str(db), graphs, "batch", "all") == [
        {"decisions": [{"type": "reject", "message": "not now"}] * 2}
    ]
    edited = {"type": "edit", "edited_action": {"name": "refund", "args": {"euros": 1}}}
    assert heard(str(db), graphs, "batch", "each") == [{"decisions": [edited, {"type": "approve"}]}]


REFUSED: list[tuple[str, tuple[str, ...], str]] = [
    ("none", ("approve",), "there is no thread 'none'"),
    ("idle", ("approve",), "waits for no answer; it is idle"),
    ("review", ("aprove",), "is 'aprove'; expected one of approve, edit, reject, respond"),
    ("review", ("approve", "now"), "approve takes no value, but 'now' follows it"),
    ("review", ("edit",), "edit needs a value; pass the new arguments as JSON after it"),
    ("review", ("edit", "{euros: 4}"), "the value of edit '{euros: 4}' is not JSON"),
    ("review", ("edit", "[1]"), "the arguments of the call 1 of 'refund' are [1]; expected {…}"),
    ("review", ("respond",), "respond needs a value; pass a text after it"),
    ("review", ("--answer", "{"), "--answer '{' is not JSON"),
    ("review", ("--answer", "5"), "--answer is 5; expected"),
    ("review", ("--answer", '{"decisions": []}'), "has 0 decisions, but the question is about 1"),
    ("review", ("--answer", '{"type": "drop"}'), "is 'drop'; expected one of approve, edit"),
    (
        "review",
        ("approve", "--question", "2"),
        "--question is 2; expected at most 1, the number of open",
    ),
    (
        "review",
        ("approve", "--graph", "twice"),
        "waits at the node 'hear', which the graph 'twice' does not have",
    ),
    ("batch", ("respond", "x"), "is 'respond'; expected one of approve, edit, reject"),
    ("batch", ("edit", "{}"), "is about 2 calls; pass a decision for each call"),
    ("plain", ("approve",), "is not about a tool call; answer it with respond TEXT"),
    ("plain", ("respond",), "is not about a tool call; answer it with respond TEXT"),
    ("plain", ("--answer", "yes"), "--answer 'yes' is not JSON"),
]


def test_what_is_refused(where: str, graphs: str) -> None:
    """The exit code is 1, one line says why, and nothing is written."""
    for name in ("review", "batch", "plain"):
        ask(where, graphs, name, name)
    ask(where, graphs, "plain", "idle")
    run("answer", "idle", "respond", "yes", "--graphs", graphs)
    names = ("review", "batch", "plain", "idle")
    before = [checkpoints(where, name) for name in names], remembered(where)

    for thread, given, said in REFUSED:
        result = attempt("answer", thread, *given, "--graphs", graphs)
        assert (result.exit_code, result.stdout) == (1, ""), (thread, given, result.output)
        assert said in result.stderr, (thread, given, result.stderr)
        assert result.stderr.startswith("perdure: ")
        assert result.stderr.count("\n") == 1
    assert ([checkpoints(where, name) for name in names], remembered(where)) == before


def test_what_has_to_be_said(
    db: Path, graphs: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a graph or a server, without an action, and of a thread whose graph nobody knows."""
    ask(str(db), graphs, "plain", "t", graph_id="unknown")

    assert "pass --graphs FILE with the langgraph.json that names the graph" in error(
        "answer", "t", "respond", "yes", into=capsys
    )
    assert "pass one of approve, edit, reject and respond" in error(
        "answer", "t", "--graphs", graphs, into=capsys
    )
    assert "remove --graphs and --db" in error(
        "answer", "t", "approve", "--url", "http://x.invalid", "--db", str(db), into=capsys
    )
    assert "pass --graph with one of review, batch, plain" in error(
        "answer", "t", "respond", "yes", "--graphs", graphs, into=capsys
    )
    only = langgraph_json(tmp_path, "plain")
    assert read("answer", "t", "respond", "yes", "--graphs", only)["status"] == "idle"


def test_a_run_that_fails_says_so(db: Path, graphs: str) -> None:
    """The answer is stored, the exit code is 1, and the error of the node is shown."""
    ask(str(db), graphs, "failing", "t")
    result = attempt("answer", "t", "respond", "yes", "--graphs", graphs)

    assert result.exit_code == 1
    assert "is stored, but the run failed: ValueError: no such account" in result.stderr


def test_it_holds_the_lock_of_the_thread(
    where: str, graphs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another run of the thread is waited for; what it left to answer counts."""
    monkeypatch.setattr("perdure.cli.answer._LOCK_TIMEOUT_S", 0.2)
    ask(where, graphs, "plain", "t")
    held, free = threading.Event(), threading.Event()

    def hold() -> None:
        with open_checkpointer(where) as saver, saver.lock("t"):
            held.set()
            free.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait(60)
    try:
        refused = attempt("answer", "t", "respond", "yes", "--graphs", graphs)
    finally:
        free.set()
        holder.join()

    assert "has not ended for 0.2 s" in str(refused.exception)
    assert heard(where, graphs, "plain", "t") == []
    assert read("answer", "t", "respond", "yes", "--graphs", graphs)["status"] == "idle"
