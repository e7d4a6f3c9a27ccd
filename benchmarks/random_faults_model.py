"""Check the outcome of random rounds of faults against the expected effects of requests.

The model relies only on the server's responses and on the guarantees in docs/server.md, not on how
runs are stored.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Literal, NamedTuple

QUESTIONS = 5
"""Questions that the graph `ask` asks in one node."""
Kind = Literal["lost", "twice", "back"]
Texts = Iterator[tuple[Kind, str]]
"""Problems of one thread."""


class Problem(NamedTuple):
    """A violated guarantee."""

    kind: Kind
    thread_id: str
    text: str


@dataclass
class Input:
    """An input, an answer or an update that was sent to a thread.

    Attributes:
        token: A short text that the graph adds to `heard` once it hears the input.
        secret: The content of the message, which must not come back after it was removed.
        how: How it was sent: by a run, an update by HTTP, or a turn of a program.
        began: `time.monotonic()` before it was sent.
        answered: `time.monotonic()` when the answer came.
        is_accepted: None if the answer did not come, because the server was killed.
        run_id: The id of its run, if it is known.
        strategy: The `multitask_strategy` of its run.
        is_delayed: Whether its run begins later.
        cancels: The actions of cancellations of its run, and whether each was accepted; None means
            that the answer did not come.
        is_erased: Whether its message was erased after it had been stored.
        is_copied: Whether the thread was copied while the message may have been in it.
        is_dropped: Whether its run was deleted after it had succeeded.
    """

    token: str
    secret: str
    how: Literal["run", "update", "turn"]
    began: float
    answered: float = inf
    is_accepted: bool | None = None
    run_id: str | None = None
    strategy: str = "enqueue"
    is_delayed: bool = False
    cancels: list[tuple[str, bool | None]] = field(default_factory=list)
    is_erased: bool = False
    is_copied: bool = False
    is_dropped: bool = False

    def is_cancelled(self, action: str, *, surely: bool = False) -> bool:
        """Return whether an action may have cancelled the run; with `surely`, whether it has."""
        answers = {True} if surely else {True, None}
        return any(done == action and answer in answers for done, answer in self.cancels)


@dataclass
class Conversation:
    """A thread, and all actions on it.

    Attributes:
        thread_id: The id of the thread.
        graph: The graph that its runs execute.
        inputs: The inputs since the thread was last deleted.
        deleted: The inputs of former threads with this id.
        answers: The answers to questions; `token` is not used.
        writes: The times, by `time.monotonic()`, when direct changes by programs began and ended.
        rewinds: The same for rewinds only.
        copies: The ids of the checkpoints of each copy of the thread, by the id of the copy.
        journal: One line of text for each action.
        lock: Held while a program changes the thread, or while it is deleted.
    """

    thread_id: str
    graph: str = "talk"
    inputs: list[Input] = field(default_factory=list)
    deleted: list[Input] = field(default_factory=list)
    answers: list[Input] = field(default_factory=list)
    writes: list[tuple[float, float]] = field(default_factory=list)
    rewinds: list[tuple[float, float]] = field(default_factory=list)
    copies: dict[str, set[str]] = field(default_factory=dict)
    journal: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def delete(self) -> None:
        """Record that the thread was deleted."""
        self.deleted += self.inputs
        self.inputs, self.writes, self.rewinds = [], [], []


class Row(NamedTuple):
    """A run as the API lists it, with its error."""

    run_id: str
    token: str
    status: str
    error: str | None


class Checkpoint(NamedTuple):
    """A stored checkpoint of a thread.

    Attributes:
        run_id: The run that put it, if any.
        is_input: Whether it stores the input of a run.
        heard: The tokens that the graph has heard.
        text: Its whole content, with its pending writes, as text.
    """

    run_id: str | None
    is_input: bool
    heard: Sequence[str]
    text: str


@dataclass
class Found:
    """The data of a thread at the end of a round.

    Attributes:
        rows: The runs of the thread.
        heard: The tokens in the newest state.
        said: The answers of the graph in the newest state.
        question: The number of the question that waits for an answer, if any.
        checkpoints: All checkpoints of the thread.
        streamed: The streams and outputs of the runs of the thread, from each server.
        stored: All rows of the database, as bytes.
        kills: When servers were killed, by `time.monotonic()`.
    """

    rows: list[Row]
    heard: list[str]
    said: list[str]
    question: int | None
    checkpoints: list[Checkpoint]
    streamed: list[str]
    stored: bytes
    kills: Sequence[float]


def count_outcomes(talk: Conversation, found: Found) -> Counter[str]:
    """Count the events of a thread by kind, to show how much a round has tested."""
    counts = Counter({"inputs": len(talk.inputs) + len(talk.deleted) + len(talk.answers)})
    counts["erased"] = sum(sent.is_erased for sent in (*talk.inputs, *talk.deleted))
    counts["deleted"] = len(talk.deleted)
    counts["unanswered"] = sum(sent.is_accepted is None for sent in talk.inputs)
    listed = {row.token for row in found.rows}
    counts["rolled_back"] = sum(
        sent.how == "run" and sent.is_accepted is True and sent.token not in listed
        for sent in talk.inputs
    )
    counts["overtaken"] = sum(row.error == "RunOvertaken" for row in found.rows)
    return counts


def check_conversation(talk: Conversation, found: Found) -> Iterator[Problem]:
    """Check the outcome for a thread against the requests that were sent to it.

    Args:
        talk: The requests.
        found: The outcome.
    """
    problems = _check_answers if talk.graph == "ask" else _check_inputs
    for kind, text in problems(talk, found):
        yield Problem(kind, talk.thread_id, text)


def _check_inputs(talk: Conversation, found: Found) -> Texts:
    rows = {row.token: row for row in found.rows}
    for sent in talk.deleted:
        yield from _check_gone(sent, found, "of a deleted thread")
        if sent.token in rows:
            yield "back", f"{sent.token}: the run of a deleted thread is listed"
    for sent in talk.inputs:
        if sent.run_id is None and sent.token in rows:
            sent.run_id = rows[sent.token].run_id
        yield from _check_not_twice(sent, found)
        if sent.is_accepted is False:
            yield from _check_gone(sent, found, "refused")
        elif sent.is_erased:
            yield from _check_secret(sent, found, "erased")
        if sent.is_accepted is False:
            continue
        if sent.how == "run":
            yield from _check_run(talk, sent, rows.get(sent.token), found)
        elif sent.is_accepted:
            yield from _check_present(talk, sent, found, said=sent.how == "turn")
    yield from _check_order(talk, rows, found)


def _check_run(talk: Conversation, sent: Input, row: Row | None, found: Found) -> Texts:
    strategies = {
        each.strategy
        for each in talk.inputs
        if each is not sent
        and each.how == "run"
        and each.is_accepted is not False
        and (each.is_delayed or each.answered > sent.began)
    }
    stopped_by = {each for each in ("interrupt", "rollback") if sent.is_cancelled(each)}
    stopped_by |= strategies & {"interrupt", "rollback"}
    # Programs that wrote after a server died may have continued from this run.
    is_overtaken = any(sent.began < kill < end for _, end in talk.writes for kill in found.kills)
    if row is not None:
        yield from _check_listed_run(talk, sent, row, found, stopped_by, is_overtaken)
        if row.error == "RunAbandoned" and len(found.kills) < 3:
            yield "lost", f"{sent.token}: abandoned, and servers died {len(found.kills)} times"
    elif sent.is_dropped:
        yield from _check_present(talk, sent, found, said=True)
    elif sent.is_accepted and "rollback" not in stopped_by:
        yield "lost", f"{sent.token}: its run is not listed"
    elif not is_overtaken:
        yield from _check_gone(sent, found, "rolled back or never accepted")


def _check_listed_run(
    talk: Conversation,
    sent: Input,
    row: Row,
    found: Found,
    stopped_by: Collection[str],
    is_overtaken: bool,
) -> Texts:
    if sent.is_cancelled("rollback", surely=True):
        yield "back", f"{sent.token}: a rollback was accepted, and the run is {row.status}"
    match row.status, row.error:
        case "success", _:
            yield from _check_present(talk, sent, found, said=True)
        case "interrupted", "RunOvertaken":
            if not is_overtaken:
                yield "lost", f"{sent.token}: overtaken, but nobody has changed the thread"
            elif not any(each.run_id == row.run_id for each in found.checkpoints):
                yield "lost", f"{sent.token}: overtaken, but it had not begun"
        case "interrupted", _:
            hides_reason = is_overtaken and any(each.is_erased for each in talk.inputs)
            if not stopped_by and not sent.is_erased and not hides_reason:
                yield "lost", f"{sent.token}: interrupted by nobody ({row.error})"
        case "error", "RunAbandoned":
            pass
        case _:
            yield "lost", f"{sent.token}: its run is {row.status} ({row.error})"


def _check_not_twice(sent: Input, found: Found) -> Texts:
    most = max((each.heard.count(sent.token) for each in found.checkpoints), default=0)
    inputs = sum(
        each.is_input and each.run_id == sent.run_id and sent.run_id is not None
        for each in found.checkpoints
    )
    if max(most, inputs) > 1:
        yield "twice", f"{sent.token}: heard {most} times, stored as an input {inputs} times"


def _check_present(talk: Conversation, sent: Input, found: Found, *, said: bool) -> Texts:
    """Check that an input is in the latest state, or in any state if the thread was rewound."""
    if any(end > sent.began for _, end in talk.rewinds):
        if not any(sent.token in each.heard for each in found.checkpoints):
            yield "lost", f"{sent.token}: in no state"
        return
    if sent.token not in found.heard:
        yield "lost", f"{sent.token}: not in the newest state"
    elif said and f"to {sent.token}" not in found.said:
        yield "lost", f"{sent.token}: not answered"
    if found.said.count(f"to {sent.token}") > 1:
        yield "twice", f"{sent.token}: answered twice"


def _check_gone(sent: Input, found: Found, why: str) -> Texts:
    """Check that the outcome contains neither the token nor the secret of an input."""
    if any(sent.token in each.heard for each in found.checkpoints):
        yield "back", f"{sent.token}: {why}, and in a state"
    yield from _check_secret(sent, found, why)


def _check_secret(sent: Input, found: Found, why: str) -> Texts:
    if any(sent.secret in each.text for each in found.checkpoints):
        yield "back", f"{sent.token}: {why}, and its message is in a checkpoint"
    elif not sent.is_copied and sent.secret.encode() in found.stored:
        yield "back", f"{sent.token}: {why}, and its message is in a row"
    if any(sent.secret in text for text in found.streamed):
        yield "back", f"{sent.token}: {why}, and its message is streamed"


def _check_order(talk: Conversation, rows: dict[str, Row], found: Found) -> Texts:
    """Check that the graph received the runs' inputs in the order in which they were accepted."""
    if talk.rewinds:
        return
    accepted = [
        sent.token
        for sent in talk.inputs
        if sent.how == "run" and sent.is_accepted and not sent.is_delayed
    ]
    heard = [token for token in found.heard if token in {*accepted}]
    if [token for token in accepted if token in heard] != heard and len({*heard}) == len(heard):
        yield "lost", f"the order of {heard} is not that of the requests"


def _is_abandoned(row: Row | None, found: Found) -> bool:
    """Return whether a run was abandoned because three servers died while executing it."""
    return row is not None and row.error == "RunAbandoned" and len(found.kills) > 2


def _check_answers(talk: Conversation, found: Found) -> Texts:
    """Check by count that each accepted answer was applied once; all answers are equal."""
    heard = QUESTIONS if found.question is None else found.question
    rows, sure, possible = {row.token: row for row in found.rows}, 0, 0
    for answer in talk.answers:
        if answer.is_accepted is False or answer.is_cancelled("rollback", surely=True):
            continue
        row = rows.get(answer.token)
        is_open = answer.is_accepted is None or answer.cancels
        is_abandoned = _is_abandoned(row, found)
        possible += 1
        sure += not (is_open or is_abandoned)
        if row is None and not is_open:
            yield "lost", f"{answer.token}: the run of the answer is not listed"
        elif row is not None and not is_abandoned and (row.error or row.status == "error"):
            yield "lost", f"{answer.token}: its run is {row.status} ({row.error})"
    if sure and _is_abandoned(rows.get(""), found):
        # The asking run was abandoned, so the first answer starts a new one.
        sure -= 1
    if found.question is None and not found.heard:
        yield "lost", "the thread has neither a question nor a state"
    elif heard < sure:
        yield "lost", f"{heard} answers were heard, and {sure} accepted"
    elif heard > possible:
        yield "twice", f"{heard} answers were heard, and {possible} given or not rolled back"
    if found.question is None and found.heard[1:] != ["yes"] * QUESTIONS:
        yield "twice", f"heard: {found.heard}"
