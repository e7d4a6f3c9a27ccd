"""Read the users and hashes of API keys from the keys file, and revoke keys in the file.

Keys can be revoked while a server is using the file.
"""

from __future__ import annotations

import os
import re
import stat
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeGuard

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from perdure.errors import ConfigurationError
from perdure.settings import is_valid_user_or_team_name

# Matches the TOML line `[[keys]]`.
_TABLE_HEADER: Final = re.compile(r"\s*\[\[\s*keys\s*\]\]\s*(#.*)?")
# Maximum number of attempts to replace the keys file when keys are revoked. An attempt fails if
# another program has changed the keys file since the attempt read it.
_MAX_ATTEMPTS: Final = 20


def is_valid_name_in_keys_file(name: Any) -> TypeGuard[str]:
    """Return whether a value is a valid name of a user or a team in a keys file.

    Such a name has a visible character, contains no NUL character, and is not `.`, `..` or `*`.
    """
    return is_valid_user_or_team_name(name) and name != "*" and "\0" not in name


def validate_key_user_name(user_name: str) -> str:
    """Check that a user name is valid in a keys file, and return it.

    Raises:
        ConfigurationError: The name has no visible character, is `.`, `..` or `*`, or contains a
            NUL character.
    """
    return _check_user_or_team_name("user", user_name)


def check_team_name(name: str) -> str:
    """Check that a team name is valid in a keys file, and return it.

    Raises:
        ConfigurationError: See `validate_key_user_name`.
    """
    return _check_user_or_team_name("team", name)


def _check_user_or_team_name(kind: Literal["user", "team"], name: str) -> str:
    """Check that the name of a user or a team is valid in a keys file, and return it."""
    if not is_valid_name_in_keys_file(name):
        raise ConfigurationError(
            f"the {kind} name {name!a} is not allowed; expected a name that has a visible "
            "character, contains no NUL character, and is not '.', '..' or '*'"
        )
    return name


class Key(BaseModel):
    """An entry of the keys file.

    Attributes:
        user: The user of the key.
        sha256: The SHA-256 hash of the key, as 64 hexadecimal digits.
        tenant: The tenant of the user, or None.
        permissions: The additional permissions of the key. Without any, the key gives access only
            to the data of its user and of the user's teams.
        teams: The teams that the user is a member of.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    user: Annotated[str, AfterValidator(validate_key_user_name)]
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    tenant: str | None = None
    permissions: list[Literal["perdure:admin", "perdure:act"]] = []
    teams: list[Annotated[str, AfterValidator(check_team_name)]] = []


class _KeysFile(BaseModel):
    """The content of the keys file."""

    model_config = ConfigDict(extra="forbid", strict=True)

    keys: list[Key]


def read_keys(path: Path) -> list[Key]:
    """Read the entries of a keys file.

    Raises:
        ConfigurationError: The file is missing or malformed.
    """
    with _convert_keys_file_errors(path):
        return _parse_keys(path.read_text(encoding="utf-8"))


def _parse_keys(text: str) -> list[Key]:
    return _KeysFile.model_validate(tomllib.loads(text)).keys


@contextmanager
def _convert_keys_file_errors(path: Path) -> Iterator[None]:
    """Convert errors from reading a keys file to ConfigurationErrors that name the file."""
    try:
        yield
    except (OSError, ValueError) as exc:
        problem = str(exc)
        if isinstance(exc, ValidationError):
            # Do not use the text of a `ValidationError`, because it contains key hashes.
            first = exc.errors(include_input=False)[0]
            problem = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise ConfigurationError(
            f"the keys file {str(path)!r} cannot be read: {problem}; expected [[keys]] "
            "tables with user, sha256 and optionally tenant, permissions and teams"
        ) from None


def revoke_keys(path: Path, is_revoked: Callable[[Key], bool]) -> list[Key]:
    """Remove keys from a keys file.

    The keys file is replaced atomically with a new file that has the same permissions. The new file
    also has the same owner if the process is permitted to set the owner. A server that reads the
    keys file at the same time sees either the old file with all keys or the new file with the
    remaining keys. If no key is revoked, the file is not replaced.

    The new keys file contains the entries of the remaining keys unchanged. The entry of a removed
    key is removed with the comments inside it and the comment block directly above it. A comment
    block that begins on the first line of the file is kept, because it describes the whole file.
    Comments below an entry belong to it, up to the comment block directly above the next entry or
    to the end of the file.

    Args:
        path: The keys file. If the path is a symbolic link, the file that it points to is replaced,
            and the link is kept.
        is_revoked: Returns True for the keys that are removed.

    Returns:
        The removed keys, in the order of the file.

    Raises:
        ConfigurationError: The file cannot be read or replaced, or it cannot be edited
            automatically because its keys are not all written as `[[keys]]` tables. Also raised if
            another program kept changing the file.
    """
    # If the path is a symbolic link, replace the file that it points to instead of the link.
    path = path.resolve()
    for _ in range(_MAX_ATTEMPTS):
        with _convert_keys_file_errors(path):
            old_content = path.read_bytes()
            text = old_content.decode("utf-8")
            keys = _parse_keys(text)
        revoked = [key for key in keys if is_revoked(key)]
        if not revoked:
            return []
        new_text = _remove_revoked_keys_from_toml(text, [is_revoked(key) for key in keys])
        if new_text is None or not _contains_exactly_these_api_keys(
            new_text, [key for key in keys if not is_revoked(key)]
        ):
            raise ConfigurationError(
                f"the keys file {str(path)!r} cannot be edited automatically, because it has "
                "settings outside of its [[keys]] tables; remove the API keys from the file by hand"
            )
        try:
            if _replace_file_if_unchanged(path, old_content, new_text.encode("utf-8")):
                return revoked
        except OSError as exc:
            raise ConfigurationError(
                f"the keys file {str(path)!r} cannot be replaced: {exc}"
            ) from exc
    raise ConfigurationError(f"another program keeps changing {str(path)!r}; try again")


def _contains_exactly_these_api_keys(file_text: str, keys: Sequence[Key]) -> bool:
    """Return whether `file_text` is a valid keys file that contains exactly the given keys."""
    try:
        return _parse_keys(file_text) == keys
    except ValueError:
        return False


def _remove_revoked_keys_from_toml(file_text: str, is_revoked: Sequence[bool]) -> str | None:
    """Remove the `[[keys]]` tables of revoked keys from the text of a keys file.

    If a `[[keys]]` table is removed from the TOML file, the comments directly above the table are
    removed as well. Comments at the start of the keys file are kept.

    Args:
        file_text: The text of the file.
        is_revoked: Whether the key of each table is revoked, in the order of the file.

    Returns:
        The new text, or None if the text does not have one line `[[keys]]` for each table.
    """
    lines = re.split(r"(?<=\n)", file_text)
    header_lines = [
        number for number, line in enumerate(lines) if _TABLE_HEADER.fullmatch(line.strip())
    ]
    if len(header_lines) != len(is_revoked):
        return None
    block_starts = [_find_start_of_comment_above_line(lines, start) for start in header_lines]
    block_ends = [*block_starts[1:], len(lines)]
    remaining_lines = lines[: block_starts[0]]
    for first, end, is_block_revoked in zip(block_starts, block_ends, is_revoked, strict=True):
        remaining_lines += [] if is_block_revoked else lines[first:end]
    if all(is_revoked):
        # A keys file must have the field `keys`, so write an empty list if all keys were removed.
        remaining_lines.append("keys = []\n")
    return "".join(remaining_lines)


def _find_start_of_comment_above_line(lines: Sequence[str], line_index: int) -> int:
    """Return the index of the first line of the comment block directly above a line.

    Return `line_index` itself if there is no comment directly above the line. Also return
    `line_index` if the comment block begins on the file's first line. Such a comment block
    describes the whole file, and not the line `line_index`.
    """
    first = line_index
    while first and lines[first - 1].lstrip().startswith("#"):
        first -= 1
    return line_index if first == 0 else first


def _replace_file_if_unchanged(path: Path, old_content: bytes, new_content: bytes) -> bool:
    """Replace a file atomically if its content still equals `old_content`.

    Return whether the file was replaced.
    """
    with _lock_folder(path):
        status = path.stat()
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with open(handle, "wb") as file:
                if hasattr(os, "fchown"):
                    with suppress(PermissionError):  # Only root may change the owner of a file.
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
        _flush_folder_to_disk(path.parent)
        return True


@contextmanager
def _lock_folder(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file's folder for the duration of the `with` block.

    On Windows, nothing is locked.

    Without the folder lock, a process could rewrite the file and restore a key that another process
    revoked.
    """
    try:
        import fcntl
    except ImportError:  # Windows has no module `fcntl`.
        yield
        return
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _flush_folder_to_disk(folder: Path) -> None:
    """Flush a folder to disk, so that the replacement of a file survives a power failure.

    If the folder is not flushed, the file's old content can reappear after a power failure.
    """
    with suppress(OSError):  # Some systems cannot flush a folder.
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
