"""The audit log: who changed or erased what, and whether it was allowed; ids, never content.

A record is written for every request and every tool whose action changes something, in one place
and not by endpoints. What it is about is what `Call.permit` was asked; an endpoint adds the hashes
of a receipt by `Call.record`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from starlette.types import Scope

from perdure.errors import ConfigurationError
from perdure.server.access import Action
from perdure.server.call import IDS, Call
from perdure.server.reply import encoded

_LOG: Final = logging.getLogger("perdure.audit")
_SAFE: Final = ("GET", "HEAD", "OPTIONS")
_READS: Final[frozenset[Action | None]] = frozenset(
    {
        None,
        "assistants:read",
        "assistants:search",
        "threads:read",
        "threads:search",
        "threads:create_run",  # a turn, which the thread's own history records
        "store:get",
        "store:search",
        "store:list_namespaces",
    }
)


def is_change(action: Action | None, method: str = "POST") -> bool:
    """Whether an action is one that is recorded."""
    return action not in _READS and method not in _SAFE


class Audit:
    """Writes records to a file of JSON lines, or to the logger `perdure.audit`.

    A line is on the disk before the reply is sent, and an edit that cannot be recorded is answered
    with an error. Several processes may write to one file; lines are only ever added to it.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        self._lock, self._file = threading.Lock(), None
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

    async def request(self, scope: Scope, status: int) -> None:
        """Record a request if it changes something, or was to."""
        action = getattr(getattr(scope.get("route"), "endpoint", None), "action", None)
        if is_change(action, scope["method"]):
            state, given = scope["state"], scope.get("path_params", {})
            path = {name: given[name] for name in IDS if name in given}
            await self.call(state.get("call"), action, status, state["request_id"], path)

    async def call(
        self,
        call: Call | None,
        action: Action | None,
        status: int,
        request_id: str | None = None,
        path: Mapping[str, Any] | None = None,
    ) -> None:
        """Record a call for an action, of nobody if it is None; `path` has the ids of a path."""
        identity, about = (
            call and call.identity,
            [each for each in call.recorded if each] if call else [],
        )
        if path and not any(path.items() <= each.items() for each in about):
            about = [dict(path), *about]
        record = {
            "at": datetime.now(UTC).isoformat(),
            "user": identity and identity.user,
            "tenant": identity and identity.tenant,
            "action": action,
            "outcome": "ok" if status < 400 else "denied" if status in (401, 403) else "failed",
            "status": status,
            "request_id": request_id,
            "about": about or None,
        }
        line = encoded({name: each for name, each in record.items() if each is not None})
        await asyncio.shield(asyncio.to_thread(self._write, line))

    def _write(self, line: bytes) -> None:
        if self._file is None:
            _LOG.info(line.decode())
            return
        with self._lock:
            os.write(self._file, line + b"\n")
            os.fsync(self._file)
