"""`perdure check`: whether questions recall what they should, for people and for their CI."""

from __future__ import annotations

import json as jsonlib
import sys
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from perdure.cli.app import DB, AsJson, app
from perdure.cli.longterm import MEMORIES, User, opened_mind
from perdure.cli.output import as_json, console, line, table
from perdure.cli.progress import at_work
from perdure.cli.store import AsOf, as_moment
from perdure.errors import ConfigurationError

if TYPE_CHECKING:
    from perdure.memory.recollection.check_reports import Asked, CheckReport
    from perdure.memory.recollection.checks import Expected

_FORM: Final = (
    'expected an object like {"question": "…", "expected": "…"}, where expected is a text, '
    '{"key": "…"}, a list of these, or {"any": […]}'
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
    as_of: AsOf = None,
    user: User = None,
    db: DB = None,
    json: AsJson = False,
) -> None:
    """Ask questions, and tell at which rank each recalls what it should.

    Exit code 1 if less is recalled than --minimum.
    """
    from perdure.memory.forming.tails import Tails
    from perdure.memory.recollection.checks import check as checked

    pairs, when = _pairs(file), as_moment(as_of, "--as-of")
    with opened_mind(db, user, reads=True) as mind, at_work("asking …"):
        report = checked(
            pairs,
            store=mind.store,
            namespaces=[MEMORIES],
            config=mind.config,
            limit=limit,
            as_of=when,
            tails=Tails(mind.extraction()),
        )
    passed = report.passed(minimum)
    if json:
        as_json(_plain(report, minimum))
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
    from perdure.memory.recollection.checks import any_of

    given = found if isinstance(found, dict) else {}
    question, expected = given.get("question"), given.get("expected")
    if not isinstance(question, str) or not question.strip():
        raise ConfigurationError(f"{where} has no question; {_FORM}")
    if isinstance(expected, dict) and set(expected) == {"any"}:
        return question, any_of(*_each(where, expected["any"]))
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


def _print(report: CheckReport) -> None:
    wide = 60 if console.is_terminal else 10_000
    table(
        ["rank", "question", "expected", "why not"],
        [
            (_ranks(each), line(each.question, wide), line(_wanted(each), wide), _why(each))
            for each in report.asked
        ],
    )
    right = len(report.asked) - len(report.missed)
    console.print(
        f"recall@{report.limit} {report.recall:.3f}, MRR {report.mrr:.3f}: {right} of "
        f"{len(report.asked)} questions recall what they should"
    )


def _ranks(asked: Asked) -> str:
    return ", ".join("-" if rank is None else str(rank) for rank in asked.ranks)


def _wanted(asked: Asked) -> str:
    return (" or " if asked.any_is_enough else " and ").join(asked.expected)


def _why(asked: Asked) -> str:
    return "; ".join(missing.reason for missing in asked.missing)


def _plain(report: CheckReport, minimum: float) -> dict[str, Any]:
    return {
        "recall": report.recall,
        "mrr": report.mrr,
        "limit": report.limit,
        "minimum": minimum,
        "passed": report.passed(minimum),
        "asked": [{**asdict(each), "recall": each.recall} for each in report.asked],
    }
