"""`perdure memories quarantine`, `jobs` and `check`: what waits for review, and how good it is."""

from __future__ import annotations

import json as jsonlib
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from perdure.cli.app import DB, AsJson, Database, User, Yes, confirm, opened, the_one
from perdure.cli.memories import memories
from perdure.cli.output import ago, as_json, counted, day, note, say, table
from perdure.cli.progress import at_work
from perdure.cli.worker import Jobs, extractor
from perdure.errors import ConfigurationError

if TYPE_CHECKING:
    from perdure.memory.due import Job
    from perdure.memory.quarantine import Entry

_MADE: Final = ("added", "updated", "superseded", "deleted", "quarantined")
_FORM: Final = (
    'expected an object like {"question": "…", "expected": "…"}, where expected is a text, '
    '{"key": "…"}, or a list of these'
)


# -- quarantine


@memories.command()
def quarantine(
    key: Annotated[
        str | None, typer.Argument(metavar="[KEY]", help="An entry, or the beginning of its key.")
    ] = None,
    release: Annotated[bool, typer.Option("--release", help="Make it a memory.")] = False,
    discard: Annotated[bool, typer.Option("--discard", help="Erase it for good.")] = False,
    yes: Yes = False,
    user: User = None,
    db: DB = None,
    json: AsJson = False,
) -> None:
    """Review what was held back.

    Lists the entries, with secrets redacted. With a key it shows the entry as it was said.
    """
    changes = release or discard
    if (release and discard) or (changes and key is None):
        raise ConfigurationError("give a key, and --release or --discard or neither")
    from perdure.memory.quarantine import Quarantine

    with opened(db, user, reads=not changes) as file:
        held, config = Quarantine(file.store), file.config
        entries = {entry.key: entry for entry in held.list(config)}
        if key is None:
            _list_entries(list(entries.values()), json)
            return
        keys = [each for each in entries if each.startswith(key)]
        entry = entries[the_one(key, keys, "entry", "perdure memories quarantine")]
        if discard and not yes:
            note(f"{entry.key}: {entry.shown}", "dim")
            confirm("Discard it for good?", yes)
        if changes:
            outcome = (held.release if release else held.discard)(entry.key, config)
    if json:
        as_json(asdict(outcome if changes else entry))
    elif changes:
        say(str(outcome) if release else f"discarded {entry.key}")
    else:
        thread = entry.provenance and entry.provenance.thread_id
        source = f"the thread {thread!r}" if thread else "no thread"
        note(f"{entry.kind} from {source}, held back on {day(entry.at)}: {entry.reason}", "dim")
        say(entry.text)


def _list_entries(entries: list[Entry], json: bool) -> None:
    secret = ("text", "fields")  # as they were said
    if json:
        plain = [asdict(entry).items() for entry in entries]
        as_json([{name: part for name, part in each if name not in secret} for each in plain])
    elif entries:
        rows = [(day(entry.at), entry.key, entry.shown, entry.reason) for entry in entries]
        table(["since", "key", "text", "why"], rows, ids=("since", "key"))
    else:
        note("nothing is in quarantine")


# -- jobs


@memories.command()
def jobs(
    dead: Annotated[bool, typer.Option("--dead", help="Only those that were given up.")] = False,
    retry: Annotated[
        list[str] | None, typer.Option(metavar="ID", help="Try this thread again.")
    ] = None,
    retry_all: Annotated[
        bool, typer.Option("--retry-all", help="Try again all that were given up.")
    ] = False,
    facts: Annotated[
        bool, typer.Option("--facts", help="The jobs of 'perdure worker --facts'.")
    ] = False,
    database: Jobs = None,
    db: DB = None,
    json: AsJson = False,
) -> None:
    """List threads that wait to be extracted.

    Lists those of all users, and what was extracted within a day.
    """
    with opened(db, reads=True) as file, _known(file, database, facts=facts) as known:
        found: list[Job] = known.jobs()
        given_up = {job.thread_id: job for job in found if job.state == "dead"}
        wanted = [*given_up] if retry_all else [_meant(each, given_up) for each in retry or ()]
        for thread in wanted:
            known.extract_now(thread, given_up[thread].config)
    if retry or retry_all:
        note(f"{counted(len(wanted), 'thread')} will be tried again")
    listed = [*given_up.values()] if dead else found
    if json:
        as_json([asdict(job) for job in listed])
    elif listed:
        rows = [
            (job.thread_id, job.namespace[-1], job.state, ago(job.at) if job.at else "", _made(job))
            for job in listed
        ]
        table(["thread", "user", "state", "at", "what came of it"], rows, ids=("thread", "state"))
    else:
        note("nothing was given up" if dead else "no thread has anything to extract")


@contextmanager
def _known(file: Database, database: str | None, *, facts: bool) -> Iterator[Any]:
    """What knows of jobs; if no worker ever worked, what is due is all there is."""
    from perdure.memory.due import DueThreads, Pace

    extraction = file.extraction(extractor(file) if facts else None)
    defaults, given = file.config["configurable"], database or f"{file.settings.db}.jobs"
    if "://" not in given and not os.path.exists(given):
        yield DueThreads(extraction, Pace(), defaults)
        return
    from perdure.memory import Background

    with Background(extraction, database=database, work=False, defaults=defaults) as background:
        yield background


def _meant(given: str, dead: Iterable[str]) -> str:
    """The thread that is meant, of those that were given up."""
    found = [thread for thread in dead if thread.startswith(given)]
    return the_one(given, found, "thread given up", "perdure memories jobs --dead")


def _made(job: Job) -> str:
    """What came of a job: why it failed, or what is new."""
    if job.error:
        return f"{counted(job.attempts, 'attempt')}: {job.error}"
    report = job.report or {}
    made = [f"{report[name]} {name}" for name in _MADE if report.get(name)]
    return ", ".join(made) or ("nothing new" if report else "")


# -- check


@memories.command()
def check(
    file: Annotated[
        typer.FileText,
        typer.Argument(
            metavar="FILE",
            encoding="utf-8",
            errors="replace",
            help="JSONL with a question a line; - is stdin.",
        ),
    ],
    limit: Annotated[int, typer.Option(min=1, help="The ranks that count as recalled.")] = 10,
    minimum: Annotated[
        float, typer.Option(min=0, max=1, metavar="SHARE", help="What must be recalled.")
    ] = 0.9,
    user: User = None,
    db: DB = None,
    json: AsJson = False,
) -> None:
    """Measure recall with questions of your own.

    Shows at which rank each expected memory is recalled. Exit code 1 if less than --minimum is.
    """
    from perdure.memory.recall_check import check_recall

    called = repr(getattr(file, "name", "-"))
    lines = [(number, text) for number, text in enumerate(file, 1) if text.strip()]
    pairs = [_pair(f"line {number} of {called}", text) for number, text in lines]
    if not pairs:
        raise ConfigurationError(f"{called} has no questions; {_FORM}, a line each")
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


def _pair(where: str, text: str) -> tuple[str, list[str]]:
    """A question, and the texts and keys that it is to recall."""
    with suppress(ValueError, LookupError, TypeError):
        given = jsonlib.loads(text)
        question, expected = given["question"], given["expected"]
        each = expected if isinstance(expected, list) else [expected]
        named = [part["key"] if isinstance(part, dict) else part for part in each]
        if named and all(isinstance(part, str) and part.strip() for part in (question, *named)):
            return question, named
    raise ConfigurationError(f"{where} is {text.strip():.80}; {_FORM}")
