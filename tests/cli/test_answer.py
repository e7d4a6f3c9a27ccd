"""`perdure answer` answers a question of a graph and continues its run."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from perdure.checkpointers import open_checkpointer
from perdure.checkpointers.labels import TURN_WITHOUT_MEMORY
from perdure.checkpointers.owner_record import record_that_owners_may_be_organisations
from perdure.checkpointers.records import ChangesByOtherUsers, ClientMetadata
from perdure.run_tables.thread_list import ThreadList
from perdure.stores import open_store
from tests.cli.asking import read_answers, run_to_question, write_langgraph_json
from tests.cli.commands import invoke, run, run_and_read_error, run_json
from tests.cli.databases import postgres_database

DORA_MESSAGE = "I want a refund on t"


@pytest.fixture(params=["file", "postgres"])
def db_address(
    request: pytest.FixtureRequest, db: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """Yield the address of the database that commands use."""
    if request.param == "file":
        yield str(db)
        return
    with postgres_database() as dsn:
        monkeypatch.setenv("PERDURE_DB", dsn)
        yield dsn


@pytest.fixture
def graphs(tmp_path: Path) -> str:
    """Return the path of a langgraph.json with the graphs that ask questions."""
    return write_langgraph_json(tmp_path)


def read_memory_texts_by_user(db: str) -> dict[str, list[str]]:
    """Return the texts of all memories by user."""
    with open_store(db) as store:
        return {
            user: sorted(item.value["text"] for item in store.search(("memories", user)))
            for _, user in store.list_namespaces(prefix=("memories",))
        }


def read_thread_size(db: str, thread: str) -> int:
    """Return the size of a thread in bytes, with the pending writes of its head."""
    with open_checkpointer(db) as saver:
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


@pytest.mark.parametrize(("arguments", "decision"), REVIEWS, ids=lambda value: str(value)[:24])
def test_answer_sends_decision_in_form_of_langchain_middleware(
    arguments: tuple[str, ...], decision: dict[str, Any], db: Path, graphs: str
) -> None:
    """Each action has the form that langchain's middleware expects."""
    run_to_question(str(db), graphs, "review", "t")
    report = run_json("answer", "t", *arguments, "--graphs", graphs)

    assert (report["thread_id"], report["status"]) == ("t", "idle")
    assert report["answer"] == {"decisions": [decision]}
    assert read_answers(str(db), graphs, "review", "t") == [{"decisions": [decision]}]


def test_answer_of_another_person_keeps_user_of_thread(db_address: str, graphs: str) -> None:
    """The turn goes into Dora's memories, and the thread stays hers, whoever answers."""
    run_to_question(db_address, graphs, "review", "t", title="A refund")
    before = read_memory_texts_by_user(db_address)
    output = run("answer", "t", "approve", "--graphs", graphs, stdin="")

    assert output == (
        "answered the question of the thread 't'; the run has ended\n"
        "dora gets {'decisions': [{'type': 'approve'}]}\n"
    )
    assert before == {}
    assert read_memory_texts_by_user(db_address) == {
        "dora": [
            "assistant: dora gets {'decisions': [{'type': 'approve'}]}",
            f"user: {DORA_MESSAGE}",
        ]
    }
    with open_checkpointer(db_address) as saver:
        head = saver.head("t")
        assert head is not None
        metadata = {name: head.metadata[name] for name in ("user_id", "graph_id", "title")}
    assert metadata == {"user_id": "dora", "graph_id": "review", "title": "A refund"}
    assert invoke("threads", "--waiting").exit_code == 1


@pytest.mark.parametrize("changes", ["none", "earlier", "since_last_message"])
def test_answer_uses_nobodys_memories_after_change_by_other_user(
    changes: ChangesByOtherUsers, db: Path, graphs: str
) -> None:
    """The server has recorded that another user changed the thread after Dora's message."""
    run_to_question(str(db), graphs, "review", "t")
    with open_checkpointer(db) as saver:
        client = ClientMetadata({}, changes_by_other_users=changes)
        ThreadList(saver).update_thread("t", lambda thread: (client, thread.last_run_status))
    run("answer", "t", "approve", "--graphs", graphs, stdin="")

    with open_store(db) as store:
        namespaces = store.list_namespaces(prefix=("memories",))
    assert namespaces == ([] if changes == "since_last_message" else [("memories", "dora")])
    with open_checkpointer(db) as saver:
        head = saver.head("t")
    assert head is not None
    assert head.metadata["user_id"] == "dora"
    is_marked = TURN_WITHOUT_MEMORY in head.metadata
    assert is_marked == (changes == "since_last_message")


@pytest.mark.parametrize("changes", ["none", "earlier"])
def test_rewind_may_return_to_change_by_other_user(
    changes: ChangesByOtherUsers, db: Path, graphs: str
) -> None:
    run_to_question(str(db), graphs, "review", "t")
    with open_checkpointer(db) as saver:
        client = ClientMetadata({}, changes_by_other_users=changes)
        ThreadList(saver).update_thread("t", lambda thread: (client, thread.last_run_status))
        question = saver.checkpoints("t", limit=1)[0].checkpoint_id
        saver.rewind("t", question)
        thread = ThreadList(saver).get("t")

    assert thread is not None
    assert thread.changes_by_other_users == ("none" if changes == "none" else "since_last_message")


@pytest.mark.parametrize(
    ("user", "are_organisations", "expected_person"),
    [("emil", False, "emil"), ("emil", True, "emil"), (None, False, "org"), (None, True, None)],
)
def test_answer_uses_owner_as_person_unless_owners_are_organisations(
    user: str | None, are_organisations: bool, expected_person: str | None, db: Path, graphs: str
) -> None:
    """The person is the `user_id` of the head, or else an `owner` that is not an organisation."""
    run_to_question(str(db), graphs, "twice", "t", user=user, owner="org")
    if are_organisations:
        with open_checkpointer(db) as saver:
            record_that_owners_may_be_organisations(saver.database)
    run("answer", "t", "respond", "yes", "--graphs", graphs)
    with open_checkpointer(db) as saver:
        head = saver.head("t")

    assert head is not None
    assert head.metadata.get("user_id") == expected_person
    assert head.metadata["owner"] == "org"


def test_any_question_is_answered_by_text_or_json(db_address: str, graphs: str) -> None:
    """`respond` sends a text, and `--answer` sends any JSON value."""
    for thread, arguments, value in (
        ("text", ("respond", "yes, all"), "yes, all"),
        ("json", ("--answer", '{"sure": [1, null]}'), {"sure": [1, None]}),
    ):
        run_to_question(db_address, graphs, "plain", thread)
        report = run_json("answer", thread, *arguments, "--graphs", graphs)
        assert report["answer"] == value
        assert read_answers(db_address, graphs, "plain", thread) == [value]


def test_answer_accepts_id_prefix_and_graphs_file_of_environment(
    db: Path, graphs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An id may be shortened as in other commands, and `PERDURE_GRAPHS` replaces --graphs."""
    run_to_question(str(db), graphs, "plain", "thread-with-a-long-id")
    monkeypatch.setenv("PERDURE_GRAPHS", graphs)

    assert run_json("answer", "thread-w", "respond", "yes")["thread_id"] == "thread-with-a-long-id"


def test_several_questions_are_answered_one_by_one(db_address: str, graphs: str) -> None:
    """One of several open questions is chosen by its number; the others stay open."""
    run_to_question(db_address, graphs, "several", "t")
    unclear = invoke("answer", "t", "respond", "yes", "--graphs", graphs)
    first = run_json("answer", "t", "respond", "one", "--question", "1", "--graphs", graphs)
    (thread,) = run_json("threads", "--waiting")
    second = run_json("answer", "t", "respond", "two", "--graphs", graphs)

    assert unclear.exit_code == 1
    assert (
        "the thread has several open questions; choose one with --question N:\n1. "
        in unclear.stderr
    )
    assert first["status"] == "waiting"
    assert first["waits_for_answers_to"] == thread["waits_for_answers_to"]
    assert (second["status"], second["waits_for_answers_to"]) == ("idle", [])
    assert sorted(read_answers(db_address, graphs, "several", "t")) == ["one", "two"]


def test_answer_prints_next_question_of_graph(db: Path, graphs: str) -> None:
    """If the graph asks again after an answer, the new question is printed."""
    run_to_question(str(db), graphs, "twice", "t")
    output = run("answer", "t", "respond", "yes", "--graphs", graphs)
    assert (
        output == "answered the question of the thread 't'; the thread is waiting for an answer "
        "(at 'second': Two?)\n"
    )
    run("answer", "t", "respond", "no", "--graphs", graphs)

    assert read_answers(str(db), graphs, "twice", "t") == ["yes", "no"]


def test_one_answer_decides_all_tool_calls_of_question(db: Path, graphs: str) -> None:
    """An action applies to all calls of a message; `--answer` has a decision for each call."""
    run_to_question(str(db), graphs, "batch", "all")
    run_to_question(str(db), graphs, "batch", "each")
    run("answer", "all", "reject", "not now", "--graphs", graphs)
    answer = {"decisions": [{"type": "edit", "args": {"euros": 1}}, {"type": "approve"}]}
    run("answer", "each", "--answer", json.dumps(answer), "--graphs", graphs)

    assert read_answers(str(db), graphs, "batch", "all") == [
        {"decisions": [{"type": "reject", "message": "not now"}] * 2}
    ]
    edited = {"type": "edit", "edited_action": {"name": "refund", "args": {"euros": 1}}}
    assert read_answers(str(db), graphs, "batch", "each") == [
        {"decisions": [edited, {"type": "approve"}]}
    ]


REFUSED: list[tuple[str, tuple[str, ...], str]] = [
    ("none", ("approve",), "there is no thread 'none'"),
    ("idle", ("approve",), "is not waiting for an answer; it is idle"),
    ("review", ("aprove",), "is 'aprove'; expected one of approve, edit, reject, respond"),
    ("review", ("approve", "now"), "'approve' accepts no value, but the value 'now' was passed"),
    ("review", ("edit",), "'edit' needs a value; pass the new arguments as JSON"),
    ("review", ("edit", "{euros: 4}"), "the value of edit '{euros: 4}' is not valid JSON"),
    (
        "review",
        ("edit", "[1]"),
        "the arguments of tool call 1 ('refund') are [1]; expected a JSON object",
    ),
    ("review", ("respond",), "'respond' needs a value; pass the text"),
    ("review", ("--answer", "{"), "--answer '{' is not valid JSON"),
    ("review", ("--answer", "5"), "--answer is 5; expected"),
    (
        "review",
        ("--answer", '{"decisions": []}'),
        "contains 0 decisions, but the interrupt asks about 1",
    ),
    ("review", ("--answer", '{"type": "drop"}'), "is 'drop'; expected one of approve, edit"),
    (
        "review",
        ("approve", "--question", "2"),
        "--question is 2; expected at most 1, the number of open",
    ),
    (
        "review",
        ("approve", "--graph", "twice"),
        "is waiting at the node 'hear', which the graph 'twice' does not have",
    ),
    ("batch", ("respond", "x"), "is 'respond'; expected one of approve, edit, reject"),
    ("batch", ("edit", "{}"), "has 2 tool calls; pass a decision for each tool call"),
    ("plain", ("approve",), "is not about a tool call; to answer it, use 'respond TEXT'"),
    ("plain", ("respond",), "is not about a tool call; to answer it, use 'respond TEXT'"),
    ("plain", ("--answer", "yes"), "--answer 'yes' is not valid JSON"),
]


def test_invalid_answer_is_refused_and_writes_nothing(db_address: str, graphs: str) -> None:
    """The exit code is 1, one line gives the reason, and nothing is written."""
    for name in ("review", "batch", "plain"):
        run_to_question(db_address, graphs, name, name)
    run_to_question(db_address, graphs, "plain", "idle")
    run("answer", "idle", "respond", "yes", "--graphs", graphs)
    names = ("review", "batch", "plain", "idle")
    before = (
        [read_thread_size(db_address, name) for name in names],
        read_memory_texts_by_user(db_address),
    )

    for thread, arguments, expected_message in REFUSED:
        result = invoke("answer", thread, *arguments, "--graphs", graphs)
        assert (result.exit_code, result.stdout) == (1, ""), (thread, arguments, result.output)
        assert expected_message in result.stderr, (thread, arguments, result.stderr)
        assert result.stderr.startswith("perdure: ")
        assert result.stderr.count("\n") == 1
    assert (
        [read_thread_size(db_address, name) for name in names],
        read_memory_texts_by_user(db_address),
    ) == before


def test_answer_names_missing_or_conflicting_option(
    db: Path, graphs: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An error names the graph, server or action that is missing, or the options that conflict."""
    run_to_question(str(db), graphs, "plain", "t", graph_id="unknown")

    assert (
        "pass --graphs with the langgraph.json file that defines the graph"
        in run_and_read_error("answer", "t", "respond", "yes", capsys=capsys)
    )
    assert "pass one of approve, edit, reject and respond" in run_and_read_error(
        "answer", "t", "--graphs", graphs, capsys=capsys
    )
    assert "remove --graphs and --db" in run_and_read_error(
        "answer", "t", "approve", "--url", "http://x.invalid", "--db", str(db), capsys=capsys
    )
    assert "pass --graph with one of review, batch, plain" in run_and_read_error(
        "answer", "t", "respond", "yes", "--graphs", graphs, capsys=capsys
    )
    single_graph_file = write_langgraph_json(tmp_path, "plain")
    assert (
        run_json("answer", "t", "respond", "yes", "--graphs", single_graph_file)["status"] == "idle"
    )


def test_answer_prints_error_of_failed_run(db: Path, graphs: str) -> None:
    """The answer is stored, the exit code is 1, and the error of the node is shown."""
    run_to_question(str(db), graphs, "failing", "t")
    result = invoke("answer", "t", "respond", "yes", "--graphs", graphs)

    assert result.exit_code == 1
    assert (
        "was stored in the thread 't', but the run failed: ValueError: no such account"
        in result.stderr
    )


def test_answer_waits_for_lock_of_thread(
    db_address: str, graphs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer is refused while another run holds the lock, and stored after its release."""
    monkeypatch.setattr("perdure.cli.answer._LOCK_TIMEOUT_S", 0.2)
    run_to_question(db_address, graphs, "plain", "t")
    lock_is_held, release_lock = threading.Event(), threading.Event()

    def hold_lock() -> None:
        with open_checkpointer(db_address) as saver, saver.lock("t"):
            lock_is_held.set()
            release_lock.wait(60)

    holder = threading.Thread(target=hold_lock)
    holder.start()
    lock_is_held.wait(60)
    try:
        refused = invoke("answer", "t", "respond", "yes", "--graphs", graphs)
    finally:
        release_lock.set()
        holder.join()

    assert "did not end within 0.2 s" in str(refused.exception)
    assert read_answers(db_address, graphs, "plain", "t") == []
    assert run_json("answer", "t", "respond", "yes", "--graphs", graphs)["status"] == "idle"
