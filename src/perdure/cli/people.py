"""`perdure forget`: everything that belongs to a person is erased."""

from __future__ import annotations

import json as jsonlib
import tomllib
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from perdure.cli.app import (
    DbOption,
    DryRunOption,
    JsonOption,
    OwnersOption,
    YesOption,
    app,
    open_database,
)
from perdure.cli.output import (
    print_json,
    print_note,
    print_note_line,
    print_owner_warning,
    print_scrub_result,
    print_table,
    print_text,
    show_status,
)
from perdure.errors import ConfigurationError, UnknownPerson
from perdure.settings import check_user

if TYPE_CHECKING:
    from perdure.people import Part, Report

_SHOWN: Final = 3  # ids of a part that a table shows


@app.command()
def forget(
    user: Annotated[
        str, typer.Option("--user", metavar="NAME", help="The person, by the exact name.")
    ],
    dry_run: DryRunOption = False,
    yes: YesOption = False,
    keys: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Count the API keys of the person in it.")
    ] = None,
    audit: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Count the audit records of the person in it."),
    ] = None,
    hand_over: Annotated[
        bool,
        typer.Option(
            "--hand-over",
            help="Keep what the person wrote for teams, without the name.",
        ),
    ] = False,
    owners: OwnersOption = None,
    db: DbOption = None,
    json: JsonOption = False,
) -> None:
    """Erase everything that belongs to a person, for good.

    Runs and crons are cancelled first. It shows what is to go and asks for the name. It may be
    repeated if it is cut off. Exit code 1 if there is nobody of this name.
    """
    from perdure import people
    from perdure.people import Part

    user = check_user("--user", user, "give the name of the person")
    by_owner = None if owners is None else owners == "people"
    beside = [
        Part("API keys", (), sum(key.get("user") == user for key in _read_keys(keys))),
        Part("audit records", (), sum(user in _users_of(row) for row in _read_audit(audit))),
    ]
    with open_database(db) as database:
        try:
            with show_status("looking …"):
                how: dict[str, Any] = {"hand_over": hand_over, "owners_are_people": by_owner}
                report = people.plan(user, database.saver, database.store, **how)
            if not (dry_run or yes):
                for action, what, count, ids in _rows(report, beside):
                    print_note_line(f"{action} {count} {what}{ids and f': {ids}'}", "dim")
            print_owner_warning(user, report.by_owner)
            if not dry_run:
                if not yes:
                    _ask_name(user)
                with show_status("erasing …"):
                    # what belongs to others was looked for once, which takes long
                    done = people.forget(
                        user, database.saver, database.store, **how, looks_elsewhere=False
                    )
                    report = replace(done, kept=report.kept)
        except UnknownPerson as exc:
            print_note(f"perdure: {exc}")
            raise typer.Exit(1) from exc
    kept = [*report.kept, *(part for part in beside if part.count)]
    if json:
        print_json({**asdict(report), "erased": _plain(report.erased), "kept": _plain(kept)})
        return
    if dry_run or yes:
        print_table(("", "what", "count", "which"), _rows(report, beside))
    print_text(f"{'would forget' if dry_run else 'forgot'} {user!r}")
    if not dry_run:
        print_scrub_result(report.scrubbed)


def _ask_name(user: str) -> None:
    """Ask for the name of the person, and end with exit code 1 if another text is typed."""
    typed = typer.prompt(
        "Type the name of the person to erase all of it", err=True, default="", show_default=False
    )
    if typed != user:
        print_note(f"perdure: {typed!r} was typed, not {user!r}: nothing was erased")
        raise typer.Exit(1)


def _rows(report: Report, beside: list[Part]) -> list[tuple[str, str, int, str]]:
    """Return the rows that say what is erased and what is kept."""
    rows = [("erase", *_row(part)) for part in report.erased]
    return rows + [("keep", *_row(part)) for part in (*report.kept, *beside) if part.count]


def _row(part: Part) -> tuple[str, int, str]:
    more = ", …" if len(part.ids) > _SHOWN else ""
    return part.what, part.count, ", ".join(part.ids[:_SHOWN]) + more


def _plain(parts: Any) -> list[dict[str, Any]]:
    return [{"what": part.what, "count": part.count, "ids": [*part.ids]} for part in parts]


def _read_keys(path: Path | None) -> list[dict[str, Any]]:
    """Return the entries of a keys file."""
    if path is None:
        return []
    try:
        keys = tomllib.loads(path.read_text(encoding="utf-8")).get("keys", [])
    except (OSError, ValueError) as exc:
        raise ConfigurationError(f"--keys {str(path)!r} cannot be read: {exc}") from exc
    return [key for key in keys if isinstance(key, dict)]


def _users_of(record: dict[str, Any]) -> tuple[Any, Any]:
    """Return who sent the request of an audit record, and for whom."""
    return record.get("user"), record.get("acting_for")


def _read_audit(path: Path | None) -> Iterator[dict[str, Any]]:
    """Yield the records of an audit log."""
    if path is None:
        return
    try:
        with path.open(encoding="utf-8") as lines:
            for line in lines:
                record = jsonlib.loads(line)
                if isinstance(record, dict):
                    yield record
    except (OSError, ValueError) as exc:
        raise ConfigurationError(f"--audit {str(path)!r} cannot be read: {exc}") from exc
