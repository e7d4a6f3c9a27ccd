"""Memory for LangGraph agents: threads that resume, history that stays, in one SQLite file."""

from importlib.metadata import version

from perdure.checkpointers import SQLiteCheckpointer
from perdure.errors import PerdureError

__version__ = version("perdure")
__all__ = ["PerdureError", "SQLiteCheckpointer", "__version__"]
