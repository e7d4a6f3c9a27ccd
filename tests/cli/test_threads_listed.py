"""`perdure threads` with `--user`, `--waiting` and `--status`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import HumanMessage
from langgraph.graph import START, MessagesState, StateGraph

from perdure.checkpointers import open_checkpointer
from perdure.checkpointers.owner_record import record_that_owners_may_be_organisations
from tests.cli.asking import run_to_question, write_langgraph_json
from tests.cli.commands import invoke, run, run_and_read_error, run_json, split_rows
from tests.cli.databases import postgres_database


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
def filled_db(db_address: str, tmp_path: Path) -> str:
    """Write threads of several users, of which some wait and one is unfinished."""
    graphs = write_langgraph_json(tmp_path)
    run_to_question(db_address, graphs, "review", "dora-waits", "dora")
    run_to_question(db_address, graphs, "plain", "emil-waits", "emil", owner="org")
    for thread, user in (("dora-idle", "dora"), ("number", 7), ("nobody", "")):
        _run_thread(db_address, thread, user)
    _run_thread(db_address, "dora-owns", None, owner="dora")
    _run_thread(db_address, "dora-cut", "dora", fails=True)
    return db_address


def _run_thread(db: str, thread: str, user: Any, *, fails: bool = False, **metadata: Any) -> None:
    def say(state: MessagesState) -> dict[str, Any]:
        if fails:
            raise RuntimeError("cut off")
        return {"messages": []}

    builder = StateGraph(MessagesState).add_node("say", say).add_edge(START, "say")
    user_field = {} if user is None else {"user_id": user}
    config: Any = {"configurable": {"thread_id": thread, **user_field}, "metadata": metadata}
    with open_checkpointer(db) as saver:
        graph: Any = builder.compile(checkpointer=saver)
        try:
            graph.invoke({"messages": [HumanMessage(f"Hello from {thread}")]}, config)
        except RuntimeError:
            assert fails


def list_thread_ids(*options: str) -> set[str]:
    return {thread["thread_id"] for thread in run_json("threads", *options)}


def test_threads_are_listed_by_person_and_status(filled_db: str) -> None:
    """A person is the `user_id` of the head, or else its `owner`; all conditions must be met."""
    dora = {"dora-waits", "dora-idle", "dora-cut", "dora-owns"}
    assert list_thread_ids("--user", "dora") == dora
    assert list_thread_ids("--user", "emil") == {"emil-waits"}
    assert list_thread_ids("--user", "7") == {"number"}
    assert list_thread_ids("--waiting") == {"dora-waits", "emil-waits"}
    assert list_thread_ids("--status", "waiting") == {"dora-waits", "emil-waits"}
    assert list_thread_ids("--status", "unfinished") == {"dora-cut"}
    assert list_thread_ids("--status", "idle") == {"dora-idle", "number", "nobody", "dora-owns"}
    assert list_thread_ids("--user", "dora", "--waiting") == {"dora-waits"}
    assert list_thread_ids("--user", "dora", "--status", "idle") == {"dora-idle", "dora-owns"}
    assert list_thread_ids("dora", "--user", "dora", "--status", "unfinished") == {"dora-cut"}
    assert list_thread_ids("emil", "--waiting") == {"emil-waits"}


def test_threads_table_shows_person_of_each_thread(filled_db: str) -> None:
    """Emil's thread, which his organisation owns, is shown as his."""
    persons = {row[0]: row[-1] for row in split_rows(run("threads", "--waiting"))}
    (emil,) = run_json("threads", "--user", "emil")

    assert persons == {"id": "user", "dora-waits": "dora", "emil-waits": "emil"}
    assert (emil["user"], emil["person"]) == ("org", "emil")


def test_organisation_is_not_listed_as_person_of_its_threads(filled_db: str) -> None:
    """If owners may be organisations, the owner of a thread without a `user_id` is not a person."""
    with open_checkpointer(filled_db) as saver:
        record_that_owners_may_be_organisations(saver.database)
    result = invoke("threads", "--user", "dora")
    persons = {thread["thread_id"]: thread["person"] for thread in run_json("threads")}

    assert "dora-owns" not in result.stdout
    assert list_thread_ids("--user", "dora") == {"dora-waits", "dora-idle", "dora-cut"}
    assert persons["dora-owns"] is None
    assert persons["dora-idle"] == "dora"


def test_filtered_list_is_cut_at_limit_with_a_note(filled_db: str) -> None:
    result = invoke("threads", "--user", "dora", "--limit", "2")

    assert len(split_rows(result.stdout)) == 3
    assert "there are more than 2 threads; pass --limit N to list more" in result.stderr
    assert "more than" not in invoke("threads", "--user", "dora", "--limit", "4").stderr
    assert len(list_thread_ids("--status", "idle", "--limit", "3")) == 3


def test_empty_list_of_threads_names_its_conditions(filled_db: str) -> None:
    """The exit code is 1, and the note names the conditions that no thread meets."""
    for options, expected_message in (
        (("--user", "org"), "no thread belongs to 'org'\n"),
        (("--user", "emil", "--status", "idle"), "no thread belongs to 'emil' and is idle\n"),
        (("dog", "--waiting"), "no thread is waiting and has 'dog' in its title or id\n"),
    ):
        result = invoke("threads", *options)
        assert (result.exit_code, result.stdout, result.stderr) == (1, "", expected_message)
        assert invoke("threads", *options, "--json").stdout == "[]\n"


def test_thread_search_is_limited_to_a_user(filled_db: str) -> None:
    """`--search` with `--user` finds messages of the threads of this user."""
    assert "dora-idle" in run("threads", "--search", "hello idle", "--user", "dora")
    assert invoke("threads", "--search", "hello number", "--user", "emil").exit_code == 1


def test_conflicting_conditions_are_refused(db: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A user without a name is refused as well."""
    run("chat", "-t", "t", "-m", "hello")
    for options, expected_message in (
        (("--waiting", "--status", "idle"), "--waiting and --status idle cannot be combined"),
        (
            ("--search", "hello", "--waiting"),
            "--search cannot be combined with --status or --waiting",
        ),
        (("--user", " "), "--user is ' '; expected a user name"),
    ):
        assert expected_message in run_and_read_error("threads", *options, capsys=capsys)
