"""`perdure config`: the settings that hold, and where each comes from."""

from __future__ import annotations

import os
from typing import Any

from perdure.cli.app import DB, AsJson, User, app
from perdure.cli.output import as_json, say, table


@app.command()
def config(db: DB = None, user: User = None, json: AsJson = False) -> None:
    """Show the settings and where they come from.

    Arguments override PERDURE_* variables, and these perdure.toml. Of keys it shows only whether
    they are set.
    """
    from perdure.settings import NAMES, SECRETS, load

    settings = load(db=db, user=user)
    rows: list[tuple[str, Any, str]] = []
    for name in NAMES:
        inside, _, last = name.rpartition(".")
        value = getattr(getattr(settings, inside) if inside else settings, last)
        if name in SECRETS and value is not None:
            value = "set"
        source = settings.sources.get(name, "default")
        rows.append((name, value, os.path.abspath(source) if os.path.isfile(source) else source))
    if json:
        as_json({name: {"value": value, "source": source} for name, value, source in rows})
    else:
        shown = [(name, _shown(value), os.path.basename(source)) for name, value, source in rows]
        table(("name", "value", "source"), shown, ids=("name", "source"))
        say(f"\ndatabase: {settings.db}")
        for path in sorted({source for _, _, source in rows if os.path.isabs(source)}):
            say(f"settings file: {path}")


def _shown(value: Any) -> str:
    """A value as it is written in `perdure.toml`; one that is not set is empty."""
    if value is None:
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value)
