"""The Typer application, and the options that every command shares."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from perdure.checkpointers import SQLiteCheckpointer
    from perdure.settings import Settings

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


def settings_for(db: str | None) -> Settings:
    """The settings with a command's own arguments."""
    from perdure.settings import load

    return load(db=db)


def open_saver(db: str | None, *, create: bool = True) -> SQLiteCheckpointer:
    """Open the database that a command works on.

    Raises:
        ConfigurationError: It is not there, and the command has nothing to begin one with.
    """
    from perdure.checkpointers import SQLiteCheckpointer
    from perdure.errors import ConfigurationError

    settings = settings_for(db)
    if not create and not Path(settings.db).exists():
        raise ConfigurationError(
            f"there is no database {settings.db!r} yet; 'perdure chat' or 'perdure import' "
            "begins one, --db names another"
        )
    return SQLiteCheckpointer.open(settings.db, key=settings.key)


def confirm(question: str, yes: bool) -> None:
    """Ask before something is gone for good."""
    if not yes:
        typer.confirm(question, abort=True, err=True)
