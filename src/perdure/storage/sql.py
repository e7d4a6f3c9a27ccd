"""SQL by name, from `.sql` files: a `-- name: what it is for` heading, then the statement."""

from __future__ import annotations

import re
from importlib.resources import files
from typing import Any

from perdure.storage.flow import Statement

_HEADING = re.compile(r"^-- (\w+):[^\n]*\n", re.MULTILINE)


class NamedSQL(dict[str, str]):
    """SQL by name."""

    def __call__(self, name: str, *params: Any) -> Statement:
        """The statement of a name, with its parameters."""
        return Statement(self[name], params)


def load(package: str, filename: str) -> NamedSQL:
    """Read the named statements of a packaged `.sql` file."""
    text = files(package).joinpath(filename).read_text(encoding="utf-8")
    _, *parts = _HEADING.split(text)
    bodies = (body.strip().rstrip(";") for body in parts[1::2])
    return NamedSQL(zip(parts[::2], bodies, strict=True))
