"""Count a person's entries in a server's keys file and audit log.

An erasure of a person's data does not change the keys file or the audit log. The erasure reports of
`perdure forget` and of the server therefore show how many API keys the person still has, and how
many audit records still name the person.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from perdure.errors import ConfigurationError
from perdure.people import Part


def count_keys_and_audit_records(
    user: str, *, tenant: str | None = None, keys_file: Path | None, audit_log: Path | None
) -> tuple[Part, ...]:
    """Count a person's API keys, and the audit records that name the person.

    Args:
        user: The name of the person.
        tenant: The tenant of the person. Keys and records of other tenants are not counted.
        keys_file: The keys file, or None.
        audit_log: The audit log, or None.

    Returns:
        The API keys and the audit records, without ids. A kind of which the person has none is
        omitted.

    Raises:
        ConfigurationError: A file cannot be read.
    """
    key_count = sum(
        (key.get("user"), key.get("tenant")) == (user, tenant)
        for key in _read_api_key_entries(keys_file)
    )
    # If a user sends a request on behalf of another user, the audit record contains the names of
    # both users.
    record_count = sum(
        user in (record.get("user"), record.get("acting_for")) and record.get("tenant") == tenant
        for record in _iter_audit_log_records(audit_log)
    )
    parts = Part("API keys", number=key_count), Part("audit records", number=record_count)
    return tuple(part for part in parts if part.count)


def _read_api_key_entries(keys_file: Path | None) -> list[dict[str, Any]]:
    """Return the entries of a keys file, or an empty list if `keys_file` is None."""
    if keys_file is None:
        return []
    try:
        keys = tomllib.loads(keys_file.read_text(encoding="utf-8")).get("keys", [])
    except (OSError, ValueError) as exc:
        raise ConfigurationError(
            f"the keys file {str(keys_file)!r} cannot be read: {exc}; expected the file that "
            "'perdure serve --keys' reads"
        ) from exc
    return [key for key in keys if isinstance(key, dict)] if isinstance(keys, list) else []


def _iter_audit_log_records(path: Path | None) -> Iterator[dict[str, Any]]:
    """Yield the records of an audit log, or nothing if `path` is None.

    Lines that are not JSON objects are skipped. A line of the audit log can be incomplete if a
    server is still writing the line, or if the disk became full during the write.
    """
    if path is None:
        return
    try:
        with path.open("rb") as lines:
            for line in lines:
                with suppress(ValueError):
                    record = json.loads(line)
                    if isinstance(record, dict):
                        yield record
    except OSError as exc:
        raise ConfigurationError(
            f"the audit log {str(path)!r} cannot be read: {exc}; expected the file that "
            "'perdure serve --audit' writes"
        ) from exc
