"""`perdure stats`: what a database holds."""

from __future__ import annotations

from typing import Any

from perdure.cli.app import DB, AsJson, app, opened
from perdure.cli.output import show, size


@app.command()
def stats(db: DB = None, json: AsJson = False) -> None:
    """Show counts and sizes."""
    with opened(db, reads=True) as file:
        saver, store = file.saver.stats(), file.store.stats()
    found = {
        **{name: saver[name] for name in ("path", "threads", "checkpoints")},
        "messages": saver["items"],
        "thread_bytes": saver["thread_bytes"],
        "namespaces": store.namespaces,
        "items": store.items,
        "old_versions": store.versions,
        "missing_vectors": store.pending,
        "item_bytes": store.value_bytes,
        "indexes": list(store.indexes),
    }
    found |= {name: value for name, value in saver.items() if name not in found}
    rows = [(name, _in_words(name, value, found)) for name, value in found.items()]
    show(found, json, ("", ""), rows)


def _in_words(name: str, value: Any, found: dict[str, Any]) -> str:
    if name == "wal_reset_bug":
        return f"in SQLite {found['sqlite_version']}, and avoided" if value else "no"
    if name.endswith("_bytes"):
        return size(value)
    return ", ".join(value) if isinstance(value, list) else str(value)
