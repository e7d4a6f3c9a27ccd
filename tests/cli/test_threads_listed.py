"""`perdure threads --user`, `--waiting` and `--status` list whose threads stand where."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import HumanMessage
from langgraph.graph import START, MessagesState, StateGraph

from perdure.checkpointers import open_checkpointer
from perdure.checkpointers.owner_record import record_organisation_owners
from tests.cli.asking import run_to_question, write_langgraph_json
from tests.cli.commands import invoke, run, run_and_read_error, run_json, split_rows
from tests.cli.databases import postgres_database


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
def filled(where: str, tmp_path: Path) -> str:
    """Threads of dora, emil, user 7 and nobody, of which some wait and one was cut off."""
    graphs = write_langgraph_json(tmp_path)
    run_to_question(where, graphs, "review", "dora-waits", "dora")
    run_to_question(where, graphs, "plain", "emil-waits", "emil", owner="org")
    for thread, user in (("dora-idle", "dora"), ("number", 7), ("nobody", "")):
        _talk(where, thread, user)
    _talk(where, "dora-owns", None, owner="dora")
    _talk(where, "dora-cut", "dora", fails=True)
    return where


def _talk(where: str, thread: str, user: Any, *, fails: bool = False, **about: Any) -> None:
    def say(state: MessagesState) -> dict[str, Any]:
        if fails:
            raise RuntimeError("cut off")
        return {"messages": []}

    builder = StateGraph(MessagesState).add_node("say", say).add_edge(START, "say")
    named = {} if user is None else {"user_id": user}
    config: Any = {"configurable": {"thread_id": thread, **named}, "metadata": about}
    with open_checkpointer(where) as saver:
        graph: Any = builder.compile(checkpointer=saver)
        try:
            graph.invoke({"messages": [HumanMessage(f"Hello from {thread}")]}, config)
        except RuntimeError:
            assert fails


def ids(*options: str) -> set[str]:
    return {thread["thread_id"] for thread in run_json("threads", *options)}


def test_threads_are_listed_by_person_and_status(filled: str) -> None:
    """The person is the `user_id` of the head, else its `owner`; conditions are met together."""
    dora = {"dora-waits", "dora-idle", "dora-cut", "dora-owns"}
    assert ids("--user", "dora") == dora
    assert ids("--user", "emil") == {"emil-waits"}
    assert ids("--user", "7") == {"number"}
    assert ids("--waiting") == {"dora-waits", "emil-waits"}
    assert ids("--status", "waiting") == {"dora-waits", "emil-waits"}
    assert ids("--status", "unfinished") == {"dora-cut"}
    assert ids("--status", "idle") == {"dora-idle", "number", "nobody", "dora-owns"}
    assert ids("--user", "dora", "--waiting") == {"dora-waits"}
    assert ids("--user", "dora", "--status", "idle") == {"dora-idle", "dora-owns"}
    assert ids("dora", "--user", "dora", "--status", "unfinished") == {"dora-cut"}
    assert ids("emil", "--waiting") == {"emil-waits"}


def test_the_person_of_each_thread_is_shown(filled: str) -> None:
    """Emil's thread, which his organisation owns, is shown as his."""
    shown = {row[0]: row[-1] for row in split_rows(run("threads", "--waiting"))}
    (emil,) = run_json("threads", "--user", "emil")

    assert shown == {"id": "user", "dora-waits": "dora", "emil-waits": "emil"}
    assert (emil["user"], emil["person"]) == ("org", "emil")


def test_organisation_is_not_listed_as_person_of_its_threads(filled: str) -> None:
    """If owners may be organisations, the owner of a thread without a `user_id` is not a person."""
    with open_checkpointer(filled) as saver:
        record_organisation_owners(saver)
    result = invoke("threads", "--user", "dora")
    persons = {thread["thread_id"]: thread["person"] for thread in run_json("threads")}

    assert "dora-owns" not in result.stdout
    assert ids("--user", "dora") == {"dora-waits", "dora-idle", "dora-cut"}
    assert persons["dora-owns"] is None
    assert persons["dora-idle"] == "dora"


def test_lists_are_cut_at_the_limit(filled: str) -> None:
    """With conditions as without, and a note says so."""
    result = invoke("threads", "--user", "dora", "--limit", "2")

    assert len(split_rows(result.stdout)) == 3
    assert "there are more than 2 threads; --limit N lists more" in result.stderr
    assert "more than" not in invoke("threads", "--user", "dora", "--limit", "4").stderr
    assert len(ids("--status", "idle", "--limit", "3")) == 3


def test_nothing_is_said_with_its_conditions(filled: str) -> None:
    """The exit code is 1, and the note names what no thread is."""
    for options, said in (
        (("--user", "org"), "no thread belongs to 'org'\n"),
        (("--user", "emil", "--status", "idle"), "no thread belongs to 'emil' and is idle\n"),
        (("dog", "--waiting"), "no thread is waiting and has 'dog' in its title or id\n"),
    ):
        result = invoke("threads", *options)
        assert (result.exit_code, result.stdout, result.stderr) == (1, "", said)
        assert invoke("threads", *options, "--json").stdout == "[]\n"


def test_what_was_said_is_searched_for_a_user(filled: str) -> None:
    """`--search` finds what was said on the threads of one user."""
    assert "dora-idle" in run("threads", "--search", "hello idle", "--user", "dora")
    assert invoke("threads", "--search", "hello number", "--user", "emil").exit_code == 1


def test_conditions_that_exclude_each_other(db: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They are refused, as is a user without a name."""
    run("chat", "-t", "t", "-m", "hello")
    for options, said in (
        (("--waiting", "--status", "idle"), "--waiting and --status idle cannot be combined"),
        (("--search", "hello", "--waiting"), "--search finds threads of any status"),
        (("--user", " "), "--user is ' '; expected the name of a user"),
    ):
        assert said in run_and_read_error("threads", *options, capsys=capsys)
