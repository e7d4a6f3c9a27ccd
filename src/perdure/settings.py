"""Load the settings from `perdure.toml`, the environment and arguments.

The environment variables `PERDURE_*` override the file `perdure.toml`. Function arguments and
command-line options override both the environment variables and `perdure.toml`. The library, the
command line, the worker and the graphs in `langgraph.json` use the same settings.
"""

from __future__ import annotations

import logging
import os
import re
import tomllib
import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final, TypeGuard

from perdure.errors import ConfigurationError


class _ConfiguredDatabase:
    def __repr__(self) -> str:
        return "CHOSEN"


CHOSEN: Final[Any] = _ConfiguredDatabase()
"""The default value of a `db` argument, which means the database that the settings name.

The default is not None, because a None that is passed by mistake must be an error.
"""
# Names of the settings whose values are secret.
SECRETS: Final = ("key", "api_key", "direct", "webhook_secret")
SEARCH_LIMIT: Final = 10
"""The default number of results of a search, in the library, command line, server and MCP."""
SHOWN_LIMIT: Final = 20
"""The default number of memories that are shown together to a model or a person."""
TOOL_LIMIT: Final = 5
"""The default number of memories or examples in one tool result or prompt."""
LIST_LIMIT: Final = 100
"""The default number of entries in lists of namespaces, items and largest threads."""
THREADS_LIMIT: Final = 50
"""The default number of threads in a list."""
MIN_SCORE: Final = 0.59
"""The default minimum score of recalled memories. Lower scores indicate irrelevant memories."""
TIMEOUT_S: Final = 30.0
"""Default timeout, in seconds, for acquiring a database connection or lock."""
_LOG = logging.getLogger("perdure")
_PREFIX: Final = "PERDURE_"
# An unknown variable is reported if its name is at least this similar to that of a setting; see
# `difflib.SequenceMatcher.ratio`.
_MIN_SIMILARITY: Final = 0.8
Setting = tuple[Any, str]
"""The value of a setting, and its source: a file, a variable or `"argument"`."""
# Maximum value of a numeric setting. For a setting in days, the maximum is about 2,700 years, which
# is longer than the age of any stored data.
_MAX_NUMBER: Final = 1_000_000
_BOOLEANS: Final = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
# For each setting type, a description of the expected value and a function that parses its text
_VALUE_KINDS: Final[Mapping[str, tuple[str, Callable[[str], Any]]]] = {
    "str": ("text", str),
    "bool": ("true or false", lambda text: _BOOLEANS[text.lower()]),
    "int": (f"an integer from 0 to {_MAX_NUMBER}", int),
    "float": (f"a number from 0 to {_MAX_NUMBER}", float),
}


def _map_fields_to_type_names(dataclass_type: type) -> dict[str, str]:
    """Return a dict that maps each field name of a dataclass to the name of the field's type."""
    return {
        dataclass_field.name: str(dataclass_field.type).removesuffix(" | None")
        for dataclass_field in fields(dataclass_type)
    }


def _check_setting_type(setting_name: str, value: Any, type_name: str) -> Any:
    """Return a value unchanged if it has the type that the setting expects.

    Raises:
        ConfigurationError: The value has another type, or is a number outside of the range from 0
            to `_MAX_NUMBER`.
    """
    if type_name in ("int", "float") and not isinstance(value, bool):
        is_valid = (
            isinstance(value, int if type_name == "int" else int | float)
            and 0 <= value <= _MAX_NUMBER
        )
    else:
        is_valid = type(value).__name__ == type_name
    if not is_valid:
        # If text was expected, the error message shows only the value's type, because the value may
        # be a secret.
        displayed_value = type(value).__name__ if type_name == "str" else f"{value!r:.80}"
        raise ConfigurationError(
            f"{setting_name} is {displayed_value}; expected {_VALUE_KINDS[type_name][0]}"
        )
    return value


_INVISIBLE: Final = ("Cc", "Cf", "Cs")
"""Unicode categories of characters that are displayed as nothing: controls, formats, surrogates."""
_FILLERS: Final = frozenset(
    "\u034f\u115f\u1160\u17b4\u17b5\u180b\u180c\u180d\u180f\u2800\u3164\uffa0"
    + "".join(map(chr, (*range(0x2060, 0x2070), *range(0xFE00, 0xFE10), *range(0xE0000, 0xE1000))))
)
"""Characters of other categories that are displayed as nothing: Unicode's property
`Default_Ignorable_Code_Point`, and the blank of Braille."""


def check_user(name: str, user: Any, remedy: str = "omit the name to use the default user") -> str:
    """Validate and return a user name from an option, a variable or a request.

    An empty name raises an error. An empty name usually comes from an unset environment variable.
    An empty name must not select the default user or all users.

    Args:
        name: The option, variable or field, for the error.
        user: The name of the user.
        remedy: What the user should do instead, for the error.

    Raises:
        ConfigurationError: The value is not a valid name; see `is_valid_user_or_team_name`.
    """
    if not is_valid_user_or_team_name(user):
        raise ConfigurationError(
            f"{name} is {user!a:.80}; expected a user name that is not blank, '.' or '..'; {remedy}"
        )
    return user


def is_valid_user_or_team_name(value: Any) -> TypeGuard[str]:
    """Return whether a value is a valid user or team name.

    A valid name is a string with at least one visible character. Spaces, control characters and
    format characters, such as the zero-width space, are invisible. `"."` and `".."` are not valid
    names, because they cannot be segments of a URL path.
    """
    return (
        isinstance(value, str)
        and value not in (".", "..")
        and not all(
            char.isspace() or char in _FILLERS or unicodedata.category(char) in _INVISIBLE
            for char in value
        )
    )


@dataclass(frozen=True, slots=True)
class Rules:
    """The retention rules from the settings file's `[retention]` table.

    A rule that is None removes nothing.

    Attributes:
        idle_days: Delete threads that have been idle for this number of days.
        memories: Whether to also erase the memories that were extracted from such threads.
        checkpoints_last: See `checkpointers.Retention`.
        checkpoints_days: See `checkpointers.Retention`.
        turns: See `checkpointers.Retention`.
        history: See `checkpointers.Retention`.
        versions_last: See `stores.VersionRetention`.
        versions_days: See `stores.VersionRetention`.
        quarantine_days: Erase candidates that have been quarantined for this number of days.
        jobs_days: Clear the records of extractions whose last failure is this number of days ago.
            The messages that such an extraction should have read are read together with the next
            message of the thread.
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
        for name, kind in _map_fields_to_type_names(type(self)).items():
            if getattr(self, name) is not None or kind == "bool":
                _check_setting_type(f"retention.{name}", getattr(self, name), kind)
        if not self.history and not self.checkpoints:
            raise ConfigurationError(
                "retention.history = false has no effect without a retention rule for checkpoints; "
                "also set checkpoints_last, checkpoints_days or turns"
            )

    @property
    def checkpoints(self) -> bool:
        """Whether at least one checkpoint retention rule is set."""
        return self.turns or not (self.checkpoints_last is None and self.checkpoints_days is None)

    def __bool__(self) -> bool:
        return self != Rules()


@dataclass(frozen=True, slots=True)
class Worker:
    """Default options for `perdure worker`, from the settings table `[worker]`.

    Attributes:
        delay_s: The option `--delay`: the number of seconds for which a thread must be idle before
            memories are extracted from its messages.
        cron: The option `--cron`: the schedule for extractions.
        timezone: The time zone of `cron`.
        facts: The option `--facts`: whether a model extracts facts.
    """

    delay_s: float | None = None
    cron: str | None = None
    timezone: str | None = None
    facts: bool = False


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of perdure.

    Attributes:
        db: The database: the path of a file, or a Postgres DSN.
        direct: The DSN of the database server, used for locks if `db` is the DSN of a connection
            pooler. None means `db`.
        model: The name of a chat model at an OpenAI-compatible endpoint. None means the responder
            that works offline.
        base_url: The URL of this endpoint. None means OpenAI's endpoint.
        api_key: The API key of the endpoint. Local servers accept any key.
        key: The encryption key of the database, in hexadecimal.
        webhook_secret: The secret with which `perdure serve` signs notifications to webhooks.
        graphs: The path of a langgraph.json. Its embedder and times to live (`store.index`,
            `store.ttl`) apply to the store of all commands, and `perdure serve` serves its graphs.
        user: The default user, to whom the long-term memories belong.
        search_threads: Whether the command line and the server search the transcripts of threads.
            If not, `perdure serve` removes the index for this search.
        retention: The rules of retention.
        worker: The default options of the worker.
        sources: The sources of values that are not defaults, by names such as
            `"retention.idle_days"`.
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
        check_user("the setting 'user'", self.user)


_SETTING_TABLES: Final = {"retention": Rules, "worker": Worker}
# Maps the name of each setting to the name of its type, such as "int".
NAMES: Final = {
    **{
        name: kind
        for name, kind in _map_fields_to_type_names(Settings).items()
        if kind in _VALUE_KINDS
    },
    **{
        f"{table}.{name}": kind
        for table, table_class in _SETTING_TABLES.items()
        for name, kind in _map_fields_to_type_names(table_class).items()
    },
}


# Matches a DSN that consists of `keyword=value` pairs. A text counts as such a DSN if it starts
# with a libpq keyword. A text that contains `password=` anywhere also counts as a DSN, because a
# file name would not contain a password.
_DSN_KEYWORDS: Final = re.compile(
    r"\s*(host|hostaddr|port|dbname|user|passfile|service|options|application_name|"
    r"connect_timeout|target_session_attrs|ssl\w+)\s*=|(.*\s)?password\s*=",
    re.IGNORECASE | re.DOTALL,
)


def is_dsn(db: str) -> bool:
    """Return whether a text is a Postgres DSN (a URI or `keyword=value` pairs) and not a path.

    Raises:
        ConfigurationError: The text is a DSN of another form, or the URL of an SQLite file.
    """
    if db.startswith(("postgresql://", "postgres://")) or _DSN_KEYWORDS.match(db):
        return True
    if re.match(r"sqlite(\+\w+)?://", db, re.IGNORECASE):
        raise ConfigurationError(
            f"the database is an SQLite URL; pass the path {_extract_sqlite_path(db)!r} instead"
        )
    if "://" in db:
        # Omit the value from the error message, because the value may contain a password.
        raise ConfigurationError(
            "the database is a URL with an unsupported scheme; expected "
            "postgresql://user@host/database, or the path of a file"
        )
    return False


def _extract_sqlite_path(url: str) -> str:
    """Extract the file path from an SQLAlchemy URL for SQLite, without the user and password.

    >>> urls = "sqlite:///x.db", "sqlite+aiosqlite:////srv/x.db", "sqlite://"
    >>> [_extract_sqlite_path(url) for url in urls]
    ['x.db', '/srv/x.db', ':memory:']
    """
    host, _, path = url.partition("://")[2].partition("/")
    return path.partition("?")[0] or host.rpartition("@")[2] or ":memory:"


def load(**arguments: str | None) -> Settings:
    """Load the settings from arguments, the environment and the settings file.

    Args:
        **arguments: Values that override the environment and the file, unless they are None.

    Raises:
        ConfigurationError: The file cannot be read, or contains an unknown setting, a value of a
            wrong type, or a setting that is risky in a file that the user has not chosen. The error
            is also raised if an argument is empty, or if the name of the user is blank.
    """
    settings = _read_settings_file() | _read_settings_from_environment()
    for name, value in arguments.items():
        if name == "user" and value is not None:
            check_user("--user", value)
        elif value == "":
            raise ConfigurationError(
                f"--{name} is empty; pass a value, or omit the option to use the configured value"
            )
    settings |= {name: (value, "argument") for name, value in arguments.items() if value}
    # Use the key from OPENAI_API_KEY only if base_url is not set, so that the key is sent only to
    # OpenAI.
    if "model" in settings and not {"api_key", "base_url"} & settings.keys():
        settings["api_key"] = os.environ.get("OPENAI_API_KEY"), "OPENAI_API_KEY"
    settings = {name: setting for name, setting in settings.items() if setting[0] not in ("", None)}
    _refuse_risky_settings_of_untrusted_files(settings)
    values: dict[str, Any] = {"db": "", **{table: {} for table in _SETTING_TABLES}}
    for name, (value, _) in settings.items():
        table, _, field_name = name.rpartition(".")
        (values[table] if table else values)[field_name] = value
    values |= {
        table: settings_class(**values[table]) for table, settings_class in _SETTING_TABLES.items()
    }
    sources = {name: source for name, (_, source) in settings.items()}
    db = os.path.expanduser(values.pop("db")) or _build_default_database_path()
    if db != ":memory:" and not is_dsn(db) and sources.get("db") != "argument":
        db = os.path.abspath(db)
    return Settings(db, **values, sources=sources)


def _refuse_risky_settings_of_untrusted_files(settings: Mapping[str, Setting]) -> None:
    """Reject settings in a `perdure.toml` that could let its author steal data or run code.

    A `perdure.toml` that the user did not choose explicitly may come from a cloned repository. A
    `perdure.toml` from a cloned repository could send user data to its author through `base_url`,
    or run the author's code through `graphs`.

    Raises:
        ConfigurationError: A file that the user has not chosen sets a DSN or `graphs`, or sets
            `base_url` while the API key comes from an environment variable.
    """
    (_, url_source), (_, key_source) = (
        settings.get(name, ("", "")) for name in ("base_url", "api_key")
    )
    if _is_untrusted_file(url_source) and key_source.endswith("_API_KEY"):
        raise ConfigurationError(
            f"the setting base_url in the file {url_source!r} was refused, because requests to "
            f"this URL would send your API key (from {key_source}) to a server that the author of "
            f"the file has chosen; if you trust the file, set PERDURE_CONFIG={url_source}; "
            "otherwise set PERDURE_BASE_URL to a URL that you trust"
        )
    for name, alternative in (("db", " or pass --db"), ("direct", "")):
        value, source = settings.get(name, ("", ""))
        if _is_untrusted_file(source) and is_dsn(value):
            raise ConfigurationError(
                f"the setting {name!r} in the file {source!r} was refused, because it would send "
                "your threads and memories to a database that the author of the file has chosen; "
                f"if you trust the file, set PERDURE_CONFIG={source}; otherwise set the database "
                f"in PERDURE_{name.upper()}{alternative}"
            )

    graphs, source = settings.get("graphs", ("", ""))
    if _is_untrusted_file(source):
        raise ConfigurationError(
            f"the file {source!r} is not trusted, so its setting 'graphs' = {graphs!r} was "
            "refused, because this setting determines which code is run. If you trust the file, "
            f"set PERDURE_CONFIG={source}. Otherwise, set PERDURE_GRAPHS to another langgraph.json"
        )


def _is_untrusted_file(source: str) -> bool:
    """Return whether a setting comes from a `perdure.toml` that was not explicitly chosen."""
    return Path(source).name == "perdure.toml" and not os.environ.get("PERDURE_CONFIG")


def _read_settings_from_environment() -> dict[str, Setting]:
    """Return the settings from the `PERDURE_*` environment variables, keyed by setting name.

    A warning is logged for each variable whose name is similar to that of a setting. Other unknown
    names are ignored, because Kubernetes sets variables such as `PERDURE_SERVICE_HOST`.
    """
    settings: dict[str, Setting] = {}
    setting_names = {name.upper().replace(".", "_") for name in NAMES} | {"CONFIG"}
    variable_names = {name.removeprefix(_PREFIX) for name in os.environ if name.startswith(_PREFIX)}
    for name in sorted(variable_names - setting_names):
        for similar in get_close_matches(name, setting_names, 1, _MIN_SIMILARITY):
            _LOG.warning(
                "the environment variable %s is not a setting; did you mean %s?",
                _PREFIX + name,
                _PREFIX + similar,
            )
    for name, kind in NAMES.items():
        variable = f"{_PREFIX}{name.upper().replace('.', '_')}"
        if name == "user" and variable in os.environ:
            check_user(variable, os.environ[variable])
        if text := os.environ.get(variable):
            settings[name] = (
                _check_setting_type(variable, _parse_environment_variable(text, kind), kind),
                variable,
            )
    return settings


def _read_settings_file() -> dict[str, Setting]:
    """Return the settings from the settings file, as a dict with the setting names as keys.

    If there is no settings file, the dict is empty.
    """
    path = _find_settings_file()
    if path is None:
        return {}
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError, RecursionError) as exc:
        raise ConfigurationError(f"the settings file {str(path)!r} cannot be read: {exc}") from exc
    for table in _SETTING_TABLES:
        if isinstance(values.get(table), dict):
            values |= {f"{table}.{name}": value for name, value in values.pop(table).items()}
    for name, value in values.items():
        description = f"{name} in the settings file {str(path)!r}"
        if name not in NAMES:
            raise ConfigurationError(f"unknown setting {description}; expected {', '.join(NAMES)}")
        _check_setting_type(description, value, NAMES[name])
        if name == "user":
            check_user(description, value)
    # A path in the settings file is relative to the file's directory.
    if values.get("db") not in (None, "", ":memory:") and not is_dsn(values["db"]):
        values["db"] = str(path.parent / os.path.expanduser(values["db"]))
    if values.get("graphs"):
        values["graphs"] = str(path.parent / os.path.expanduser(values["graphs"]))
    return {name: (value, str(path)) for name, value in values.items()}


def _find_settings_file() -> Path | None:
    """Find the settings file.

    Returns:
        The file in `PERDURE_CONFIG`, otherwise the nearest `perdure.toml` in the working directory
        and the folders above it, otherwise the file in the user's configuration folder. None if
        there is none. The search through the folders ends at the user's home folder and at a folder
        that contains `.git`.
    """
    if configured_path := os.environ.get("PERDURE_CONFIG"):
        if not os.path.exists(configured_path):
            raise ConfigurationError(
                f"the file {configured_path!r} in PERDURE_CONFIG does not exist"
            )
        return Path(configured_path)
    folder, home = Path(), _read_folder_identity("~")
    # Keep the path relative, because LangGraph's server forbids calls to os.getcwd().
    while True:
        if os.path.isfile(path := folder / "perdure.toml"):
            return path
        # Stop searching parent folders at the home folder or at the root folder. The root folder is
        # its own parent folder.
        top_folders = (home, _read_folder_identity(folder / ".."))
        if os.path.exists(folder / ".git") or _read_folder_identity(folder) in top_folders:
            break
        folder /= ".."
    import platformdirs  # only needed if no database is named

    try:
        path = platformdirs.user_config_path("perdure") / "config.toml"
    except RuntimeError:  # the user has no home folder, as in many containers
        return None
    return path if os.path.isfile(path) else None


def _read_folder_identity(folder: str | Path) -> tuple[int, int] | None:
    """Return the device and inode of a folder, or None if it cannot be read."""
    try:
        status = os.stat(os.path.expanduser(folder))
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _parse_environment_variable(text: str, type_name: str) -> Any:
    """Convert an environment variable's value to the type of the setting.

    If the value cannot be converted to the type of the setting, return the original text.
    """
    try:
        return _VALUE_KINDS[type_name][1](text)
    except (KeyError, ValueError):
        return text


def _build_default_database_path() -> str:
    """Return the default path of the database, and create the folder if it is missing.

    Raises:
        ConfigurationError: The user has no home folder, or the folder cannot be created.
    """
    import platformdirs  # only needed if no database is named

    remedy = "set PERDURE_DB or --db to the path of a file in a folder that this user may write"
    try:
        folder = platformdirs.user_data_path("perdure")
    except RuntimeError as exc:
        raise ConfigurationError(
            f"the default database is in the home folder, but this user has none; {remedy}"
        ) from exc
    try:
        # Check first whether the folder exists, because LangGraph's server forbids `os.mkdir()` in
        # its event loop.
        if not folder.is_dir():
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise ConfigurationError(
            f"the folder {str(folder)!r} of the default database cannot be created "
            f"({exc.strerror}); {remedy}"
        ) from exc
    return str(folder / "perdure.db")
