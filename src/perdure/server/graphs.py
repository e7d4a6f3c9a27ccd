"""The graphs that the server runs: perdure's own, or those of a `langgraph.json`."""

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
from perdure.server.access import Refused
from perdure.settings import Settings
from perdure.stores.whole_store import WholeStore

Graph: TypeAlias = Pregel[Any, Any, Any, Any]
GraphSource: TypeAlias = Any
"""A graph, compiled or not, or a function that makes one, awaited or not, or a context of one."""
_UNNAMED: Final = "LangGraph"  # the name that langgraph gives to a graph without one
_ASSISTANT_NAMESPACE: Final = UUID("3d1b2f0e-7c52-5d0c-9c0f-8a3f6c1e2b47")
# What `ServerRuntime` may be: for runs, and for reading.
_RUN_RUNTIME, _READ_RUNTIME = (get_origin(each) for each in get_args(ServerRuntime.__value__))


class UnknownGraph(Refused):
    """No graph that is served has this name."""

    status = 404


class Graphs:
    """Graphs by their names.

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
        StoredTypes(**self.saver_options)  # check the options at the start of the server
        self._sources = {
            name: source.compile() if isinstance(source, StateGraph) else source
            for name, source in sources.items()
        }

    @classmethod
    def load_built_in(cls, settings: Settings) -> Self:
        """The chat and the agent, with the model of the settings."""
        return cls({name: _BuiltInGraph(name, settings) for name in ("chat", "agent")})

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Import the graphs of a `langgraph.json`; its folder and dependencies join `sys.path`.

        `"perdure": {"types": "./file.py:TYPES", "aliases": {"old.module:Name": "module:Name"}}`
        sets the options of the checkpointer. The value of `aliases` may also be the path of an
        object, like that of `types`.

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
        """A graph with this checkpointer and store; the rest is for a function that makes one.

        Args:
            name: Its name.
            saver: The checkpointer.
            store: The store.
            config: The run's.
            access: What the graph is used for.
            user: What the authentication handler returned.
            context: The run's.

        Raises:
            UnknownGraph: It is not served.
        """
        if name not in self._sources:
            raise UnknownGraph(
                f"the graph {name!r} is not served; the graphs are {', '.join(self._sources)}"
            )
        made = self._sources[name]
        if isinstance(made, _BuiltInGraph):
            made = self._sources[name] = await asyncio.to_thread(made.build)
        if not isinstance(made, Pregel):
            shared = {"access_context": access, "user": user, "store": store}
            runs = access == "threads.create_run"
            runtime = _RUN_RUNTIME(**shared, context=context) if runs else _READ_RUNTIME(**shared)
            made = await asyncio.to_thread(_call_factory, made, config or {}, runtime)
            if inspect.isawaitable(made):
                made = await made
        entered: Any = made if hasattr(made, "__aenter__") else nullcontext(made)
        async with entered as graph:
            yield _bind_graph(graph, name, saver, store)


class _BuiltInGraph(NamedTuple):
    """A graph of perdure's, made when it is first needed: its imports take seconds."""

    name: str
    settings: Settings

    def build(self) -> Graph:
        """Make it."""
        from perdure.graphs import configured

        make = {"chat": configured.build_memory_chat, "agent": configured.build_memory_agent}[
            self.name
        ]
        return make(self.settings)


@cache
def default_assistant_id(name: str) -> str:
    """The id of a graph's own assistant."""
    return str(uuid5(_ASSISTANT_NAMESPACE, name))


def _bind_graph(graph: Any, name: str, saver: Checkpointer, store: WholeStore) -> Graph:
    """Return the graph with a checkpointer, a store, and its own name or that of the file."""
    compiled = graph.compile() if isinstance(graph, StateGraph) else graph
    if not isinstance(compiled, Pregel):
        raise ConfigurationError(
            f"the function of the graph {name!r} returned {graph!r:.80}; expected a StateGraph or "
            "a compiled graph"
        )
    update = {"checkpointer": saver, "store": store}
    return compiled.copy(update | ({"name": name} if compiled.name == _UNNAMED else {}))


def _call_factory(make: Any, config: RunnableConfig, runtime: Any) -> Any:
    """Call a function that takes nothing, a config, a `ServerRuntime`, or both."""
    given = []
    for parameter in inspect.signature(make).parameters.values():
        wants = parameter.name == "runtime" or "ServerRuntime" in str(parameter.annotation)
        if wants or parameter.default is parameter.empty:
            given.append(runtime if wants else config)
    return make(*given)
