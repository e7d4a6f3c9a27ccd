"""Count the content that an import stores and the content that it omits, and report the counts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Final

from perdure.checkpointers.reports import ImportReport
from perdure.cli.importing.conversation import Problem
from perdure.cli.output import format_count, join_first, print_note
from perdure.stores.base import Namespace, TransferReport

# Maximum number of users that a report lists by name. Any further users are only counted.
_MAX_LISTED_USERS: Final = 5
# Maximum number of refused items listed in a report.
_MAX_LISTED_ITEMS: Final = 20


@dataclass
class ConversationsReport:
    """The counts of an import.

    `messages` counts only messages that the database did not contain before the import.
    `conversations` counts only conversations that contain messages.
    """

    conversations: int = 0
    messages: int = 0
    # Number of incomplete messages (skipped or only partially stored by an earlier import) that
    # this import has completed.
    updated: int = 0
    # Number of incomplete messages that this import could not complete. The threads of these
    # messages have changed since the earlier import that skipped the messages or stored them only
    # partially.
    outdated: int = 0
    # Number of conversations (or threads, if a database is imported) to which this import added
    # nothing.
    unchanged: int = 0
    empty: int = 0  # Number of conversations without messages.
    unread: int = 0  # Number of conversations in which no message could be read.
    checkpoints: int = 0  # Number of new checkpoints that were imported from databases.
    items: int = 0  # Number of new store items that were imported from databases.
    # Number of items and memories that the import read but did not add. Most of them are known,
    # which means that this database already contains them. Refused, forgotten and quarantined items
    # and memories are included.
    known_items: int = 0
    # Number of run and cron records in imported archives. Runs and crons are counted but never
    # executed.
    records: int = 0
    # Number of new memories, or None if this import extracts no memories.
    memories: int | None = None
    quarantined: int = 0
    # Number of memories that were not stored because this database contains tombstones for them.
    forgotten: int = 0
    # The user that is configured for the import.
    user: str = ""
    # Number of conversations per user. A conversation without a user is counted under the
    # configured user. With the option --later, a conversation without a user is counted under the
    # key "" instead.
    users: Counter[str] = field(default_factory=Counter)
    by_user: Counter[str] = field(default_factory=Counter)  # Number of new memories of each user.
    # Namespaces and keys of items that were refused because a tombstone exists for them.
    refused: list[tuple[Namespace, str]] = field(default_factory=list)
    # Number of skipped message parts and archive entries of each kind, such as "thinking" or "item
    # of a team".
    left_out: Counter[str] = field(default_factory=Counter)
    skipped: list[Problem] = field(default_factory=list)
    # Number of JSON files that were not read, for each file name. All files in an export's folder
    # `frames` are counted together, under the name of the folder.
    not_read: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        parts = [
            self.messages and format_count(self.messages, "new message"),
            self.updated and format_count(self.updated, "completed message"),
            self.checkpoints and format_count(self.checkpoints, "new checkpoint"),
            self.items and format_count(self.items, "new item"),
            self.refused and f"{format_count(len(self.refused), 'item')} refused",
            self.unchanged and format_count(self.unchanged, "unchanged conversation"),
            self.empty and f"{format_count(self.empty, 'other conversation')} without messages",
            self.unread
            and f"{format_count(self.unread, 'other conversation')} without readable messages",
            self.memories is not None and self._format_memory_count(),
            self.quarantined and f"{self.quarantined:,} in quarantine",
            self.forgotten
            and f"{format_count(self.forgotten, 'memory', 'memories')} forgotten earlier and not "
            "stored again",
            self.records
            and f"{format_count(self.records, 'record')} of runs and crons, which are not executed",
        ]
        counts = ", ".join(str(part) for part in parts if part)
        owners = f" ({_format_counts_by_user(self.users)})" if self._names_others else ""
        return (
            f"{format_count(self.conversations, 'conversation')}{owners}: {counts or 'no messages'}"
        )

    @property
    def is_empty(self) -> bool:
        """True if the import found no conversations, no store items and no new memories."""
        return not (self.conversations or self.items or self.known_items or self.memories)

    def add_thread_counts(self, report: ImportReport) -> None:
        """Add the thread and checkpoint counts of a database import to the totals."""
        self.conversations += report.threads
        self.checkpoints += report.checkpoints
        self.unchanged += report.unchanged

    def add_store_item_counts(self, report: TransferReport) -> None:
        """Add the item counts of a store import to the totals, and record the refused items."""
        self.items += report.items
        self.refused += report.refused
        self.known_items += report.skipped + len(report.refused)

    def add_memory_counts(
        self, user: str, *, added: int, quarantined: int, forgotten: int = 0
    ) -> None:
        """Add the counts of memories that were extracted or imported for a user to the totals."""
        self.memories = (self.memories or 0) + added
        self.by_user += Counter({user: added})
        self.quarantined += quarantined
        self.forgotten += forgotten

    @property
    def _names_others(self) -> bool:
        return bool(self.users.keys() - {self.user})

    def _format_memory_count(self) -> str:
        if self.memories and self._names_others:
            noun = "memory" if max(self.by_user.values()) == 1 else "memories"
            return _format_counts_by_user(self.by_user).replace(" of ", f" {noun} of ", 1)
        return format_count(self.memories or 0, "memory", "memories")

    def print_notes_about_unimported_content(self) -> None:
        """Print notes to stderr about content that was not imported, grouped by kind."""
        from perdure.cli.store import format_namespace

        problems = Counter(problem.reason for problem in self.skipped)
        files = [f"{name} ({n})" if n > 1 else name for name, n in self.not_read.items()]
        refused = [f"{key!r} in {format_namespace(namespace)}" for namespace, key in self.refused]
        notes = [
            self.left_out and f"left out: {_format_most_common_kinds(self.left_out)}",
            problems and f"problems: {_format_most_common_kinds(problems)}",
            problems and "pass --json to see where these problems are",
            files and f"files that were not read: {', '.join(files)}",
            self.outdated
            and f"{format_count(self.outdated, 'message')} that an earlier import skipped or cut "
            "cannot be completed, because the thread has continued without them; to import the "
            "complete conversation, pass another --prefix",
            self.is_empty and "no message was read",
            refused
            and "refused, because they were deleted or forgotten in this database: "
            f"{join_first(refused, _MAX_LISTED_ITEMS)}",
            self.users[""]
            and "'perdure worker' extracts no memories from conversations without a user; to "
            "extract them as your own memories, import the conversations without --later",
            self.forgotten
            and "texts that were deleted or forgotten in this database are not remembered again; "
            "'perdure memories add' adds such a text by hand",
            self.quarantined
            and "'perdure memories quarantine' lists the memories that wait for a review",
        ]
        for note in filter(None, notes):
            print_note(str(note))


def _format_most_common_kinds(counts: Counter[str]) -> str:
    """Format the counts of up to 20 kinds, highest first, such as "thinking (3), image (1)"."""
    return join_first([f"{kind} ({count})" for kind, count in counts.most_common()], 20)


def _format_counts_by_user(counts: Counter[str]) -> str:
    """Format counts per user, highest first, such as "12 of ann, 3 of me"."""
    top_counts = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0] or "nobody"))[
        :_MAX_LISTED_USERS
    ]
    parts = [f"{count:,} of {user or 'nobody'}" for user, count in top_counts]
    if others := len(counts) - len(top_counts):
        rest = counts.total() - sum(count for _, count in top_counts)
        parts.append(f"{rest:,} of {format_count(others, 'other')}")
    return ", ".join(parts)
