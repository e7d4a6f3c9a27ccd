"""The Typer application, and the options that every command shares."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

if TYPE_CHECKING:
    from perdure.checkpointers import SQLiteCheckpointer
    from perdure.settings import Settings
    from perdure.stores import SQLiteStore

    Opened = TypeVar("Opened", SQLiteCheckpointer, SQLiteStore)

app = typer.Typer(
    name="perdure",
    help="Memory for LangGraph agents: threads that resume, history that stays.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from perdure import __version__

        print(f"perdure {__version__}")
        raise typer.Exit


@app.callback()
def _(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Memory for LangGraph agents: threads that resume, history that stays."""


DB = Annotated[
    str | None,
    typer.Option("--db", help="The database file; else PERDURE_DB, else the data folder's."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


def settings_for(db: str | None, user: str | None = None) -> Settings:
    """The settings with a command's own arguments."""
    from perdure.settings import load

    return load(db=db, user=user)


def open_saver(db: str | None, *, create: bool = True, reads: bool = False) -> SQLiteCheckpointer:
    """Open the database that a command works on; see `opened`."""
    from perdure.checkpointers import SQLiteCheckpointer

    begin = "perdure chat' or 'perdure import"
    return opened(SQLiteCheckpointer, db, create=create, reads=reads, begin=begin)


def opened(kind: type[Opened], db: str | None, *, create: bool, reads: bool, begin: str) -> Opened:
    """Open what a command works on.

    Args:
        kind: What to open the database as.
        db: The command's own argument.
        create: Whether the command has something to begin a database with.
        reads: Whether it only reads, so that a file which cannot be written will do.
        begin: The command that begins a database.

    Raises:
        ConfigurationError: The database is not there, and is not to be begun.
    """
    from perdure.errors import ConfigurationError, StorageError

    settings = settings_for(db)
    if not create and not Path(settings.db).exists():
        raise ConfigurationError(
            f"there is no database {settings.db!r} yet; '{begin}' begins one, --db names another"
        )
    try:
        return kind.open(settings.db, key=settings.key)
    except StorageError as exc:
        # its kinds say that the file is locked, damaged or none: reading would say so again
        if not reads or type(exc) is not StorageError:
            raise
        try:
            return kind.open(settings.db, key=settings.key, read_only=True)
        except StorageError:
            raise exc from None


def confirm(question: str, yes: bool) -> None:
    """Ask before something is gone for good."""
    if not yes:
        typer.confirm(question, abort=True, err=True)
