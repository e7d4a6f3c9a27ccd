"""The model of random rounds of faults finds what was lost, applied twice, or has come back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from benchmarks.random_faults_model import (
    QUESTIONS,
    Checkpoint,
    Conversation,
    Found,
    Input,
    Row,
    check_conversation,
)

SECRET = "the safe opens at nine"


def sent(token: str = "a", *, is_accepted: bool | None = True, **fields: Any) -> Input:
    made = Input(token, SECRET, "run", 1.0, 2.0, is_accepted, f"run {token}")
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def found(
    status: str | None,
    heard: Sequence[str] = (),
    error: str | None = None,
    *,
    text: str = "",
    streamed: str = "",
    stored: str = "",
    kills: Sequence[float] = (),
) -> Found:
    rows = [Row("run a", "a", status, error)] if status else []
    checkpoints = [Checkpoint("run a", False, heard, text)] if heard or text else []
    said = [f"to {token}" for token in heard]
    return Found(rows, [*heard], said, None, checkpoints, [streamed], stored.encode(), kills)


def kinds(talk: Conversation, there: Found) -> set[str]:
    return {problem.kind for problem in check_conversation(talk, there)}


@pytest.mark.parametrize(
    ("input", "there"),
    [
        (sent(), found("success", ["a"])),
        (sent(is_accepted=None), found(None)),
        (sent(is_accepted=None), found("success", ["a"])),
        (sent(is_accepted=False), found(None)),
        (sent(cancels=[("interrupt", True)]), found("interrupted")),
        (sent(cancels=[("interrupt", None)]), found("interrupted", ["a"])),
        (sent(cancels=[("rollback", True)]), found(None)),
        (sent(cancels=[("rollback", False)]), found("success", ["a"])),
        (sent(is_dropped=True), found(None, ["a"])),
        (sent(is_erased=True), found("interrupted", ["a"])),
    ],
)
def test_promises_that_are_kept(input: Input, there: Found) -> None:
    assert kinds(Conversation("t", inputs=[input]), there) == set()


@pytest.mark.parametrize(
    ("kind", "input", "there"),
    [
        ("lost", sent(), found(None)),
        ("lost", sent(), found("success")),
        ("lost", sent(), found("interrupted", ["a"])),
        ("lost", sent(), found("error", error="ValueError")),
        ("lost", sent(), found("error", error="RunAbandoned", kills=[1.5])),
        ("lost", sent(), found("interrupted", ["a"], "RunOvertaken")),
        ("lost", sent(is_dropped=True), found(None)),
        ("twice", sent(), found("success", ["a", "a"])),
        ("back", sent(is_accepted=False), found(None, ["a"])),
        ("back", sent(cancels=[("rollback", True)]), found("success", ["a"])),
        ("back", sent(cancels=[("rollback", True)]), found(None, ["a"])),
        ("back", sent(cancels=[("rollback", True)]), found(None, stored=SECRET)),
        ("back", sent(is_erased=True), found("success", ["a"], streamed=SECRET)),
        ("back", sent(is_erased=True), found("success", ["a"], text=SECRET)),
    ],
)
def test_promises_that_are_broken(kind: str, input: Input, there: Found) -> None:
    assert kinds(Conversation("t", inputs=[input]), there) == {kind}


@pytest.mark.parametrize("where", ["text", "stored", "streamed"])
def test_a_deleted_thread_that_is_back(where: str) -> None:
    talk = Conversation("t", inputs=[sent()])
    talk.delete()
    what: Any = {where: SECRET}

    assert kinds(talk, found(None)) == set()
    assert kinds(talk, found(None, **what)) == {"back"}


def test_a_run_is_overtaken_only_by_who_writes_after_a_kill() -> None:
    there = found("interrupted", ["a"], "RunOvertaken", kills=[2.5])

    assert kinds(Conversation("t", inputs=[sent()], writes=[(2.4, 3.0)]), there) == set()
    assert kinds(Conversation("t", inputs=[sent()], writes=[(2.1, 2.2)]), there) == {"lost"}


@pytest.mark.parametrize(
    ("question", "expected"), [(1, {"lost"}), (2, set()), (3, set()), (4, {"twice"})]
)
def test_answers_are_counted(question: int, expected: set[str]) -> None:
    """Two were accepted, one may have been, and one was rolled back."""
    answers = [
        sent("a"),
        sent("b"),
        sent("c", is_accepted=None),
        sent("d", cancels=[("rollback", True)]),
    ]
    rows = [Row(f"run {token}", token, "interrupted", None) for token in "ab"]
    there = Found(rows, ["q"], [], question, [], [], b"", [])

    assert question < QUESTIONS
    assert kinds(Conversation("t", "ask", answers=answers), there) == expected


@pytest.mark.parametrize(("kills", "expected"), [([0.5, 1.0, 1.5], set()), ([0.5], {"lost"})])
def test_the_first_answer_begins_to_ask_if_the_run_that_asks_was_given_up(
    kills: list[float], expected: set[str]
) -> None:
    answers = [sent("a"), sent("b")]
    rows = [Row(f"run {token}", token, "interrupted", None) for token in "ab"]
    rows.append(Row("run", "", "error", "RunAbandoned"))
    there = Found(rows, ["q"], [], 1, [], [], b"", kills)

    assert kinds(Conversation("t", "ask", answers=answers), there) == expected
