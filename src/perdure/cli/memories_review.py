"""`perdure memories quarantine`, `jobs` and `check`: what waits for review, and how good it is."""

from __future__ import annotations

import json as jsonlib
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from perdure.cli.app import DB, AsJson, Database, User, Yes, confirm, opened, the_one
from perdure.cli.memories import memories
from perdure.cli.output import ago, as_json, counted, day, note, say, table
from perdure.cli.progress import at_work
from perdure.errors import ConfigurationError

if TYPE_CHECKING:
    from perdure.memory.background import Background
    from perdure.memory.due import Job
    from perdure.memory.proposals import Extractor
    from perdure.memory.quarantine import Entry, Quarantine

_MADE: Final = ("added", "updated", "superseded", "deleted", "quarantined")
_FORM: Final = (
    'expected an object like {"question": "…", "expected": "…"}, where expected is a text, '
    '{"key": "…"}, or a list of these'
)


# -- quarantine


@memories.command()
def quarantine(
    key: Annotated[
        str | None, typer.Argument(metavar="[KEY]", help="An entry; a beginning will do.")
    ] = None,
    release: Annotated[bool, typer.Option("--release", help="Make it a memory.")] = False,
    discard: Annotated[
        bool, typer.Option("--discard", help="Erase it; it is not extracted again.")
    ] = False,
    yes: Yes = False,
    user: User = None,
    db: DB = None,
    json: AsJson = False,
) -> None:
    """List what the gate held back, with secrets redacted; with a key, show it as it was said."""
    if (release and discard) or (key is None and (release or discard)):
        raise ConfigurationError("give a key, and --release or --discard or neither")
    from perdure.memory.quarantine import Quarantine

    with opened(db, user, reads=not (release or discard)) as file:
        held = Quarantine(file.store)
        entries = held.list(file.config)
        if key is None:
            _list_entries(entries, json)
            return
        listing = "perdure memories quarantine"
        chosen = the_one(key, (e.key for e in entries if e.key.startswith(key)), "entry", listing)
        entry = next(entry for entry in entries if entry.key == chosen)
        if release or discard:
            _decide(file, held, entry, release=release, yes=yes, json=json)
        elif json:
            as_json(asdict(entry))
        else:
            _show_entry(entry)


def _list_entries(entries: list[Entry], json: bool) -> None:
    if json:
        as_json([_plain(entry) for entry in entries])
    elif entries:
        rows = [(day(entry.at), entry.key, entry.shown, entry.reason) for entry in entries]
        table(["since", "key", "text", "why"], rows, ids=("since", "key"))
    else:
        note("nothing is in quarantine")


def _plain(entry: Entry) -> dict[str, Any]:
    """An entry for programs, without what it says as it was said."""
    return {name: part for name, part in asdict(entry).items() if name not in ("text", "fields")}


def _show_entry(entry: Entry) -> None:
    source = entry.provenance
    thread = f" on the thread {source.thread_id!r}" if source and source.thread_id else ""
    note(f"{entry.kind}, {entry.role}{thread}, held back on {day(entry.at)}: {entry.reason}", "dim")
    say(entry.text)


def _decide(
    file: Database, held: Quarantine, entry: Entry, *, release: bool, yes: bool, json: bool
) -> None:
    if release:
        outcome = held.release(entry.key, file.config)
    else:
        if not yes:
            note(f"{entry.key}: {entry.shown}", "dim")
        confirm("Discard it for good?", yes)
        outcome = held.discard(entry.key, file.config)
    if json:
        as_json(asdict(outcome))
    else:
        say(str(outcome) if release else f"discarded {entry.key}")


# -- jobs


@memories.command()
def jobs(
    dead: Annotated[bool, typer.Option("--dead", help="Only those that were given up.")] = False,
    retry: Annotated[
        list[str] | None, typer.Option(metavar="ID", help="Try this thread again.")
    ] = None,
    retry_all: Annotated[
        bool, typer.Option("--retry-all", help="Try all again that were given up.")
    ] = False,
    facts: Annotated[bool, typer.Option("--facts", help="Of 'perdure worker --facts'.")] = False,
    database: Annotated[
        str | None, typer.Option(help="Where the worker keeps jobs; else a file beside.")
    ] = None,
    db: DB = None,
    json: AsJson = False,
) -> None:
    """List threads that wait to be extracted, and those extracted lately, of all users."""
    with opened(db, reads=True) as file:
        extractor = _extractor(file) if facts else None
        with _background(file, extractor, database) as background:
            found = _due(file, extractor) if background is None else background.jobs()
            given_up = {job.thread_id: job for job in found if job.state == "dead"}
            wanted = (
                list(given_up) if retry_all else [_dead(each, given_up) for each in retry or ()]
            )
            for thread in wanted:
                assert background is not None  # else nothing was ever tried
                background.extract_now(thread, given_up[thread].config)
    if wanted:
        note(f"{counted(len(wanted), 'thread')} will be tried again")
    listed = list(given_up.values()) if dead else found
    if json:
        as_json([asdict(job) for job in listed])
    elif listed:
        rows = [
            (job.thread_id, job.state, ago(job.at) if job.at else "", _made(job)) for job in listed
        ]
        table(["thread", "state", "at", "what came of it"], rows, ids=("thread", "state"))
    else:
        note("nothing was given up" if dead else "no thread has anything to extract")


def _extractor(file: Database) -> Extractor:
    """What asks the configured model."""
    from perdure.graphs.configured import configured_model
    from perdure.memory import ModelExtractor

    model = configured_model(file.settings)
    if model is None:
        raise ConfigurationError("--facts needs a model; set PERDURE_MODEL, or leave it out")
    return ModelExtractor(model)


@contextmanager
def _background(
    file: Database, extractor: Extractor | None, database: str | None
) -> Iterator[Background | None]:
    """What knows of jobs; None: no worker ever worked, so that what is due is all there is."""
    given = database or f"{file.settings.db}.jobs"
    if "://" not in given and not os.path.exists(given):
        yield None
        return
    from perdure.memory import Background

    extraction, defaults = file.extraction(extractor), file.config["configurable"]
    background = Background(extraction, database=database, work=False, defaults=defaults)
    try:
        yield background
    finally:
        background.stop()


def _due(file: Database, extractor: Extractor | None) -> list[Job]:
    """The threads with something to extract."""
    from perdure.memory.due import DueThreads, Pace

    return DueThreads(file.extraction(extractor), Pace(), file.config["configurable"]).jobs()


def _dead(given: str, dead: Iterable[str]) -> str:
    """The thread that is meant, of those that were given up."""
    found = [thread for thread in dead if thread.startswith(given)]
    return the_one(given, found, "thread given up", "perdure memories jobs --dead")


def _made(job: Job) -> str:
    """What came of a job: why it failed, or what is new."""
    report = job.report or {}
    made = ", ".join(f"{report[name]} {name}" for name in _MADE if report.get(name))
    tried = f"{counted(job.attempts, 'attempt')}: " if job.attempts else ""
    return f"{tried}{job.error}" if job.error else made or "nothing new" * bool(report)


# -- check


@memories.command()
def check(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="JSONL, a question a line; - is stdin.")
    ],
    limit: Annotated[int, typer.Option(min=1, help="How many memories count as recalled.")] = 10,
    minimum: Annotated[
        float, typer.Option(min=0, max=1, help="The share that must be recalled.")
    ] = 0.9,
    user: User = None,
    db: DB = None,
    json: AsJson = False,
) -> None:
    """Ask questions, and show at which rank each recalls what it should.

    Exit code 1 if less is recalled than --minimum.
    """
    from perdure.memory.recall_check import check_recall

    pairs = _pairs(file)
    with opened(db, user, reads=True) as db_, at_work("asking …"):
        report = check_recall(pairs, store=db_.store, config=db_.config, limit=limit)
    passed = report.recall >= minimum
    if json:
        asked = [each._asdict() for each in report.questions]
        figures = {name: getattr(report, name) for name in ("recall", "mrr", "limit")}
        as_json({**figures, "minimum": minimum, "passed": passed, "asked": asked})
    else:
        rows = [
            (", ".join(str(rank or "-") for rank in q.ranks), q.question, " and ".join(q.expected))
            for q in report.questions
        ]
        table(["rank", "question", "expected"], rows, ids=("rank",))
        say(str(report).splitlines()[-1])
    if not passed:
        raise typer.Exit(1)


def _pairs(file: Path) -> list[tuple[str, list[str]]]:
    """The questions of a file, each with what it is to recall."""
    called = "stdin" if file == Path("-") else str(file)
    try:
        with nullcontext(sys.stdin) if file == Path("-") else file.open(encoding="utf-8") as lines:
            texts = [(number, text) for number, text in enumerate(lines, 1) if text.strip()]
    except OSError as exc:
        raise ConfigurationError(f"{called!r} cannot be read: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        raise ConfigurationError(f"{called!r} is not UTF-8 text: {exc.reason}") from exc
    if not texts:
        raise ConfigurationError(f"{called!r} has no questions; {_FORM}, a line each")
    return [_pair(f"{called!r}, line {number}", text) for number, text in texts]


def _pair(where: str, text: str) -> tuple[str, list[str]]:
    try:
        given = jsonlib.loads(text)
    except ValueError as exc:
        raise ConfigurationError(f"{where} is no JSON ({exc}); {_FORM}") from exc
    question = given.get("question") if isinstance(given, dict) else None
    if not isinstance(question, str) or not question.strip():
        raise ConfigurationError(f"{where} has no question; {_FORM}")
    expected = given.get("expected")
    each = expected if isinstance(expected, list) else [expected]
    named = [part.get("key") if isinstance(part, dict) else part for part in each]
    texts = [part for part in named if isinstance(part, str) and part.strip()]
    if not texts or len(texts) < len(each):
        raise ConfigurationError(f"{where} expects {jsonlib.dumps(expected):.80}; {_FORM}")
    return question, texts
