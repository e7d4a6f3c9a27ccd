"""The graphs of whoever runs a server: the model and the database are those that `PERDURE_*` names.

`langgraph.json` lists them with the checkpointer and the store of that database, so that what is
said there is what the command line sees: `langgraph dev --config graphs/langgraph.json`.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from langchain_core.language_models import BaseChatModel
from langchain_core.runnables import RunnableConfig
from langgraph.graph.state import CompiledStateGraph

from perdure import settings
from perdure.checkpointers import SQLiteCheckpointer
from perdure.errors import ConfigurationError
from perdure.graphs.chat import chat_graph
from perdure.graphs.memory_agent import MEMORIES, memory_agent
from perdure.graphs.reflection import reflection_graph
from perdure.graphs.remembering import Notes, extraction_graph
from perdure.memory import Gate, Instructions, summarize, trim, update_instructions, use_memories
from perdure.memory.extraction import Extraction
from perdure.stores import SQLiteStore

_GATE = Gate()  # one for all: loaders make a graph for each run, and it counts what comes
_OPEN: dict[tuple[settings.Settings, tuple[str, ...]], _Forms] = {}
_OPENING = threading.Lock()
TOKENS = 8_000
"""What the model is shown of a thread at most; what is old is summarised from 6,000 tokens on."""


def memory_chat(config: RunnableConfig) -> CompiledStateGraph[Any, None, Any, Any]:
    """A chat with a window and a running summary, for loaders that read `langgraph.json`.

    The settings are those of the command line (`PERDURE_MODEL`, `PERDURE_BASE_URL`,
    `PERDURE_API_KEY`, or the file); without a model the offline responder answers, and nothing is
    summarised. The loader brings its own checkpointer.

    Args:
        config: That loaders pass; nothing in it changes the graph.

    Raises:
        ConfigurationError: The settings cannot be read.
    """
    window = trim(tokens=TOKENS)
    model = configured_model(_chosen())
    if model is None:
        return chat_graph(window=window)
    summary = summarize(model, trigger=("tokens", TOKENS * 3 // 4))
    return chat_graph(model, window=window, summary=summary)


@asynccontextmanager
async def checkpointer() -> AsyncIterator[SQLiteCheckpointer]:
    """The checkpointer of the database that the settings name, for a server's lifetime."""
    chosen = await asyncio.to_thread(settings.load)
    async with SQLiteCheckpointer.open(chosen.db, key=chosen.key) as saver:
        yield saver


@asynccontextmanager
async def store() -> AsyncIterator[SQLiteStore]:
    """The store of that database."""
    chosen = await asyncio.to_thread(settings.load)
    async with SQLiteStore.open(chosen.db, key=chosen.key) as opened:
        yield opened


def agent(config: RunnableConfig) -> CompiledStateGraph[Any, None, Any, Any]:
    """The memory agent: `{"configurable": {"user_id": …}}` of a run says whose memories.

    Those of a run that names no user, as Studio's first, are the settings' user's.
    """
    model, window = configured_model(_chosen()), trim(tokens=TOKENS)
    return memory_agent(model, namespace=_namespace(config), gate=_GATE, window=window)


def remembering_chat(config: RunnableConfig) -> CompiledStateGraph[Any, None, Any, Any]:
    """A chat that recalls, and notes its threads for `extraction`, or `perdure worker`."""
    namespace = _namespace(config)
    forms = _forms(namespace)
    return chat_graph(
        configured_model(_chosen()),
        window=trim(tokens=TOKENS),
        recall=use_memories(namespaces=[namespace]),
        background=Notes(forms.extraction),
    )


def extraction(config: RunnableConfig) -> CompiledStateGraph[Any, None, Any, Any]:
    """Forms memories of a thread of the database: of its turns, without a model."""
    return extraction_graph(_forms(_namespace(config)).extraction)


def reflection(config: RunnableConfig) -> CompiledStateGraph[Any, None, Any, Any]:
    """Learns instructions from a conversation.

    Raises:
        ConfigurationError: The settings name no model, and nothing learns without one.
    """
    model = configured_model(_chosen())
    if model is None:
        raise ConfigurationError("reflection needs a model: set PERDURE_MODEL")
    return reflection_graph(update_instructions(model, Instructions()))


def _chosen() -> settings.Settings:
    return settings.load(db=":memory:")  # a name, so that none is looked for: none is opened


def _namespace(config: RunnableConfig) -> tuple[str, ...]:
    """Where the memories of a run's user are; without one, those of the settings' user."""
    if config.get("configurable", {}).get("user_id"):  # langgraph's server says "" for nobody
        return MEMORIES
    return (MEMORIES[0], _chosen().user)


class _Forms(NamedTuple):
    """What forms memories, and knows what is not yet formed: it remembers what it has read."""

    extraction: Extraction


def _forms(namespace: tuple[str, ...]) -> _Forms:
    """What forms in the database of the settings, which stays open as long as the process."""
    chosen = settings.load()
    with _OPENING:
        if (chosen, namespace) not in _OPEN:
            saver = SQLiteCheckpointer.open(chosen.db, key=chosen.key)
            store = SQLiteStore.open(chosen.db, key=chosen.key)
            made = Extraction(saver, store, namespace=namespace, gate=_GATE)
            _OPEN[chosen, namespace] = _Forms(made)
        return _OPEN[chosen, namespace]


def configured_model(chosen: settings.Settings) -> BaseChatModel | None:
    """The chat model that the settings name; None if they name none."""
    if chosen.model is None:
        return None
    from langchain_openai import ChatOpenAI  # takes seconds: only for whoever has a model

    return ChatOpenAI(
        model=chosen.model,
        base_url=chosen.base_url,
        api_key=chosen.api_key or "none",  # type: ignore[arg-type]
    )
