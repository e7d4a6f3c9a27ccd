"""`perdure worker`: extraction and retention in the background."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Final

import typer

from perdure.cli.app import CommandDatabase, DbOption, JsonOption, app, open_database
from perdure.cli.database import summarize_report
from perdure.cli.output import print_json, print_note, print_text
from perdure.errors import PerdureError

if TYPE_CHECKING:
    from perdure.memory.background import Background
    from perdure.memory.extraction import ExtractionJob

_DELAY_S: Final = 30.0
_LONGEST_S: Final = 1e9  # --once ends when all is extracted
_OFF: Final = "off"
_HOUR_S: Final = 3600.0
_LOG: Final = logging.getLogger("perdure.background")


@app.command()
def worker(
    once: Annotated[bool, typer.Option("--once", help="Do what there is to do, and end.")] = False,
    facts: Annotated[bool | None, typer.Option(help="Ask the model for facts, or not.")] = None,
    delay: Annotated[
        float | None,
        typer.Option(min=0, metavar="SECONDS", help="Extract after a pause of this length."),
    ] = None,
    cron: Annotated[
        str | None,
        typer.Option(metavar="TIMES", help="Extract by the clock, like '0 3 * * *', or off."),
    ] = None,
    database: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Where jobs are kept: a file, or a Postgres URL."),
    ] = None,
    db: DbOption = None,
    json: JsonOption = False,
) -> None:
    """Extract memories in the background.

    It works on the threads of all users whose conversation pauses, until it is stopped. Threads
    whose runs named no user are left out and counted. Without --facts no model is asked: what was
    said is what is remembered. Rules under [retention] in perdure.toml are applied every hour.
    Options default to its table [worker].
    """
    from perdure.memory.background import Background, run_worker
    from perdure.memory.extraction import Pace
    from perdure.settings import is_dsn

    done: list[ExtractionJob] = []

    def tell(job: ExtractionJob) -> None:
        done.append(job)
        print_json(asdict(job), indent=None) if json else print_text(str(job))

    with open_database(db) as file, _logged():
        if database is not None and is_dsn(file.settings.db) and is_dsn(database):
            file.direct_dsn = database
        preset = file.settings.worker
        delay, cron = preset.delay_s if delay is None else delay, cron or preset.cron
        facts = preset.facts if facts is None else facts
        background = Background(
            file.build_extraction(facts=facts),
            pace=Pace(delay_s=_DELAY_S if delay is None and cron in (None, _OFF) else delay),
            database=database,
            on_job=tell,
        )
        if cron is not None:
            background.every(None if cron == _OFF else cron, preset.timezone)
        if not once:
            with _hourly(lambda: _retain(file, background, json=json)):
                run_worker(background)
            return
        with background:
            left = background.flush(_LONGEST_S)
            _retain(file, background, json=json)
        if json and not (done or file.settings.retention):
            print_json([], indent=None)
    for job in left:
        print_note(f"not extracted: {job}")
    if left:
        raise typer.Exit(1)


def _retain(file: CommandDatabase, background: Background, *, json: bool) -> None:
    """Apply the rules of the settings, but to threads that wait to be extracted."""
    if not file.settings.retention:
        return
    from perdure import retention

    try:
        waiting = {job.thread_id for job in background.jobs() if job.state not in ("dead", "done")}
        rules = file.settings.retention
        report = retention.apply(rules, file.saver, file.store, skip=waiting)
    except PerdureError as exc:  # the next hour tries again
        _LOG.warning("retention is held up: %s", exc)
        return
    if json:
        print_json({"retention": asdict(report)}, indent=None)
    elif report:
        print_text(f"removed {summarize_report(report)}")


@contextmanager
def _hourly(work: Callable[[], None]) -> Iterator[None]:
    """Call a function now and every hour, in a thread."""
    ended = threading.Event()

    def run() -> None:
        work()
        while not ended.wait(_HOUR_S):
            work()

    thread = threading.Thread(target=run, name="perdure-retention", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(_DELAY_S)  # it may be cut off, and goes on with the next start


@contextmanager
def _logged() -> Iterator[None]:
    """Say on stderr what holds the worker up."""
    from perdure.memory.extraction import ExtractionJob  # a worker tells of its jobs by itself

    class Notes(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if not any(isinstance(each, ExtractionJob) for each in record.args or ()):
                print_note(f"perdure: {record.getMessage()}")

    _LOG.addHandler(handler := Notes())
    try:
        yield
    finally:
        _LOG.removeHandler(handler)
