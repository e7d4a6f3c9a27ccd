"""Lines of JSON that are to become items: read, checked for what they may hold, and addressed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any, Final

from perdure.errors import ImportFailed
from perdure.stores.base import PROVENANCE, Namespace
from perdure.stores.sources import Lines
from perdure.stores.unknown import meant
from perdure.stores.values import decode

TIMES: Final = ("created_at", "valid_from", "valid_to", "expires_at")
_FIELDS: Final = ("namespace", "key", "value", "version", *TIMES, "ttl", "index", "provenance")


def parsed(lines: Iterable[str], namespace: Namespace | None) -> Lines:
    """Each line that is not empty, as what it is called in messages and what it says.

    Args:
        lines: JSON, an object a line.
        namespace: Where items go that name none.

    Raises:
        ImportFailed: A line is no JSON object, or has a field that no item has.
    """
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
