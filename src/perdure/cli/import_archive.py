"""Read store items and run records from an archive written by `perdure export --user`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from perdure.memory.person_archive import is_archive_header, is_item_version, is_run_or_cron_record
from perdure.memory.person_namespaces import CHAT_LABEL
from perdure.memory.recorded_templates import PERSONAL_LABELS
from perdure.memory.records import RESERVED_LABEL
from perdure.memory.run_config import TEAMS


class ArchiveLines:
    """Collects the store items in a person's archive, and counts the runs and crons in it.

    Attributes:
        is_archive: Whether the file began with the header of an archive.
        records: The number of run and cron records in the archive. Runs and crons are counted but
            never executed.
        left_out: The number of items that are not imported, because they belong to a team or to
            another person than the one whom the header names.
    """

    def __init__(self) -> None:
        self.is_archive = False
        self.records = self.left_out = 0
        self._user = ""
        self._items: list[Mapping[str, Any]] = []

    def try_to_add_archive_line(self, line: Mapping[str, Any]) -> bool:
        """Process a line if it belongs to an archive, and return whether it was processed.

        Return False, without adding anything, if the line is a thread or the file is not an
        archive.
        """
        if is_archive_header(line):
            self.is_archive, self._user = True, line["user"]
        elif not self.is_archive:
            return False
        elif is_item_version(line):
            if self._may_namespace_belong_to_archived_person(line["namespace"]):
                self._items.append(line)
            else:
                self.left_out += 1
        elif is_run_or_cron_record(line):
            self.records += 1
        else:
            return False
        return True

    def _may_namespace_belong_to_archived_person(self, namespace: list[Any]) -> bool:
        """Return whether a namespace can belong to the person named in the archive's header.

        Each item's namespace is checked, because the archive may have been forged.

        Items in team namespaces are not imported, even if the person wrote them.
        """
        labels = namespace[2:] if namespace[:1] == [RESERVED_LABEL] else namespace
        # The second label is a conversation id, which does not necessarily contain the person's
        # name.
        if labels[:1] == [CHAT_LABEL]:
            return True
        if labels[:1] and labels[0] in (*PERSONAL_LABELS, TEAMS):
            return labels[0] != TEAMS and labels[1:2] == [self._user]
        return self._user in labels

    def iter_item_lines(self) -> Iterator[str]:
        """Yield the items as JSON lines, in the format that `WholeStore.import_lines` reads."""
        yield from map(json.dumps, self._items)
