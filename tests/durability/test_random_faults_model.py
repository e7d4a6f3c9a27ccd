"""The model of the random fault rounds finds inputs that were lost, applied twice, or restored."""

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


def make_input(token: str = "a", *, is_accepted: bool | None = True, **fields: Any) -> Input:
    accepted_input = Input(token, SECRET, "run", 1.0, 2.0, is_accepted, f"run {token}")
    for name, value in fields.items():
        setattr(accepted_input, name, value)
    return accepted_input


def make_findings(
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
    answers = [f"to {token}" for token in heard]
    return Found(rows, [*heard], answers, None, checkpoints, [streamed], stored.encode(), kills)


def find_problem_kinds(conversation: Conversation, findings: Found) -> set[str]:
    return {problem.kind for problem in check_conversation(conversation, findings)}


@pytest.mark.parametrize(
    ("input", "findings"),
    [
        (make_input(), make_findings("success", ["a"])),
        (make_input(is_accepted=None), make_findings(None)),
        (make_input(is_accepted=None), make_findings("success", ["a"])),
        (make_input(is_accepted=False), make_findings(None)),
        (make_input(cancels=[("interrupt", True)]), make_findings("interrupted")),
        (make_input(cancels=[("interrupt", None)]), make_findings("interrupted", ["a"])),
        (make_input(cancels=[("rollback", True)]), make_findings(None)),
        (make_input(cancels=[("rollback", False)]), make_findings("success", ["a"])),
        (make_input(is_dropped=True), make_findings(None, ["a"])),
        (make_input(is_erased=True), make_findings("interrupted", ["a"])),
    ],
)
def test_model_finds_no_problem_if_promises_are_kept(input: Input, findings: Found) -> None:
    assert find_problem_kinds(Conversation("t", inputs=[input]), findings) == set()


@pytest.mark.parametrize(
    ("expected_kind", "input", "findings"),
    [
        ("lost", make_input(), make_findings(None)),
        ("lost", make_input(), make_findings("success")),
        ("lost", make_input(), make_findings("interrupted", ["a"])),
        ("lost", make_input(), make_findings("error", error="ValueError")),
        ("lost", make_input(), make_findings("error", error="RunAbandoned", kills=[1.5])),
        ("lost", make_input(), make_findings("interrupted", ["a"], "RunOvertaken")),
        ("lost", make_input(is_dropped=True), make_findings(None)),
        ("twice", make_input(), make_findings("success", ["a", "a"])),
        ("back", make_input(is_accepted=False), make_findings(None, ["a"])),
        ("back", make_input(cancels=[("rollback", True)]), make_findings("success", ["a"])),
        ("back", make_input(cancels=[("rollback", True)]), make_findings(None, ["a"])),
        ("back", make_input(cancels=[("rollback", True)]), make_findings(None, stored=SECRET)),
        ("back", make_input(is_erased=True), make_findings("success", ["a"], streamed=SECRET)),
        ("back", make_input(is_erased=True), make_findings("success", ["a"], text=SECRET)),
    ],
)
def test_model_finds_kind_of_broken_promise(
    expected_kind: str, input: Input, findings: Found
) -> None:
    assert find_problem_kinds(Conversation("t", inputs=[input]), findings) == {expected_kind}


@pytest.mark.parametrize("where", ["text", "stored", "streamed"])
def test_model_finds_remains_of_deleted_thread(where: str) -> None:
    talk = Conversation("t", inputs=[make_input()])
    talk.delete()
    what: Any = {where: SECRET}

    assert find_problem_kinds(talk, make_findings(None)) == set()
    assert find_problem_kinds(talk, make_findings(None, **what)) == {"back"}


def test_model_allows_overtaken_run_only_for_write_after_a_kill() -> None:
    findings = make_findings("interrupted", ["a"], "RunOvertaken", kills=[2.5])

    assert (
        find_problem_kinds(Conversation("t", inputs=[make_input()], writes=[(2.4, 3.0)]), findings)
        == set()
    )
    assert find_problem_kinds(
        Conversation("t", inputs=[make_input()], writes=[(2.1, 2.2)]), findings
    ) == {"lost"}


@pytest.mark.parametrize(
    ("question", "expected"), [(1, {"lost"}), (2, set()), (3, set()), (4, {"twice"})]
)
def test_model_counts_accepted_answers(question: int, expected: set[str]) -> None:
    """Two answers were accepted, one may have been, and one was rolled back."""
    answers = [
        make_input("a"),
        make_input("b"),
        make_input("c", is_accepted=None),
        make_input("d", cancels=[("rollback", True)]),
    ]
    rows = [Row(f"run {token}", token, "interrupted", None) for token in "ab"]
    findings = Found(rows, ["q"], [], question, [], [], b"", [])

    assert question < QUESTIONS
    assert find_problem_kinds(Conversation("t", "ask", answers=answers), findings) == expected


@pytest.mark.parametrize(("kills", "expected"), [([0.5, 1.0, 1.5], set()), ([0.5], {"lost"})])
def test_model_allows_first_answer_to_ask_if_asking_run_was_abandoned(
    kills: list[float], expected: set[str]
) -> None:
    answers = [make_input("a"), make_input("b")]
    rows = [Row(f"run {token}", token, "interrupted", None) for token in "ab"]
    rows.append(Row("run", "", "error", "RunAbandoned"))
    findings = Found(rows, ["q"], [], 1, [], [], b"", kills)

    assert find_problem_kinds(Conversation("t", "ask", answers=answers), findings) == expected
