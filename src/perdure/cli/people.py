"""Implement `perdure forget`, which erases everything that belongs to a person."""

from __future__ import annotations

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
    exit_with_error,
    open_database,
)
from perdure.cli.output import (
    join_first,
    print_json,
    print_note_line,
    print_table,
    print_text,
    print_warning_about_threads_matched_by_owner,
    print_whether_deleted_bytes_remain,
    show_status,
)
from perdure.errors import UnknownPerson
from perdure.settings import check_user

if TYPE_CHECKING:
    from perdure.people import Report

# Maximum number of ids shown in each row of the printed table.
_MAX_LISTED_IDS: Final = 3


@app.command()
def forget(
    user: Annotated[str, typer.Option("--user", metavar="NAME", help="The exact user name.")],
    dry_run: DryRunOption = False,
    yes: YesOption = False,
    keys: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Also count the user's API keys in this keys file."),
    ] = None,
    audit: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Also count the user's records in this audit log file."),
    ] = None,
    hand_over: Annotated[
        bool,
        typer.Option(
            "--hand-over",
            help="Keep team items, but remove the user's name from them.",
        ),
    ] = False,
    owners: OwnersOption = None,
    db: DbOption = None,
    json: JsonOption = False,
) -> None:
    """Erase everything that belongs to a user, permanently.

    The command shows what will be erased, and asks you to type the user's name to confirm. The
    user's runs and crons are cancelled before anything is erased. If `perdure forget` is
    interrupted, run it again to erase the remaining data. The exit code is 1 if no data belongs to
    a user with this name.
    """
    from perdure import people
    from perdure.keys_and_audit_log import count_keys_and_audit_records

    user = check_user("--user", user, "pass the person's user name")
    owners_are_people = None if owners is None else owners == "people"
    parts_in_files = count_keys_and_audit_records(user, keys_file=keys, audit_log=audit)
    with open_database(db) as database:
        try:
            with show_status("looking for data of the person …"):
                options: dict[str, Any] = {
                    "hand_over": hand_over,
                    "owners_are_people": owners_are_people,
                }
                report = people.plan(user, database.saver, database.store, **options)
                report = replace(report, kept=(*report.kept, *parts_in_files))
            if not (dry_run or yes):
                for action, what, count, ids in _build_erasure_report_rows(report):
                    print_note_line(f"{action} {count} {what}{ids and f': {ids}'}", "dim")
            print_warning_about_threads_matched_by_owner(user, report.by_owner)
            if not dry_run:
                if not yes:
                    _ask_user_to_type_name_or_exit(user)
                with show_status("erasing …"):
                    # Skip the search for traces of the person in other people's data, because this
                    # search is slow and `people.plan` has already done it.
                    erased = people.forget(
                        user, database.saver, database.store, **options, looks_elsewhere=False
                    )
                    report = replace(erased, kept=report.kept)
        except UnknownPerson as exc:
            exit_with_error(str(exc))
    if json:
        print_json(
            {
                **asdict(report),
                "erased": _build_parts_json(report.erased),
                "kept": _build_parts_json(report.kept),
            }
        )
        return
    if dry_run or yes:
        print_table(("", "what", "count", "ids"), _build_erasure_report_rows(report))
    print_text(f"{'would forget' if dry_run else 'forgot'} {user!r}")
    if not dry_run:
        print_whether_deleted_bytes_remain(report.scrubbed)


def _ask_user_to_type_name_or_exit(expected_name: str) -> None:
    """Ask the user to type the person's name, and exit with code 1 if the name is wrong."""
    typed = typer.prompt(
        "Type the name of the person to erase all of this",
        err=True,
        default="",
        show_default=False,
    )
    if typed != expected_name:
        exit_with_error(f"you typed {typed!r} instead of {expected_name!r}, so nothing was erased")


def _build_erasure_report_rows(report: Report) -> list[tuple[str, str, int, str]]:
    """Build the table rows that list the erased data and the kept data.

    Returns:
        For each row, the action (`erase` or `keep`), the kind of data as a plural noun, the number
        of objects, and the first ids, separated by commas.
    """
    return [
        (action, part.what, part.count, join_first(part.ids, _MAX_LISTED_IDS))
        for action, parts in (("erase", report.erased), ("keep", report.kept))
        for part in parts
    ]


def _build_parts_json(parts: Any) -> list[dict[str, Any]]:
    """Convert the parts of an erasure report to JSON objects.

    Each JSON object contains all ids of one part of the report, such as the ids of all erased
    threads. The printed report shows only the first few ids of each part.
    """
    return [{"what": part.what, "count": part.count, "ids": [*part.ids]} for part in parts]
