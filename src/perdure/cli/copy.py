"""Implement `perdure copy`, which copies one database into another."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Annotated, Final

import typer

from perdure.cli.app import JsonOption, app, open_database
from perdure.cli.output import (
    format_count,
    print_json_or_sentence,
    print_progress_on_interrupt,
    progress_bar,
)
from perdure.errors import ConfigurationError

_KEY_HELP: Final = "A file with the key of the database, in hexadecimal."
KeyFile = Path | None


@app.command()
def copy(
    source: Annotated[
        str,
        typer.Option("--from", metavar="DB", help="The source: a file or a Postgres DSN."),
    ],
    target: Annotated[
        str, typer.Option("--to", metavar="DB", help="The target: a new or empty database.")
    ],
    from_key_file: Annotated[KeyFile, typer.Option(metavar="FILE", help=_KEY_HELP)] = None,
    to_key_file: Annotated[KeyFile, typer.Option(metavar="FILE", help=_KEY_HELP)] = None,
    json: JsonOption = False,
) -> None:
    """Copy a database into an empty file or Postgres schema.

    The copy contains all threads, checkpoints, branches and pending writes, and all items with
    their versions and provenance. After all rows have been copied, the source and the target are
    compared. To resume an interrupted copy where it stopped, run the same command again.
    """
    from perdure.cli.copied_store_tables import StoreTables
    from perdure.cli.copied_tables import Tables
    from perdure.cli.copied_thread_tables import build_thread_table_pair
    from perdure.cli.database_copy import DatabaseCopy
    from perdure.cli.sources import open_database_to_copy

    row_count = 0

    def advance(count: int) -> None:
        nonlocal row_count
        row_count += count
        update_bar(None, row_count)

    def create_indexes() -> None:
        for path in source_database.store.indexes() if source_database.store is not None else ():
            # Ignore the error that is raised if the target database does not support indexes on
            # fields inside stored values.
            with suppress(ConfigurationError):
                target_database.store.create_index(path)

    with (
        open_database_to_copy(source, _read_encryption_key_file(from_key_file)) as source_database,
        open_database(
            target, create=True, key=_read_encryption_key_file(to_key_file)
        ) as target_database,
        print_progress_on_interrupt(lambda: f"{format_count(row_count, 'row')} copied so far"),
        progress_bar("copying", "row") as update_bar,
    ):
        table_pairs = list[tuple[Tables, Tables]]()
        if source_database.saver is not None:
            table_pairs.append(
                build_thread_table_pair(source_database.saver, target_database.saver)
            )
        if source_database.store is not None:
            table_pairs.append(
                (
                    StoreTables.from_store(source_database.store),
                    StoreTables.from_store(target_database.store),
                )
            )
        database_copy = DatabaseCopy(table_pairs, advance, create_indexes)
        database_copy.run()
    nouns = {"threads": "thread", "checkpoints": "checkpoint", "store_items": "item"}
    counts = (format_count(database_copy.row_counts[table], noun) for table, noun in nouns.items())
    print_json_or_sentence(
        database_copy.row_counts, json, f"copied and compared: {', '.join(counts)}"
    )


def _read_encryption_key_file(path: Path | None) -> str | None:
    """Read an encryption key from a file, or return None if `path` is None.

    Raises:
        ConfigurationError: The file cannot be read or is empty.
    """
    if path is None:
        return None
    try:
        key = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigurationError(f"the key file {str(path)!r} cannot be read: {exc}") from exc
    if not key:
        raise ConfigurationError(f"the key file {str(path)!r} is empty; expected a hexadecimal key")
    return key
