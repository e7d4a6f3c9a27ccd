"""The file of API keys: reading it, and revoking keys in it while a server reads it."""

from __future__ import annotations

import os
import re
import stat
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from perdure.errors import ConfigurationError
from perdure.settings import is_name

_TABLE_HEADER: Final = re.compile(r"\s*\[\[\s*keys\s*\]\]\s*(#.*)?")
_MAX_ATTEMPTS: Final = (
    20  # how often the file is read again, if another program changes it meanwhile
)


def check_key_user(name: str) -> str:
    """Check the user of a key, and return it.

    Raises:
        ConfigurationError: No user can have this name.
    """
    if not is_name(name) or name == "*" or "\0" in name:
        raise ConfigurationError(f"no user can be called {name!a}; choose another name")
    return name


def check_team_name(name: str) -> str:
    """Check the team of a key, and return it.

    Raises:
        ConfigurationError: No team can have this name.
    """
    if not is_name(name) or name == "*" or "\0" in name:
        raise ConfigurationError(f"no team can be called {name!a}; choose another name")
    return name


class Key(BaseModel):
    """An entry of the file: whose a key is, the hash of the key, and what the user may do."""

    model_config = ConfigDict(extra="forbid", strict=True)

    user: Annotated[str, AfterValidator(check_key_user)]
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    tenant: str | None = None
    permissions: list[Literal["perdure:admin", "perdure:act"]] = []
    teams: list[Annotated[str, AfterValidator(check_team_name)]] = []


class _KeysFile(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    keys: list[Key]


def read_keys(path: Path) -> list[Key]:
    """Read the keys of a file.

    Raises:
        ConfigurationError: The file is missing or malformed.
    """
    with _wrap_file_errors(path):
        return _parse_keys(path.read_text(encoding="utf-8"))


def _parse_keys(text: str) -> list[Key]:
    return _KeysFile.model_validate(tomllib.loads(text)).keys


@contextmanager
def _wrap_file_errors(path: Path) -> Iterator[None]:
    """Raise ConfigurationError, which names the file, in place of errors of reading it."""
    try:
        yield
    except (OSError, ValueError) as exc:
        problem = str(exc)
        if isinstance(exc, ValidationError):  # its text has the values
            first = exc.errors(include_input=False)[0]
            problem = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise ConfigurationError(
            f"the keys file {str(path)!r} cannot be read: {problem}; expected [[keys]] "
            "with user, sha256 and, if wanted, tenant, permissions and teams"
        ) from None


def revoke_keys(path: Path, is_revoked: Callable[[Key], bool]) -> list[Key]:
    """Remove keys from a file, and return them.

    The file is replaced atomically by one with the same permissions and owner, so a server reads
    either all keys as they were or those that are left. Other lines and comments stay.

    Raises:
        ConfigurationError: The file cannot be read or written, has a form that cannot be edited, or
            another program changes it all the time.
    """
    path = path.resolve()  # of a link, the file that it names is replaced
    for _ in range(_MAX_ATTEMPTS):
        with _wrap_file_errors(path):
            old_content = path.read_bytes()
            text = old_content.decode("utf-8")
            keys = _parse_keys(text)
        revoked = [key for key in keys if is_revoked(key)]
        if not revoked:
            return []
        new_text = _remove_blocks(text, [is_revoked(key) for key in keys])
        if new_text is None or not _has_keys(
            new_text, [key for key in keys if not is_revoked(key)]
        ):
            raise ConfigurationError(
                f"the keys file {str(path)!r} does not have each key under a line [[keys]] of its "
                "own, so it cannot be edited; remove the keys by hand"
            )
        try:
            if _replace_file(path, old_content, new_text.encode("utf-8")):
                return revoked
        except OSError as exc:
            raise ConfigurationError(f"{str(path)!r} cannot be replaced: {exc}") from exc
    raise ConfigurationError(f"another program changes {str(path)!r} all the time; try again")


def _has_keys(text: str, keys: Sequence[Key]) -> bool:
    """Return whether a text is a file with exactly these keys."""
    try:
        return _parse_keys(text) == keys
    except ValueError:
        return False


def _remove_blocks(text: str, is_removed: Sequence[bool]) -> str | None:
    """Remove tables `[[keys]]` by their numbers, or return None if there are not so many.

    Comments directly above a table go with it, unless the file begins with them.
    """
    lines = re.split(r"(?<=\n)", text)
    header_lines = [
        number for number, line in enumerate(lines) if _TABLE_HEADER.fullmatch(line.strip())
    ]
    if len(header_lines) != len(is_removed):
        return None
    block_starts = [_find_comment_start(lines, start) for start in header_lines]
    block_ends = [*block_starts[1:], len(lines)]
    remaining_lines = lines[: block_starts[0]]
    for first, end, is_block_removed in zip(block_starts, block_ends, is_removed, strict=True):
        remaining_lines += [] if is_block_removed else lines[first:end]
    if all(is_removed):
        remaining_lines.append("keys = []\n")  # what a file without keys has to say
    return "".join(remaining_lines)


def _find_comment_start(lines: Sequence[str], start: int) -> int:
    """Return the number of the first of the comments directly above a line."""
    first = start
    while first and lines[first - 1].lstrip().startswith("#"):
        first -= 1
    return start if first == 0 else first


def _replace_file(path: Path, old_content: bytes, new_content: bytes) -> bool:
    """Replace a file if it is as it was. Return whether it was."""
    with _lock_folder(path):
        status = path.stat()
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with open(handle, "wb") as file:
                if hasattr(os, "fchown"):
                    with suppress(PermissionError):  # only root gives files away
                        os.fchown(file.fileno(), status.st_uid, status.st_gid)
                os.chmod(name, stat.S_IMODE(status.st_mode))
                file.write(new_content)
                file.flush()
                os.fsync(file.fileno())
            if path.read_bytes() != old_content:
                return False
            os.replace(name, path)
        finally:
            with suppress(FileNotFoundError):
                os.unlink(name)
        _sync_folder(path.parent)
        return True


@contextmanager
def _lock_folder(path: Path) -> Iterator[None]:
    """Hold a lock on the folder of a file, so that of two revocations none is lost."""
    try:
        import fcntl
    except ImportError:  # on Windows
        yield
        return
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _sync_folder(folder: Path) -> None:
    """Flush a folder, so that a power cut does not bring the replaced file back."""
    with suppress(OSError):  # some systems cannot
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
