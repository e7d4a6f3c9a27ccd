"""`perdure worker` and `jobs`: extraction in the background, and how it stands."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Final

import typer

from perdure.cli.app import DB, AsJson, app, settings_for
from perdure.cli.longterm import Mind, opened_mind
from perdure.cli.output import ago, as_json, console, counted, json_line, line, notes, table
from perdure.cli.store import shown
from perdure.errors import ConfigurationError, UnknownThread

if TYPE_CHECKING:
    from perdure.memory.background import Background
    from perdure.memory.due import Job
    from perdure.memory.proposals import Extractor

_DELAY_S: Final = 30.0
_LONGEST_S: Final = 1e9  # --once ends when all is extracted
_OFF: Final = "off"
Database = Annotated[
    str | None,
    typer.Option(help="Where jobs are kept: a file or a Postgres URL; else a file beside."),
]


@app.command()
def worker(
    database: Database = None,
    once: Annotated[bool, typer.Option("--once", help="Extract all there is, and end.")] = False,
    facts: Annotated[
        bool, typer.Option("--facts", help="Ask PERDURE_MODEL for facts, which costs what it does.")
    ] = False,
    delay: Annotated[
        float | None, typer.Option(help="Seconds for which nothing must have been said.")
    ] = None,
    cron: Annotated[
        str | None, typer.Option(help="Extract all there is by the clock, like '0 3 * * *'.")
    ] = None,
    timezone: Annotated[str | None, typer.Option(help="Of --cron; else UTC.")] = None,
    db: DB = None,
    json: AsJson = False,
) -> None:
    """Extract memories of threads whose conversation pauses, of all users, until it is stopped.

    Without --facts no model is asked: what was said is what is remembered.
    """
    from perdure.memory.background import Background, run_worker
    from perdure.memory.due import Pace

    extractor = _extractor(db) if facts else None
    if timezone is not None and cron is None:
        raise ConfigurationError("--timezone is that of --cron, which is not given")
    with opened_mind(db, None) as mind, _logged():
        background = Background(
            mind.extraction(extractor),
            pace=Pace(delay_s=_DELAY_S if delay is None and cron in (None, _OFF) else delay),
            database=database,
            defaults=mind.config["configurable"],
            on_job=_print_line if json else _print,
        )
        if cron is not None:
            background.every(None if cron == _OFF else cron, timezone)
        if not once:
            run_worker(background)
            return
        with background:
            left = background.flush(_LONGEST_S)
    for job in left:
        notes.print(f"not extracted: {job}", markup=False)
    if left:
        raise typer.Exit(1)


def _extractor(db: str | None) -> Extractor:
    """What asks the configured model.

    Raises:
        ConfigurationError: None is.
    """
    from perdure.graphs.configured import configured_model
    from perdure.memory.model_extractor import ModelExtractor

    model = configured_model(settings_for(db))
    if model is None:
        raise ConfigurationError("--facts needs a model; set PERDURE_MODEL, or leave it out")
    return ModelExtractor(model)


@contextmanager
def _logged() -> Iterator[None]:
    """Say on stderr what holds the worker up; of its jobs it tells by itself."""
    from perdure.memory.due import Job

    def is_other(record: logging.LogRecord) -> bool:
        return not any(isinstance(each, Job) for each in record.args or ())

    logger, handler = logging.getLogger("perdure.background"), logging.StreamHandler()
    handler.addFilter(is_other)
    handler.setFormatter(logging.Formatter("perdure: %(message)s"))
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def _print(job: Job) -> None:
    sys.stdout.write(f"{job}\n")  # at once, for several threads print
    sys.stdout.flush()


def _print_line(job: Job) -> None:
    json_line(asdict(job))


@app.command()
def jobs(
    dead: Annotated[bool, typer.Option("--dead", help="Only what was given up.")] = False,
    retry: Annotated[
        list[str] | None, typer.Option(metavar="ID", help="Try this thread again.")
    ] = None,
    retry_all: Annotated[
        bool, typer.Option("--retry-all", help="Try again all that was given up.")
    ] = False,
    facts: Annotated[bool, typer.Option("--facts", help="Of 'perdure worker --facts'.")] = False,
    database: Database = None,
    db: DB = None,
    json: AsJson = False,
) -> None:
    """List threads with something to extract, and those extracted lately, of all users."""
    extractor = _extractor(db) if facts else None
    with (
        opened_mind(db, None, reads=True) as mind,
        _background(mind, extractor, database) as background,
    ):
        found = _due(mind, extractor) if background is None else background.jobs()
        given_up = [job for job in found if job.state == "dead"]
        if retry or retry_all:
            wanted = given_up if retry_all else _wanted(given_up, retry or [])
            for job in wanted:
                assert background is not None  # else nothing was ever tried
                background.extract_now(job.thread_id, job.config)
            notes.print(f"{counted(len(wanted), 'thread')} will be tried again")
    listed = given_up if dead else found
    if json:
        as_json([asdict(job) for job in listed])
    elif listed:
        _list(listed)
    else:
        notes.print("nothing was given up" if dead else "no thread has anything to extract")


@contextmanager
def _background(
    mind: Mind, extractor: Extractor | None, database: str | None
) -> Iterator[Background | None]:
    """What knows of jobs; None: no worker ever worked, so that what is due is all there is."""
    given = database or f"{mind.store.database.path}.jobs"
    if "://" not in given and not os.path.exists(given):
        yield None
        return
    from perdure.memory.background import Background

    background = Background(
        mind.extraction(extractor),
        database=database,
        work=False,
        defaults=mind.config["configurable"],
    )
    try:
        yield background
    finally:
        background.stop()


def _due(mind: Mind, extractor: Extractor | None) -> list[Job]:
    """The threads with something to extract."""
    from perdure.memory.due import DueThreads, Pace

    return DueThreads(mind.extraction(extractor), Pace(), mind.config["configurable"]).jobs()


def _wanted(dead: list[Job], ids: list[str]) -> list[Job]:
    """The jobs of some threads.

    Raises:
        UnknownThread: One of them was not given up.
    """
    for thread_id in ids:
        if all(job.thread_id != thread_id for job in dead):
            raise UnknownThread(
                f"the thread {thread_id!r} was not given up; 'perdure jobs --dead' lists those "
                "that were"
            )
    return [job for job in dead if job.thread_id in ids]


def _list(found: list[Job]) -> None:
    rows = [
        (
            *(
                job.thread_id,
                shown(job.namespace),
                job.state,
                ago(job.at) if job.at else "",
                job.attempts,
            ),
            line(job.error or _made(job), 200 if console.is_terminal else 10_000),
        )
        for job in found
    ]
    table(["thread", "memories", "state", "at", "attempts", "what came of it"], rows)


def _made(job: Job) -> str:
    """What came of a job that is done."""
    if job.report is None:
        return ""
    names = ("added", "updated", "superseded", "deleted", "quarantined")
    counts = {name: job.report.get(name) for name in names}
    return ", ".join(f"{count} {name}" for name, count in counts.items() if count) or "nothing new"
