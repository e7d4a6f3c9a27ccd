"""Sources of imports: JSON Lines, a file of langgraph's SqliteStore, or any open store."""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
from collections.abc import Generator, Iterable, Mapping
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, cast

from langgraph.store.base import BaseStore, SearchItem, SearchOp

from perdure.errors import ConfigurationError, ImportFailed, NotADatabase
from perdure.stores.base import PROVENANCE, Namespace
from perdure.stores.options import meant
from perdure.stores.values import decode

_PAGE = 500  # items or namespaces asked for at a time

Line = tuple[str, Mapping[str, Any] | ImportFailed]
"""What an item is called in messages, and the item; or why it cannot be read."""
Lines = Generator[Line, None, None]

TIMES: Final = ("created_at", "valid_from", "valid_to", "expires_at")
_FIELDS: Final = ("namespace", "key", "value", "version", *TIMES, "ttl", "index", "provenance")


def of_text(lines: Iterable[str], namespace: Namespace | None) -> Lines:
    """Each line that is not empty, as what it is called in messages and what it says."""
    for number, text in enumerate(lines, 1):
        where = f"line {number}"
        if not isinstance(text, str):
            raise ImportFailed(f"{where}: a {type(text).__name__}; expected text")
        if not text.strip():
            continue
        try:
            line = decode(text)
        except (ValueError, RecursionError) as exc:
            raise ImportFailed(f"{where}: no JSON ({exc}); expected an object a line") from exc
        if not isinstance(line, dict):
            raise ImportFailed(
                f"{where}: {str(line)[:60]!r} is no object; expected an object a line"
            )
        yield where, _addressed(where, line, namespace)


def _addressed(where: str, line: dict[str, Any], namespace: Namespace | None) -> Mapping[str, Any]:
    """The same with a namespace and a key."""
    if "value" not in line and "namespace" not in line:
        line = {"value": line, "key": line.get("key")}
    _check_fields(where, line)
    if "namespace" not in line:
        if namespace is None:
            raise ImportFailed(f"{where}: it names no namespace, and none was given")
        line["namespace"] = namespace
    if line.get("key") is None:
        text = json.dumps(line["value"], sort_keys=True)
        line["key"] = hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
    return line


def _check_fields(where: str, line: dict[str, Any]) -> None:
    """Refuse what would be lost: a field that nothing reads, a key that becomes another."""
    said = line.get("provenance")
    within = said if isinstance(said, dict) else {}
    for holder, names, known in (("", line, _FIELDS), (" of its provenance", within, PROVENANCE)):
        for name in names:
            if name not in known:
                raise ImportFailed(
                    f"{where}: unknown field {name[:60]!r}{holder}; {meant(name, known)}"
                )
    if "value" not in line:
        raise ImportFailed(f"{where}: it has no 'value'; expected a JSON object there")
    if not isinstance(line.get("key"), str | None):
        raise ImportFailed(f"{where}: its key is {line['key']!r}; expected text, in quotes")


def of_store(store: BaseStore) -> Lines:
    """The present items of a store, namespace by namespace."""
    offset = 0
    while page := store.list_namespaces(limit=_PAGE, offset=offset):
        for namespace in page:
            yield from _of_namespace(store, tuple(namespace))
        offset += len(page)


def _of_namespace(store: BaseStore, namespace: tuple[str, ...]) -> Lines:
    offset = 0
    while found := _searched(store, namespace, offset):
        for item in found:
            if tuple(item.namespace) == namespace:  # the others come with their own
                yield (
                    f"{item.key!r} in {namespace!r}",
                    _line(namespace, item.key, item.value, item.created_at, item.updated_at),
                )
        offset += len(found)


def _searched(store: BaseStore, namespace: tuple[str, ...], offset: int) -> list[SearchItem]:
    # as an operation, for the method refuses labels that the store may well hold
    op = SearchOp(namespace, limit=_PAGE, offset=offset, refresh_ttl=False)
    return cast(list[SearchItem], store.batch([op])[0])


def of_langgraph_file(path: str | os.PathLike[str]) -> Lines:
    """The items of a file that langgraph's SqliteStore wrote; it is only read."""
    if not isinstance(path, str | os.PathLike):
        raise ConfigurationError(f"{path!r} cannot be imported; expected a path or a store")
    text = os.fspath(path)
    if not os.path.isfile(text):
        raise ConfigurationError(f"there is no file {text!r} to import")
    try:
        with closing(sqlite3.connect(f"{Path(text).absolute().as_uri()}?mode=ro", uri=True)) as db:
            columns = {row[1] for row in db.execute("PRAGMA table_info(store)")}
            if not {"prefix", "key", "value"} <= columns:
                if db.execute("SELECT 1 FROM sqlite_master WHERE name = 'store_items'").fetchall():
                    raise NotADatabase(
                        f"{text!r} is a file of perdure's own: export its items to "
                        "JSON Lines and import those, or open it and give the open store"
                    )
                raise NotADatabase(f"{text!r} has no table of langgraph's SqliteStore")
            timed = {"expires_at", "ttl_minutes"} <= columns
            rows = db.execute(
                "SELECT prefix, key, value, created_at, updated_at, "
                + ("expires_at, ttl_minutes" if timed else "NULL, NULL")
                + " FROM store ORDER BY prefix, key"
            )
            for row in rows:
                yield _of_row(text, row)
    except sqlite3.DatabaseError as exc:
        raise NotADatabase(f"{text!r} cannot be read as an SQLite database: {exc}") from exc


def _of_row(path: str, row: tuple[Any, ...]) -> Line:
    prefix, key, value, created, updated, expires, ttl = row
    where = f"{path!r}, {key!r} in {prefix!r}"
    try:
        namespace = tuple(prefix.split("."))
        line = _line(namespace, key, json.loads(value), _moment(created), _moment(updated))
        if expires is not None:
            line["expires_at"] = _moment(expires).isoformat()
        if ttl is not None:
            line["ttl"] = ttl
    except (ValueError, TypeError) as exc:
        return where, ImportFailed(f"{where}: {exc}")
    return where, line


def _moment(text: str) -> datetime:
    """SQLite's own timestamps are UTC and do not say so."""
    found = datetime.fromisoformat(text)
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)


def _line(
    namespace: tuple[str, ...],
    key: str,
    value: Mapping[str, Any],
    created: datetime,
    updated: datetime,
) -> dict[str, Any]:
    return {
        "namespace": list(namespace),
        "key": key,
        "value": value,
        "created_at": created.astimezone(UTC).isoformat(),
        "valid_from": updated.astimezone(UTC).isoformat(),
    }
