"""The graphs of `langgraph.json`: settings `PERDURE_*` name the model, database and local user."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.runnables import RunnableConfig
from langgraph.graph.state import CompiledStateGraph

from perdure import settings
from perdure.checkpointers import open_checkpointer
from perdure.checkpointers.address import WITHOUT_MEMORY_KEY
from perdure.checkpointers.checkpointer import Checkpointer
from perdure.graphs.chat import Part, chat_graph, memory_agent
from perdure.memory.context import use_memories
from perdure.memory.extraction import remember_turns
from perdure.memory.recall import NAMESPACE
from perdure.memory.summary import summarize
from perdure.memory.trim import trim
from perdure.stores import open_store
from perdure.stores.whole_store import WholeStore

MAX_TOKENS = 8_000
"""What the model is shown of a thread at most; older messages are summarised from 6,000 on."""


def memory_chat(config: RunnableConfig) -> CompiledStateGraph[Any, Any, Any, Any]:
    """A chat that recalls and remembers, with a window and, where there is a model, a summary."""
    return build_memory_chat(_load_settings(), _choose_namespace(config))


def agent(config: RunnableConfig) -> CompiledStateGraph[Any, Any, Any, Any]:
    """The memory agent, with a window."""
    return build_memory_agent(_load_settings(), _choose_namespace(config))


def build_memory_chat(
    chosen: settings.Settings, namespace: tuple[str, ...] = NAMESPACE
) -> CompiledStateGraph[Any, Any, Any, Any]:
    """`memory_chat` with the model of these settings."""
    model = build_configured_model(chosen)
    parts: list[Part] = [use_memories(namespace=namespace)]
    if model is not None:
        options: Any = {
            "trigger": ("tokens", MAX_TOKENS * 3 // 4),
            "keep": ("tokens", MAX_TOKENS // 4),
        }
        parts.append(summarize(model, **options))
    parts += [trim(max_tokens=MAX_TOKENS), remember_turns(namespace=namespace)]
    return chat_graph(model, memory=parts)


def build_memory_agent(
    chosen: settings.Settings, namespace: tuple[str, ...] = NAMESPACE
) -> CompiledStateGraph[Any, Any, Any, Any]:
    """`agent` with the model of these settings."""
    model, window = build_configured_model(chosen), trim(max_tokens=MAX_TOKENS)
    return memory_agent(model, memory=[window], namespace=namespace)


@asynccontextmanager
async def checkpointer() -> AsyncIterator[Checkpointer]:
    """The checkpointer of the settings' database, for a server's lifetime."""
    chosen = await asyncio.to_thread(settings.load)
    async with open_checkpointer(chosen.db, key=chosen.key) as saver:
        yield saver


@asynccontextmanager
async def store() -> AsyncIterator[WholeStore]:
    """The store of the settings' database."""
    chosen = await asyncio.to_thread(settings.load)
    async with open_store(chosen.db, key=chosen.key) as opened:
        yield opened


def build_configured_model(chosen: settings.Settings) -> BaseChatModel | None:
    """The chat model that the settings name; None if they name none."""
    if chosen.model is None:
        return None
    from langchain_openai import ChatOpenAI  # its import takes seconds

    return ChatOpenAI(
        model=chosen.model.removeprefix("openai:"),  # a name that `load_chat_model` accepts
        base_url=chosen.base_url,
        api_key=chosen.api_key or "none",  # type: ignore[arg-type]
    )


def _load_settings() -> settings.Settings:
    return settings.load(db=":memory:")  # with a name, no folder is looked for; none is opened


def _choose_namespace(config: RunnableConfig) -> tuple[str, ...]:
    """Of the config's user, else of the local one."""
    configurable = config.get("configurable", {})
    # langgraph's server says "" for nobody; perdure's says so of runs without memory
    if configurable.get("user_id") or configurable.get(WITHOUT_MEMORY_KEY):
        return NAMESPACE
    return (NAMESPACE[0], _load_settings().user)
