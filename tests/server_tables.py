"""Open the server's tables of a checkpointer's database, which a server creates when it starts."""

from __future__ import annotations

from typing import Any, TypeVar

from perdure.run_tables.component import create_server_tables
from perdure.run_tables.server_table import ServerTable

Table = TypeVar("Table", bound=ServerTable)


def open_table(table_class: type[Table], saver: Any) -> Table:
    """Create the server's tables unless they exist, and return one of them."""
    create_server_tables(saver)
    return table_class(saver)
