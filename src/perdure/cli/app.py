"""The application: options that commands share, the database that they open, how errors end."""

from __future__ import annotations

import gc
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
import typer.core

from perdure.cli.output import safe
from perdure.errors import ConfigurationError, PerdureError

if TYPE_CHECKING:
    from langchain_core.runnables import RunnableConfig

    from perdure.checkpointers import SQLiteCheckpointer
    from perdure.memory.extraction import Extraction
    from perdure.memory.proposals import Extractor
    from perdure.settings import Settings
    from perdure.stores import SQLiteStore

    Part = TypeVar("Part", SQLiteCheckpointer, SQLiteStore)


class Command(typer.core.TyperCommand):
    """A command whose help names each value in capitals, and says nothing of Python's types."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """The line of usage."""
        arguments = (p.metavar or "" for p in self.params if p.param_type_name == "argument")
        return ["[OPTIONS]", *arguments]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """The lists of arguments and options."""
        shown: dict[str, list[tuple[str, str]]] = {"argument": [], "option": []}
        for parameter in self.get_params(ctx):
            shown[parameter.param_type_name].append(_described(parameter, ctx))
        for kind, rows in shown.items():
            if rows:
                with formatter.section(f"{kind.title()}s"):
                    formatter.write_dl(rows)


def _described(parameter: Any, ctx: Any) -> tuple[str, str]:
    """A parameter as it is typed, and what it is for."""
    if parameter.param_type_name == "argument":
        return parameter.metavar, parameter.help
    names = ", ".join(sorted(parameter.opts, key=len))
    names = " / ".join([names, *parameter.secondary_opts])
    if not parameter.is_flag:
        number = parameter.type_descriptor.is_ranged
        names += f" {parameter.metavar or ('N' if number else 'TEXT')}"
    default = parameter.get_default(ctx, call=False)
    if parameter.required:
        return names, f"{parameter.help} [required]"
    noted = default not in (None, "", ()) and not isinstance(default, bool)
    return names, f"{parameter.help} [default: {default}]" if noted else parameter.help


def finish(order: tuple[str, ...]) -> None:
    """Put the commands in order, and give them all the help of this program."""
    app.registered_commands.sort(key=lambda each: order.index(_name(each)))
    groups = (each.typer_instance for each in app.registered_groups)
    for typed in (app, *filter(None, groups)):
        for each in typed.registered_commands:
            each.cls = Command


def _name(of: Any) -> str:
    return of.name or str(of.callback.__name__)


HELP = {"context_settings": {"help_option_names": ["-h", "--help"]}, "rich_markup_mode": None}
app = typer.Typer(
    name="perdure",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    **HELP,  # type: ignore[arg-type]
)


def group(name: str, help: str) -> typer.Typer:
    """A group of commands, added to the application."""
    made = typer.Typer(name=name, help=help, no_args_is_help=True, **HELP)  # type: ignore[arg-type]
    app.add_typer(made)
    return made


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
    """Memory for LangGraph agents: conversations that resume, and what they said."""


def main() -> None:
    """Run a command. Exit codes: 0; 1, the answer is no; 2, an error, which is a line on stderr."""
    try:
        code = app(standalone_mode=False)
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:
        code = 0
    except PerdureError as exc:
        code = _failed(str(exc))
    except Exception as exc:
        if isinstance(exc, typer.Abort):
            code = _failed("aborted", 1)
        elif hasattr(exc, "format_message"):  # an error of usage, whose class typer does not export
            context = getattr(exc, "ctx", None)
            usage = context.get_usage() + "\n" if context else ""
            code = _failed(exc.format_message(), usage=usage)
        else:
            code = _failed(traceback.format_exc(), 1)
    gc.freeze()  # else Python looks through all modules for cycles at exit: a tenth of a second
    raise SystemExit(code)


def _failed(text: str, code: int = 2, usage: str = "") -> int:
    sys.stderr.write(f"{safe(usage)}perdure: {safe(text)}\n")
    return code


# -- options

DB = Annotated[
    str | None,
    typer.Option("--db", metavar="FILE", help="The database, instead of the configured one."),
]
User = Annotated[
    str | None, typer.Option("--user", metavar="NAME", help="Whose memories, instead of yours.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def _moment(text: str) -> datetime:
    """A moment that was typed; without a time zone it is one of this machine's."""
    try:
        return datetime.fromisoformat(text).astimezone(UTC)
    except (ValueError, OverflowError) as exc:
        raise typer.BadParameter(
            f"{text!r} is no moment; expected ISO 8601, like 2026-01-31T09:30 or "
            "2026-01-31T08:30:00Z"
        ) from exc


AsOf = Annotated[
    datetime | None,
    typer.Option(parser=_moment, metavar="MOMENT", help="As it was then, like 2026-01-31T09:30."),
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


def confirm(question: str, yes: bool) -> None:
    """Ask before something is gone for good."""
    if not yes:
        typer.confirm(safe(question), abort=True, err=True)


# -- the database


class Database:
    """The database of a command: each part is opened when it is first used.

    Attributes:
        settings: Where it is, and whose memories are meant.
    """

    def __init__(self, settings: Settings, stack: ExitStack, *, reads: bool, hasty: bool) -> None:
        self.settings = settings
        self._stack = stack
        self._reads = reads
        self._options = {"synchronous": "normal"} if hasty else {}

    @cached_property
    def saver(self) -> SQLiteCheckpointer:
        """The threads."""
        from perdure.checkpointers import SQLiteCheckpointer

        return self._opened(SQLiteCheckpointer)

    @cached_property
    def store(self) -> SQLiteStore:
        """The items, memories among them."""
        from perdure.stores import SQLiteStore

        return self._opened(SQLiteStore)

    @property
    def user(self) -> str:
        """Whose memories."""
        return self.settings.user

    @property
    def config(self) -> RunnableConfig:
        """What fills in the namespaces of memories."""
        return {"configurable": {"user_id": self.user}}

    def index(self) -> None:
        """Index the user's memories, so that the first search does not have to."""
        self.store.search(("memories", self.user), query="memories", limit=1)

    def extraction(self, extractor: Extractor | None = None) -> Extraction:
        """The extraction of the threads; without an extractor, of turns."""
        from perdure.memory.extraction import Extraction
        from perdure.memory.recall import NAMESPACE

        return Extraction(self.saver, self.store, extractor, namespace=NAMESPACE)

    def _opened(self, part: type[Part]) -> Part:
        from perdure.errors import StorageError

        path, key = self.settings.db, self.settings.key
        try:
            opened = part.open(path, key=key, **self._options)
            return self._stack.enter_context(opened)
        except StorageError as exc:
            # its kinds say that the file is locked, damaged or none: reading would say so again
            if not self._reads or type(exc) is not StorageError:
                raise
            return self._stack.enter_context(part.open(path, key=key, read_only=True))


@contextmanager
def opened(
    db: str | None,
    user: str | None = None,
    *,
    create: bool = False,
    reads: bool = False,
    hasty: bool = False,
) -> Iterator[Database]:
    """The database that a command works on.

    Args:
        db: The command's own argument.
        user: The same.
        create: Whether the command has something to begin a database with.
        reads: Whether it only reads, so that a file which cannot be written will do.
        hasty: Whether a write need not wait for the disk: a power cut may lose the last of them,
            so the command must be one that can be repeated.

    Raises:
        ConfigurationError: The database is not there, and is not to be begun.
    """
    from perdure.settings import load

    settings = load(db=db, user=user)
    if not create and not Path(settings.db).exists():
        raise ConfigurationError(
            f"there is no database {settings.db!r} yet; 'perdure chat' or 'perdure import' begins "
            "one, --db names another"
        )
    with ExitStack() as stack:
        yield Database(settings, stack, reads=reads, hasty=hasty)


# -- ids


def the_one(given: str, found: Iterable[str], noun: str, listing: str) -> str:
    """The id that equals what is given, or the only one that begins with it.

    Args:
        given: The id, or a beginning of it.
        found: Ids that begin with it.
        noun: What they are ids of.
        listing: The command that lists them.

    Raises:
        ConfigurationError: None is meant, or several are.
    """
    ids = list(found)
    if given in ids:
        return given
    if given and len(ids) == 1:
        return ids[0]
    if not ids:
        raise ConfigurationError(f"there is no {noun} {given!r}; '{listing}' lists them")
    some = ", ".join(ids[:3]) + (", …" if len(ids) > 3 else "")
    raise ConfigurationError(
        f"{len(ids)} ids of {noun}s begin with {given!r} ({some}); give more of the one you mean"
    )


def thread_id(file: Database, given: str) -> str:
    """The thread that an id, or the beginning of one, names."""
    try:
        return file.saver.thread(given).thread_id
    except PerdureError:  # unknown, or nothing that can be an id
        found = file.saver.threads(prefix=given, limit=4)
    return the_one(given, (info.thread_id for info in found), "thread", "perdure threads")


def checkpoint_id(file: Database, thread: str, given: str) -> str:
    """The checkpoint of a thread that an id, or the beginning of one, names."""
    found = file.saver.checkpoints(thread, checkpoint_ns="")
    ids = [info.checkpoint_id for info in found if info.checkpoint_id.startswith(given)]
    return the_one(given, ids, "checkpoint", f"perdure show {thread} --all")


def completed_thread(incomplete: str) -> list[str]:
    """The threads that a shell completes what is typed to."""
    try:
        with opened(None, reads=True) as file:
            return [info.thread_id for info in file.saver.threads(prefix=incomplete)]
    except Exception:  # whatever it is, a shell that completes has no place to say it
        return []


Thread = Annotated[
    str,
    typer.Argument(
        metavar="ID",
        help="The thread, or the beginning of its id.",
        autocompletion=completed_thread,
    ),
]
