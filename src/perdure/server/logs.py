"""The audit log, and logs on stderr.

The audit log says who changed or erased what, and whether it was allowed: a record for every
request and tool whose action changes something, unless it is refused for its host, site, rate or
content type. They are written by what surrounds requests and tools, not by endpoints. What a
record is about is what `Call.permit` was asked; an endpoint adds the hashes of a receipt by
`Call.record`. There is no content in it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from perdure.errors import ConfigurationError, StorageFull

if TYPE_CHECKING:
    from perdure.server.access import Action
    from perdure.server.call import Call

_LOG: Final = logging.getLogger("perdure.audit")
_MIN_FREE_BYTES: Final = 1_000_000  # bytes of a disk that are kept for records
SAFE_METHODS: Final = ("GET", "HEAD", "OPTIONS")
"""Methods that change nothing."""
# a run is a turn, which the thread's own history records
_UNRECORDED_ACTIONS: Final = ("read", "search", "get", "list_namespaces", "create_run")


def is_change(action: Action | None, method: str = "POST") -> bool:
    """Whether an action is one that is recorded."""
    return (
        action is not None
        and action.split(":")[-1] not in _UNRECORDED_ACTIONS
        and method not in SAFE_METHODS
    )


class Audit:
    """Writes records to a file of JSON lines, or to the logger `perdure.audit`.

    A line is on the disk before the reply is sent. On a disk that is almost full nothing may be
    changed; a change whose record cannot be written for another reason is answered with an error.
    Several processes may write to one file; lines are only ever added to it.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        self._file, self._path = None, path
        if path is not None:
            try:
                self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
                os.fsync(self._file)  # what is no file has no disk
            except OSError as exc:
                raise ConfigurationError(
                    f"the audit log {str(path)!r} cannot be written: {exc}; give a file"
                ) from exc

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    async def check_room(self, action: Action | None, method: str = "POST") -> None:
        """Refuse a change that could not be recorded.

        Raises:
            StorageFull: There is no room for records.
        """
        if self._path is not None and is_change(action, method):
            free = (await asyncio.to_thread(shutil.disk_usage, self._path)).free
            if free < _MIN_FREE_BYTES:
                raise StorageFull(
                    f"nothing is changed: the disk of the audit log has {free:,} bytes left; "
                    f"expected {_MIN_FREE_BYTES:,} or more"
                )

    async def record(
        self,
        call: Call | None,
        action: Action | None,
        status: int,
        request_id: str | None,
        path: Mapping[str, Any] | None = None,
    ) -> None:
        """Record a call for an action, of nobody if it is None; `path` has the ids of a path."""
        about = [each for each in call.recorded if each] if call else []
        if path and not any(path.items() <= each.items() for each in about):
            about = [dict(path), *about]
        record = {
            "at": datetime.now(UTC).isoformat(),
            "user": call and call.identity.user,
            "acting_for": call and call.identity.acting_for,
            "tenant": call and call.identity.tenant,
            "action": action,
            "outcome": "ok" if status < 400 else "denied" if status in (401, 403) else "failed",
            "status": status,
            "request_id": request_id,
            "about": about or None,
        }
        line = _encode_line({name: each for name, each in record.items() if each is not None})
        await asyncio.shield(asyncio.to_thread(self._append_line, f"{line}\n".encode()))

    def _append_line(self, line: bytes) -> None:
        if self._file is None:
            _LOG.info(line.decode().rstrip())
            return
        if os.write(self._file, line) < len(line):
            raise OSError("the audit log has a part of a record only: is the disk full?")
        os.fsync(self._file)


def _encode_line(fields: dict[str, Any]) -> str:
    from perdure.server.reply import (
        encode_json,
        escape_unprintable,
    )  # imported late: perdure mcp starts faster

    return escape_unprintable(
        encode_json(fields).decode()
    )  # JSON may have U+2028, where some tools end a line


class TextLines(logging.Formatter):
    """A log record as text, whose lines but the first are indented; a terminal shows all of it."""

    def format(self, record: logging.LogRecord) -> str:
        """The lines."""
        from perdure.server.reply import escape_unprintable

        return escape_unprintable(super().format(record)).replace("\n", "\n  ")


class JSONLines(logging.Formatter):
    """A log record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        fields: dict[str, Any] = getattr(record, "fields", None) or {"message": record.getMessage()}
        if record.exc_info:
            fields = {**fields, "error": self.formatException(record.exc_info)}
        at = datetime.fromtimestamp(record.created, UTC).isoformat()
        return _encode_line(
            {"time": at, "level": record.levelname, "logger": record.name, **fields}
        )


def log_to_stderr(style: Literal["text", "json"] = "text") -> None:
    """Send all logs of the process to stderr, those of perdure from INFO on."""
    handler = logging.StreamHandler(sys.stderr)
    text = TextLines("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(JSONLines() if style == "json" else text)
    logging.basicConfig(handlers=[handler], level=logging.WARNING)
    logging.getLogger("perdure").setLevel(logging.INFO)
