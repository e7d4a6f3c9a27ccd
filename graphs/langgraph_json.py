"""Read the graphs, database settings and server settings from a `langgraph.json` file.

The file format is described at https://docs.langchain.com/langsmith/cli#configuration-file.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from perdure.errors import ConfigurationError
from perdure.run_tables.thread_list import TimeToLive

# Maximum TTL in minutes (100 years).
MAX_TTL_MINUTES: Final = 100 * 366 * 24 * 60
_Minutes = Annotated[float, Field(gt=0, le=MAX_TTL_MINUTES)]
# Keys in `langgraph.json` that are ignored without being reported.
_UNREPORTED_KEYS: Final = frozenset({"$schema"})
_CORS_REASON: Final = (
    "every site that matches could read and change all memories of a user who visits the site. "
    'List exact origins instead: {"allow_origins": ["https://app.example.com"]}'
)


class _ConfigSection(BaseModel):
    """A section of `langgraph.json`. Keys that the class does not declare as fields are ignored."""

    model_config = ConfigDict(extra="allow")

    def iter_names_of_ignored_keys(self, key_prefix: str = "") -> Iterator[str]:
        """Yield the dotted names of the unknown keys in this section and its subsections.

        The keys in `_UNREPORTED_KEYS`, such as `$schema`, are left out.
        """
        yield from (
            f"{key_prefix}{name}" for name in self.model_extra or {} if name not in _UNREPORTED_KEYS
        )
        for name in self.model_fields_set & type(self).model_fields.keys():
            value = getattr(self, name)
            if isinstance(value, _ConfigSection):
                yield from value.iter_names_of_ignored_keys(f"{key_prefix}{name}.")


class _ThreadTtl(_ConfigSection):
    strategy: Literal["delete", "keep_latest"] = "delete"
    default_ttl: _Minutes | None = None


class _Checkpointer(_ConfigSection):
    ttl: _ThreadTtl | None = None


class _StoreTtl(_ConfigSection):
    default_ttl: _Minutes | None = None
    refresh_on_read: bool | None = None
    sweep_interval_minutes: _Minutes | None = None


class _StoreIndex(_ConfigSection):
    embed: str
    dims: int | None = None
    fields: list[str] | None = None


class _Store(_ConfigSection):
    ttl: _StoreTtl | None = None
    index: _StoreIndex | None = None


class _Cors(_ConfigSection):
    allow_origins: list[str] = []
    allow_origin_regex: str | None = None
    allow_credentials: bool = False


class _Http(_ConfigSection):
    app: str | None = None
    cors: _Cors | None = None


class _Auth(_ConfigSection):
    path: str


class _Graph(BaseModel):
    path: str


class _File(_ConfigSection):
    graphs: dict[str, str | _Graph]
    dependencies: list[str] = []
    env: dict[str, Any] | str = {}
    auth: _Auth | None = None
    perdure: Any = {}
    store: _Store | None = None
    checkpointer: _Checkpointer | None = None
    http: _Http | None = None


@dataclass(frozen=True)
class LanggraphFile:
    """The contents of a `langgraph.json`.

    Attributes:
        path: The path of the file, absolute.
        thread_ttl: The time to live of new threads, or None.
        origins: The sites whose scripts may call the server.
        ignored: The dotted names of keys that have no effect in perdure.
    """

    path: Path
    thread_ttl: TimeToLive | None
    origins: tuple[str, ...]
    ignored: tuple[str, ...]
    _sections: _File

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Read a `langgraph.json` file and check its sections. No module is imported.

        Raises:
            ConfigurationError: The file cannot be read, has no object `graphs`, or has an invalid
                section. Also raised if its `http.cors` section has settings that perdure does not
                allow.
        """
        file = Path(path).resolve()
        expected = 'expected a langgraph.json with "graphs": {"name": "./file.py:graph"}'
        if not file.exists():
            raise ConfigurationError(f"the file {str(path)!r} does not exist; {expected}")
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as exc:
            raise ConfigurationError(f"{str(path)!r} cannot be read ({exc}); {expected}") from exc
        if not isinstance(content, dict) or not isinstance(content.get("graphs"), dict):
            raise ConfigurationError(f"{str(path)!r} contains no graphs; {expected}")
        try:
            sections = _File.model_validate(content)
        except ValidationError as exc:
            error = exc.errors(include_url=False)[0]
            name = ".".join(map(str, error["loc"]))
            raise ConfigurationError(
                f"{name} in {str(path)!r} is {error['input']!r:.80}: {error['msg']}"
            ) from exc
        ttl = sections.checkpointer.ttl if sections.checkpointer else None
        return cls(
            file,
            TimeToLive(ttl.default_ttl, ttl.strategy == "keep_latest")
            if ttl and ttl.default_ttl
            else None,
            _validate_cors_origins(sections.http.cors if sections.http else None, path),
            tuple(sections.iter_names_of_ignored_keys()),
            sections,
        )

    @property
    def graph_names(self) -> tuple[str, ...]:
        """The names of the graphs, in the order in which they appear in `langgraph.json`."""
        return tuple(self._sections.graphs)

    @property
    def auth(self) -> str | None:
        """The location of the authentication handlers, such as `"/srv/auth.py:auth"`, or None."""
        auth = self._sections.auth
        return str(self.path.parent / auth.path) if auth else None

    def import_graphs(self) -> dict[str, Any]:
        """Import the graphs, and return them by name.

        Instead of a graph, the file may name a function that returns a graph. The function is
        returned without being called.

        Raises:
            ConfigurationError: An object cannot be imported, or it is neither a graph nor a
                function that could return one.
        """
        self._set_environment()
        graphs = dict[str, Any]()
        for name, graph in self._sections.graphs.items():
            location, description = (
                graph if isinstance(graph, str) else graph.path,
                f"the graph {name!r}",
            )
            graphs[name] = import_object(
                location, self.path.parent, f"{description} of {str(self.path)!r}"
            )
            check_is_graph_or_graph_function(
                f"{description}, {location!r} of {str(self.path)!r},", graphs[name]
            )
        return graphs

    def import_saver_options(self) -> dict[str, Any]:
        """Return the checkpointer options `types` and `aliases` from the file's section `perdure`.

        Raises:
            ConfigurationError: The section has other keys, or an object that it names cannot be
                imported.
        """
        self._set_environment()
        options = self._sections.perdure
        if not isinstance(options, Mapping) or options.keys() - {"types", "aliases"}:
            raise ConfigurationError(
                f'"perdure" in {str(self.path)!r} is {options!r:.80}; expected an object with the '
                'keys "types" and "aliases", for example {"types": "./file.py:TYPES"}'
            )
        return {
            name: import_object(value, self.path.parent, f"perdure.{name}")
            if isinstance(value, str)
            else value
            for name, value in options.items()
        }

    def import_store_options(self) -> dict[str, Any]:
        """Return the `index` and `ttl` options for opening the store.

        Raises:
            ConfigurationError: The embedder cannot be imported.
        """
        section, options = self._sections.store or _Store(), dict[str, Any]()
        if section.ttl is not None:
            options["ttl"] = section.ttl.model_dump(
                include=set(_StoreTtl.model_fields), exclude_none=True
            )
        if section.index is not None:
            self._set_environment()
            index = section.index.model_dump(
                include=set(_StoreIndex.model_fields), exclude_none=True
            )
            # The value of `store.index.embed` is either the location of an object in a Python file,
            # which contains ".py:", or a provider and a model name, such as
            # "openai:text-embedding-3-small".
            if ".py:" in index["embed"]:
                index["embed"] = import_object(
                    index["embed"], self.path.parent, "store.index.embed"
                )
            options["index"] = index
        return options

    def import_app(self) -> Any:
        """Import the user's own web application, which is configured as `http.app`.

        Return None if `langgraph.json` does not set `http.app`.

        Raises:
            ConfigurationError: The application cannot be imported.
        """
        location = self._sections.http.app if self._sections.http else None
        if location is None:
            return None
        self._set_environment()
        return import_object(location, self.path.parent, "http.app")

    def _set_environment(self) -> None:
        """Set the environment variables from the `env` section, and add folders to `sys.path`.

        The folder of `langgraph.json` and the folders of local dependencies are added to
        `sys.path`.
        """
        folder = self.path.parent
        for dependency in [".", *self._sections.dependencies]:
            folder_path = str((folder / dependency).resolve())
            if dependency.startswith(".") and folder_path not in sys.path:  # others are packages
                sys.path.insert(0, folder_path)
        os.environ.update(_read_environment_variables(self._sections.env, folder))


def import_object(location: str, folder: Path, description: str) -> Any:
    """Import the object at a location like `"./file.py:name"` or `"package.module:name"`.

    Args:
        location: The location of the object.
        folder: The folder to which the path of a file is relative.
        description: A description of the object for the error, such as `"the graph 'chat'"`.

    Raises:
        ConfigurationError: The module cannot be imported, or the module does not have the object.
    """
    module_name, _, attribute = location.rpartition(":")
    file = (folder / module_name).resolve() if module_name.endswith(".py") else None
    try:
        if not (module_name and attribute):
            reason = "it does not name an object in a module"
        elif file is not None and not file.is_file():
            reason = f"the file {str(file)!r} does not exist"
        else:
            module = importlib.import_module(module_name) if file is None else _import_file(file)
            if hasattr(module, attribute):
                return getattr(module, attribute)
            reason = f"{module_name!r} has no {attribute!r}"
    except Exception as exc:
        raise _build_import_error(description, location, f"{type(exc).__name__}: {exc}") from exc
    raise _build_import_error(description, location, reason)


def _build_import_error(description: str, location: str, reason: str) -> ConfigurationError:
    return ConfigurationError(
        f"{description} is {location!r}, which cannot be imported: {reason}; expected "
        "'./file.py:name' or 'package.module:name'"
    )


def check_is_graph_or_graph_function(description: str, graph: Any) -> None:
    """Check that an object is a graph, or a callable that could return a graph.

    A graph may be compiled or not. An asynchronous context manager also counts as a graph, because
    entering the context manager may return a graph. A class is callable too, but is rejected unless
    it has the method `__aenter__`.

    Raises:
        ConfigurationError: The object is not a graph and cannot return a graph.
    """
    from langgraph.graph import StateGraph
    from langgraph.pregel import Pregel

    is_graph = isinstance(graph, StateGraph | Pregel) or hasattr(graph, "__aenter__")
    if not is_graph and (isinstance(graph, type) or not callable(graph)):
        raise ConfigurationError(
            f"{description} is {graph!r:.80}; expected a StateGraph, a compiled graph, or a "
            "function that returns one of them"
        )


def _import_file(file: Path) -> ModuleType:
    """Import a file as a module, or return the module if the file is already imported.

    The module's name is the file's name without `.py`. If another module already has this name, the
    suffix `_graph` is added until the name is free. Only modules with these names are checked, so a
    file that was imported as part of a package is imported a second time.
    """
    name = file.stem
    while (imported_module := sys.modules.get(name)) is not None:
        if getattr(imported_module, "__file__", None) == str(file):
            return imported_module
        name = f"{name}_graph"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _validate_cors_origins(cors: _Cors | None, config_path: str | Path) -> tuple[str, ...]:
    """Return the origins allowed by an `http.cors` section.

    Each origin must be exact. Wildcards and patterns are rejected.

    Raises:
        ConfigurationError: The section allows any site, allows sites by a pattern, or allows
            credentials.
    """
    if cors is None:
        return ()
    wildcard_origin = next((origin for origin in cors.allow_origins if "*" in origin), None)
    for name, value in (
        ("allow_origins", wildcard_origin),
        ("allow_origin_regex", cors.allow_origin_regex),
        ("allow_credentials", cors.allow_credentials or None),
    ):
        if value is not None:
            raise ConfigurationError(
                f"http.cors.{name} in {str(config_path)!r} is {value!r}, which is not allowed, "
                f"because {_CORS_REASON}"
            )
    return tuple(cors.allow_origins)


def _read_environment_variables(variables: Mapping[str, Any] | str, folder: Path) -> dict[str, str]:
    """Return the environment variables from `env`, which is either a mapping or a file name."""
    if isinstance(variables, Mapping):
        return {name: str(value) for name, value in variables.items()}
    try:
        lines = (folder / variables).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigurationError(
            f'cannot read the file {variables!r}, which is set as "env": {exc}'
        ) from exc
    pairs = (line.partition("=") for line in lines if "=" in line and not line.startswith("#"))
    return {name.strip(): value.strip().strip("\"'") for name, _, value in pairs}
