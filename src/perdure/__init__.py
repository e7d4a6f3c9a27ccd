"""Memory for LangGraph agents: threads that resume, history that stays, in one SQLite file."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from perdure.errors import PerdureError

if TYPE_CHECKING:
    from perdure.checkpointers import SQLiteCheckpointer
    from perdure.stores import SQLiteStore

    __version__: str

__all__ = ["PerdureError", "SQLiteCheckpointer", "SQLiteStore", "__version__"]

_PARTS = {"SQLiteCheckpointer": "perdure.checkpointers", "SQLiteStore": "perdure.stores"}


def __getattr__(name: str) -> Any:
    """Import a part when it is first used."""
    if name in _PARTS:
        return getattr(import_module(_PARTS[name]), name)
    if name == "__version__":
        from importlib.metadata import version

        return version("perdure")
    raise AttributeError(f"module 'perdure' has no attribute {name!r}")
