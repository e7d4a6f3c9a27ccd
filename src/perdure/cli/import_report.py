"""An import report, as text and as JSON."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Final

from perdure.checkpointers.reports import ImportReport
from perdure.cli.conversation import Problem
from perdure.cli.output import format_count, print_note
from perdure.stores.base import Namespace, TransferReport

# Maximum number of users that a report lists by name. Any further users are only counted.
_MAX_LISTED_USERS: Final = 5
# Maximum number of refused items listed in a report.
_MAX_LISTED_ITEMS: Final = 20


@dataclass
class ConversationsReport:
    """The counts of an import.

    `messages` counts only messages that were not stored before. `conversations` counts only
    conversations that contain messages.
    """

    conversations: int = 0
    messages: int = 0
    # Number of messages that an earlier import skipped or stored only partially, and that this
    # import has completed.
    updated: int = 0
    # Number of messages that an earlier import skipped or stored only partially, and that this
    # import could not complete because the thread's state has changed since then.
    outdated: int = 0
    # Number of conversations, or threads of a database, to which this import added nothing.
    unchanged: int = 0
    empty: int = 0  # Number of conversations without messages.
    unread: int = 0  # Number of conversations in which no message could be read.
    checkpoints: int = 0  # Number of new checkpoints that were imported from databases.
    items: int = 0  # Number of new store items that were imported from databases.
    # Number of items and memories that were not added, for example because this database already
    # contains them. The items in `refused` are included.
    known_items: int = 0
    # Number of run and cron records in imported archives. Runs and crons are counted but never
    # executed.
    records: int = 0
    # Number of new memories, or None if this import extracts no memories.
    memories: int | None = None
    quarantined: int = 0
    # Number of memories that were not stored because this database contains tombstones for them.
    forgotten: int = 0
    # The configured user. A conversation whose thread has no user is counted for the configured
    # user. With --later, such a conversation is counted for nobody.
    user: str = ""
    # Number of conversations per user. The key "" stands for nobody.
    users: Counter[str] = field(default_factory=Counter)
    by_user: Counter[str] = field(default_factory=Counter)  # Number of new memories of each user.
    # Namespaces and keys of items that were refused because a tombstone exists for them.
    refused: list[tuple[Namespace, str]] = field(default_factory=list)
    # Number of skipped message parts of each kind, such as "thinking".
    left_out: Counter[str] = field(default_factory=Counter)
    skipped: list[Problem] = field(default_factory=list)
    # Number of JSON files that were not read, keyed by file name, or by folder name for `frames`
    # folders.
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
        problems = Counter(problem.reason for problem in self.skipped)
        for heading, kinds in (("left out", self.left_out), ("problems", problems)):
            if kinds:
                listed_kinds = ", ".join(
                    f"{kind} ({count})" for kind, count in kinds.most_common(20)
                )
                print_note(f"{heading}: {listed_kinds}{', …' if len(kinds) > 20 else ''}")
        if problems:
            print_note("pass --json to see where these problems are")
        if self.not_read:
            names = (f"{name} ({n})" if n > 1 else name for name, n in self.not_read.items())
            print_note(f"files that were not read: {', '.join(names)}")
        if self.outdated:
            print_note(
                f"{format_count(self.outdated, 'message')} that an earlier import skipped or cut "
                "cannot be completed, because the thread has continued without them; to import the "
                "complete conversation, pass another --prefix"
            )
        if self.is_empty:
            print_note("no message was read")
        if self.refused:
            from perdure.cli.store import format_namespace

            names = (
                f"{key!r} in {format_namespace(namespace)}"
                for namespace, key in self.refused[:_MAX_LISTED_ITEMS]
            )
            more = ", …" if len(self.refused) > _MAX_LISTED_ITEMS else ""
            print_note(
                "refused, because they were deleted or forgotten in this database: "
                f"{', '.join(names)}{more}"
            )
        if self.users[""]:
            print_note(
                "'perdure worker' extracts no memories from conversations without a user; to "
                "extract them as your own memories, import the conversations without --later"
            )
        self._print_memory_notes()

    def _print_memory_notes(self) -> None:
        """Explain on stderr why some memories were not stored, and how the user can store them."""
        if self.forgotten:
            print_note(
                "texts that were deleted or forgotten in this database are not remembered again; "
                "'perdure memories add' adds such a text by hand"
            )
        if self.quarantined:
            print_note("'perdure memories quarantine' lists the memories that wait for a review")


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
