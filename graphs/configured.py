"""The chat of whoever runs a server: the model that `PERDURE_*` names, with memory that fits it."""

from __future__ import annotations

from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.runnables import RunnableConfig
from langgraph.graph.state import CompiledStateGraph

from perdure import settings
from perdure.graphs.chat import chat_graph
from perdure.memory import summarize, trim

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
    chosen = settings.load(db=":memory:")  # a name, so that none is looked for: none is opened
    window = trim(tokens=TOKENS)
    model = configured_model(chosen)
    if model is None:
        return chat_graph(window=window)
    summary = summarize(model, when={"tokens": TOKENS * 3 // 4}, on_failure="keep")
    return chat_graph(model, window=window, summary=summary)


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
