"""Implement `perdure forget`, which erases everything that belongs to a person."""

from __future__ import annotations

import json as jsonlib
import tomllib
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple

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
    print_table,
    print_text,
    print_warning_about_threads_matched_by_owner,
    print_whether_deleted_bytes_remain,
    show_status,
)
from perdure.errors import ConfigurationError, UnknownPerson
from perdure.settings import check_user

if TYPE_CHECKING:
    from perdure.people import Part, Report

# Maximum number of ids shown in each row of the printed table.
_MAX_LISTED_IDS: Final = 3


class _ReportRow(NamedTuple):
    """A row of the printed table.

    Attributes:
        action: `erase` or `keep`.
        noun: The kind of data, such as `threads`.
        object_count: The number of objects.
        first_ids: The first ids, separated by commas.
    """

    action: str
    noun: str
    object_count: int
    first_ids: str


@app.command()
def forget(
    user: Annotated[
        str, typer.Option("--user", metavar="NAME", help="The exact user name of the person.")
    ],
    dry_run: DryRunOption = False,
    yes: YesOption = False,
    keys: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A keys file in which to count the person's API keys."),
    ] = None,
    audit: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="An audit log in which to count the person's records."),
    ] = None,
    hand_over: Annotated[
        bool,
        typer.Option(
            "--hand-over",
            help="Keep team items, but remove the person's name.",
        ),
    ] = False,
    owners: OwnersOption = None,
    db: DbOption = None,
    json: JsonOption = False,
) -> None:
    """Erase everything that belongs to a person, permanently.

    The command shows what will be erased, and asks you to type the person's name to confirm. The
    person's runs and crons are cancelled before anything is erased. If `perdure forget` is
    interrupted, run it again. The exit code is 1 if no data belongs to a person with this name.
    """
    from perdure import people
    from perdure.people import Part

    user = check_user("--user", user, "pass the name of the person")
    owners_are_people = None if owners is None else owners == "people"
    parts_in_files = [
        Part("API keys", (), sum(key.get("user") == user for key in _read_api_key_entries(keys))),
        Part(
            "audit records",
            (),
            sum(
                user in _get_sender_and_represented_user(record)
                for record in _iter_audit_log_records(audit)
            ),
        ),
    ]
    with open_database(db) as database:
        try:
            with show_status("looking for data of the person …"):
                options: dict[str, Any] = {
                    "hand_over": hand_over,
                    "owners_are_people": owners_are_people,
                }
                report = people.plan(user, database.saver, database.store, **options)
            if not (dry_run or yes):
                for action, what, count, ids in _build_erasure_report_rows(report, parts_in_files):
                    print_note_line(f"{action} {count} {what}{ids and f': {ids}'}", "dim")
            print_warning_about_threads_matched_by_owner(user, report.by_owner)
            if not dry_run:
                if not yes:
                    _ask_user_to_type_name_or_exit(user)
                with show_status("erasing …"):
                    # Skip the slow search through other people's data, because `people.plan` has
                    # already done it.
                    erased = people.forget(
                        user, database.saver, database.store, **options, looks_elsewhere=False
                    )
                    report = replace(erased, kept=report.kept)
        except UnknownPerson as exc:
            print_note(f"perdure: {exc}")
            raise typer.Exit(1) from exc
    kept_parts = [*report.kept, *(part for part in parts_in_files if part.count)]
    if json:
        print_json(
            {
                **asdict(report),
                "erased": _build_parts_json(report.erased),
                "kept": _build_parts_json(kept_parts),
            }
        )
        return
    if dry_run or yes:
        print_table(
            ("", "what", "count", "ids"), _build_erasure_report_rows(report, parts_in_files)
        )
    print_text(f"{'would forget' if dry_run else 'forgot'} {user!r}")
    if not dry_run:
        print_whether_deleted_bytes_remain(report.scrubbed)


def _ask_user_to_type_name_or_exit(expected_name: str) -> None:
    """Ask the user to type the person's name, and exit with code 1 if it does not match."""
    typed = typer.prompt(
        "Type the name of the person to erase all of this",
        err=True,
        default="",
        show_default=False,
    )
    if typed != expected_name:
        print_note(
            f"perdure: you typed {typed!r} instead of {expected_name!r}, so nothing was erased"
        )
        raise typer.Exit(1)


def _build_erasure_report_rows(report: Report, parts_in_files: list[Part]) -> list[_ReportRow]:
    """Build the table rows that list the erased data and the kept data.

    Args:
        report: The report of the erasure.
        parts_in_files: Counts of API keys and audit records, which are in files and are kept.
    """
    rows = [_build_report_row("erase", part) for part in report.erased]
    kept_parts = [part for part in (*report.kept, *parts_in_files) if part.count]
    return rows + [_build_report_row("keep", part) for part in kept_parts]


def _build_report_row(action: str, part: Part) -> _ReportRow:
    """Build the table row that describes one part of the report."""
    more = ", …" if len(part.ids) > _MAX_LISTED_IDS else ""
    first_ids = ", ".join(part.ids[:_MAX_LISTED_IDS]) + more
    return _ReportRow(action, part.what, part.count, first_ids)


def _build_parts_json(parts: Any) -> list[dict[str, Any]]:
    """Convert the parts of a report to JSON objects with complete lists of ids."""
    return [{"what": part.what, "count": part.count, "ids": [*part.ids]} for part in parts]


def _read_api_key_entries(keys_file: Path | None) -> list[dict[str, Any]]:
    """Return the entries of a keys file, or an empty list if `keys_file` is None."""
    if keys_file is None:
        return []
    try:
        keys = tomllib.loads(keys_file.read_text(encoding="utf-8")).get("keys", [])
    except (OSError, ValueError) as exc:
        raise ConfigurationError(
            f"the keys file {str(keys_file)!r} cannot be read: {exc}; pass the server's keys file "
            "as --keys"
        ) from exc
    return [key for key in keys if isinstance(key, dict)]


def _get_sender_and_represented_user(audit_record: dict[str, Any]) -> tuple[Any, Any]:
    """Return the user who sent an audited request, and the user on whose behalf it was sent.

    The second user is None if the sender did not act on behalf of another user.
    """
    return audit_record.get("user"), audit_record.get("acting_for")


def _iter_audit_log_records(path: Path | None) -> Iterator[dict[str, Any]]:
    """Yield the records of an audit log, or nothing if `path` is None."""
    if path is None:
        return
    try:
        with path.open(encoding="utf-8") as lines:
            for line in lines:
                record = jsonlib.loads(line)
                if isinstance(record, dict):
                    yield record
    except (OSError, ValueError) as exc:
        raise ConfigurationError(
            f"the audit log {str(path)!r} cannot be read: {exc}; pass the server's audit log "
            "as --audit"
        ) from exc
