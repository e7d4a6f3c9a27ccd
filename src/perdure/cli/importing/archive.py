"""Read store items and run records from an archive written by `perdure export --user`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, Final

from perdure.errors import PerdureError
from perdure.memory.long_term.person_archive import (
    is_archive_header,
    is_item_version,
    is_run_or_cron_record,
)
from perdure.memory.long_term.person_namespaces import CHAT_LABEL, select_templates_to_record
from perdure.memory.long_term.records import RESERVED_LABEL
from perdure.memory.namespace_templates import PERSONAL_LABELS, TEAMS, Template
from perdure.stores.base import Namespace
from perdure.stores.namespaces import check_namespace_and_build_path

# Maximum number of namespace templates that are read from an archive's header.
_MAX_TEMPLATES: Final = 100


class ArchiveLines:
    """Collects the store items in a person's archive, and counts the runs and crons in it.

    Attributes:
        is_archive: Whether the file began with the header of an archive.
        records: The number of run and cron records in the archive. Runs and crons are counted but
            never executed.
        left_out: The number of items that are not imported, for each reason.
    """

    def __init__(self) -> None:
        self.is_archive = False
        self.records = 0
        self.left_out = Counter[str]()
        self._user = ""
        # Maps each user to a list of namespace templates. If several archive headers name the same
        # user, the list contains the templates from all of these headers.
        self._templates_by_user: dict[str, list[Any]] = {}
        self._items: list[Mapping[str, Any]] = []

    def try_to_add_archive_line(self, line: Mapping[str, Any]) -> bool:
        """Process a line if it belongs to an archive, and return whether it was processed.

        The method returns False and ignores the line if the line contains a thread. The method does
        the same if no archive header precedes the line in the file.
        """
        if is_archive_header(line):
            self.is_archive, self._user = True, line["user"]
            # The field may be missing or malformed, because the archive may have been forged.
            templates = line.get("templates")
            own_templates = self._templates_by_user.setdefault(self._user, [])
            own_templates += templates if isinstance(templates, list) else []
        elif not self.is_archive:
            return False
        elif is_item_version(line):
            reason = self._find_reason_to_leave_out(line["namespace"])
            if reason is None:
                self._items.append(line)
            else:
                self.left_out[reason] += 1
        elif is_run_or_cron_record(line):
            self.records += 1
        else:
            return False
        return True

    def _find_reason_to_leave_out(self, namespace: list[Any]) -> str | None:
        """Return why an item of a namespace is not imported, or None if it is imported.

        An item is imported only if its namespace can belong to the person named in the archive's
        header. Each item's namespace is checked, because the archive may have been forged.

        Items in team namespaces are not imported, even if the person wrote them.
        """
        labels = namespace[2:] if namespace[:1] == [RESERVED_LABEL] else namespace
        # Accept every chat namespace. The second label of a chat namespace is the id of a
        # conversation. A chat namespace therefore does not reliably show which person the
        # conversation belongs to.
        if labels[:1] == [CHAT_LABEL]:
            return None
        if labels[:1] == [TEAMS]:
            return "item of a team"
        if labels[:1] and labels[0] in PERSONAL_LABELS:
            return None if labels[1:2] == [self._user] else "item of another person"
        return None if self._user in labels else "item without the person's name"

    def find_templates_to_record(self) -> list[Template]:
        """Select the namespace templates that must be recorded so that imported items can be found.

        The namespace templates come from the archive's headers.

        Each template is checked, because the archive may have been forged. A template that is
        invalid, is too long, or matches no namespace of an imported item is left out and counted in
        `left_out`.
        """
        namespaces = {tuple(map(str, item["namespace"])) for item in self._items}
        templates_to_record = dict[Namespace, Template]()
        for user, header_templates in self._templates_by_user.items():
            templates = []
            for labels in header_templates[:_MAX_TEMPLATES]:
                with suppress(PerdureError):
                    check_namespace_and_build_path(labels)
                    templates.append(Template(labels).labels)
            selected = select_templates_to_record(templates, namespaces, user)
            templates_to_record |= {labels: Template(labels) for labels in selected}
            if refused_count := len(header_templates) - len(selected):
                self.left_out["namespace template"] += refused_count
        return [*templates_to_record.values()]

    def iter_item_lines(self) -> Iterator[str]:
        """Yield the items as JSON lines, in the format that `WholeStore.import_lines` reads."""
        yield from map(json.dumps, self._items)
