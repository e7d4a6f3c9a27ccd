"""`perdure config`, `stats` and `retain`: settings, counts and sizes, removal of what is old."""

from __future__ import annotations

import os
import re
from dataclasses import asdict, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from perdure.cli.app import (
    DbOption,
    DryRunOption,
    JsonOption,
    ThreadsArgument,
    UserOption,
    YesOption,
    app,
    open_database,
    require_confirmation,
    resolve_thread_id,
)
from perdure.cli.output import (
    format_count,
    format_size,
    print_note,
    print_rows,
    print_text,
    show_status,
)
from perdure.errors import ConfigurationError

if TYPE_CHECKING:
    from perdure.retention import Report

_PASSWORD: Final = r"(\bpassword\s*=\s*)('(?:\\.|[^'\\])*'|[^\s&]*)"  # of a URI, or of keywords
_NAMED: Final = 20  # ids that are listed


@app.command()
def config(db: DbOption = None, user: UserOption = None, json: JsonOption = False) -> None:
    """Show the settings and where they come from.

    Arguments override PERDURE_* variables, and these perdure.toml. Of keys it shows only whether
    they are set.
    """
    from perdure.settings import NAMES, SECRETS, load

    settings = load(db=db, user=user)
    db = re.sub(r"(://[^:/@]*:).*@", r"\1…@", settings.db)
    settings = replace(settings, db=re.sub(_PASSWORD, r"\1…", db))
    table: dict[str, dict[str, Any]] = {}
    for name in NAMES:
        value, source = attrgetter(name)(settings), settings.sources.get(name, "default")
        source = os.path.abspath(source) if os.path.isfile(source) else source
        secret = name in SECRETS and value is not None
        table[name] = {"value": "set" if secret else value, "source": source}
    rows = [
        (name, _as_toml(row["value"]), os.path.basename(row["source"]))
        for name, row in table.items()
    ]
    print_rows(table, json, ("name", "value", "source"), rows, ids=("name", "source"))
    if not json:
        print_text(f"\ndatabase: {settings.db}")
        for path in sorted({row["source"] for row in table.values()}):
            if os.path.isabs(path):
                print_text(f"settings file: {path}")


def _as_toml(value: Any) -> str:
    """A value as it is written in `perdure.toml`; one that is not set is empty."""
    if isinstance(value, bool):
        return str(value).lower()
    return "" if value is None else str(value)


@app.command()
def stats(db: DbOption = None, json: JsonOption = False) -> None:
    """Show counts and sizes."""
    with open_database(db, allow_read_only=True) as file:
        saver, store = file.saver.stats(), file.store.stats()
    counts = {
        **{name: saver[name] for name in ("path", "threads", "checkpoints")},
        "messages": saver["items"],
        "thread_bytes": saver["thread_bytes"],
        "namespaces": store.namespaces,
        "items": store.items,
        "old_versions": store.versions,
        "missing_vectors": store.pending,
        "item_bytes": store.value_bytes,
        "indexes": list(store.indexes),
    }
    counts |= {name: value for name, value in saver.items() if name not in counts}
    rows = [(name, _in_words(name, value, counts)) for name, value in counts.items()]
    print_rows(counts, json, ("", ""), rows)


def _in_words(name: str, value: Any, counts: dict[str, Any]) -> str:
    if name == "wal_reset_bug":
        return f"in SQLite {counts['sqlite_version']}, and avoided" if value else "no"
    if name.endswith("_bytes"):
        return format_size(value)
    return ", ".join(value) if isinstance(value, list) else str(value)


def _rule(option: str, metavar: str, help: str) -> Any:
    return typer.Option(option, min=0, metavar=metavar, help=help)


@app.command()
def retain(
    ids: ThreadsArgument = None,
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
    dry_run: DryRunOption = False,
    yes: YesOption = False,
    db: DbOption = None,
    json: JsonOption = False,
) -> None:
    """Remove old threads, checkpoints and versions.

    The rules are those under [retention] in perdure.toml; options override four of them. Expired
    items always go. Of checkpoints and versions, what any rule keeps stays.
    """
    from perdure import retention

    options: dict[str, Any] = {
        "idle_days": idle_days,
        "memories": memories,
        "checkpoints_last": checkpoints_last,
        "checkpoints_days": checkpoints_days,
    }
    with open_database(db, allow_read_only=dry_run) as file:
        chosen = {name: value for name, value in options.items() if value is not None}
        rules = replace(file.settings.retention, **chosen)
        if ids and not rules.checkpoints and rules.idle_days is None:
            raise ConfigurationError("no rule is for threads; give --idle-days, --last, …")
        if not rules:
            print_note("no rules are given: only expired items go; --help lists options")
        threads = [resolve_thread_id(file, each) for each in ids] if ids else None
        what = rules, file.saver, file.store
        with show_status("looking for what is old"):
            report = retention.plan(*what, thread_ids=threads)
        if report and not dry_run:
            if not yes:
                print_note(f"would go: {summarize_report(report)}")
            require_confirmation("Remove this for good?", yes)
            with show_status("removing what is old"):
                report = retention.apply(*what, thread_ids=threads)
    rows = [
        (each.what, f"{each.count:,}", format_size(each.size_bytes)) for each in report.removals
    ]
    columns = ("would go" if dry_run else "gone", "count", "about")
    print_rows({**asdict(report), "size_bytes": report.size_bytes}, json, columns, rows)
    if json:
        return
    for each in report.removals:
        for name in each.ids[:_NAMED]:
            print_text(f"  {name}")
        if len(each.ids) > _NAMED:
            print_text(f"  … and {format_count(len(each.ids) - _NAMED, 'other')}; --json names all")
    for name in report.left:
        print_note(f"left for the next time, as a run has it locked: {name}")


def summarize_report(report: Report) -> str:
    """What goes, on one line."""
    counts = [f"{each.count:,} {each.what}" for each in report.removals if each.count]
    return f"{', '.join(counts)}; about {format_size(report.size_bytes)}"
