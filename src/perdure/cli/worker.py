"""Implement `perdure worker`, which extracts memories and applies retention in the background."""

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
    from perdure.memory.long_term.background import Background
    from perdure.memory.long_term.extraction import ExtractionJob

# Default idle time, in seconds, after which memories are extracted from a conversation.
_DEFAULT_DELAY_S: Final = 30.0
# Maximum time, in seconds, that `--once` waits for extractions. The value is so large that the wait
# is effectively unlimited, but `--once` exits as soon as no more threads are due.
_FLUSH_TIMEOUT_S: Final = 1e9
# Value of --cron that disables the schedule from perdure.toml.
_OFF: Final = "off"
# Interval between retention passes, in seconds.
_RETENTION_INTERVAL_S: Final = 3600.0
# Maximum number of seconds that an exiting worker waits for a retention pass to finish.
_STOP_TIMEOUT_S: Final = 30.0
_LOGGER: Final = logging.getLogger("perdure.background")


@app.command()
def worker(
    once: Annotated[
        bool, typer.Option("--once", help="Process the threads that are due now, then exit.")
    ] = False,
    facts: Annotated[bool | None, typer.Option(help="Extract facts with a model.")] = None,
    delay: Annotated[
        float | None,
        typer.Option(min=0, metavar="SECONDS", help="Process threads idle for at least this long."),
    ] = None,
    cron: Annotated[
        str | None,
        typer.Option(metavar="TIMES", help="A cron schedule such as '0 3 * * *', or off."),
    ] = None,
    database: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Store the jobs in this file or Postgres database."),
    ] = None,
    db: DbOption = None,
    json: JsonOption = False,
) -> None:
    """Extract memories in the background.

    The worker extracts memories from the threads of all users. By default, memories are extracted
    from a thread after the thread has been idle for some time. The worker runs until you stop it.
    The worker skips threads whose runs have no user, and logs a warning with the number of skipped
    threads. Without --facts no model is called, and each turn becomes a memory. The worker also
    applies the rules under [retention] in perdure.toml every hour. The values under [worker] in
    perdure.toml are the defaults for these options.
    """
    from perdure.memory.long_term.background import Background, run_worker
    from perdure.memory.long_term.extraction import Pace
    from perdure.settings import is_dsn

    finished: list[ExtractionJob] = []

    def print_job(job: ExtractionJob) -> None:
        finished.append(job)
        print_json(asdict(job), indent=None) if json else print_text(str(job))

    with open_database(db) as opened_database, _print_extraction_logs_during_block():
        settings = opened_database.settings
        if database is not None and is_dsn(settings.db) and is_dsn(database):
            opened_database.direct_dsn = database
        defaults = settings.worker
        delay, cron = defaults.delay_s if delay is None else delay, cron or defaults.cron
        facts = defaults.facts if facts is None else facts
        background = Background(
            opened_database.build_memory_extraction(extracts_facts=facts),
            # Without a cron schedule, memories are extracted from a thread after it has been idle
            # for some time.
            pace=Pace(
                delay_s=_DEFAULT_DELAY_S if delay is None and cron in (None, _OFF) else delay
            ),
            database=database,
            on_job=print_job,
        )
        if cron is not None:
            background.every(None if cron == _OFF else cron, defaults.timezone)
        if not once:
            with _run_hourly_during_block(
                lambda: _apply_retention(opened_database, background, json=json)
            ):
                run_worker(background)
            return
        with background:
            unfinished = background.flush(_FLUSH_TIMEOUT_S)
            _apply_retention(opened_database, background, json=json)
        if json and not (finished or settings.retention):
            print_json([], indent=None)
    for job in unfinished:
        print_note(f"not extracted: {job}")
    if unfinished:
        raise typer.Exit(1)


def _apply_retention(database: CommandDatabase, background: Background, *, json: bool) -> None:
    """Apply the configured retention rules, but skip threads that are waiting for extraction."""
    if not database.settings.retention:
        return
    from perdure import retention

    try:
        waiting = {job.thread_id for job in background.jobs() if job.state not in ("dead", "done")}
        report = retention.apply(
            database.settings.retention, database.saver, database.store, skip=waiting
        )
    except PerdureError as exc:
        _LOGGER.warning("retention failed and will be retried within an hour: %s", exc)
        return
    if json:
        print_json({"retention": asdict(report)}, indent=None)
    elif report:
        print_text(f"removed {summarize_report(report)}")


@contextmanager
def _run_hourly_during_block(work: Callable[[], None]) -> Iterator[None]:
    """Call a function immediately and then hourly, in an OS thread, while the context is open."""
    stopped = threading.Event()

    def run_until_stopped() -> None:
        work()
        while not stopped.wait(_RETENTION_INTERVAL_S):
            work()

    thread = threading.Thread(target=run_until_stopped, name="perdure-retention", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        # An exiting worker waits at most `_STOP_TIMEOUT_S` seconds for a retention pass to finish.
        # If the pass takes longer, the worker exits before the pass is complete. The remaining old
        # data is removed when the worker is next started.
        thread.join(_STOP_TIMEOUT_S)


@contextmanager
def _print_extraction_logs_during_block() -> Iterator[None]:
    """Print log records from background extraction to stderr while the context is open."""
    from perdure.memory.long_term.extraction import ExtractionJob

    class StderrHandler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            # Skip log records about finished extraction jobs, because `print_job` already prints a
            # line for each finished job.
            if not any(isinstance(argument, ExtractionJob) for argument in record.args or ()):
                print_note(f"perdure: {record.getMessage()}")

    _LOGGER.addHandler(handler := StderrHandler())
    try:
        yield
    finally:
        _LOGGER.removeHandler(handler)
