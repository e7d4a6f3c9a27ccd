"""`perdure config`: the settings that hold, and where each comes from."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from operator import attrgetter
from typing import Any, Final

from perdure.cli.app import DB, AsJson, User, app
from perdure.cli.output import say, show

_PASSWORD: Final = r"(\bpassword\s*=\s*)('(?:\\.|[^'\\])*'|[^\s&]*)"  # of a URI, or of keywords


@app.command()
def config(db: DB = None, user: User = None, json: AsJson = False) -> None:
    """Show the settings and where they come from.

    Arguments override PERDURE_* variables, and these perdure.toml. Of keys it shows only whether
    they are set.
    """
    from perdure.settings import NAMES, SECRETS, load

    settings = load(db=db, user=user)
    db = re.sub(r"(://[^:/@]*:).*@", r"\1…@", settings.db)
    settings = replace(settings, db=re.sub(_PASSWORD, r"\1…", db))
    found: dict[str, dict[str, Any]] = {}
    for name in NAMES:
        value, source = attrgetter(name)(settings), settings.sources.get(name, "default")
        source = os.path.abspath(source) if os.path.isfile(source) else source
        secret = name in SECRETS and value is not None
        found[name] = {"value": "set" if secret else value, "source": source}
    rows = [
        (name, _shown(each["value"]), os.path.basename(each["source"]))
        for name, each in found.items()
    ]
    show(found, json, ("name", "value", "source"), rows, ids=("name", "source"))
    if not json:
        say(f"\ndatabase: {settings.db}")
        for path in sorted({each["source"] for each in found.values()}):
            if os.path.isabs(path):
                say(f"settings file: {path}")


def _shown(value: Any) -> str:
    """A value as it is written in `perdure.toml`; one that is not set is empty."""
    if isinstance(value, bool):
        return str(value).lower()
    return "" if value is None else str(value)
