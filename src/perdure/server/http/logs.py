"""The audit log, and the formatters for logs on stderr.

The audit log records which user changed or erased which data, and whether the user was permitted to
do so. The audit log has a record for each request or tool call whose action modifies data. Requests
that start runs are not recorded. If a request on behalf of another person is refused with status
403, the request is always recorded. This rule also applies to actions that are otherwise not
recorded, and to callers who may not act for others. Requests that `guard.py` rejects before the
user is identified are not recorded. `guard.py` rejects requests with a wrong host, origin or
content type, and clients that exceed the rate limit. Audit records are written by `guard.py` and
`mcp.py`, and by `event_streams.py` for refused commands of a websocket. The object ids in an audit
record are those that the endpoint passed to `Call.authorize_action_arguments`. After erasing texts,
an endpoint adds hashes of the erased texts to the audit record by calling `Call.record_for_audit`.
Audit records do not contain the content of messages or memories.
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
    from perdure.server.http.access import Action, Identity
    from perdure.server.http.call import Call

_LOG: Final = logging.getLogger("perdure.audit")
# Minimum free space, in bytes, on the disk of the audit log file. If less is available, the server
# rejects requests that must be recorded in the audit log.
_MIN_FREE_BYTES: Final = 1_000_000
SAFE_METHODS: Final = ("GET", "HEAD", "OPTIONS")
"""The HTTP methods that change nothing."""
# Names of the actions that are not recorded in the audit log, without their prefixes (such as
# `store:`). Run creation is not recorded, because a thread's history already shows its runs.
_UNRECORDED_ACTIONS: Final = ("read", "search", "get", "list_namespaces", "create_run")


def is_audited_change(action: Action | None, method: str = "POST") -> bool:
    """Return whether a request for an action must be recorded in the audit log.

    Every action that modifies data is recorded, except the creation of runs.
    """
    return (
        action is not None
        and action.split(":")[-1] not in _UNRECORDED_ACTIONS
        and method not in SAFE_METHODS
    )


def is_refused_while_acting(identity: Identity | None, status: int) -> bool:
    """Return whether a request on behalf of another person was refused with status 403.

    Such a request is recorded in the audit log even if its action changes nothing.

    Args:
        identity: The caller and the person, or None if the caller is unknown.
        status: The HTTP status of the reply.
    """
    return status == 403 and identity is not None and identity.acting_for is not None


class Audit:
    """Writes audit records to a JSON Lines file, or to the logger `perdure.audit`.

    An audit record is flushed to disk before the reply is sent. If the disk is almost full, the
    server rejects requests that would have to be recorded in the audit log. If writing an audit
    record fails unexpectedly, the client receives an error, although the requested change was made.
    Several processes can safely write to the same audit log, because lines are only appended to it.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        self._file, self._path = None, path
        if path is not None:
            try:
                # Without O_BINARY, Windows would end each line with a carriage return.
                flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_BINARY", 0)
                self._file = os.open(path, flags, 0o600)
                # `fsync` fails on pipes and devices, which cannot be flushed to disk.
                os.fsync(self._file)
            except OSError as exc:
                raise ConfigurationError(
                    f"the audit log {str(path)!r} cannot be written: {exc}; choose another file"
                ) from exc

    @property
    def readable_path(self) -> Path | None:
        """Return the path of the file, or None if the records are sent to a logger or a pipe."""
        path = None if self._path is None else Path(self._path)
        return path if path is not None and path.is_file() else None

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    async def check_free_space(self, action: Action | None, method: str = "POST") -> None:
        """Raise an error if there is not enough free disk space for a change's audit record.

        Raises:
            StorageFull: The disk of the audit log has fewer than `_MIN_FREE_BYTES` free bytes.
        """
        if self._path is not None and is_audited_change(action, method):
            free = (await asyncio.to_thread(shutil.disk_usage, self._path)).free
            if free < _MIN_FREE_BYTES:
                raise StorageFull(
                    "nothing was changed, because the disk that holds the audit log has only "
                    f"{free:,} bytes free; at least {_MIN_FREE_BYTES:,} bytes are required"
                )

    async def record(
        self,
        call: Call | None,
        action: Action | None,
        status: int,
        request_id: str | None,
        path_ids: Mapping[str, Any] | None = None,
        identity: Identity | None = None,
    ) -> None:
        """Write a record of an action.

        Args:
            call: The call, or None if the request was refused before there was a call.
            action: The action.
            status: The HTTP status of the reply.
            request_id: The id of the request.
            path_ids: The ids in the path of the request, by the names of the path parameters.
            identity: The caller, and the person for whom the caller acts or tried to act. None
                means the identity of the call, or an unknown caller if there is no call.
        """
        if identity is None and call:
            identity = call.audited_identity
        objects = [entry for entry in call.recorded if entry] if call else []
        if path_ids and not any(path_ids.items() <= entry.items() for entry in objects):
            objects = [dict(path_ids), *objects]
        record = {
            "at": datetime.now(UTC).isoformat(),
            "user": identity and identity.user,
            "acting_for": identity and identity.acting_for,
            "tenant": identity and identity.tenant,
            "action": action,
            "outcome": "ok" if status < 400 else "denied" if status in (401, 403) else "failed",
            "status": status,
            "request_id": request_id,
            "about": objects or None,
        }
        line = _encode_json_line(
            {name: entry for name, entry in record.items() if entry is not None}
        )
        await asyncio.shield(asyncio.to_thread(self._append_line, f"{line}\n".encode()))

    def _append_line(self, line: bytes) -> None:
        """Append a line to the audit log, and flush the file to disk.

        If no audit log file is configured, the line is written to the logger `perdure.audit`
        instead.
        """
        if self._file is None:
            _LOG.info(line.decode().rstrip())
            return
        if os.write(self._file, line) < len(line):
            raise OSError(
                "only part of a record was written to the audit log; check whether the disk is full"
            )
        os.fsync(self._file)


def _encode_json_line(fields: dict[str, Any]) -> str:
    """Encode fields as one line of JSON, with unprintable characters escaped."""
    # Import `reply` only when it is needed, so that `perdure mcp` starts faster.
    from perdure.server.http.reply import encode_json, escape_unprintable

    # Escape unprintable characters, because JSON may contain U+2028, which some tools treat as
    # the end of a line.
    return escape_unprintable(encode_json(fields).decode())


class TextLines(logging.Formatter):
    """Formats a log record as text.

    All lines after the first are indented, and unprintable characters are escaped.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the lines of a record."""
        from perdure.server.http.reply import escape_unprintable

        return escape_unprintable(super().format(record)).replace("\n", "\n  ")


class JSONLines(logging.Formatter):
    """Formats each log record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        fields: dict[str, Any] = getattr(record, "fields", None) or {"message": record.getMessage()}
        if record.exc_info:
            fields = {**fields, "error": self.formatException(record.exc_info)}
        return _encode_json_line(
            {
                "time": datetime.fromtimestamp(record.created, UTC).isoformat(),
                "level": record.levelname,
                "logger": record.name,
                **fields,
            }
        )


def log_to_stderr(style: Literal["text", "json"] = "text") -> None:
    """Send the logs of the process to stderr.

    The log level is INFO for perdure's own loggers, and WARNING for all others.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        JSONLines()
        if style == "json"
        else TextLines("%(asctime)s %(levelname)s %(name)s: %(message)s")
    )
    logging.basicConfig(handlers=[handler], level=logging.WARNING)
    logging.getLogger("perdure").setLevel(logging.INFO)
