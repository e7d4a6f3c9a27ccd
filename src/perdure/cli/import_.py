"""Implement the `perdure import` and `perdure export` commands."""

from __future__ import annotations

import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, Final

import typer

from perdure.cli.app import (
    DbOption,
    JsonOption,
    OwnersOption,
    ThreadsArgument,
    UserOption,
    app,
    exit_with_error,
    open_database,
    resolve_thread_id,
)
from perdure.cli.importing.conversation_files import ConversationFilesReader, starts_with
from perdure.cli.output import (
    print_json,
    print_json_or_sentence,
    print_note,
    print_progress_on_interrupt,
    print_warning_about_threads_matched_by_owner,
    progress_bar,
    show_status,
)
from perdure.errors import ConfigurationError, ImportFailed
from perdure.settings import check_user, is_dsn

if TYPE_CHECKING:
    from perdure.cli.importing.report import ConversationsReport

_SQLITE: Final = b"SQLite format 3\0"  # https://sqlite.org/fileformat.html
# Chunk size, in bytes, for reading from a pipe.
_CHUNK_BYTES: Final = 1 << 20


@app.command("import")
def import_(
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE...",
            help="Files or folders to import, Postgres DSNs, or - for stdin.",
        ),
    ],
    prefix: Annotated[
        str, typer.Option(metavar="TEXT", help="Text to prepend to each thread id.")
    ] = "",
    no_memories: Annotated[
        bool, typer.Option("--no-memories", help="Do not extract memories.")
    ] = False,
    later: Annotated[
        bool, typer.Option("--later", help="Have 'perdure worker' extract the memories later.")
    ] = False,
    trust_templates: Annotated[
        bool,
        typer.Option("--trust-templates", help="Record the namespace templates of archives."),
    ] = False,
    renamed: Annotated[
        list[str] | None,
        typer.Option(
            "--as",
            metavar="ID=NEW",
            help="Import the thread with id ID under the new id NEW.",
        ),
    ] = None,
    max_value_mb: Annotated[
        int,
        typer.Option(
            "--max-value-mb",
            min=1,
            max=2047,
            metavar="N",
            help="Reject values larger than N MB.",
        ),
    ] = 256,
    user: UserOption = None,
    db: DbOption = None,
    json: JsonOption = False,
) -> None:
    """Import conversations as threads, and extract memories from them.

    Reads exports of ChatGPT and Claude (ZIP, folder or conversations.json), of Open WebUI and
    LibreChat, sessions of Claude Code and Codex, the JSON of a shared link, JSONL of messages,
    databases of langgraph's own savers, and databases of perdure, whose threads and items are
    merged. Regenerated answers become branches. If you repeat an import, only new messages
    are added. The exit code is 1 if there was nothing to import.
    """
    from perdure.checkpointers.owner_record import may_owners_be_organisations
    from perdure.cli.importing.import_writer import ImportWriter
    from perdure.cli.importing.report import ConversationsReport
    from perdure.cli.sources import open_database_to_import

    new_thread_ids = _parse_thread_id_renames(renamed or [])
    report = ConversationsReport()
    reader = ConversationFilesReader(report)
    with (
        treat_termination_signals_as_ctrl_c(),
        tempfile.TemporaryDirectory() as folder,
        ExitStack() as stack,
    ):
        database_sources = _read_files_and_list_databases(files, Path(folder), reader)
        if database_sources and prefix:
            raise ConfigurationError(
                "--prefix cannot be used with a database, because threads that are imported from a "
                "database keep their ids; remove --prefix"
            )
        conversations = reader.finish_reading_and_get_conversations()
        conversations.sort(key=lambda conversation: conversation.last_message_time)
        # Check all databases to be imported before anything is written to the target database.
        with show_status("checking databases") if database_sources else nullcontext():
            source_databases = [
                stack.enter_context(open_database_to_import(database_source, max_value_mb << 20))
                for database_source in database_sources
            ]
        interruption_note = print_progress_on_interrupt(lambda: f"{report}; these are stored")
        with (
            open_database(db, user, create=True, relaxed_durability=True) as target_database,
            interruption_note,
        ):
            owners_were_people = not may_owners_be_organisations(target_database.saver.database)
            importing = ImportWriter(
                target_database,
                report,
                with_memories=not no_memories,
                later=later,
                trusts_templates=trust_templates,
            )
            for database in source_databases:
                importing.import_database(database, new_thread_ids)
            importing.store_conversations_as_threads(prefix, conversations)
            importing.store_memories_and_project_documents(reader.texts)
            importing.import_store_items_of_archives(reader.iter_archives())
            has_new_organisations = owners_were_people and may_owners_be_organisations(
                target_database.saver.database
            )
            if report.memories:
                with show_status("indexing memories …"):
                    target_database.index_memories(report.by_user)
    _print_report(report, json)
    if has_new_organisations:
        print_note(
            "the owners of the imported threads may be organisations; from now on, a thread in "
            "this database that has an owner but no user belongs to a person only if you pass "
            "--owners people"
        )
    if report.is_empty:
        raise typer.Exit(1)


def _read_files_and_list_databases(
    files: list[str], folder: Path, reader: ConversationFilesReader
) -> list[str]:
    """Read the files that are not databases. Return the DSNs and the paths of the databases.

    Args:
        files: The files, folders and DSNs to import.
        folder: A temporary folder for copies of files that are not seekable, such as pipes.
        reader: Reads the files that are not databases.
    """
    databases = [name for name in files if is_dsn(name)]
    for number, path in enumerate(Path(name) for name in files if not is_dsn(name)):
        copied = folder / str(number)
        with show_status(f"reading {path}"), _open_seekable_file(path, copied) as source:
            if source is None or not starts_with(source, _SQLITE):
                reader.read_file_or_folder(path, source)
            else:
                databases.append(str(copied if copied.exists() else path))
    return databases


def _print_report(report: ConversationsReport, json: bool) -> None:
    """Print the report of an import, either as JSON or as readable text.

    The readable text is followed by notes about content that was not imported.
    """
    print_json_or_sentence(
        {
            **vars(report),
            "skipped": [problem._asdict() for problem in report.skipped],
            "refused": [{"namespace": namespace, "key": key} for namespace, key in report.refused],
        },
        json,
        str(report),
    )
    if not json:
        report.print_notes_about_unimported_content()


@app.command()
def export(
    thread: ThreadsArgument = None,
    every: Annotated[bool, typer.Option("--all", help="Export all threads.")] = False,
    user: Annotated[
        str | None,
        typer.Option("--user", metavar="NAME", help="Export all data of this user."),
    ] = None,
    owners: OwnersOption = None,
    db: DbOption = None,
) -> None:
    """Write threads with their branches as JSONL, one thread per line.

    With --user, write an archive of everything that belongs to a user: threads, memories with all
    of their versions, profile, instructions, examples, and a record of runs and crons. Use 'perdure
    import' to import an archive. The exit code is 1 if there is no data for this user.
    """
    from perdure.memory.thread_export import build_thread_export

    if [bool(thread), every, user is not None].count(True) != 1:
        raise ConfigurationError(
            "select the threads in exactly one way: pass thread ids, --all or --user"
        )
    if user is not None:
        _export_data_of_person(
            check_user("--user", user, "pass the person's user name"), owners, db
        )
        return
    if owners is not None:
        raise ConfigurationError(f"--owners {owners} can only be used with --user; remove --owners")
    with open_database(db, allow_read_only=True) as database:
        ids = [resolve_thread_id(database, name) for name in thread or ()]
        # Read all thread ids before exporting the first thread. If the ids were read page by page,
        # threads that change during the export would be missed.
        ids = ids or [head.thread_id for head in database.saver.heads(limit=sys.maxsize)]
        with progress_bar("exporting", "thread") as update_bar:
            for number, name in enumerate(ids, 1):
                print_json(build_thread_export(database.saver, name), indent=None)
                update_bar(number / len(ids), number)


def _export_data_of_person(user: str, owner_kind: str | None, db: str | None) -> None:
    """Write the archive of a person. Exit with code 1 if there is no data for the person."""
    from perdure.errors import UnknownPerson
    from perdure.people import export as export_person

    with open_database(db, allow_read_only=True) as database:
        try:
            lines = export_person(
                user,
                database.saver,
                database.store,
                owners_are_people=None if owner_kind is None else owner_kind == "people",
            )
        except UnknownPerson as exc:
            exit_with_error(str(exc))
        with progress_bar("exporting", "line") as update_bar:
            for number, line in enumerate(lines, 1):
                if number == 1:
                    print_warning_about_threads_matched_by_owner(user, line["threads_by_owner"])
                print_json(line, indent=None)
                update_bar(None, number)


@contextmanager
def treat_termination_signals_as_ctrl_c() -> Iterator[None]:
    """Raise KeyboardInterrupt in the main thread when the process receives SIGTERM or SIGHUP.

    By default, SIGTERM and SIGHUP would end the process without removing its temporary files.
    """
    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)):
            # Do not set a handler if the signal does not have its default action. For example,
            # SIGHUP is ignored in a process started by nohup, and must stay ignored.
            if signal.getsignal(number) is signal.SIG_DFL:
                before[number] = signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _parse_thread_id_renames(rename_options: list[str]) -> dict[str, str]:
    """Parse options of the form `OLD=NEW` into a dict that maps old thread ids to new ones."""
    new_ids = dict[str, str]()
    for option in rename_options:
        old, _, new = option.partition("=")
        if not old or not new:
            raise ConfigurationError(f"the value of --as is {option!r}; expected OLD_ID=NEW_ID")
        new_ids[old] = new
    return new_ids


@contextmanager
def _open_seekable_file(path: Path, copy_path: Path) -> Iterator[IO[bytes] | None]:
    """Open a file for reading more than once. Yield None if the path is a folder.

    Because a pipe can be read only once, the content of a pipe is copied to the file `copy_path`,
    and the copy is opened instead.
    """
    try:
        is_stdin = path == Path("-")
        if path.is_dir() and not is_stdin:
            yield None
        elif path.is_file() and not is_stdin:
            with path.open("rb") as file:
                yield file
        else:
            with copy_path.open("w+b") as file:
                _copy_pipe_to_file(path, file)
                yield file
    except OSError as exc:
        raise ImportFailed(f"{str(path)!r} cannot be read: {exc.strerror}") from exc


def _copy_pipe_to_file(path: Path, target_file: IO[bytes]) -> None:
    """Copy stdin or a pipe to a file.

    Raises:
        ImportFailed: The path is a device.
    """
    if path == Path("-"):
        _copy_chunks(sys.stdin.buffer, target_file)
    elif path.is_char_device() or path.is_block_device():
        raise ImportFailed(f"{str(path)!r} is a device; expected a file, a pipe or a folder")
    else:
        with path.open("rb") as pipe:
            _copy_chunks(pipe, target_file)
    target_file.seek(0)


def _copy_chunks(source: Any, target_file: IO[bytes]) -> None:
    """Copy a stream to a file in chunks.

    `read1` returns after a single `read` system call. Signals are therefore handled between two
    chunks, and a single Ctrl-D ends the input from a terminal. With `shutil.copyfileobj`, Ctrl-D
    would have to be pressed twice.
    """
    while chunk := source.read1(_CHUNK_BYTES):
        target_file.write(chunk)
