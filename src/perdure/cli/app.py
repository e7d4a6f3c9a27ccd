"""The application: options that commands share, the database that they open, how errors end."""

from __future__ import annotations

import gc
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from dataclasses import asdict
from datetime import UTC, datetime
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeVar

import typer
import typer.core

from perdure.cli.output import console, note, safe, say_clean, say_done
from perdure.errors import ConfigurationError, InvalidNamespace, PerdureError

if TYPE_CHECKING:
    from langchain_core.runnables import RunnableConfig

    from perdure.checkpointers import ThreadHead
    from perdure.checkpointers.checkpointer import Checkpointer
    from perdure.memory.extraction import Extraction
    from perdure.memory.extractors import Extractor
    from perdure.settings import Settings
    from perdure.stores import Receipt
    from perdure.stores.whole_store import WholeStore

    Namespace = tuple[str, ...]
    Part = TypeVar("Part", Checkpointer, WholeStore)


class Command(typer.core.TyperCommand):
    """A command whose help shows arguments as they are typed, without Python's types."""

    def get_short_help_str(self, limit: int = 0) -> str:
        """What a list of commands says of it: the first sentence, whole."""
        return (self.help or "").split("\n")[0]

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """The line of usage."""
        arguments = (p.metavar or "" for p in self.params if p.param_type_name == "argument")
        return ["[OPTIONS]", *arguments]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """The lists of arguments and options."""
        parameters: list[Any] = self.get_params(ctx)
        arguments = [(p.metavar, p.help) for p in parameters if p.param_type_name == "argument"]
        options = [p.get_help_record(ctx) for p in parameters if p.param_type_name == "option"]
        for heading, rows in (("Arguments", arguments), ("Options", options)):
            if rows:
                with formatter.section(heading):
                    formatter.write_dl(rows)


HELP_SETTINGS = {
    "context_settings": {"help_option_names": ["-h", "--help"]},
    "rich_markup_mode": None,
}
REMOVALS_HELP = """\b
What removes something:
  delete               Threads for good, with the memories made of them.
  forget               Everything that belongs to a person, for good.
  retain               What is old, by rules: threads, checkpoints, versions.
  memories forget      Memories for good; the messages stay on their threads.
  memories quarantine  With --discard, an entry that was held back, for good.
  keys revoke          API keys of a server.
  store delete         An item; its versions stay.
  store forget         Items for good, with the messages that they come from."""
app = typer.Typer(
    name="perdure",
    no_args_is_help=True,
    epilog=REMOVALS_HELP,
    pretty_exceptions_enable=False,
    **HELP_SETTINGS,  # type: ignore[arg-type]
)


def add_command_group(name: str, help: str) -> typer.Typer:
    """A group of commands, added to the application."""
    made = typer.Typer(name=name, help=help, no_args_is_help=True, **HELP_SETTINGS)  # type: ignore[arg-type]
    app.add_typer(made)
    return made


def _print_version(is_given: bool) -> None:
    if is_given:
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
        if sys.stdout is None:
            raise OSError("the output is closed")
        code = app(prog_name="perdure", standalone_mode=False)
        sys.stdout.flush()
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:
        code = 0
    except OSError as exc:
        code = _report_error(str(exc))
        sys.stdout = None
    except PerdureError as exc:
        code = _report_error(str(exc))
    except Exception as exc:
        if isinstance(exc, typer.Abort):
            code = _report_error("aborted", 1)
        elif hasattr(exc, "format_message"):  # an error of usage, whose class typer does not export
            code = _report_usage_error(exc)
        else:
            code = _report_error(traceback.format_exc(), 1)
    gc.freeze()  # else Python looks through all modules for cycles at exit: a tenth of a second
    raise SystemExit(code)


def _report_error(text: str, code: int = 2) -> int:
    note(f"perdure: {text}")
    return code


def _report_usage_error(exc: Any) -> int:
    """Say how a command is called; of a group without a command that is its help."""
    context, text = getattr(exc, "ctx", None), exc.format_message()
    if context is None:
        return _report_error(text)
    if text == context.get_help():
        note(text)
        return 2
    if hasattr(exc, "option_name") and hasattr(context.command, "commands"):
        called = f"{context.command_path} COMMAND {exc.option_name}"
        text = f"{text}; options of a command stand after its name: {called}"
    note(context.get_usage())
    return _report_error(text)


# -- options

DbOption = Annotated[
    str | None,
    typer.Option("--db", metavar="FILE", help="The database, instead of the configured one."),
]
UserOption = Annotated[
    str | None, typer.Option("--user", metavar="NAME", help="Whose memories, instead of yours.")
]
GraphsOption = Annotated[
    str | None,
    typer.Option("--graphs", metavar="FILE", help="A langgraph.json that configures the store."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
LimitOption = Annotated[
    int, typer.Option(min=1, max=2**31 - 1, metavar="N", help="List at most N.")
]
IdsOption = Annotated[bool, typer.Option("--ids", help="Show whole ids, and keys.")]
OwnersOption = Annotated[
    Literal["people", "organisations"] | None,
    typer.Option(
        metavar="KIND",
        help="What owners of threads are: people or organisations.",
    ),
]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Show what would go.")]
NoPagerOption = Annotated[bool, typer.Option("--no-pager", help="Do not use a pager.")]
QueryOption = Annotated[
    str | None, typer.Option("--query", metavar="TEXT", help="All that contain these words.")
]
KeyArgument = Annotated[str, typer.Argument(metavar="KEY", help="The key, or the beginning of it.")]


def check_query(query: str | None) -> None:
    """Raise ConfigurationError if `--query` is given and blank, because it would match all."""
    if query is not None and not query.strip():
        raise ConfigurationError("--query is empty; give it words, or leave it out")


def _parse_moment(text: str) -> datetime:
    """A moment as it is typed; without a time zone it is one of this machine's."""
    try:
        return datetime.fromisoformat(text).astimezone(UTC)
    except (ValueError, OverflowError) as exc:
        raise typer.BadParameter(
            f"{text!r} is no moment; expected ISO 8601, like 2026-01-31T09:30 or "
            "2026-01-31T08:30:00Z"
        ) from exc


AsOfOption = Annotated[
    datetime | None,
    typer.Option(
        parser=_parse_moment, metavar="MOMENT", help="As it was then, like 2026-01-31T09:30Z."
    ),
]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


def require_confirmation(question: str, is_confirmed: bool) -> None:
    """Ask before something is gone for good."""
    if not is_confirmed:
        try:
            with redirect_stdout(sys.stderr):  # else typer writes a space to stdout
                typer.confirm(safe(question), abort=True, err=True)
        except typer.Abort as exc:
            raise exc.__context__ or exc from None  # Ctrl-C, which it takes for a no


def erase_items(
    forget: Callable[..., Receipt],
    describe: Callable[[Receipt], str],
    preview: Callable[[Receipt], None] = lambda receipt: None,
    *,
    dry_run: bool = False,
    yes: bool,
    json: bool,
) -> Receipt:
    """Erase items and show the receipt; ask before, with a preview of what is to go."""
    receipt = forget(dry_run=True)
    if receipt.keys and not dry_run:
        if not yes:
            preview(receipt)
        require_confirmation(f"Forget {describe(receipt)} for good?", yes)
        receipt = forget(dry_run=False)
    did = "would forget" if dry_run else "forgot"
    say_done({**asdict(receipt), "dry_run": dry_run}, json, f"{did} {describe(receipt)}")
    if receipt.keys and not (dry_run or json):
        say_clean(receipt.clean)
    return receipt


# -- the database


class CommandDatabase:
    """The database of a command: each part is opened when it is first used."""

    def __init__(
        self,
        settings: Settings,
        stack: ExitStack,
        *,
        allow_read_only: bool,
        relaxed_durability: bool,
    ) -> None:
        from perdure.settings import is_dsn

        self.settings, self.user = settings, settings.user
        self._stack = stack
        self._reads = allow_read_only
        self.direct_dsn = settings.direct if is_dsn(settings.db) else None  # for locks
        self._options = (
            {"synchronous": "normal"} if relaxed_durability and not is_dsn(settings.db) else {}
        )

    @cached_property
    def saver(self) -> Checkpointer:
        """The threads."""
        return self.open_saver({})

    def open_saver(self, options: Mapping[str, Any]) -> Checkpointer:
        """Open the threads with options such as `types`; see `SQLiteCheckpointer.open`."""
        from perdure.checkpointers import open_checkpointer

        direct = {"direct": self.direct_dsn} if self.direct_dsn else {}
        return self._open_component(partial(open_checkpointer, **direct, **options))

    @cached_property
    def store(self) -> WholeStore:
        """The items, memories among them."""
        from perdure.stores import open_store

        if self.settings.graphs is None:
            return self._open_component(open_store)
        from perdure.graphs.langgraph_json import LanggraphFile

        options = LanggraphFile.read(self.settings.graphs).import_store_options()
        return self._open_component(partial(open_store, **options))

    @property
    def config(self) -> RunnableConfig:
        """What fills in the namespaces of memories."""
        return {"configurable": {"user_id": self.user}}

    def index_memories(self, users: Iterable[str]) -> None:
        """Index the memories of users, so that the first search does not have to."""
        for user in users:
            self.store.search(("memories", user), query="memories", limit=1, refresh_ttl=False)

    def build_extraction(self, *, facts: bool = False) -> Extraction:
        """The extraction of the threads: of turns, or of facts by the configured model."""
        from perdure.memory.extraction import Extraction
        from perdure.memory.recall import NAMESPACE

        extractor = self._build_model_extractor() if facts else None
        return Extraction(self.saver, self.store, extractor, namespace=NAMESPACE)

    def _build_model_extractor(self) -> Extractor:
        from perdure.graphs.configured import configured_model
        from perdure.memory.model_extractor import ModelExtractor

        model = configured_model(self.settings)
        if model is None:
            raise ConfigurationError("--facts needs a model; set PERDURE_MODEL, or leave it out")
        return ModelExtractor(model)

    def _open_component(self, open_component: Callable[..., Part]) -> Part:
        from perdure.errors import StorageError

        path, key = self.settings.db, self.settings.key
        try:
            component = open_component(path, key=key, **self._options)
            return self._stack.enter_context(component)
        except StorageError as exc:
            # its kinds say that the file is locked, damaged or none: reading would say so again
            if not self._reads or type(exc) is not StorageError:
                raise
            return self._stack.enter_context(open_component(path, key=key, read_only=True))


@contextmanager
def open_database(
    db: str | None,
    user: str | None = None,
    *,
    create: bool = False,
    allow_read_only: bool = False,
    relaxed_durability: bool = False,
    key: str | None = None,
    graphs: str | None = None,
) -> Iterator[CommandDatabase]:
    """Open the database of a command, and close it at the end.

    Args:
        db: The file or the Postgres DSN, or None for the configured database.
        user: The user, or None for the configured user.
        create: Whether to create the file if it does not exist.
        allow_read_only: Whether to open a file read-only if it cannot be opened for writing.
        relaxed_durability: Whether a write may return before its data are on the disk. The last
            writes may be lost in a power cut, so the command must be repeatable.
        key: The encryption key, or None for the configured key.
        graphs: The langgraph.json, or None for the configured file.

    Raises:
        ConfigurationError: The file does not exist, and `create` is False.
    """
    from perdure.settings import is_dsn, load

    settings = load(db=db, user=user, key=key, graphs=graphs)
    if not create and not is_dsn(settings.db):
        check_exists(settings.db)
    with ExitStack() as stack:
        yield CommandDatabase(
            settings, stack, allow_read_only=allow_read_only, relaxed_durability=relaxed_durability
        )


def check_exists(db: str) -> None:
    """Raise ConfigurationError if the file of the database does not exist."""
    if not Path(db).exists():
        raise ConfigurationError(
            f"there is no database {db!r} yet; create it with 'perdure chat' or 'perdure import', "
            "or name another with --db"
        )


# -- ids

_SHORT_ID: Final = 12  # characters


def resolve_id_prefix(typed: str, ids: Iterable[str], noun: str, list_command: str) -> str:
    """The id that equals what is typed, or the only one of those ids, which begin with it.

    Raises:
        ConfigurationError: None is meant, or several are; `listing` is the command to look in.
    """
    if not typed:
        raise ConfigurationError("the id is empty")
    ids = list(ids)
    if typed in ids:
        return typed
    if len(ids) == 1:
        return ids[0]
    if not ids:
        raise ConfigurationError(f"there is no {noun} {typed!r}; '{list_command}' lists them")
    some = ", ".join(ids[:3]) + (", …" if len(ids) > 3 else "")
    raise ConfigurationError(
        f"several ids of {noun}s begin with {typed!r} ({some}); give more of the one you mean"
    )


def resolve_item_key(
    store: WholeStore,
    namespaces: Sequence[Namespace],
    typed: str,
    list_command: str,
    *,
    include_deleted: bool = False,
) -> tuple[Namespace, str]:
    """The namespace and key of the item that a key, or the beginning of one, names.

    A whole key may with `deleted` be that of an item of the past.
    """
    for place in namespaces:
        with suppress(InvalidNamespace):  # nothing that can be a key
            present = store.get(place, typed, refresh_ttl=False)
            if present or (include_deleted and store.history(place, typed)):
                return place, typed
    begin = {
        item.key: place
        for place in namespaces
        for item in store.search(place, limit=sys.maxsize, refresh_ttl=False)
        if item.namespace == place and item.key.startswith(typed)
    }
    chosen = resolve_id_prefix(typed, begin, "key", list_command)
    return begin[chosen], chosen


def shorten_thread_id(file: CommandDatabase, thread: str, *, is_whole: bool) -> str:
    """The id of a thread for a row: of a long one, on a terminal, the beginning that tells it."""
    whole = is_whole or len(thread) <= _SHORT_ID or not console().is_terminal
    return thread if whole else file.saver.beginning(thread)


def find_thread_head(file: CommandDatabase, typed: str) -> ThreadHead:
    """Return the head of the thread that is named by its id or by a prefix of its id."""
    with suppress(PerdureError):  # raised if the text cannot be an id
        head = file.saver.head(typed)
        if head is not None:
            return head
    heads = {head.thread_id: head for head in file.saver.heads(prefix=typed, limit=4)}
    return heads[resolve_id_prefix(typed, heads, "thread", "perdure threads")]


def resolve_thread_id(file: CommandDatabase, typed: str) -> str:
    """The thread that an id, or the beginning of one, names."""
    return find_thread_head(file, typed).thread_id


def resolve_checkpoint_id(file: CommandDatabase, thread: str, typed: str) -> str:
    """The checkpoint of a thread that an id, or the beginning of one, names."""
    checkpoints = file.saver.checkpoints(thread, checkpoint_ns="")
    ids = [info.checkpoint_id for info in checkpoints if info.checkpoint_id.startswith(typed)]
    return resolve_id_prefix(typed, ids, "checkpoint", f"perdure show {thread}")


def complete_thread_id(incomplete: str) -> list[str]:
    """The threads that a shell completes what is typed to."""
    try:
        with open_database(None, allow_read_only=True) as file:
            return [head.thread_id for head in file.saver.heads(prefix=incomplete)]
    except Exception:  # whatever it is, a shell that completes has no place to say it
        return []


ThreadArgument = Annotated[
    str,
    typer.Argument(
        metavar="ID",
        help="The thread, or the beginning of its id.",
        autocompletion=complete_thread_id,
    ),
]
ThreadsArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[ID]...",
        help="Threads, or the beginnings of their ids.",
        autocompletion=complete_thread_id,
    ),
]
