"""Load the graphs to serve, which are the built-in graphs or those listed in a `langgraph.json`."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple, Self, TypeAlias, get_args, get_origin
from uuid import UUID, uuid5

from langchain_core.runnables import RunnableConfig
from langgraph.graph import StateGraph
from langgraph.pregel import Pregel
from langgraph_sdk.runtime import AccessContext, ServerRuntime

from perdure.checkpointers.checkpointer import Checkpointer
from perdure.checkpointers.stored_types import StoredTypes
from perdure.errors import ConfigurationError
from perdure.graphs.langgraph_json import LanggraphFile
from perdure.server.http.access import Refused
from perdure.settings import Settings
from perdure.stores.whole_store import WholeStore

Graph: TypeAlias = Pregel[Any, Any, Any, Any]
GraphSource: TypeAlias = Any
"""A compiled graph, a graph that is not compiled, or a graph factory.

A graph factory is a function that returns a graph, an awaitable of a graph, or a context manager
that yields a graph.
"""
# Name that LangGraph assigns to graphs that are compiled without a name.
_UNNAMED: Final = "LangGraph"
_ASSISTANT_NAMESPACE: Final = UUID("3d1b2f0e-7c52-5d0c-9c0f-8a3f6c1e2b47")
# The two classes in the union type `ServerRuntime`. If a graph is opened for a run, its factory
# receives an instance of the first class. If a graph is opened only for reading, its factory
# receives an instance of the second class.
_RUN_RUNTIME_CLASS, _READ_RUNTIME_CLASS = (
    get_origin(runtime_type) for runtime_type in get_args(ServerRuntime.__value__)
)


class UnknownGraph(Refused):
    """No graph with this name is served."""

    status = 404


class Graphs:
    """The graphs of the server, by name.

    Args:
        sources: The graphs, by name.
        saver_options: The options `types` and `aliases` of the checkpointers of the graphs.

    Raises:
        ConfigurationError: An option is wrong.
    """

    def __init__(
        self, sources: Mapping[str, GraphSource], saver_options: Mapping[str, Any] | None = None
    ) -> None:
        self.saver_options = dict(saver_options or {})
        # Validate the checkpointer options now, so that an invalid option prevents the server
        # from starting.
        StoredTypes(**self.saver_options)
        self._sources = {
            name: source.compile() if isinstance(source, StateGraph) else source
            for name, source in sources.items()
        }

    @classmethod
    def load_built_in(cls, settings: Settings) -> Self:
        """Return perdure's built-in graphs `chat` and `agent`, which use the configured model."""
        return cls({name: _BuiltInGraph(name, settings) for name in ("chat", "agent")})

    @classmethod
    def load_langgraph_json(cls, path: str | Path) -> Self:
        """Import the graphs listed in a `langgraph.json` file.

        The folders of the configuration file and of its local dependencies are added to `sys.path`.
        The environment variables in the configuration file's `env` section are set.

        The file may have a `perdure` section that configures the checkpointer, for example
        `"perdure": {"types": "./file.py:TYPES", "aliases": {"old.module:Name": "module:Name"}}`.
        `aliases` may also be a string that names a Python object, such as `"./file.py:ALIASES"`.

        Raises:
            ConfigurationError: The file cannot be read, or an object that it names cannot be
                imported.
        """
        file = LanggraphFile.read(path)
        return cls(file.import_graphs(), file.import_saver_options())

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    @asynccontextmanager
    async def open_graph(
        self,
        name: str,
        saver: Checkpointer,
        store: WholeStore,
        config: RunnableConfig | None = None,
        *,
        access: AccessContext = "threads.read",
        user: Any = None,
        context: Any = None,
    ) -> AsyncIterator[Graph]:
        """Yield a graph that uses the given checkpointer and store.

        If the graph is built by a graph factory, the factory receives `config` and a runtime
        object. The runtime object that a factory receives has the attributes `access`, `user`,
        `store` and, for a run, `context`.

        Args:
            name: The name of the graph.
            saver: The checkpointer.
            store: The store.
            config: The config of the run.
            access: The purpose for which the graph is opened.
            user: The user as the authentication handler returned it.
            context: The context of the run.

        Raises:
            UnknownGraph: The graph is not served.
        """
        if name not in self._sources:
            raise UnknownGraph(
                f"the graph {name!r} is not served; the served graphs are "
                f"{', '.join(self._sources)}"
            )
        source = self._sources[name]
        if isinstance(source, _BuiltInGraph):
            source = self._sources[name] = await asyncio.to_thread(source.build)
        if not isinstance(source, Pregel):
            shared = {"access_context": access, "user": user, "store": store}
            runtime = (
                _RUN_RUNTIME_CLASS(**shared, context=context)
                if access == "threads.create_run"
                else _READ_RUNTIME_CLASS(**shared)
            )
            source = await asyncio.to_thread(_call_graph_factory, source, config or {}, runtime)
            if inspect.isawaitable(source):
                source = await source
        graph_context: Any = source if hasattr(source, "__aenter__") else nullcontext(source)
        async with graph_context as graph:
            yield _bind_graph_to_saver_and_store(graph, name, saver, store)


class _BuiltInGraph(NamedTuple):
    """A built-in graph of perdure.

    A built-in graph is built on first use, because its imports take seconds.
    """

    name: str
    settings: Settings

    def build(self) -> Graph:
        """Build the graph."""
        from perdure.graphs import configured

        build_graph = {
            "chat": configured.build_memory_chat,
            "agent": configured.build_memory_agent,
        }[self.name]
        return build_graph(self.settings)


@cache
def default_assistant_id(name: str) -> str:
    """Return the id of a graph's default assistant."""
    return str(uuid5(_ASSISTANT_NAMESPACE, name))


def _bind_graph_to_saver_and_store(
    graph: Any, name: str, saver: Checkpointer, store: WholeStore
) -> Graph:
    """Return a copy of the graph that uses the given checkpointer and store.

    If the graph has no name, its copy gets the name under which the graph is served.
    """
    compiled = graph.compile() if isinstance(graph, StateGraph) else graph
    if not isinstance(compiled, Pregel):
        raise ConfigurationError(
            f"the factory function of the graph {name!r} returned {graph!r:.80}; expected a "
            "StateGraph or a compiled graph"
        )
    changes = {"checkpointer": saver, "store": store}
    return compiled.copy(changes | ({"name": name} if compiled.name == _UNNAMED else {}))


def _call_graph_factory(factory: Any, config: RunnableConfig, runtime: Any) -> Any:
    """Call a graph factory with the arguments that its signature requires.

    A graph factory has at most two parameters: one for the config and one for a `ServerRuntime`. If
    the factory's config parameter has a default value, the factory is called without a config.
    """
    arguments = []
    for parameter in inspect.signature(factory).parameters.values():
        takes_runtime = parameter.name == "runtime" or "ServerRuntime" in str(parameter.annotation)
        if takes_runtime or parameter.default is parameter.empty:
            arguments.append(runtime if takes_runtime else config)
    return factory(*arguments)
