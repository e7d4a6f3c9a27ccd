"""Implement the `perdure config`, `perdure stats` and `perdure retain` commands.

`config` shows the settings. `stats` shows counts and sizes. `retain` removes old data according to
the retention rules in the settings.
"""

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
    print_json_or_table,
    print_note,
    print_text,
    show_status,
)
from perdure.errors import ConfigurationError

if TYPE_CHECKING:
    from perdure.retention import Report

# Matches a password parameter in a Postgres DSN, in URI or keyword/value format.
_PASSWORD: Final = r"(\bpassword\s*=\s*)('(?:\\.|[^'\\])*'|[^\s&]*)"
# Maximum number of ids that `perdure retain` prints for each kind of removed data.
_MAX_NAMED_IDS: Final = 20


@app.command()
def config(db: DbOption = None, user: UserOption = None, json: JsonOption = False) -> None:
    """Show the settings and where they come from.

    Arguments override PERDURE_* environment variables, which override perdure.toml. Secrets, such
    as keys, are not printed. For a configured secret, "set" is printed instead of its value.
    """
    from perdure.settings import NAMES, SECRETS, load

    settings = load(db=db, user=user)
    db = re.sub(r"(://[^:/@]*:).*@", r"\1…@", settings.db)
    settings = replace(settings, db=re.sub(_PASSWORD, r"\1…", db))
    table: dict[str, dict[str, Any]] = {}
    for name in NAMES:
        value, source = attrgetter(name)(settings), settings.sources.get(name, "default")
        source = os.path.abspath(source) if os.path.isfile(source) else source
        is_secret = name in SECRETS and value is not None
        table[name] = {"value": "set" if is_secret else value, "source": source}
    rows = [
        (name, _format_setting(row["value"]), os.path.basename(row["source"]))
        for name, row in table.items()
    ]
    print_json_or_table(table, json, ("name", "value", "source"), rows, ids=("name", "source"))
    if not json:
        print_text(f"\ndatabase: {settings.db}")
        for path in sorted({row["source"] for row in table.values()}):
            if os.path.isabs(path):
                print_text(f"settings file: {path}")


def _format_setting(value: Any) -> str:
    """Format a setting as text: booleans as in TOML, and None as an empty string."""
    if isinstance(value, bool):
        return str(value).lower()
    return "" if value is None else str(value)


@app.command()
def stats(db: DbOption = None, json: JsonOption = False) -> None:
    """Show counts and sizes of the stored data."""
    with open_database(db, allow_read_only=True) as database:
        saver, store = database.saver.stats(), database.store.stats()
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
    print_json_or_table(
        counts,
        json,
        ("", ""),
        [(name, _format_statistic(name, value, counts)) for name, value in counts.items()],
    )


def _format_statistic(name: str, value: Any, all_statistics: dict[str, Any]) -> str:
    """Format the value of one statistic, such as a number of bytes, for a table cell."""
    if name == "wal_reset_bug":
        version = all_statistics["sqlite_version"]
        return f"present in SQLite {version}; perdure works around it" if value else "no"
    if name.endswith("_bytes"):
        return format_size(value)
    return ", ".join(value) if isinstance(value, list) else str(value)


def _build_rule_option(option: str, metavar: str, help: str) -> Any:
    """Build a command line option that overrides a retention rule. The minimum value is 0."""
    return typer.Option(option, min=0, metavar=metavar, help=help)


@app.command()
def retain(
    ids: ThreadsArgument = None,
    idle_days: Annotated[
        float | None,
        _build_rule_option("--idle-days", "DAYS", "Delete threads idle for over DAYS days."),
    ] = None,
    memories: Annotated[
        bool | None, typer.Option(help="Erase or keep memories from deleted threads.")
    ] = None,
    checkpoints_last: Annotated[
        int | None,
        _build_rule_option("--last", "N", "Keep each thread's N newest checkpoints."),
    ] = None,
    checkpoints_days: Annotated[
        float | None,
        _build_rule_option("--days", "DAYS", "Keep checkpoints at most DAYS days old."),
    ] = None,
    dry_run: DryRunOption = False,
    yes: YesOption = False,
    db: DbOption = None,
    json: JsonOption = False,
) -> None:
    """Remove old threads, checkpoints and versions.

    The retention rules are read from the [retention] table of perdure.toml. Options override four
    of the rules. A checkpoint or version is kept if at least one rule keeps it. Expired items are
    always removed.
    """
    from perdure import retention

    options: dict[str, Any] = {
        "idle_days": idle_days,
        "memories": memories,
        "checkpoints_last": checkpoints_last,
        "checkpoints_days": checkpoints_days,
    }
    with open_database(db, allow_read_only=dry_run) as database:
        rules = replace(
            database.settings.retention,
            **{name: value for name, value in options.items() if value is not None},
        )
        if ids and not rules.checkpoints and rules.idle_days is None:
            raise ConfigurationError(
                "thread ids were passed, but no retention rule for threads is set; pass "
                "--idle-days, --last or --days, or remove the thread ids"
            )
        if not rules:
            print_note(
                "no rules are set, so only expired items are removed; --help lists the options"
            )
        threads = [resolve_thread_id(database, typed) for typed in ids] if ids else None
        arguments = rules, database.saver, database.store
        with show_status("looking for old data"):
            report = retention.plan(*arguments, thread_ids=threads)
        if report and not dry_run:
            if not yes:
                print_note(f"to be removed: {summarize_report(report)}")
            require_confirmation("Remove this data permanently?", yes)
            with show_status("removing old data"):
                report = retention.apply(*arguments, thread_ids=threads)
    rows = [
        (removal.what, f"{removal.count:,}", format_size(removal.size_bytes))
        for removal in report.removals
    ]
    columns = ("would be removed" if dry_run else "removed", "count", "approx. size")
    print_json_or_table({**asdict(report), "size_bytes": report.size_bytes}, json, columns, rows)
    if json:
        return
    for removal in report.removals:
        for name in removal.ids[:_MAX_NAMED_IDS]:
            print_text(f"  {name}")
        if len(removal.ids) > _MAX_NAMED_IDS:
            print_text(
                f"  … and {format_count(len(removal.ids) - _MAX_NAMED_IDS, 'other')}; "
                "--json lists all ids"
            )
    for thread in report.left:
        print_note(
            f"skipped the thread {thread!r}, which a run has locked; repeat the command later"
        )


def summarize_report(report: Report) -> str:
    """Format a retention report's counts and total size as a single line."""
    counts = [f"{removal.count:,} {removal.what}" for removal in report.removals if removal.count]
    return f"{', '.join(counts)}; about {format_size(report.size_bytes)}"
