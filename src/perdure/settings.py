"""Settings: from `perdure.toml`, then `PERDURE_*`, then arguments; the later is stronger.

They are the same for the library, the command line, the worker and the graphs of `langgraph.json`.
"""

from __future__ import annotations

import os
import re
import tomllib
import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final, TypeGuard

import platformdirs

from perdure.errors import ConfigurationError


class _Chosen:
    def __repr__(self) -> str:
        return "CHOSEN"


CHOSEN: Final[Any] = _Chosen()
"""In place of a path: the database of the settings. None is refused: a path may be missing."""
SECRETS: Final = ("key", "api_key", "direct", "webhook_secret")
SEARCH_LIMIT: Final = 10
"""The most results of a search, from code, the command line, the server or its tools (MCP)."""
SHOWN_LIMIT: Final = 20
"""The most memories that are shown at a time, to a model or to a person."""
TOOL_LIMIT: Final = 5
"""The most memories, or examples, that one call of a tool or one prompt gives a model."""
LIST_LIMIT: Final = 100
"""The most entries of a list: of namespaces, items, the largest threads."""
THREADS_LIMIT: Final = 50
"""The most threads that are listed."""
MIN_SCORE: Final = 0.59
"""The floor of a recall: a memory of a perdure store that scores less does not answer a query."""
TIMEOUT_S: Final = 30.0
"""How long to wait for a database: for another process that writes, or for a connection."""
Setting = tuple[Any, str]
"""A value, and where it comes from."""
_MOST: Final = 1_000_000  # days are more on no calendar
_BOOLEANS: Final = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
_KINDS: Final[
    Mapping[str, tuple[str, Callable[[str], Any]]]
] = {  # what is expected, how it is read
    "str": ("text", str),
    "bool": ("true or false", lambda text: _BOOLEANS[text.lower()]),
    "int": (f"a whole number from 0 to {_MOST}", int),
    "float": (f"a number from 0 to {_MOST}", float),
}


def _kinds(of: type) -> dict[str, str]:
    """The names of a dataclass, each with its kind."""
    return {one.name: str(one.type).removesuffix(" | None") for one in fields(of)}


def _checked(name: str, value: Any, kind: str) -> Any:
    """A value, if it is of a kind."""
    if kind in ("int", "float") and not isinstance(value, bool):
        right = isinstance(value, int if kind == "int" else int | float) and 0 <= value <= _MOST
    else:
        right = type(value).__name__ == kind
    if not right:
        shown = type(value).__name__ if kind == "str" else f"{value!r:.80}"  # it may be a secret
        raise ConfigurationError(f"{name} is {shown}; expected {_KINDS[kind][0]}")
    return value


_INVISIBLE: Final = ("Cc", "Cf", "Cs")
"""Unicode categories of characters that are displayed as nothing: controls, formats, surrogates."""
_FILLERS: Final = frozenset(
    "\u034f\u115f\u1160\u17b4\u17b5\u180b\u180c\u180d\u180f\u2800\u3164\uffa0"
    + "".join(map(chr, (*range(0x2060, 0x2070), *range(0xFE00, 0xFE10), *range(0xE0000, 0xE1000))))
)
"""Characters of other categories that are displayed as nothing: Unicode's property
`Default_Ignorable_Code_Point`, and the blank of Braille."""


def check_user(name: str, user: Any, otherwise: str = "leave it out for the default user") -> str:
    """Check the name of a user that comes from outside, and return it.

    An empty name is mostly that of a variable that is not set, and must not stand for the default
    user or for all users.

    Args:
        name: The option, variable or field, for the error.
        user: The name of the user.
        otherwise: What to do instead, for the error.

    Raises:
        ConfigurationError: It is no name; see `is_name`.
    """
    if not is_name(user):
        rule = "'.' or '..'" if user in (".", "..") else "blank"
        raise ConfigurationError(
            f"{name} is {user!a:.80}; expected the name of a user, which is not {rule}; {otherwise}"
        )
    return user


def is_name(name: Any) -> TypeGuard[str]:
    """Return whether a value may be the name of a user or a team.

    It is text with a visible character. Spaces, control and format characters, such as the
    zero-width space, are invisible. `"."` and `".."` are no names, because no URL can have them as
    a part of its path.
    """
    if not isinstance(name, str) or name in (".", ".."):
        return False
    return not all(
        char.isspace() or char in _FILLERS or unicodedata.category(char) in _INVISIBLE
        for char in name
    )


@dataclass(frozen=True, slots=True)
class Rules:
    """What retention removes, the table `[retention]`; a rule that is not given removes nothing.

    Attributes:
        idle_days: Threads whose conversation did not go on for so long.
        memories: Whether the memories that come from such threads go with them.
        checkpoints_last, checkpoints_days, turns, history: See `checkpointers.Retention`.
        versions_last, versions_days: See `stores.VersionRetention`.
        quarantine_days: Entries that are in quarantine for longer.
        jobs_days: Extractions that failed last so long ago and were not repeated: they are listed
            no more. Their messages are read with the next message of the thread.
    """

    idle_days: float | None = None
    memories: bool = False
    checkpoints_last: int | None = None
    checkpoints_days: float | None = None
    turns: bool = False
    history: bool = True
    versions_last: int | None = None
    versions_days: float | None = None
    quarantine_days: float | None = None
    jobs_days: float | None = None

    def __post_init__(self) -> None:
        for name, kind in _kinds(type(self)).items():
            if getattr(self, name) is not None or kind == "bool":
                _checked(f"retention.{name}", getattr(self, name), kind)
        if not self.history and not self.checkpoints:
            raise ConfigurationError(
                "retention.history is false, and there is no rule for checkpoints; give "
                "checkpoints_last, checkpoints_days or turns too"
            )

    @property
    def checkpoints(self) -> bool:
        """Whether there is a rule for checkpoints."""
        return self.turns or not (self.checkpoints_last is None and self.checkpoints_days is None)

    def __bool__(self) -> bool:
        return self != Rules()


@dataclass(frozen=True, slots=True)
class Worker:
    """Defaults of the options of `perdure worker`, the table `[worker]`."""

    delay_s: float | None = None
    cron: str | None = None
    timezone: str | None = None
    facts: bool = False


@dataclass(frozen=True, slots=True)
class Settings:
    """What perdure works with where nothing else is said.

    Attributes:
        db: The database: a file, or a Postgres DSN.
        direct: Behind a pooler, the DSN of the server itself, for locks; None: that of `db`.
        model: Name of a chat model at an OpenAI-compatible endpoint; None: the offline responder.
        base_url: That endpoint; None: OpenAI's.
        api_key: Its key; local servers take any.
        key: Encryption key of the database, in hexadecimal.
        webhook_secret: Signs what `perdure serve` tells webhooks.
        graphs: The path of a langgraph.json. Its embedder and times to live (`store.index`,
            `store.ttl`) apply to the store of all commands, and `perdure serve` serves its graphs.
        user: Whose long-term memories they are.
        search_threads: Whether the command line and the server search what was said in threads. If
            not, `perdure serve` removes the index for this search.
        retention: What retention removes.
        worker: What the worker does.
        sources: Where values that are no defaults come from, by name: `"retention.idle_days"`.
    """

    db: str
    direct: str | None = field(default=None, repr=False)
    model: str | None = None
    base_url: str | None = None
    api_key: str | None = field(default=None, repr=False)
    key: str | None = field(default=None, repr=False)
    webhook_secret: str | None = field(default=None, repr=False)
    graphs: str | None = None
    user: str = "me"
    search_threads: bool = True
    retention: Rules = Rules()
    worker: Worker = Worker()
    sources: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_user("user", self.user)


_TABLES: Final = {"retention": Rules, "worker": Worker}
NAMES: Final = {
    **{name: kind for name, kind in _kinds(Settings).items() if kind in _KINDS},
    **{f"{t}.{name}": kind for t, of in _TABLES.items() for name, kind in _kinds(of).items()},
}


_KEYWORDS: Final = re.compile(  # of libpq's conninfo strings; a password is in no file's name
    r"\s*(host|hostaddr|port|dbname|user|passfile|service|options|application_name|"
    r"connect_timeout|target_session_attrs|ssl\w+)\s*=|(.*\s)?password\s*=",
    re.IGNORECASE | re.DOTALL,
)


def is_dsn(db: str) -> bool:
    """Whether a database is one of Postgres, as a URI or `keyword=value` pairs, rather than a file.

    Raises:
        ConfigurationError: The text is a DSN in another form, or a URL of an SQLite file.
    """
    if db.startswith(("postgresql://", "postgres://")) or _KEYWORDS.match(db):
        return True
    if re.match(r"sqlite(\+\w+)?://", db, re.IGNORECASE):
        raise ConfigurationError(
            f"the database is a URL of SQLite; expected a path; pass {_extract_sqlite_path(db)!r}"
        )
    if "://" in db:  # it is not shown, as it may hold a password
        raise ConfigurationError(
            "the database looks like a connection string; write it as "
            "postgresql://user@host/database"
        )
    return False


def _extract_sqlite_path(url: str) -> str:
    """Return the path in an SQLite URL of SQLAlchemy, without the user and the password.

    >>> urls = "sqlite:///x.db", "sqlite+aiosqlite:////srv/x.db", "sqlite://"
    >>> [_extract_sqlite_path(url) for url in urls]
    ['x.db', '/srv/x.db', ':memory:']
    """
    host, _, path = url.partition("://")[2].partition("/")
    return path.partition("?")[0] or host.rpartition("@")[2] or ":memory:"


def load(**arguments: str | None) -> Settings:
    """Put the settings together; an argument that is None is left to the environment and the file.

    Raises:
        ConfigurationError: The file cannot be read, or holds something unknown or of a wrong type.
            An argument is empty, or the user is blank, wherever it comes from.
    """
    settings = _in_file() | _in_environment()
    for name, value in arguments.items():
        if name == "user" and value is not None:
            check_user("--user", value)
        elif value == "":
            raise ConfigurationError(
                f"--{name} is empty; give it a value, or leave it out for the configured one"
            )
    settings |= {name: (value, "argument") for name, value in arguments.items() if value}
    if (
        "model" in settings and not {"api_key", "base_url"} & settings.keys()
    ):  # that key is OpenAI's
        settings["api_key"] = os.environ.get("OPENAI_API_KEY"), "OPENAI_API_KEY"
    settings = {name: setting for name, setting in settings.items() if setting[0] not in ("", None)}
    _check_sources(settings)
    values: dict[str, Any] = {"db": "", **{table: {} for table in _TABLES}}
    for name, (value, _) in settings.items():
        table, _, last = name.rpartition(".")
        (values[table] if table else values)[last] = value
    values |= {table: of(**values[table]) for table, of in _TABLES.items()}
    sources = {name: source for name, (_, source) in settings.items()}
    db = os.path.expanduser(values.pop("db")) or _default_db()
    if db != ":memory:" and not is_dsn(db) and sources.get("db") != "argument":
        db = os.path.abspath(db)
    return Settings(db, **values, sources=sources)


def _check_sources(settings: Mapping[str, Setting]) -> None:
    """Send nothing to where a file says that merely lies in the folder, such as a cloned one."""
    (_, asks), (_, key) = (settings.get(name, ("", "")) for name in ("base_url", "api_key"))
    if _lies_in_folder(asks) and key.endswith("_API_KEY"):
        raise ConfigurationError(
            f"base_url is in {asks!r}, and the key in {key}: whoever wrote the file would get "
            f"the key. If you trust it, set PERDURE_BASE_URL, or PERDURE_CONFIG={asks}"
        )
    for name, instead in (("db", "; else give --db"), ("direct", "")):
        value, source = settings.get(name, ("", ""))
        if _lies_in_folder(source) and is_dsn(value):
            raise ConfigurationError(
                f"{name} is a DSN in {source!r}: whoever wrote the file would get your threads and "
                f"memories. If you trust it, set PERDURE_{name.upper()}, or PERDURE_CONFIG={source}"
                f"{instead}"
            )

    graphs, source = settings.get("graphs", ("", ""))
    if _lies_in_folder(source):
        raise ConfigurationError(
            f"graphs is {graphs!r} in {source!r}: the code that it names would be run. If you "
            f"trust it, set PERDURE_GRAPHS, or PERDURE_CONFIG={source}"
        )


def _lies_in_folder(source: str) -> bool:
    return Path(source).name == "perdure.toml" and not os.environ.get("PERDURE_CONFIG")


def _in_environment() -> dict[str, Setting]:
    settings: dict[str, Setting] = {}
    for name, kind in NAMES.items():
        variable = f"PERDURE_{name.upper().replace('.', '_')}"
        if name == "user" and variable in os.environ:
            check_user(variable, os.environ[variable])
        if text := os.environ.get(variable):
            settings[name] = _checked(variable, _parsed(text, kind), kind), variable
    return settings


def _in_file() -> dict[str, Setting]:
    path = _file()
    if path is None:
        return {}
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError, RecursionError) as exc:
        raise ConfigurationError(f"the settings file {str(path)!r} cannot be read: {exc}") from exc
    for table in _TABLES:
        if isinstance(values.get(table), dict):
            values |= {f"{table}.{name}": value for name, value in values.pop(table).items()}
    for name, value in values.items():
        where = f"{name} in the settings file {str(path)!r}"
        if name not in NAMES:
            raise ConfigurationError(f"unknown setting {where}; expected {', '.join(NAMES)}")
        _checked(where, value, NAMES[name])
        if name == "user":
            check_user(where, value)
    if values.get("db") not in (None, "", ":memory:") and not is_dsn(
        values["db"]
    ):  # beside the file
        values["db"] = str(path.parent / os.path.expanduser(values["db"]))
    if values.get("graphs"):
        values["graphs"] = str(path.parent / os.path.expanduser(values["graphs"]))
    return {name: (value, str(path)) for name, value in values.items()}


def _file() -> Path | None:
    """The settings file: the named one, else the nearest `perdure.toml`, else the user's."""
    if named := os.environ.get("PERDURE_CONFIG"):
        if not os.path.exists(named):
            raise ConfigurationError(f"PERDURE_CONFIG names {named!r}, which is not there")
        return Path(named)
    folder, home = Path(), _identity("~")
    while True:  # in relative paths: langgraph's server forbids getcwd in its event loop
        if os.path.isfile(path := folder / "perdure.toml"):
            return path
        last = (home, _identity(folder / ".."))
        if os.path.exists(folder / ".git") or _identity(folder) in last:
            break
        folder /= ".."
    path = platformdirs.user_config_path("perdure") / "config.toml"
    return path if os.path.isfile(path) else None


def _identity(folder: str | Path) -> tuple[int, int] | None:
    try:
        status = os.stat(os.path.expanduser(folder))
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _parsed(text: str, kind: str) -> Any:
    """What the text of a variable means; itself, if it is not of the kind."""
    try:
        return _KINDS[kind][1](text)
    except (KeyError, ValueError):
        return text


def _default_db() -> str:
    folder = platformdirs.user_data_path("perdure")
    if not folder.is_dir():  # langgraph's server forbids mkdir in its event loop
        folder.mkdir(parents=True, exist_ok=True)
    return str(folder / "perdure.db")
