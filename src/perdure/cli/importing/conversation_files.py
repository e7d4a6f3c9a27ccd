"""Find the conversations in files, folders and zip archives, and detect each file's format."""

from __future__ import annotations

import json as jsonlib
import re
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, NamedTuple

from perdure.cli.output import (
    format_size,
)
from perdure.errors import ImportFailed

if TYPE_CHECKING:
    from perdure.cli.importing.archive import ArchiveLines
    from perdure.cli.importing.coding_agents import SessionsReader
    from perdure.cli.importing.conversation import Conversation, MalformedPart, SavedText
    from perdure.cli.importing.json_lines import JsonLinesReader
    from perdure.cli.importing.report import ConversationsReport


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


def starts_with(source: IO[bytes], prefix: bytes) -> bool:
    """Return whether a file starts with the bytes in `prefix`, and rewind the file."""
    first = source.read(len(prefix))
    source.seek(0)
    return first == prefix


class ConversationFilesReader:
    """Reads the files that a single `perdure import` command imports, except databases.

    Attributes:
        conversations: Conversations that are one object in their file.
            `finish_reading_and_get_conversations` adds the other conversations.
        texts: Memories and documents.
        batches: Requests of OpenAI batches, and their responses, which may be in another file.
    """

    def __init__(self, report: ConversationsReport) -> None:
        from perdure.cli.importing.openai_files import OpenAIBatches

        self._report = report
        self.conversations: list[Conversation] = []
        self.texts: list[SavedText] = []
        self.batches = OpenAIBatches()
        self._files: list[_FileParts] = []

    def finish_reading_and_get_conversations(self) -> list[Conversation]:
        """Return the conversations of all files, and count the skipped requests and the records.

        Call this method only once, after all files have been read.
        """
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
        """Parse the text of a file, and collect the conversations that the text contains.

        Args:
            file_name: The name of the file, which may be in a ZIP or a folder.
            source_label: The name of the file, the ZIP or the folder to import.
            text: The text of the file.
            location: The name of the file for error messages, or "" if it equals `source_label`.

        Returns:
            None if the text contains something to import. Otherwise, the reason why it contains
            nothing, or "" if the reason is unknown.
        """
        from perdure.cli.importing.archive import ArchiveLines
        from perdure.cli.importing.coding_agents import SessionsReader
        from perdure.cli.importing.conversation import (
            MalformedPart,
            Problem,
            iter_json_values_with_positions,
        )
        from perdure.cli.importing.json_lines import JsonLinesReader

        file = file_name if file_name == source_label else f"{source_label}/{file_name}"
        has_conversations, reason = False, ""
        parts = _FileParts(file, JsonLinesReader(file), SessionsReader(file), ArchiveLines())
        self._files.append(parts)
        for number, value in iter_json_values_with_positions(text):
            try:
                if isinstance(value, MalformedPart):
                    raise value
                if not self._collect_value_and_check_if_any(str(number), value, parts):
                    raise _build_no_conversation_error(value)
                has_conversations = True
            except MalformedPart as exc:
                reason = reason or _explain_missing_conversations(exc, location)
                self._report.skipped.append(Problem(str(exc), f"{file_name}, {number}"))
        return None if has_conversations else reason

    def _collect_value_and_check_if_any(
        self, position: str, value: Any, parts: _FileParts, remaining_depth: int = _MAX_DEPTH
    ) -> bool:
        """Find conversations, memories and documents in a JSON value, and add them to the import.

        Nested lists and dicts are searched down to `remaining_depth` levels.

        Args:
            position: The position of the value in its file, such as "3.1".
            value: A value of JSON.
            parts: The readers for the content of the file.
            remaining_depth: The number of levels that may still be searched. It is `_MAX_DEPTH` for
                a value at the top level of its file.

        Returns:
            Whether there was anything to import.
        """
        from perdure.memory.message_forms import is_message

        is_object, is_top_level = isinstance(value, dict), remaining_depth == _MAX_DEPTH
        if is_object and self._collect_object_if_known(position, value, parts, is_top_level):
            return True
        if is_top_level and is_message(value):
            parts.lines.add_message(value)
            return True
        if not remaining_depth:
            return False
        children = value.values() if is_object else value if isinstance(value, list) else ()
        # Search all child values for conversations before calling `any`. If `any` iterated over a
        # generator, it would stop at the first child value that contains a conversation, and the
        # remaining child values would not be searched.
        collected = [
            self._collect_value_and_check_if_any(
                f"{position}.{number}", child, parts, remaining_depth - 1
            )
            for number, child in enumerate(children, 1)
        ]
        return any(collected)

    def _collect_object_if_known(
        self, position: str, value: dict[str, Any], parts: _FileParts, is_top_level: bool
    ) -> bool:
        """Read a JSON object for import if its format is known. Return whether the format is known.

        Only an object at the top level of its file can be a line of an archive or of a session.
        """
        from perdure.cli.importing import claude
        from perdure.cli.importing.json_lines import has_messages
        from perdure.cli.importing.openai_files import (
            convert_fine_tuning_example_to_conversation,
            is_batch_line,
        )

        if is_top_level and parts.archive.try_to_add_archive_line(value):
            return True
        if (build_conversation := _find_conversation_builder(value)) is not None:
            self.conversations.append(build_conversation(value))
        elif claude.is_memories(value):
            self.texts.extend(claude.iter_claude_memories(value))
        elif claude.is_project(value):
            self.texts.extend(claude.iter_project_documents(value))
        elif is_top_level and parts.sessions.try_to_add_session_line(value):
            return True
        elif is_batch_line(value):
            self.batches.add_request_or_response(
                parts.file, position, value, parts.lines.add_conversation
            )
        elif (example := convert_fine_tuning_example_to_conversation(value)) is not None:
            parts.lines.add_conversation(position, example)
        elif has_messages(value):
            parts.lines.add_conversation(position, value)
        else:
            return False
        return True


def _explain_missing_conversations(error: MalformedPart, location: str) -> str:
    """Convert an error to a message that explains why no conversation was found in a file.

    Return "" if the reason is unknown.
    """
    cause, reason = error.__cause__, str(error)
    if isinstance(cause, jsonlib.JSONDecodeError):
        return f"is not valid JSON: {location}line {cause.lineno}, column {cause.colno}"
    if reason == _NO_CONVERSATION:
        return ""
    is_link_list = reason.startswith(_LINK_LIST_PROBLEM)
    return reason if is_link_list else f"contains no conversations: {location}{reason}"


def _build_no_conversation_error(value: Any) -> MalformedPart:
    """Build the error to raise for a value that does not contain a conversation."""
    from perdure.cli.importing.claude import list_zip_files_in_download_links
    from perdure.cli.importing.conversation import MalformedPart

    zips = list_zip_files_in_download_links(value) if isinstance(value, dict) else []
    return MalformedPart(
        f"{_LINK_LIST_PROBLEM}: download {', '.join(zips)} from them, and import these files"
        if zips
        else _NO_CONVERSATION
    )


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
    elif starts_with(source, b"PK"):
        with zipfile.ZipFile(source) as archive:
            for name in _select_conversation_file_names(sorted(archive.namelist()), report):
                info = archive.getinfo(name)
                if info.file_size > max(
                    _ALWAYS_UNPACKED_BYTES, _MAX_UNPACK_RATIO * info.compress_size
                ):
                    raise zipfile.BadZipFile(
                        f"{name!r} was not unpacked, because it would expand from "
                        f"{format_size(info.compress_size)} to {format_size(info.file_size)}, more "
                        f"than {_MAX_UNPACK_RATIO} times its size. If you trust the archive, "
                        "unpack it yourself and import the folder"
                    )
                try:
                    data = archive.read(info)
                # Catch all exceptions, because the exceptions that are raised for the various
                # compression methods have no common base class.
                except Exception as exc:
                    reason = "it is encrypted" if info.flag_bits & 1 else exc
                    raise zipfile.BadZipFile(f"{name!r}: {reason}") from exc
                yield name, data
    else:
        yield display_name, source.read()


def _select_conversation_file_names(
    file_names: list[str], report: ConversationsReport
) -> list[str]:
    """Select the export files of ChatGPT or Claude or, if there are none, all JSON files.

    JSON files that are not selected for the import are counted in `report.not_read`, because they
    will not be read. JSON files in the export's folder `frames` are counted in `report.not_read`
    under the name of the folder instead of their own names.
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
    """A group of readers for one imported file, with one reader for each kind of content.

    Attributes:
        file: The name of the file in messages.
        lines: Reads objects with messages.
        sessions: Reads sessions of coding agents.
        archive: Reads the lines of a person's archive, except threads.
    """

    file: str
    lines: JsonLinesReader
    sessions: SessionsReader
    archive: ArchiveLines


def _find_conversation_builder(json_object: dict[str, Any]) -> Callable[[Any], Conversation] | None:
    """Find the function that converts a JSON object to a conversation.

    Return None if the object is not a conversation in a known format.
    """
    from perdure.cli.importing import chatgpt, claude, webui

    builders = (
        (chatgpt.is_chatgpt_conversation, chatgpt.build_chatgpt_conversation),
        (claude.is_claude_conversation, claude.build_claude_conversation),
        (claude.is_claude_design_chat, claude.build_claude_design_conversation),
        (webui.is_open_webui_chat_export, webui.build_open_webui_conversation),
        (webui.is_librechat, webui.build_librechat_conversation),
    )
    return next((build for is_format, build in builders if is_format(json_object)), None)
