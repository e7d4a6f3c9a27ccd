"""Create database files, and the files next to them, so that other users cannot read them.

A new database file has the mode 0600. SQLite creates the WAL and its index with the mode of the
database file. perdure does the same for lock files and for the reserve file. To share a database
with a group, change the mode of the database file before other files exist next to it.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from typing import Final

# Permissions of a new database file: only its owner can read and write it.
_PRIVATE_MODE: Final = 0o600


def create_private_file(path: str) -> None:
    """Create an empty file that only its owner can read and write, unless the file exists.

    Raises:
        OSError: The file cannot be created.
    """
    if not os.path.exists(path):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, _PRIVATE_MODE))


def read_mode_of_database(database: str) -> int:
    """Return the permissions of a database file, or those of a new one if it cannot be read."""
    with suppress(OSError):
        return stat.S_IMODE(os.stat(database).st_mode)
    return _PRIVATE_MODE


def open_file_with_mode(path: str, mode: int, flags: int = 0) -> int:
    """Open a file for reading and writing, and return its file descriptor.

    Args:
        path: The path of the file.
        mode: The permissions that the file gets if it does not exist and is created.
        flags: Further flags for `os.open`.

    Raises:
        OSError: The file cannot be opened or created.
    """
    with suppress(FileNotFoundError):
        return os.open(path, os.O_RDWR | flags)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | flags, _PRIVATE_MODE)
    # The process's umask limits the mode in `os.open`, but not the mode in `fchmod`. Windows has no
    # `fchmod`. `fchmod` fails if another user has just created the file.
    if hasattr(os, "fchmod"):
        with suppress(OSError):
            os.fchmod(descriptor, mode)
    return descriptor


def open_file_of_database(path: str, database: str, flags: int = 0) -> int:
    """Open a file next to a database for reading and writing, and return its file descriptor.

    If the file does not exist, it is created with the permissions of the database file.

    Args:
        path: The path of the file.
        database: The path of the database.
        flags: Further flags for `os.open`.

    Raises:
        OSError: The file cannot be opened or created.
    """
    with suppress(FileNotFoundError):
        return os.open(path, os.O_RDWR | flags)
    return open_file_with_mode(path, read_mode_of_database(database), flags)
