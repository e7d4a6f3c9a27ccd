"""Assistants of the server as rows of the saver's database, in versions.

What clients gave a version is sealed. A version never changes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from perdure.checkpointers.server_table import ServerTable
from perdure.storage.encryption import Place
from perdure.storage.flow import Flow, Last, Row, Statement


class AssistantRow(NamedTuple):
    """A version of an assistant.

    Attributes:
        created_at: When it was made; of the latest version, when the assistant was.
        since: When it became the latest version; None: it is not.
        content: What clients gave it.
    """

    assistant_id: str
    version: int
    created_at: float
    since: float | None
    content: dict[str, Any]


def assistant_place(assistant_id: str, version: int) -> Place:
    """The data that binds a version to its row."""
    return ("assistant", assistant_id, version)


class AssistantTable(ServerTable):
    """The assistants in a checkpointer's database."""

    async def get(self, assistant_id: str) -> AssistantRow | None:
        """The latest version of an assistant; None: there is none."""
        found = await self._read("latest_version", assistant_id)
        return found[0] if found else None

    async def all(self) -> list[AssistantRow]:
        """The latest version of each, the newest assistant first."""
        return await self._read("latest_versions")

    async def versions(self, assistant_id: str) -> list[AssistantRow]:
        """All versions of an assistant, newest first."""
        return await self._read("versions_of", assistant_id)

    async def create(self, assistant_id: str, content: Mapping[str, Any]) -> bool:
        """Store the first version of an assistant, unless there is one of this id."""

        def flow() -> Flow[bool]:
            if (yield self._sql("latest_version", assistant_id)):
                return False
            yield Last(self._added(assistant_id, 1, content, time.time()))
            return True

        return await self._database.awrite(flow, exclusive=(assistant_id,))

    async def change(
        self, assistant_id: str, change: Callable[[AssistantRow], dict[str, Any]]
    ) -> AssistantRow | None:
        """Make a new version of an assistant, which is the latest; None: there is none.

        Args:
            assistant_id: Whose.
            change: Its content, of the version that is the latest now; what it raises ends this.
        """

        def flow() -> Flow[AssistantRow | None]:
            rows = yield self._sql("latest_version", assistant_id)
            if not rows:
                return None
            before, version, now = self._opened(rows[0]), rows[0][-1] + 1, time.time()
            content = change(before)
            yield Last(self._added(assistant_id, version, content, now))
            return before._replace(version=version, since=now, content=content)

        return await self._database.awrite(flow, exclusive=(assistant_id,))

    async def set_latest(self, assistant_id: str, version: int) -> None:
        """Have another version be the latest."""
        latest = self._sql("set_latest", version, time.time(), assistant_id)
        await self._write([latest], (assistant_id,))

    async def delete(self, assistant_id: str) -> None:
        """Delete an assistant with all its versions."""
        await self._write([self._sql("drop_assistant", assistant_id)], (assistant_id,))

    def _added(
        self, assistant_id: str, version: int, content: Mapping[str, Any], now: float
    ) -> list[Statement]:
        place = assistant_place(assistant_id, version)
        sealed = self._seal.seal(json.dumps(content).encode(), place)
        return [
            self._sql("add_version", assistant_id, version, now, sealed),
            self._sql("set_latest", version, now, assistant_id),
        ]

    async def _read(self, name: str, *params: Any) -> list[AssistantRow]:
        return [self._opened(row) for row in await self._rows(name, *params)]

    def _opened(self, row: Row) -> AssistantRow:
        assistant_id, version, created_at, since, content, *_ = row
        given = json.loads(self._seal.open(content, assistant_place(assistant_id, version)))
        return AssistantRow(assistant_id, version, created_at, since, given)
