"""SQL by name, from `.sql` files: a `-- name: what it is for` heading, then the statement."""

from __future__ import annotations

import re
from importlib.resources import files

_HEADING = re.compile(r"^-- (\w+):[^\n]*\n", re.MULTILINE)


def load(package: str, filename: str) -> dict[str, str]:
    """Read the named statements of a packaged `.sql` file."""
    text = files(package).joinpath(filename).read_text(encoding="utf-8")
    parts = _HEADING.split(text)
    return {
        name: body.strip().rstrip(";") for name, body in zip(parts[1::2], parts[2::2], strict=True)
    }
