"""Define the command-line application and the code that its commands share.

The code that the commands share includes common options and arguments, the class that opens the
database, functions that find an id by its prefix, and functions that print errors and return exit
codes.
"""

from __future__ import annotations

import gc
import io
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from dataclasses import asdict
from datetime import UTC, datetime
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NoReturn, TypeVar

import typer
import typer.core

from perdure.cli.output import (
    escape_control_characters,
    get_console,
    join_first,
    print_json_or_sentence,
    print_note,
    print_whether_deleted_bytes_remain,
)
from perdure.errors import (
    ConfigurationError,
    InvalidNamespace,
    MissingDependency,
    PerdureError,
    StorageUnavailable,
)
from perdure.settings import check_user

if TYPE_CHECKING:
    from langchain_core.runnables import RunnableConfig

    from perdure.checkpointers import ThreadHead
    from perdure.checkpointers.checkpointer import Checkpointer
    from perdure.memory.long_term.extraction import Extraction
    from perdure.memory.long_term.extractors import Extractor
    from perdure.settings import Settings
    from perdure.stores import Receipt
    from perdure.stores.whole_store import WholeStore

    Namespace = tuple[str, ...]
    Component = TypeVar("Component", Checkpointer, WholeStore)


class Command(typer.core.TyperCommand):
    """A command whose help text omits the Python types of arguments and options."""

    def get_short_help_str(self, limit: int = 0) -> str:
        """Return the first line of the help text, untruncated, for the list of commands."""
        return (self.help or "").split("\n")[0]

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the words that follow the command's name in the usage line."""
        return [
            "[OPTIONS]",
            *(p.metavar or "" for p in self.params if p.param_type_name == "argument"),
        ]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the help sections that list the arguments and the options."""
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
Commands that remove data:
  delete               Delete threads and the memories that come from them.
  forget               Erase everything that belongs to a person.
  retain               Remove old threads, checkpoints and versions.
  memories forget      Erase memories; the messages stay in their threads.
  memories quarantine  With --discard, erase a quarantined entry.
  keys revoke          Revoke API keys of a server.
  store delete         Delete an item, but keep its old versions.
  store forget         Erase items and the messages that they come from."""
app = typer.Typer(
    name="perdure",
    no_args_is_help=True,
    epilog=REMOVALS_HELP,
    pretty_exceptions_enable=False,
    **HELP_SETTINGS,  # type: ignore[arg-type]
)


def add_command_group(name: str, help: str) -> typer.Typer:
    """Add an empty command group to the application, and return it."""
    group = typer.Typer(
        name=name,
        help=help,
        no_args_is_help=True,
        **HELP_SETTINGS,  # type: ignore[arg-type]
    )
    app.add_typer(group)
    return group


def _print_version(is_requested: bool) -> None:
    """Print the version and exit, if `--version` was passed."""
    if is_requested:
        from perdure import __version__

        print(f"perdure {__version__}")
        raise typer.Exit


@app.callback()
def _(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version and exit.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Manage conversations and long-term memories of LangGraph agents."""


def _escape_characters_that_the_output_cannot_encode() -> None:
    """Print characters that the encoding of the output lacks as escape sequences.

    On Windows, redirected output has an encoding such as cp1252, which lacks most characters. A
    command would otherwise fail with UnicodeEncodeError.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def main() -> None:
    """Run the command given in `sys.argv`, and exit with its exit code.

    Exit code 0 means success. Exit code 1 means that nothing matched, that a check failed, that the
    user declined, or that an unexpected error occurred, in which case the traceback is printed to
    stderr. Exit code 2 means any other error, which is printed to stderr on one line. If the
    command line is invalid, the command's usage is printed before the error. Exit code 130 means
    that the command was interrupted with Ctrl-C. If the reader of stdout closes the pipe, the exit
    code is 0.
    """
    try:
        if sys.stdout is None:
            raise OSError("stdout is closed; run the command again with an open stdout")
        _escape_characters_that_the_output_cannot_encode()
        code = app(prog_name="perdure", standalone_mode=False)
        sys.stdout.flush()
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:
        code = 0
    except OSError as exc:
        code = _report_error(str(exc))
        # The error may have occurred while writing to stdout. Prevent Python from flushing stdout
        # again at exit, because this would fail too.
        sys.stdout = None
    except PerdureError as exc:
        code = _report_error(str(exc))
    except typer.Abort:
        code = _report_error("aborted", 1)
    except Exception as exc:
        # Recognise a usage error by its method `format_message`, because Typer does not export the
        # exception class for usage errors.
        if hasattr(exc, "format_message"):
            code = _print_usage_error_and_get_exit_code(exc)
        else:
            code = _report_error(traceback.format_exc(), 1)
    # `gc.freeze` avoids the full garbage collection at interpreter exit, which takes 0.1 s.
    gc.freeze()
    raise SystemExit(code)


def _report_error(text: str, code: int = 2) -> int:
    """Print an error to stderr, and return the exit code."""
    print_note(f"perdure: {text}")
    return code


def exit_with_error(text: str) -> NoReturn:
    """Print an error to stderr, and exit with code 1."""
    raise typer.Exit(_report_error(text, 1))


def _print_usage_error_and_get_exit_code(exc: Any) -> int:
    """Print a usage error with the usage line of the command, and return exit code 2.

    If a command group was called without a subcommand, print the help of the group.
    """
    context, text = getattr(exc, "ctx", None), exc.format_message()
    if context is None:
        return _report_error(text)
    if text == context.get_help():
        print_note(text)
        return 2
    if hasattr(exc, "option_name") and hasattr(context.command, "commands"):
        example = f"{context.command_path} COMMAND {exc.option_name}"
        text = f"{text}; put the options of a command after its name: {example}"
    print_note(context.get_usage())
    return _report_error(text)


# -- options

DbOption = Annotated[
    str | None,
    typer.Option("--db", metavar="FILE", help="Use this database instead of the configured one."),
]
UserOption = Annotated[
    str | None, typer.Option("--user", metavar="NAME", help="Use the memories of this user.")
]
GraphsOption = Annotated[
    str | None,
    typer.Option(
        "--graphs", metavar="FILE", help="The langgraph.json file that configures the store."
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
LimitOption = Annotated[
    int, typer.Option(min=1, max=2**31 - 1, metavar="N", help="List at most N entries.")
]
IdsOption = Annotated[bool, typer.Option("--ids", help="Show full ids and keys.")]
OwnersOption = Annotated[
    Literal["people", "organisations"] | None,
    typer.Option(
        metavar="KIND",
        help="Specify whether thread owners are people or organisations.",
    ),
]
DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Show what would be removed, without removing it.")
]
NoPagerOption = Annotated[bool, typer.Option("--no-pager", help="Do not use a pager.")]
QueryOption = Annotated[
    str | None,
    typer.Option("--query", metavar="TEXT", help="Select entries that contain these words."),
]
KeyArgument = Annotated[str, typer.Argument(metavar="KEY", help="The key or a key prefix.")]


def check_query_option_not_blank(query: str | None) -> None:
    """Raise ConfigurationError if `--query` is blank, because a blank query matches everything."""
    if query is not None and not query.strip():
        raise ConfigurationError(
            "--query is empty; pass the words to search for, or remove --query"
        )


def check_user_filter(user: str | None, noun: str) -> None:
    """Raise ConfigurationError if the option `--user` of a list command has an invalid name.

    Args:
        user: The name, or None if the option was not passed.
        noun: What the command lists, such as "threads", for the error.
    """
    if user is not None:
        check_user("--user", user, f"remove --user to list the {noun} of all users")


def print_note_if_has_more_and_exit_if_no_match(
    has_more: bool, limit: int, noun: str, *, no_match: bool
) -> None:
    """Print a note if `has_more` is True. Exit with code 1 if `no_match` is True."""
    if has_more:
        print_note(f"there are more than {limit} {noun}; pass --limit N to list more")
    if no_match:
        raise typer.Exit(1)


def _parse_time(text: str) -> datetime:
    """Parse an ISO 8601 time. A time without a time zone is interpreted as local time.

    Returns:
        The time in UTC.
    """
    try:
        return datetime.fromisoformat(text).astimezone(UTC)
    except (ValueError, OverflowError) as exc:
        raise typer.BadParameter(
            f"{text!r} is not a time; expected ISO 8601, such as 2026-01-31T09:30 or "
            "2026-01-31T08:30:00Z"
        ) from exc


AsOfOption = Annotated[
    datetime | None,
    typer.Option(
        parser=_parse_time, metavar="TIME", help="Show the state at TIME, like 2026-01-31T09:30Z."
    ),
]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]


def require_confirmation(question: str, is_confirmed: bool) -> None:
    """Ask the user to confirm a removal, unless `is_confirmed` is True.

    Raises:
        typer.Abort: The user declined.
    """
    if not is_confirmed:
        try:
            # Redirect stdout to stderr, because typer writes a space to stdout when it asks for
            # confirmation.
            with redirect_stdout(sys.stderr):
                typer.confirm(escape_control_characters(question), abort=True, err=True)
        except typer.Abort as exc:
            # Typer also raises Abort on Ctrl-C. In that case, re-raise the original
            # KeyboardInterrupt, which is the context of the Abort.
            raise exc.__context__ or exc from None


def confirm_and_erase_items(
    forget: Callable[..., Receipt],
    describe: Callable[[Receipt], str],
    preview: Callable[[Receipt], None] = lambda receipt: None,
    *,
    dry_run: bool = False,
    yes: bool,
    json: bool,
) -> Receipt:
    """Erase items after the user has confirmed, and print the result.

    Args:
        forget: Erases the items, or with `dry_run=True` returns what would be erased.
        describe: Returns a phrase with the number of items in a receipt.
        preview: Prints the items that a receipt lists, before the user is asked.
        dry_run: Whether to print only what would be erased.
        yes: Whether to erase without a preview and a question.
        json: Whether to print JSON.

    Returns:
        The receipt of what was erased, or would be erased.
    """
    receipt = forget(dry_run=True)
    if receipt.keys and not dry_run:
        if not yes:
            preview(receipt)
        require_confirmation(f"Forget {describe(receipt)} permanently?", yes)
        receipt = forget(dry_run=False)
    verb = "would forget" if dry_run else "forgot"
    print_json_or_sentence(
        {**asdict(receipt), "dry_run": dry_run}, json, f"{verb} {describe(receipt)}"
    )
    if receipt.keys and not (dry_run or json):
        print_whether_deleted_bytes_remain(receipt.clean)
    return receipt


# -- the database


class CommandDatabase:
    """The database that a command works on.

    Create a `CommandDatabase` with the context manager `open_database`, which closes the database
    when the command ends. The checkpointer and the store are opened on first use.

    Attributes:
        settings: The settings, with the options of the command applied.
        user: The id of the user whose memories the command uses.
        direct_dsn: The DSN of Postgres connections that bypass a pooler, or None. Locks use
            these connections.
    """

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
        self._allow_read_only = allow_read_only
        self.direct_dsn = settings.direct if is_dsn(settings.db) else None
        self._options = (
            {"synchronous": "normal"} if relaxed_durability and not is_dsn(settings.db) else {}
        )

    @cached_property
    def saver(self) -> Checkpointer:
        """The checkpointer that stores the threads."""
        return self.open_saver({})

    def open_saver(self, options: Mapping[str, Any]) -> Checkpointer:
        """Open the checkpointer with `SQLiteCheckpointer.open` options such as `types`."""
        from perdure.checkpointers import open_checkpointer

        direct = {"direct": self.direct_dsn} if self.direct_dsn else {}
        return self._open_checkpointer_or_store(partial(open_checkpointer, **direct, **options))

    @cached_property
    def store(self) -> WholeStore:
        """The store that holds memories and all other items."""
        if self.settings.graphs is None:
            return self.open_store({})
        from perdure.graphs.langgraph_json import LanggraphFile

        return self.open_store(LanggraphFile.read(self.settings.graphs).import_store_options())

    def open_store(self, options: Mapping[str, Any]) -> WholeStore:
        """Open the store with `SQLiteStore.open` options such as `index`."""
        from perdure.stores import open_store

        return self._open_checkpointer_or_store(partial(open_store, **options))

    @property
    def config(self) -> RunnableConfig:
        """A run config with the user's id, which is substituted for `{user_id}` in namespaces."""
        return {"configurable": {"user_id": self.user}}

    def index_memories(self, users: Iterable[str]) -> None:
        """Index the users' memories in advance, so that the first search is fast."""
        for user in users:
            self.store.search(("memories", user), query="memories", limit=1, refresh_ttl=False)

    def build_memory_extraction(self, *, extracts_facts: bool = False) -> Extraction:
        """Build the `Extraction` object, which extracts memories from threads.

        Args:
            extracts_facts: Whether the configured model extracts facts. By default each turn
                becomes a memory, without a model.

        Raises:
            ConfigurationError: `extracts_facts` is True and no model is configured.
        """
        from perdure.memory.long_term.extraction import Extraction
        from perdure.memory.long_term.recall import NAMESPACE

        extractor = self._build_model_extractor() if extracts_facts else None
        return Extraction(self.saver, self.store, extractor, namespace=NAMESPACE)

    def _build_model_extractor(self) -> Extractor:
        """Build the extractor that asks the configured model for facts."""
        from perdure.graphs.configured import build_configured_model
        from perdure.memory.long_term.model_extractor import ModelExtractor

        model = build_configured_model(self.settings)
        if model is None:
            raise ConfigurationError("--facts needs a model; set PERDURE_MODEL, or remove --facts")
        return ModelExtractor(model)

    def _open_checkpointer_or_store(self, open_component: Callable[..., Component]) -> Component:
        """Open the checkpointer or the store.

        A file that cannot be opened for writing is opened read-only, if the command allows it.
        """
        from perdure.errors import StorageError

        path, key = self.settings.db, self.settings.key
        try:
            return self._stack.enter_context(open_component(path, key=key, **self._options))
        except StorageError as exc:
            # Opening a locked, damaged or missing file raises a subclass of StorageError. Do not
            # try to open such a file read-only, because this attempt would raise the same error.
            if not self._allow_read_only or type(exc) is not StorageError:
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
    """Open the database for a command, and close it when the command ends.

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
        check_database_exists(settings.db)
    with ExitStack() as stack:
        yield CommandDatabase(
            settings, stack, allow_read_only=allow_read_only, relaxed_durability=relaxed_durability
        )


@contextmanager
def explain_missing_server_packages(feature: str) -> Iterator[None]:
    """Raise MissingDependency if the `with` block cannot import a module of the server.

    Args:
        feature: The name of the feature that needs the module, for the error.
    """
    try:
        yield
    except ImportError as exc:
        raise MissingDependency(
            f'{feature} needs additional packages; run pip install "perdure[server]"'
        ) from exc


def check_database_exists(db: str) -> None:
    """Raise ConfigurationError if the database file does not exist."""
    if not Path(db).exists():
        raise ConfigurationError(
            f"there is no database {db!r} yet; create it with 'perdure chat' or 'perdure import', "
            "or pass another database with --db"
        )


@contextmanager
def explain_lock_timeout(thread_id: str, timeout_s: float) -> Iterator[None]:
    """Raise an error that names the thread if its lock is not acquired in time.

    Args:
        thread_id: The thread whose lock the `with` block acquires.
        timeout_s: The number of seconds after which the lock times out.

    Raises:
        StorageUnavailable: Another run held the lock for more than `timeout_s` seconds.
    """
    try:
        yield
    except StorageUnavailable as exc:
        if not isinstance(exc.__cause__, TimeoutError):
            raise
        raise StorageUnavailable(
            f"another run of the thread {thread_id!r} did not end within {timeout_s} s; wait until "
            "that run ends, and try again"
        ) from exc


# -- ids

# Maximum length, in characters, of a thread id that is printed in full on a terminal.
_MAX_UNSHORTENED: Final = 12


def resolve_id_prefix(id_or_prefix: str, ids: Iterable[str], noun: str, list_command: str) -> str:
    """Return the id that equals `id_or_prefix`, or the only id that begins with `id_or_prefix`.

    Args:
        id_or_prefix: An id or a prefix of an id, as the user typed it.
        ids: Ids that begin with `id_or_prefix`.
        noun: A word for what has the ids, such as `"thread"`, for error messages.
        list_command: The command that lists the ids, for error messages.

    Raises:
        ConfigurationError: No id or several ids begin with `id_or_prefix`.
    """
    if not id_or_prefix:
        raise ConfigurationError(f"the id is empty; run '{list_command}' to list the ids")
    ids = list(ids)
    if id_or_prefix in ids:
        return id_or_prefix
    if len(ids) == 1:
        return ids[0]
    if not ids:
        raise ConfigurationError(
            f"there is no {noun} {id_or_prefix!r}; run '{list_command}' for a list"
        )
    raise ConfigurationError(
        f"the {noun} prefix {id_or_prefix!r} is ambiguous: it matches {join_first(ids, 3)}; type "
        "more characters"
    )


def resolve_item_key(
    store: WholeStore,
    namespaces: Sequence[Namespace],
    key_or_prefix: str,
    list_command: str,
    *,
    include_deleted: bool = False,
) -> tuple[Namespace, str]:
    """Find an item by its key, or by a unique prefix of the key.

    Args:
        store: The store.
        namespaces: The namespaces to look in.
        key_or_prefix: A key or a prefix of a key, as the user typed it.
        list_command: The command that lists the keys, for error messages.
        include_deleted: Whether a deleted item is found too. A deleted item is found only by its
            whole key.

    Returns:
        The namespace and the key of the item.

    Raises:
        ConfigurationError: No key or several keys begin with `key_or_prefix`.
    """
    for namespace in namespaces:
        # `store.get` raises InvalidNamespace if `key_or_prefix` is not a valid key.
        with suppress(InvalidNamespace):
            item = store.get(namespace, key_or_prefix, refresh_ttl=False)
            if item or (include_deleted and store.history(namespace, key_or_prefix)):
                return namespace, key_or_prefix
    namespaces_by_key = {
        item.key: namespace
        for namespace in namespaces
        for item in store.search(namespace, limit=sys.maxsize, refresh_ttl=False)
        if item.namespace == namespace and item.key.startswith(key_or_prefix)
    }
    key = resolve_id_prefix(key_or_prefix, namespaces_by_key, "key", list_command)
    return namespaces_by_key[key], key


def shorten_thread_id(database: CommandDatabase, thread_id: str, *, is_whole: bool) -> str:
    """Return a thread id for a table row.

    On a terminal, a long id is shortened to a unique prefix. If `is_whole` is True, the whole
    thread id is returned.
    """
    is_whole = is_whole or len(thread_id) <= _MAX_UNSHORTENED or not get_console().is_terminal
    return thread_id if is_whole else database.saver.unique_prefix(thread_id)


def find_thread_head(database: CommandDatabase, id_or_prefix: str) -> ThreadHead:
    """Return the head of the thread with the given id or unique id prefix."""
    # `saver.head` raises an error if `id_or_prefix` is not a valid id.
    with suppress(PerdureError):
        head = database.saver.head(id_or_prefix)
        if head is not None:
            return head
    heads = {head.thread_id: head for head in database.saver.heads(prefix=id_or_prefix, limit=4)}
    return heads[resolve_id_prefix(id_or_prefix, heads, "thread", "perdure threads")]


def resolve_thread_id(database: CommandDatabase, id_or_prefix: str) -> str:
    """Return the full id of a thread, given its id or a unique prefix of the id."""
    return find_thread_head(database, id_or_prefix).thread_id


def resolve_checkpoint_id(database: CommandDatabase, thread_id: str, id_or_prefix: str) -> str:
    """Return the full id of a thread's checkpoint, given its id or a unique prefix of the id."""
    ids = [
        info.checkpoint_id
        for info in database.saver.checkpoints(thread_id, checkpoint_ns="")
        if info.checkpoint_id.startswith(id_or_prefix)
    ]
    return resolve_id_prefix(id_or_prefix, ids, "checkpoint", f"perdure show {thread_id}")


def complete_thread_id(incomplete: str) -> list[str]:
    """Return the thread ids that begin with `incomplete`, for shell completion."""
    try:
        with open_database(None, allow_read_only=True) as database:
            return [head.thread_id for head in database.saver.heads(prefix=incomplete)]
    # If the thread ids cannot be read, do not print an error message, because it would garble the
    # command line that the user is typing.
    except Exception:
        return []


ThreadArgument = Annotated[
    str,
    typer.Argument(
        metavar="ID",
        help="The thread id or an id prefix.",
        autocompletion=complete_thread_id,
    ),
]
ThreadsArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[ID]...",
        help="Thread ids or id prefixes.",
        autocompletion=complete_thread_id,
    ),
]
