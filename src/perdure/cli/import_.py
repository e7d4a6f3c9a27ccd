"""Implement the `perdure import` and `perdure export` commands."""

from __future__ import annotations

import json as jsonlib
import re
import signal
import sys
import tempfile
import threading
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, Final, NamedTuple

import typer

from perdure.cli.app import (
    DbOption,
    JsonOption,
    OwnersOption,
    ThreadsArgument,
    UserOption,
    app,
    open_database,
    resolve_thread_id,
)
from perdure.cli.output import (
    format_size,
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
    from perdure.cli.conversation import Conversation, MalformedPart, SavedText
    from perdure.cli.import_agents import SessionsReader
    from perdure.cli.import_archive import ArchiveLines
    from perdure.cli.import_lines import JsonLinesReader
    from perdure.cli.import_report import ConversationsReport

_SQLITE: Final = b"SQLite format 3\0"  # https://sqlite.org/fileformat.html
# Chunk size, in bytes, for reading from a pipe.
_CHUNK_BYTES: Final = 1 << 20
# Maximum size, in bytes, at which a file in a ZIP archive is unpacked without checking its
# compression ratio.
_ALWAYS_UNPACKED_BYTES: Final = 64 << 20
# Maximum compression ratio (unpacked size / packed size) of a file in a ZIP archive. The ratio is
# checked only for files larger than `_ALWAYS_UNPACKED_BYTES`. Text has a ratio of about 10.
_MAX_UNPACK_RATIO: Final = 50
# Matches the names of the files that contain an export's conversations.
_CONVERSATIONS: Final = re.compile(r"(^|/)conversations[^/]*\.jsonl?$", re.IGNORECASE)
# Matches the names of the files in a Claude export that contain memories, projects or chats.
_CLAUDE_FILES: Final = re.compile(
    r"(^|/)((memories|projects)(/[^/]+)?|(design_chats|conversations)/[^/]+)\.json$", re.IGNORECASE
)
# Matches the names of the ZIP files into which Claude splits an export.
_CLAUDE_ZIP: Final = re.compile(r"-\d+( \(\d+\))?\.zip$", re.IGNORECASE)
# Matches the names of JSON and JSONL files.
_JSON: Final = re.compile(r"\.jsonl?$", re.IGNORECASE)
_LINK_LIST_PROBLEM: Final = "is a list of links to the files of an export"
_NO_CONVERSATION: Final = "no conversation"
# Matches the names of the metadata files that macOS adds to ZIP archives.
_JUNK: Final = re.compile(r"(^|/)(__MACOSX/|\._)")
# Maximum nesting depth to which a JSON value is searched for conversations. In the page of a shared
# link, for example, the conversation is nested in other objects.
_MAX_DEPTH: Final = 8


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
        bool, typer.Option("--later", help="Leave memory extraction to 'perdure worker'.")
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
    merged. Regenerated answers become branches. Threads that were imported before are not changed,
    so an import can be repeated. The exit code is 1 if there was nothing to import.
    """
    from perdure.checkpointers.owner_record import may_owners_be_organisations
    from perdure.cli.import_report import ConversationsReport
    from perdure.cli.import_thread import ImportWriter
    from perdure.cli.sources import open_database_to_import

    new_thread_ids = _parse_thread_id_renames(renamed or [])
    report = ConversationsReport()
    reader = _ConversationFilesReader(report)
    databases = [name for name in files if is_dsn(name)]
    with (
        treat_termination_signals_as_ctrl_c(),
        tempfile.TemporaryDirectory() as folder,
        ExitStack() as stack,
    ):
        for number, path in enumerate(Path(name) for name in files if not is_dsn(name)):
            copied = Path(folder) / str(number)
            with show_status(f"reading {path}"), _open_seekable_file(path, copied) as source:
                if source is None or not _starts_with(source, _SQLITE):
                    reader.read_file_or_folder(path, source)
                else:
                    databases.append(str(copied if copied.exists() else path))
        if databases and prefix:
            raise ConfigurationError(
                "--prefix cannot be used with a database, because threads that are imported from a "
                "database keep their ids; remove --prefix"
            )
        conversations = reader.build_conversations()
        conversations.sort(
            key=lambda conversation: conversation.find_message_creation_time(
                next(reversed(conversation.nodes), None)
            )
        )
        # All databases are checked before anything is written.
        with show_status("checking databases") if databases else nullcontext():
            sources = [
                stack.enter_context(open_database_to_import(db, max_value_mb << 20))
                for db in databases
            ]
        interruption_note = print_progress_on_interrupt(lambda: f"{report}; these are stored")
        with (
            open_database(db, user, create=True, relaxed_durability=True) as target_database,
            interruption_note,
        ):
            owners_were_people = not may_owners_be_organisations(target_database.saver.database)
            importing = ImportWriter(
                target_database, report, with_memories=not no_memories, later=later
            )
            for database in sources:
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
    skipped = [problem._asdict() for problem in report.skipped]
    refused = [{"namespace": namespace, "key": key} for namespace, key in report.refused]
    print_json_or_sentence(
        {**vars(report), "skipped": skipped, "refused": refused}, json, str(report)
    )
    if not json:
        report.print_notes_about_unimported_content()
    if has_new_organisations:
        print_note(
            "the owners of the imported threads may be organisations; from now on, a thread in "
            "this database that has an owner but no user belongs to a person only if you pass "
            "--owners people"
        )
    if report.is_empty:
        raise typer.Exit(1)


@app.command()
def export(
    thread: ThreadsArgument = None,
    every: Annotated[bool, typer.Option("--all", help="Export all threads.")] = False,
    user: Annotated[
        str | None,
        typer.Option(
            "--user", metavar="NAME", help="Export everything that belongs to this person."
        ),
    ] = None,
    owners: OwnersOption = None,
    db: DbOption = None,
) -> None:
    """Write threads with their branches as JSONL, one thread per line.

    With --user, write an archive of everything that belongs to a person: threads, memories with all
    of their versions, profile, instructions, examples, and a record of runs and crons. Use 'perdure
    import' to import an archive. The exit code is 1 if there is no data for this person.
    """
    from perdure.memory.thread_export import build_thread_export

    if [bool(thread), every, user is not None].count(True) != 1:
        raise ConfigurationError(
            "select the threads in exactly one way: pass thread ids, --all or --user"
        )
    if user is not None:
        _export_data_of_person(
            check_user("--user", user, "pass the name of the person"), owners, db
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
            by_owner = None if owner_kind is None else owner_kind == "people"
            lines = export_person(user, database.saver, database.store, owners_are_people=by_owner)
        except UnknownPerson as exc:
            print_note(f"perdure: {exc}")
            raise typer.Exit(1) from exc
        with progress_bar("exporting", "line") as update_bar:
            for number, line in enumerate(lines, 1):
                if number == 1:
                    print_warning_about_threads_matched_by_owner(user, line["threads_by_owner"])
                print_json(line, indent=None)
                update_bar(None, number)


@contextmanager
def treat_termination_signals_as_ctrl_c() -> Iterator[None]:
    """Raise KeyboardInterrupt on SIGTERM and SIGHUP, so that temporary files are removed."""
    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)):
            # Set a handler only if the signal has the default action. Under nohup, SIGHUP is
            # ignored and must stay ignored.
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
            raise ConfigurationError(f"the option --as has the value {option!r}; expected ID=NEW")
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


def _copy_chunks(source: Any, into: IO[bytes]) -> None:
    """Copy a stream in chunks so that signals can be handled between chunks."""
    while chunk := source.read1(_CHUNK_BYTES):
        into.write(chunk)


def _starts_with(source: IO[bytes], prefix: bytes) -> bool:
    """Return whether a file starts with the bytes in `prefix`, and rewind the file."""
    first = source.read(len(prefix))
    source.seek(0)
    return first == prefix


class _ConversationFilesReader:
    """Reads the files of one import, except databases.

    Attributes:
        conversations: Conversations that are one object in their file. `build_conversations` adds
            the other conversations.
        texts: Memories and documents.
        batches: Requests of OpenAI batches, and their responses, which may be in another file.
    """

    def __init__(self, report: ConversationsReport) -> None:
        from perdure.cli.import_openai import OpenAIBatches

        self._report = report
        self.conversations: list[Conversation] = []
        self.texts: list[SavedText] = []
        self.batches = OpenAIBatches()
        self._files: list[_FileParts] = []

    def build_conversations(self) -> list[Conversation]:
        """Return the conversations of all files. Call this method once, after reading all files."""
        self._report.skipped += self.batches.import_requests_with_answers()
        for parts in self._files:
            conversations = [
                *parts.lines.build_conversations(),
                *parts.sessions.build_conversations(),
            ]
            for conversation in conversations if parts.archive.is_archive else ():
                conversation.is_archived = True
            self.conversations += conversations
            self._report.records += parts.archive.records
            if parts.archive.left_out:
                self._report.left_out["item of another person"] += parts.archive.left_out
        return self.conversations

    def iter_archives(self) -> Iterator[ArchiveLines]:
        """Yield one archive for each file that `perdure export --user` wrote."""
        yield from (parts.archive for parts in self._files if parts.archive.is_archive)

    def read_file_or_folder(self, path: Path, source: IO[bytes] | None) -> None:
        """Read a file or a folder.

        Raise ImportFailed if the file or folder contains nothing to import.
        """
        label = "stdin" if path == Path("-") else str(path)
        has_conversations, reason, location = False, "", ""
        try:
            for name, data in _iter_conversation_files(path, label, source, self._report):
                location = "" if name == label else f"{name!r}, "
                text = data.decode(jsonlib.detect_encoding(data))
                problem = self._read_conversations_or_explain_failure(name, label, text, location)
                has_conversations = has_conversations or problem is None
                reason = reason or problem or ""
        except zipfile.BadZipFile as exc:
            raise ImportFailed(f"{label!r} cannot be unpacked: {exc}") from exc
        except UnicodeDecodeError as exc:
            raise ImportFailed(
                f"{label!r} is not UTF-8 text: {location}invalid byte at offset {exc.start}"
            ) from exc
        if not has_conversations:
            raise ImportFailed(
                f"nothing can be imported from {label!r}, because it "
                f"{reason or 'contains no conversations'}; expected one of these: a ChatGPT or "
                "Claude export (ZIP, folder or conversations.json); an Open WebUI or LibreChat "
                "export; a Claude Code or Codex session; the JSON of a shared link; a JSONL file "
                "of messages; a LangGraph or perdure database"
            )

    def _read_conversations_or_explain_failure(
        self, file_name: str, source_label: str, text: str, location: str
    ) -> str | None:
        """Read the conversations in the text of a file.

        Args:
            file_name: The name of the file, which may be in a ZIP or a folder.
            source_label: The name of the file, the ZIP or the folder to import.
            text: The text of the file.
            location: The name of the file for error messages, or "" if it equals `source_label`.

        Returns:
            None if the text contains something to import. Otherwise, the reason why it contains
            nothing, or "" if the reason is unknown.
        """
        from perdure.cli.conversation import MalformedPart, Problem, iter_json_values_with_positions
        from perdure.cli.import_agents import SessionsReader
        from perdure.cli.import_archive import ArchiveLines
        from perdure.cli.import_lines import JsonLinesReader

        file, has_conversations, reason = (
            file_name if file_name == source_label else f"{source_label}/{file_name}",
            False,
            "",
        )
        parts = _FileParts(file, JsonLinesReader(file), SessionsReader(file), self, ArchiveLines())
        self._files.append(parts)
        for number, value in iter_json_values_with_positions(text):
            try:
                if isinstance(value, MalformedPart):
                    raise value
                if not _collect_conversations_and_check_if_any(str(number), value, parts):
                    raise _build_no_conversation_error(value)
                has_conversations = True
            except MalformedPart as exc:
                reason = reason or _explain_missing_conversations(exc, location)
                self._report.skipped.append(Problem(str(exc), f"{file_name}, {number}"))
        return None if has_conversations else reason


def _explain_missing_conversations(error: MalformedPart, location: str) -> str:
    """Convert an error to a message that says why a file contains no conversations.

    Return "" if the reason is unknown.
    """
    cause = error.__cause__
    if isinstance(cause, jsonlib.JSONDecodeError):
        return f"is not valid JSON: {location}line {cause.lineno}, column {cause.colno}"
    if str(error) == _NO_CONVERSATION:
        return ""
    reason = str(error)
    if reason.startswith(_LINK_LIST_PROBLEM):
        return reason
    return f"contains no conversations: {location}{reason}"


def _build_no_conversation_error(value: Any) -> MalformedPart:
    """Build the error to raise for a value that does not contain a conversation."""
    from perdure.cli.conversation import MalformedPart
    from perdure.cli.import_claude import list_zip_files_in_download_links

    zips = list_zip_files_in_download_links(value) if isinstance(value, dict) else []
    if zips:
        return MalformedPart(
            f"{_LINK_LIST_PROBLEM}: download {', '.join(zips)} from them, and import these files"
        )
    return MalformedPart(_NO_CONVERSATION)


def _iter_conversation_files(
    path: Path, display_name: str, source: IO[bytes] | None, report: ConversationsReport
) -> Iterator[tuple[str, bytes]]:
    """Yield the name and content of each file that may contain conversations.

    Args:
        path: The path of a file, a ZIP or a folder.
        display_name: The name of the file in messages.
        source: The open file, or None for a folder.
        report: Counts the files that are skipped.
    """
    if source is None:
        names = sorted(str(entry.relative_to(path)) for entry in path.rglob("*") if entry.is_file())
        for name in _select_conversation_file_names(names, report):
            yield name, (path / name).read_bytes()
        for name in filter(_CLAUDE_ZIP.search, names):
            with (path / name).open("rb") as file:
                yield from _iter_conversation_files(path / name, name, file, report)
    elif _starts_with(source, b"PK"):
        with zipfile.ZipFile(source) as archive:
            for name in _select_conversation_file_names(sorted(archive.namelist()), report):
                info = archive.getinfo(name)
                if info.file_size > max(
                    _ALWAYS_UNPACKED_BYTES, _MAX_UNPACK_RATIO * info.compress_size
                ):
                    raise zipfile.BadZipFile(
                        f"unpacking would expand {name!r} from {format_size(info.compress_size)} "
                        f"to {format_size(info.file_size)}, which is more than the allowed "
                        f"{format_size(_ALWAYS_UNPACKED_BYTES)} and more than {_MAX_UNPACK_RATIO} "
                        "times the packed size; if you trust the archive, unpack it yourself and "
                        "import the folder"
                    )
                try:
                    data = archive.read(info)
                # The exceptions raised for the various compression methods have no common base
                # class.
                except Exception as exc:
                    reason = "it is encrypted" if info.flag_bits & 1 else exc
                    raise zipfile.BadZipFile(f"{name!r}: {reason}") from exc
                yield name, data
    else:
        yield display_name, source.read()


def _select_conversation_file_names(
    file_names: list[str], report: ConversationsReport
) -> list[str]:
    """Return the names of ChatGPT or Claude export files or, if there are none, of all JSON files.

    JSON files that are not selected are counted in `report.not_read`. JSON files in the export's
    folder `frames` are counted under the folder's name, and not listed individually.
    """
    file_names = [name for name in file_names if not _JUNK.search(name) and not name.endswith("/")]
    conversations = [name for name in file_names if _CONVERSATIONS.search(name)]
    claude_files = [name for name in file_names if _CLAUDE_FILES.search(name)]
    selected = [*conversations, *claude_files] or [
        name for name in file_names if _JSON.search(name)
    ]
    for name in {*file_names}.difference(selected):
        folder = name.rpartition("/")[0]
        if _JSON.search(name):
            report.not_read[f"{folder}/…" if folder.startswith("frames") else name] += 1
    return selected


class _FileParts(NamedTuple):
    """Readers for the different kinds of content in a single file.

    Attributes:
        file: The name of the file in messages.
        lines: Reads objects with messages.
        sessions: Reads sessions of coding agents.
        reader: Collects objects that are complete conversations.
        archive: Reads the lines of a person's archive, except threads.
    """

    file: str
    lines: JsonLinesReader
    sessions: SessionsReader
    reader: _ConversationFilesReader
    archive: ArchiveLines


def _collect_conversations_and_check_if_any(
    position_in_file: str,
    value: Any,
    collected_parts: _FileParts,
    remaining_depth: int = _MAX_DEPTH,
) -> bool:
    """Collect the conversations, memories and documents in a JSON value, including nested ones.

    Args:
        position_in_file: The position of the value in its file, such as "3.1".
        value: A value of JSON.
        collected_parts: Receives everything that is found.
        remaining_depth: The number of levels that may still be searched. It is `_MAX_DEPTH` for a
            value at the top level of its file. Only such a value can be a line of an archive, of a
            session or of a list of messages.

    Returns:
        Whether there was anything to import.
    """
    from perdure.cli.import_lines import has_messages
    from perdure.cli.import_openai import convert_fine_tuning_example_to_conversation, is_batch_line
    from perdure.memory.message_forms import is_message

    is_object = isinstance(value, dict)
    if (
        is_object
        and remaining_depth == _MAX_DEPTH
        and collected_parts.archive.try_to_add_archive_line(value)
    ):
        pass
    elif is_object and (read := _find_conversation_builder(value)) is not None:
        collected_parts.reader.conversations.append(read(value))
    elif is_object and (read_texts := _find_memory_or_document_reader(value)) is not None:
        collected_parts.reader.texts.extend(read_texts(value))
    elif (
        is_object
        and remaining_depth == _MAX_DEPTH
        and collected_parts.sessions.try_to_add_session_line(value)
    ):
        pass
    elif is_object and is_batch_line(value):
        collected_parts.reader.batches.add_request_or_response(
            collected_parts.file, position_in_file, value, collected_parts.lines.add_conversation
        )
    elif is_object and (example := convert_fine_tuning_example_to_conversation(value)) is not None:
        collected_parts.lines.add_conversation(position_in_file, example)
    elif is_object and has_messages(value):
        collected_parts.lines.add_conversation(position_in_file, value)
    elif remaining_depth == _MAX_DEPTH and is_message(value):
        collected_parts.lines.add_message(value)
    else:
        children = value.values() if is_object else value if isinstance(value, list) else ()
        numbered = enumerate(children, 1) if remaining_depth else ()
        # Use a list rather than a generator. With a generator, `any` would stop at the first
        # conversation, and the remaining child values would not be searched.
        collected = [
            _collect_conversations_and_check_if_any(
                f"{position_in_file}.{n}", child, collected_parts, remaining_depth - 1
            )
            for n, child in numbered
        ]
        return any(collected)
    return True


def _find_conversation_builder(json_object: dict[str, Any]) -> Callable[[Any], Conversation] | None:
    """Find the function that converts a JSON object to a conversation.

    Return None if the object is not a conversation in a known format.
    """
    from perdure.cli import import_chatgpt, import_claude, import_webui

    if json_object.keys() & {"mapping", "linear_conversation"}:
        return import_chatgpt.build_chatgpt_conversation
    if "chat_messages" in json_object:
        return import_claude.build_claude_conversation
    if import_claude.is_claude_design_chat(json_object):
        return import_claude.build_claude_design_conversation
    if import_webui.is_open_webui_chat_export(json_object):
        return import_webui.build_open_webui_conversation
    return (
        import_webui.build_librechat_conversation
        if import_webui.is_librechat(json_object)
        else None
    )


def _find_memory_or_document_reader(
    json_object: dict[str, Any],
) -> Callable[[Any], Iterable[SavedText]] | None:
    """Find the function that reads memories or documents from a JSON object.

    Return None if the object contains neither memories nor a project.
    """
    from perdure.cli import import_claude

    if import_claude.is_memories(json_object):
        return import_claude.iter_claude_memories
    return import_claude.iter_project_documents if import_claude.is_project(json_object) else None
