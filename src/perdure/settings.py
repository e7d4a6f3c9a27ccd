"""Settings of the command line: from arguments, then `PERDURE_*`, then a file."""

from __future__ import annotations

import os
import tomllib
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import platformdirs

from perdure.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Settings:
    """What a run of the command line works with.

    Attributes:
        db: The database file.
        model: Name of a chat model at an OpenAI-compatible endpoint; None: the offline responder.
        base_url: That endpoint; None: OpenAI's.
        api_key: Its key; local servers take any.
        key: Encryption key of the database, in hexadecimal.
        user: Whose long-term memories they are.
    """

    db: str
    model: str | None = None
    base_url: str | None = None
    api_key: str | None = field(default=None, repr=False)
    key: str | None = field(default=None, repr=False)
    user: str = "me"


def load(**arguments: str | None) -> Settings:
    """Put the settings together; an argument that is None is left to the environment and the file.

    Raises:
        ConfigurationError: The file is malformed or holds something unknown.
    """
    names = [f.name for f in fields(Settings)]
    settings = Settings(db="")
    for source in (_from_file(names), _from_environment(names), arguments):
        settings = replace(settings, **{k: v for k, v in source.items() if v})
    if settings.model and not settings.api_key and not settings.base_url:  # that key is OpenAI's
        settings = replace(settings, api_key=os.environ.get("OPENAI_API_KEY"))
    return replace(settings, db=os.path.expanduser(settings.db) or _default_db())


def _from_environment(names: list[str]) -> dict[str, Any]:
    return {name: os.environ.get(f"PERDURE_{name.upper()}") for name in names}


def _from_file(names: list[str]) -> dict[str, Any]:
    given = os.environ.get("PERDURE_CONFIG")
    path = Path(given) if given else platformdirs.user_config_path("perdure") / "config.toml"
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if given:
            raise ConfigurationError(
                f"PERDURE_CONFIG names {given!r}, which is not there"
            ) from None
        return {}
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as exc:
        raise ConfigurationError(f"the settings file {str(path)!r} cannot be read: {exc}") from exc
    unknown = {k for k, v in found.items() if k not in names or not isinstance(v, str)}
    if unknown:
        raise ConfigurationError(
            f"the settings file {str(path)!r} has {sorted(unknown)}; expected text for {names}"
        )
    return found


def _default_db() -> str:
    folder = platformdirs.user_data_path("perdure")
    if not folder.is_dir():  # langgraph's server forbids mkdir in its event loop
        folder.mkdir(parents=True, exist_ok=True)
    return str(folder / "perdure.db")
