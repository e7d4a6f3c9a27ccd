"""Store the server's assistants, with their versions, in the checkpointer's database.

Clients supply the content of each version of an assistant. If the database has an encryption key,
the content of an assistant version is stored encrypted. Once an assistant version is stored, its
content never changes. Updating an assistant adds a version with the next higher number.

The *latest* version of an assistant is the one that is in use, as in LangGraph's API. The latest
version is the one that was added last, unless a client has chosen an earlier version.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from perdure.run_tables.server_table import ServerTable
from perdure.storage.encryption import AssociatedData, Seal
from perdure.storage.flow import Flow, LastRequest, Row, Statement


class AssistantRow(NamedTuple):
    """A version of an assistant.

    Attributes:
        created_at: In the rows of `list_versions`, the time at which the version was created, in
            seconds since 1970. In all other rows, the time at which the assistant was created.
        latest_since: The time at which the version became the latest one, in seconds since 1970, or
            None if it is not the latest version.
        content: The fields that a client supplied, such as graph, config and metadata.
    """

    assistant_id: str
    version: int
    created_at: float
    latest_since: float | None
    content: dict[str, Any]


def build_assistant_associated_data(assistant_id: str, version: int) -> AssociatedData:
    """Return the associated data that binds the ciphertext of an assistant version to its row."""
    return ("assistant", assistant_id, version)


def decrypt_assistant(seal: Seal, row: Row) -> AssistantRow:
    """Decrypt a version of an assistant from its row.

    Raises:
        CorruptRecord: The row is damaged or was tampered with.
    """
    assistant_id, version, created_at, latest_since, sealed, *_ = row
    associated_data = build_assistant_associated_data(assistant_id, version)
    content = json.loads(seal.unseal(sealed, associated_data))
    return AssistantRow(assistant_id, version, created_at, latest_since, content)


class AssistantTable(ServerTable):
    """Reads and writes the assistants table of a checkpointer's database."""

    async def get(self, assistant_id: str) -> AssistantRow | None:
        """Return the latest version of an assistant, or None if the assistant does not exist."""
        rows = await self._read_and_decrypt_rows(decrypt_assistant, "latest_version", assistant_id)
        return rows[0] if rows else None

    async def list_assistants(self) -> list[AssistantRow]:
        """Return the latest version of each assistant, most recently created assistant first."""
        return await self._read_and_decrypt_rows(decrypt_assistant, "latest_versions")

    async def list_versions(self, assistant_id: str) -> list[AssistantRow]:
        """Return all versions of an assistant, highest version number first."""
        return await self._read_and_decrypt_rows(decrypt_assistant, "versions_of", assistant_id)

    async def create(self, assistant_id: str, content: Mapping[str, Any]) -> bool:
        """Store the first version of an assistant, unless an assistant with this id already exists.

        Returns:
            Whether the assistant was created.
        """

        def flow() -> Flow[bool]:
            if (yield self._sql("latest_version", assistant_id)):
                return False
            yield LastRequest(self._build_version_insert(assistant_id, 1, content, time.time()))
            return True

        return await self._database.awrite(flow, exclusive_names=(assistant_id,))

    async def add_version(
        self, assistant_id: str, build_content: Callable[[AssistantRow], dict[str, Any]]
    ) -> AssistantRow | None:
        """Add a version to an assistant and make it the latest one.

        Args:
            assistant_id: The assistant.
            build_content: A function that receives the latest version, as the transaction reads
                it, and returns the content of the new version. If the function raises an
                exception, nothing is stored.

        Returns:
            The new version, or None if the assistant does not exist.
        """

        def flow() -> Flow[AssistantRow | None]:
            rows = yield self._sql("latest_version", assistant_id)
            if not rows:
                return None
            # The last column is the highest version number of the assistant. The version in use has
            # a lower number if a client has switched to an earlier version.
            previous, version, now = (
                decrypt_assistant(self._seal, rows[0]),
                rows[0][-1] + 1,
                time.time(),
            )
            content = build_content(previous)
            yield LastRequest(self._build_version_insert(assistant_id, version, content, now))
            return previous._replace(version=version, latest_since=now, content=content)

        return await self._database.awrite(flow, exclusive_names=(assistant_id,))

    async def set_latest_version(self, assistant_id: str, version: int) -> None:
        """Make a version of an assistant the latest one. The version must exist."""
        await self._execute_statement(
            assistant_id, "set_latest", version, time.time(), assistant_id
        )

    async def delete(self, assistant_id: str) -> None:
        """Delete an assistant with all its versions."""
        await self._execute_statement(assistant_id, "drop_assistant", assistant_id)

    def _build_version_insert(
        self, assistant_id: str, version: int, content: Mapping[str, Any], now: float
    ) -> list[Statement]:
        """Build the statements that insert a version of an assistant and mark it as the latest."""
        sealed = self._seal.seal(
            json.dumps(content).encode(), build_assistant_associated_data(assistant_id, version)
        )
        return [
            self._sql("add_version", assistant_id, version, now, sealed),
            self._sql("set_latest", version, now, assistant_id),
        ]
