"""`perdure retain`: remove what is old, by the rules of `perdure.toml` and options."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from perdure.cli.app import DB, AsJson, DryRun, Threads, Yes, app, confirm, opened, thread_id
from perdure.cli.output import counted, note, say, show, size
from perdure.cli.progress import at_work
from perdure.errors import ConfigurationError

if TYPE_CHECKING:
    from perdure.retention import Report

_NAMED = 20  # ids that are listed


def _rule(option: str, metavar: str, help: str) -> Any:
    return typer.Option(option, min=0, metavar=metavar, help=help)


@app.command()
def retain(
    ids: Threads = None,
    idle_days: Annotated[
        float | None, _rule("--idle-days", "DAYS", "Delete threads idle for longer.")
    ] = None,
    memories: Annotated[
        bool | None, typer.Option(help="Forget the memories of such threads, or not.")
    ] = None,
    checkpoints_last: Annotated[
        int | None, _rule("--last", "N", "Keep the newest N checkpoints of each.")
    ] = None,
    checkpoints_days: Annotated[
        float | None, _rule("--days", "DAYS", "Keep checkpoints no older than this.")
    ] = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    db: DB = None,
    json: AsJson = False,
) -> None:
    """Remove old threads, checkpoints and versions.

    The rules are those under [retention] in perdure.toml; options override four of them. Expired
    items always go. Of checkpoints and versions, what any rule keeps stays.
    """
    from perdure import retention

    given: dict[str, Any] = {
        "idle_days": idle_days,
        "memories": memories,
        "checkpoints_last": checkpoints_last,
        "checkpoints_days": checkpoints_days,
    }
    given = {name: value for name, value in given.items() if value is not None}
    with opened(db, reads=dry_run) as file:
        rules = replace(file.settings.retention, **given)
        if ids and not rules.checkpoints and rules.idle_days is None:
            raise ConfigurationError("no rule is for threads; give --idle-days, --last, …")
        if not rules:
            note("no rules are given: only expired items go; --help lists options")
        threads = [thread_id(file, each) for each in ids] if ids else None
        what = rules, file.saver, file.store
        with at_work("looking for what is old"):
            report = retention.plan(*what, thread_ids=threads)
        if report and not dry_run:
            if not yes:
                note(f"would go: {summary(report)}")
            confirm("Remove this for good?", yes)
            with at_work("removing what is old"):
                report = retention.apply(*what, thread_ids=threads)
    rows = [(each.what, f"{each.count:,}", size(each.size_bytes)) for each in report.removals]
    columns = ("would go" if dry_run else "gone", "count", "about")
    show({**asdict(report), "size_bytes": report.size_bytes}, json, columns, rows)
    if json:
        return
    for each in report.removals:
        for name in each.ids[:_NAMED]:
            say(f"  {name}")
        if len(each.ids) > _NAMED:
            say(f"  … and {counted(len(each.ids) - _NAMED, 'other')}; --json names all")
    for name in report.left:
        note(f"left for the next time, as a run has it locked: {name}")


def summary(report: Report) -> str:
    """What goes, on one line."""
    counts = [f"{each.count:,} {each.what}" for each in report.removals if each.count]
    return f"{', '.join(counts)}; about {size(report.size_bytes)}"
