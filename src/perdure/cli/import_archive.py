"""The archive of a person, as `perdure export --user` writes it: items, and a record of runs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from perdure.memory.person_archive import is_header, is_item, is_record
from perdure.memory.person_namespaces import CHAT_LABEL
from perdure.memory.recorded_templates import PERSONAL_LABELS
from perdure.memory.records import RESERVED_LABEL
from perdure.memory.run_config import TEAMS


class ArchiveLines:
    """The lines of a file that are part of an archive, besides the threads.

    Attributes:
        is_archive: Whether the file began with the header of an archive.
        records: The number of runs and crons, which are never run or scheduled.
        left_out: The number of items that are not of the person whom the header names.
    """

    def __init__(self) -> None:
        self.is_archive = False
        self.records = self.left_out = 0
        self._user = ""
        self._items: list[Mapping[str, Any]] = []

    def add_line(self, value: Mapping[str, Any]) -> bool:
        """Keep an object if it is of an archive and no thread, and return whether it is."""
        if is_header(value):
            self.is_archive, self._user = True, value["user"]
        elif not self.is_archive:
            return False
        elif is_item(value):
            if self._may_belong_to_person(value["namespace"]):
                self._items.append(value)
            else:
                self.left_out += 1
        elif is_record(value):
            self.records += 1
        else:
            return False
        return True

    def _may_belong_to_person(self, namespace: list[Any]) -> bool:
        """Return whether a namespace can be the person's, whatever the archive says.

        What the person wrote for a team stays with the database of the team.
        """
        labels = namespace[2:] if namespace[:1] == [RESERVED_LABEL] else namespace
        if labels[:1] == [CHAT_LABEL]:
            return True
        if labels[:1] and labels[0] in (*PERSONAL_LABELS, TEAMS):
            return labels[0] != TEAMS and labels[1:2] == [self._user]
        return self._user in labels

    def iter_item_lines(self) -> Iterator[str]:
        """Yield the items as lines for `WholeStore.import_lines`."""
        yield from map(json.dumps, self._items)
