"""The report of an import, as text and as JSON."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Final

from perdure.checkpointers.reports import ImportReport
from perdure.cli.conversation import Problem
from perdure.cli.output import counted, note
from perdure.stores.base import Namespace, TransferReport

_MAX_LISTED_USERS: Final = 5  # the most users that a report names
_MAX_LISTED_ITEMS: Final = 20  # the most refused items that a report names


@dataclass
class ConversationsReport:
    """What an import did: each message counts if it is new, each conversation if it has one."""

    conversations: int = 0
    messages: int = 0
    updated: int = 0  # messages to which this import added what a former one left out
    outdated: int = 0  # such messages that are no longer in the state, so unchanged
    unchanged: int = 0
    empty: int = 0  # conversations without messages
    unread: int = 0  # conversations with messages of which none could be read
    checkpoints: int = 0  # new checkpoints, from databases
    items: int = 0  # new items, from databases
    known_items: int = 0  # items that exist already, or were deleted here
    records: int = 0  # runs and crons of an archive, which are not run
    memories: int | None = None  # None if none are to be made, or a worker makes them
    quarantined: int = 0
    forgotten: int = 0  # memories that were not made, as they were deleted or forgotten here
    user: str = ""  # the user of the settings, to whom belongs what names no user
    users: Counter[str] = field(default_factory=Counter)  # conversations by user; "" for no user
    by_user: Counter[str] = field(default_factory=Counter)  # new memories by user
    refused: list[tuple[Namespace, str]] = field(default_factory=list)  # they have a tombstone here
    left_out: Counter[str] = field(default_factory=Counter)  # by kind, such as thoughts
    skipped: list[Problem] = field(default_factory=list)
    not_read: Counter[str] = field(default_factory=Counter)  # files, by name or folder

    def __str__(self) -> str:
        parts = [
            self.messages and counted(self.messages, "new message"),
            self.updated and counted(self.updated, "completed message"),
            self.checkpoints and counted(self.checkpoints, "new checkpoint"),
            self.items and counted(self.items, "new item"),
            self.refused and f"{counted(len(self.refused), 'item')} refused",
            self.unchanged and f"{self.unchanged:,} unchanged",
            self.empty and f"{self.empty:,} more without messages",
            self.unread and f"{self.unread:,} more of which no message could be read",
            self.memories is not None and self._format_memory_count(),
            self.quarantined and f"{self.quarantined:,} in quarantine",
            self.forgotten and f"{counted(self.forgotten, 'memory', 'memories')} forgotten before",
            self.records and f"{self.records:,} recorded runs and crons, which are not run",
        ]
        counts = ", ".join(str(part) for part in parts if part)
        owners = f" ({_format_counts(self.users)})" if self._names_others else ""
        return f"{counted(self.conversations, 'conversation')}{owners}: {counts or 'no messages'}"

    @property
    def is_empty(self) -> bool:
        """Whether no message was read, and no thread or item of a database."""
        return not (self.conversations or self.items or self.known_items or self.memories)

    def count_threads(self, threads: ImportReport) -> None:
        """Count what was taken over from a database."""
        self.conversations += threads.threads
        self.checkpoints += threads.checkpoints
        self.unchanged += threads.unchanged

    def count_items(self, items: TransferReport) -> None:
        """Count the items that were taken over from a store, and name those that were refused."""
        self.items += items.items
        self.refused += items.refused
        self.known_items += items.skipped + len(items.refused)

    @property
    def _names_others(self) -> bool:
        return bool(self.users.keys() - {self.user})

    def _format_memory_count(self) -> str:
        if self.memories and self._names_others:
            noun = "memory" if max(self.by_user.values()) == 1 else "memories"
            return _format_counts(self.by_user).replace(" of ", f" {noun} of ", 1)
        return counted(self.memories or 0, "memory", "memories")

    def print_notes(self) -> None:
        """Print on stderr what was not imported, by kind."""
        problems = Counter(problem.reason for problem in self.skipped)
        for heading, kinds in (("left out", self.left_out), ("not as expected", problems)):
            if kinds:
                listed_kinds = ", ".join(f"{kind} ({count})" for kind, count in kinds.most_common(20))
                note(f"{heading}: {listed_kinds}{', …' if len(kinds) > 20 else ''}")
        if problems:
            note("--json lists where")
        if self.not_read:
            names = (f"{name} ({n})" if n > 1 else name for name, n in self.not_read.items())
            note(f"files that were not read: {', '.join(names)}")
        if self.outdated:
            note(
                f"{counted(self.outdated, 'message')} that a former import left out, wholly or in "
                "part, cannot be added, because the thread went on elsewhere; to import the whole "
                "conversation, pass another --prefix"
            )
        if self.is_empty:
            note("no message was read")
        if self.refused:
            from perdure.cli.store import format_namespace

            names = (
                f"{key!r} in {format_namespace(namespace)}"
                for namespace, key in self.refused[:_MAX_LISTED_ITEMS]
            )
            more = ", …" if len(self.refused) > _MAX_LISTED_ITEMS else ""
            note(f"deleted or forgotten here, and therefore refused: {', '.join(names)}{more}")
        if self.users[""]:
            note(
                "'perdure worker' makes no memories of conversations without a user; without "
                "--later, their memories become yours"
            )
        self._print_memory_notes()

    def _print_memory_notes(self) -> None:
        """Print on stderr which memories were not made, and how to have them."""
        if self.forgotten:
            note(
                "texts that were deleted or forgotten here are not remembered again; 'perdure "
                "memories add' adds one by hand"
            )
        if self.quarantined:
            note("'perdure memories quarantine' lists what waits to be reviewed")


def _format_counts(counts: Counter[str]) -> str:
    """Format counts by user, the highest first, such as "12 of ann, 3 of me"."""
    listed = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0] or "nobody"))[:_MAX_LISTED_USERS]
    parts = [f"{count:,} of {user or 'nobody'}" for user, count in listed]
    if others := len(counts) - len(listed):
        rest = counts.total() - sum(count for _, count in listed)
        parts.append(f"{rest:,} of {counted(others, 'other')}")
    return ", ".join(parts)
