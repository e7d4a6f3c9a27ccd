"""Build the graphs for `langgraph.json` with the model, database and user from the settings."""

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
from perdure.memory.long_term.extraction import remember_turns
from perdure.memory.long_term.recall import NAMESPACE
from perdure.memory.short_term.summary import summarize
from perdure.memory.short_term.trim import trim
from perdure.stores import open_store
from perdure.stores.whole_store import WholeStore

MAX_TOKENS = 8_000
"""The maximum number of tokens of a request to the model.

In `memory_chat`, older messages are summarised when three quarters of this number are reached.
"""


def memory_chat(config: RunnableConfig) -> CompiledStateGraph[Any, Any, Any, Any]:
    """Build a chat graph that recalls memories, trims requests and remembers turns.

    If the settings name a model, the graph also summarises old messages.
    """
    return build_memory_chat(_load_settings(), _choose_memory_namespace(config))


def agent(config: RunnableConfig) -> CompiledStateGraph[Any, Any, Any, Any]:
    """Build the memory agent, which trims the conversation in each model request."""
    return build_memory_agent(_load_settings(), _choose_memory_namespace(config))


def build_memory_chat(
    chosen_settings: settings.Settings, namespace: tuple[str, ...] = NAMESPACE
) -> CompiledStateGraph[Any, Any, Any, Any]:
    """Build the `memory_chat` graph with the model configured in `chosen_settings`."""
    model = build_configured_model(chosen_settings)
    parts: list[Part] = [use_memories(namespace=namespace)]
    if model is not None:
        parts.append(
            summarize(
                model,
                trigger=("tokens", MAX_TOKENS * 3 // 4),
                keep=("tokens", MAX_TOKENS // 4),
            )
        )
    parts += [trim(max_tokens=MAX_TOKENS), remember_turns(namespace=namespace)]
    return chat_graph(model, memory=parts)


def build_memory_agent(
    chosen_settings: settings.Settings, namespace: tuple[str, ...] = NAMESPACE
) -> CompiledStateGraph[Any, Any, Any, Any]:
    """Build the `agent` graph with the model configured in `chosen_settings`."""
    return memory_agent(
        build_configured_model(chosen_settings),
        memory=[trim(max_tokens=MAX_TOKENS)],
        namespace=namespace,
    )


@asynccontextmanager
async def checkpointer() -> AsyncIterator[Checkpointer]:
    """Open the checkpointer for the configured database, and close it on exit."""
    chosen_settings = await asyncio.to_thread(settings.load)
    async with open_checkpointer(chosen_settings.db, key=chosen_settings.key) as saver:
        yield saver


@asynccontextmanager
async def store() -> AsyncIterator[WholeStore]:
    """Open the store for the configured database, and close it on exit."""
    chosen_settings = await asyncio.to_thread(settings.load)
    async with open_store(chosen_settings.db, key=chosen_settings.key) as opened_store:
        yield opened_store


def build_configured_model(chosen_settings: settings.Settings) -> BaseChatModel | None:
    """Build the configured chat model, or return None if none is configured."""
    if chosen_settings.model is None:
        return None
    from langchain_openai import ChatOpenAI  # the import takes seconds

    # Accept the prefix "openai:", because model names for `load_chat_model` can contain it.
    return ChatOpenAI(
        model=chosen_settings.model.removeprefix("openai:"),
        base_url=chosen_settings.base_url,
        api_key=chosen_settings.api_key or "none",  # type: ignore[arg-type]
    )


def _load_settings() -> settings.Settings:
    """Load the settings without creating the folder of the default database.

    The returned settings specify an in-memory database as a placeholder. Callers do not open it.
    """
    return settings.load(db=":memory:")


def _choose_memory_namespace(config: RunnableConfig) -> tuple[str, ...]:
    """Return the namespace template for the memories of a run.

    If the run has no user, the namespace contains the user from the settings.
    """
    configurable = config.get("configurable", {})
    # Return the default template if the run has a user, or if memory is disabled for the run. A
    # missing or empty `user_id` means that the run has no user. LangGraph's server, for example,
    # sets `user_id` to "" for a run without a user. Perdure's server disables memory for a run by
    # setting `WITHOUT_MEMORY_KEY`.
    if configurable.get("user_id") or configurable.get(WITHOUT_MEMORY_KEY):
        return NAMESPACE
    return (NAMESPACE[0], _load_settings().user)
