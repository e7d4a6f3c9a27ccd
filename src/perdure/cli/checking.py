"""`perdure check`: whether questions recall what they should, for people and for their CI."""

from __future__ import annotations

import json as jsonlib
import sys
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from perdure.cli.app import DB, AsJson, app
from perdure.cli.longterm import MEMORIES, User, opened_mind
from perdure.cli.output import as_json, console, line, table
from perdure.cli.progress import at_work
from perdure.errors import ConfigurationError

if TYPE_CHECKING:
    from perdure.memory.recall_check import Expected, RecallReport

_FORM: Final = (
    'expected an object like {"question": "…", "expected": "…"}, where expected is a text, '
    '{"key": "…"}, or a list of these'
)


@app.command()
def check(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="JSONL, a question a line; - is stdin.")
    ],
    limit: Annotated[int, typer.Option(help="How many memories count as recalled.")] = 10,
    minimum: Annotated[
        float, typer.Option(help="The share that must be recalled, from 0 to 1.")
    ] = 0.9,
    user: User = None,
    db: DB = None,
    json: AsJson = False,
) -> None:
    """Ask questions, and tell at which rank each recalls what it should.

    Exit code 1 if less is recalled than --minimum.
    """
    from perdure.memory.options import number
    from perdure.memory.recall_check import check_recall

    pairs, share = _pairs(file), number("--minimum", minimum, 0, 1)
    with opened_mind(db, user, reads=True) as mind, at_work("asking …"):
        report = check_recall(
            pairs,
            store=mind.store,
            config=mind.config,
            namespace=MEMORIES,
            limit=limit,
        )
    passed = report.recall >= share
    if json:
        as_json(_plain(report, minimum, passed))
    else:
        _print(report)
    if not passed:
        raise typer.Exit(1)


# -- the questions


def _pairs(file: Path) -> list[tuple[str, Expected]]:
    """The questions of a file, each with what it is to recall.

    Raises:
        ConfigurationError: The file cannot be read, or a line is something else.
    """
    called = "stdin" if file == Path("-") else str(file)
    try:
        with nullcontext(sys.stdin) if file == Path("-") else file.open(encoding="utf-8") as lines:
            return _read(called, lines)
    except OSError as exc:
        raise ConfigurationError(f"{called!r} cannot be read: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        raise ConfigurationError(f"{called!r} is no UTF-8 text: {exc.reason}") from exc


def _read(called: str, lines: Iterable[str]) -> list[tuple[str, Expected]]:
    pairs: list[tuple[str, Expected]] = []
    for number, text in enumerate(lines, 1):
        if text.strip():
            where = f"{called!r}, line {number}"
            try:
                found = jsonlib.loads(text)
            except ValueError as exc:
                raise ConfigurationError(f"{where} is no JSON ({exc}); {_FORM}") from exc
            pairs.append(_pair(where, found))
    if not pairs:
        raise ConfigurationError(f"{called!r} has no questions; {_FORM}, a line each")
    return pairs


def _pair(where: str, found: Any) -> tuple[str, Expected]:
    given = found if isinstance(found, dict) else {}
    question, expected = given.get("question"), given.get("expected")
    if not isinstance(question, str) or not question.strip():
        raise ConfigurationError(f"{where} has no question; {_FORM}")
    return question, _each(where, expected)


def _each(where: str, expected: Any) -> list[str]:
    """The texts and keys that are expected."""
    each = expected if isinstance(expected, list) else [expected]
    named = [part.get("key") if isinstance(part, dict) else part for part in each]
    texts = [part for part in named if isinstance(part, str) and part.strip()]
    if not texts or len(texts) < len(each):
        raise ConfigurationError(f"{where} expects {jsonlib.dumps(expected):.80}; {_FORM}")
    return texts


# -- what came of them


def _print(report: RecallReport) -> None:
    wide = 60 if console.is_terminal else 10_000
    table(
        ["rank", "question", "expected"],
        [
            (
                ", ".join(str(rank or "-") for rank in each.ranks),
                line(each.question, wide),
                line(" and ".join(each.expected), wide),
            )
            for each in report.questions
        ],
    )
    console.print(str(report).splitlines()[-1])


def _plain(report: RecallReport, minimum: float, passed: bool) -> dict[str, Any]:
    return {
        "recall": report.recall,
        "mrr": report.mrr,
        "limit": report.limit,
        "minimum": minimum,
        "passed": passed,
        "asked": [each._asdict() for each in report.questions],
    }
