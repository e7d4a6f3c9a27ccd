"""Describe a table that `perdure copy` copies: how its rows are read, converted and inserted."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any, ClassVar, Final, NamedTuple

from perdure.checkpointers.records import (
    decode_stored_id,
    encode_id_for_storage,
)
from perdure.errors import CorruptRecord
from perdure.storage.database import Database
from perdure.storage.encryption import AssociatedData
from perdure.storage.flow import Flow, NamedSQL, Row, Statement

# Maximum total size, in bytes, of the rows read per page. A larger row is read on its own.
_PAGE_BYTES: Final = 4 << 20


_PAGE_ROWS: Final = 1000  # Maximum number of rows read per page.


# Number of rows per INSERT statement.
_ROWS_PER_INSERT: Final = 64


_MAX_ID: Final = b"\xff" * 17  # This value sorts after every packed id.


# Maximum size, in bytes, of an indexed text. Postgres limits an index entry to a third of a page.
MAX_NAME_BYTES: Final = 2600


class Page(NamedTuple):
    """A page of the rows of a table.

    Attributes:
        rows: The decrypted rows. There are none if all rows of the table have been read.
        last_key: The primary key of the last row, after which the next page begins.
    """

    rows: list[Row]
    last_key: Sequence[Any]


class Table(NamedTuple):
    """A table to copy, and the names of the columns to copy.

    Attributes:
        name: The name of the table.
        columns: The copied columns, separated by ", ". The columns of the primary key come first.
        owner: SQL expressions that name the owner of a row `r`, such as the id of its thread.
        joins: The joins that these expressions need.
        key: The columns of the primary key.
        name_columns: Columns of text that users choose.
        indexed_columns: Other columns that have an index.
        large_columns: Columns without a limit of length.
        id_positions: The positions of ids in a row that begins with its owner. Such ids are stored
            as packed bytes; see `encode_id_for_storage`.
        flag_positions: The positions, in such a row, of values that are compared as booleans.
        associated_data: Returns the associated data of the encrypted columns, which are the last
            columns of the row.
        max_key_part: A value that sorts after all values of the second and later key columns.
    """

    name: str
    columns: str
    owner: str
    joins: str = ""
    key: str = "id"
    name_columns: str = ""
    indexed_columns: str = ""
    large_columns: str = ""
    id_positions: Sequence[int] = ()
    flag_positions: Sequence[int] = ()
    associated_data: Callable[[Sequence[Any]], Sequence[AssociatedData]] = lambda row: ()
    max_key_part: Any = _MAX_ID

    def read_page(self, after: Sequence[Any]) -> Flow[list[Row]]:
        """Read one page of the rows after a key.

        Each returned row begins with the values that identify the row's owner (a thread or a
        namespace), followed by the values of the columns to be copied.
        """
        marks = ", ".join("?" for _ in after)
        rest = f"FROM {self.name} WHERE ({self.key}) > ({marks}) ORDER BY {self.key} LIMIT ?"
        columns = split_columns(self.name_columns, self.indexed_columns, self.large_columns)
        sizes = " + ".join(f"coalesce(length({column}), 0)" for column in columns)
        rows = yield Statement(f"SELECT {sizes} {rest}", (*after, _PAGE_ROWS))
        limit = max(1, sum(total <= _PAGE_BYTES for total in accumulate(size for (size,) in rows)))
        sql = (
            f"SELECT {self.owner}, {qualify_columns(self.columns)} "
            f"FROM (SELECT * {rest}) AS r {self.joins} "
            f"ORDER BY {qualify_columns(self.key)}"
        )
        return (yield Statement(sql, (*after, limit)))  # type: ignore[no-any-return]

    def build_inserts(self, rows: Sequence[Row]) -> list[Statement]:
        """Build `INSERT` statements that skip rows whose key already exists."""
        marks = f"({', '.join('?' for _ in self.columns.split(', '))})"
        statements, start = [], 0
        for width in (_ROWS_PER_INSERT, 1):
            stop = len(rows) - len(rows) % width
            sql = (
                f"INSERT INTO {self.name} ({self.columns}) VALUES {', '.join([marks] * width)} "
                "ON CONFLICT DO NOTHING"
            )
            parameters = [
                [*chain(*rows[position : position + width])]
                for position in range(start, stop, width)
            ]
            if parameters:
                statements.append(Statement(sql, parameters, execute_many=True))
            start = stop
        return statements

    def key_before(self, number: int) -> list[Any]:
        """Return a primary key that sorts just before all primary keys that begin with `number`."""
        return [number - 1, *(self.max_key_part for _ in self.key.split(", ")[1:])]


def split_columns(*columns: str) -> list[str]:
    """Split comma-separated lists of column names."""
    return [name for names in columns for name in names.split(", ") if name]


def qualify_columns(columns: str) -> str:
    """Prefix each column name in a comma-separated list with the table alias `r`."""
    return ", ".join(f"r.{column}" for column in columns.split(", "))


@dataclass
class Tables(ABC):
    """The tables of the checkpointer or the store, in either the source or the target database.

    Attributes:
        database: The database.
        sql: The statements of the component.
        decrypt: Returns the content of an encrypted value.
        encrypt: Returns the encrypted value for a content.
        component_tables: The tables of the component.
        noun: The noun for the owner of a row in messages, such as `thread`.
    """

    database: Database
    sql: NamedSQL
    decrypt: Callable[[Any, AssociatedData], Any]
    encrypt: Callable[[Any, AssociatedData], Any]
    component_tables: ClassVar[Sequence[Table]]
    noun: ClassVar[str]

    @property
    def tables(self) -> Sequence[Table]:
        """The tables to copy, in this order."""
        return self.component_tables

    def read_page(self, table: Table, after: Sequence[Any]) -> Flow[Page]:
        """Read and decrypt the next page of rows after the primary key `after`.

        Raises:
            CorruptRecord: A row is damaged, or belongs to a thread or namespace that is missing.
        """
        rows = yield from table.read_page(after)
        column_count = len(table.columns.split(", "))
        for row in rows:
            owner, columns = row[:-column_count], row[-column_count:]
            after = columns[: len(after)]
            if None in owner:
                raise CorruptRecord(
                    f"the database {self.database.path} is damaged: the table {table.name} "
                    f"contains an orphaned row with the key {[*after]!r}; restore the database "
                    "from a backup"
                )
        return Page([self.decrypt_row(table, row) for row in rows], after)

    def decrypt_row(self, table: Table, row: Row) -> Row:
        """Decrypt a row.

        If a row in the source and a row in the target have the same content, the decrypted rows are
        equal, even if the stored bytes differ.

        Raises:
            CorruptRecord: The row is damaged.
        """
        values = [*row]
        for position in table.id_positions:
            values[position] = decode_stored_id(values[position])
        for position in table.flag_positions:
            values[position] = bool(values[position])
        for position, associated_data in enumerate(reversed(table.associated_data(values)), 1):
            values[-position] = (
                None
                if values[-position] is None
                else self.decrypt(values[-position], associated_data)
            )
        return tuple(values)

    def encrypt_row(self, table: Table, row: Row) -> Row:
        """Encrypt a row's content, and return the column values to store in this database."""
        values = [*row]
        for position, associated_data in enumerate(reversed(table.associated_data(row)), 1):
            values[-position] = (
                None
                if values[-position] is None
                else self.encrypt(values[-position], associated_data)
            )
        for position in table.id_positions:
            values[position] = encode_id_for_storage(values[position])
        return tuple(values[len(row) - len(table.columns.split(", ")) :])

    def build_inserts(self, table: Table, rows: Sequence[Row]) -> list[Statement]:
        """Encrypt rows, and return the statements that insert them."""
        return table.build_inserts([self.encrypt_row(table, row) for row in rows])

    def format_owner(self, owner: Any) -> str:
        """Format the thread id or namespace that a row belongs to, for error messages."""
        return repr(owner)

    @abstractmethod
    def read_settings(self) -> Flow[list[Row]]:
        """Read the settings of a checkpointer or store. They are copied after all tables."""

    def read_removals(self) -> set[Row]:
        """Return a row `(thread_hash, number)` for each removal record of the database.

        The result is empty if the database's tables do not include removal records.
        """
        return set()

    def store_settings_after_copy(self, settings: list[Row]) -> Flow[None]:
        """Store the source database's settings in this target after all rows have been copied.

        After this method has run, the target database gives new rows higher primary keys than the
        copied rows have.
        """
        yield [self.sql("raise_keys_after_copy"), self.sql("analyze_tables")]

    def find_owners_of_names_postgres_rejects(self) -> Flow[list[str]]:
        """Return the threads or namespaces whose rows contain names that Postgres cannot store.

        Postgres cannot store names that contain NUL characters or are too long.

        Raises:
            StorageError: The database does not have the tables, or it is a Postgres database, which
                has no SQL function `instr`. The names in a Postgres database need no check.
        """
        owners = []
        for table in self.tables:
            sql = f"SELECT {table.owner} FROM {table.name} AS r {table.joins} WHERE"
            for name in split_columns(table.name_columns):
                with_nul = Statement(f"{sql} instr(r.{name}, ?) > 0", ("\0",))
                owners += [self.format_owner(row[0]) for row in (yield with_nul)]
            for name in split_columns(table.name_columns, table.indexed_columns):
                too_long = Statement(f"{sql} length(CAST(r.{name} AS blob)) > ?", (MAX_NAME_BYTES,))
                owners += [self.format_owner(row[0]) for row in (yield too_long)]
        return sorted({*owners})
