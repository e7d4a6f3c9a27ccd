"""Short-term memory for langchain's agents: the same nodes, as a middleware of `create_agent`.

Nodes that change the state run before each call of the model, views decide what it is shown. Needs
the package langchain: `pip install "perdure[agents]"`.
"""

from __future__ import annotations

import operator
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, NotRequired

from langchain_core.messages import SystemMessage
from langgraph.config import get_config
from langgraph.graph import add_messages

from perdure.errors import ConfigurationError, MissingDependency
from perdure.memory.conversation import Messages
from perdure.memory.nodes import SHOWN, MessagesNode
from perdure.memory.presenting import Summary
from perdure.memory.summary_node import Summarize

try:
    from langchain.agents.middleware import (
        AgentMiddleware,
        AgentState,
        ModelRequest,
        ModelResponse,
    )
except ImportError as exc:
    raise MissingDependency(
        'perdure.memory.middleware needs langchain: pip install "perdure[agents]"'
    ) from exc


class MemoryState(AgentState[Any]):
    """An agent's state with the channels of a summary."""

    summary: NotRequired[Summary | None]
    summarized: NotRequired[Annotated[list[str], operator.add]]


class MemoryMiddleware(AgentMiddleware[Any, Any, Any]):
    """Nodes of short-term memory around each call of an agent's model.

    `create_agent(model, tools, middleware=[MemoryMiddleware(trim(tokens=4_000))])`

    Args:
        nodes: In order, what cuts last. A node in the mode `"state"` changes the thread, one that
            is a view changes what the model is shown of it.

    Raises:
        ConfigurationError: There is none, or one is no node of perdure's.
    """

    state_schema = MemoryState

    def __init__(self, *nodes: MessagesNode) -> None:
        super().__init__()
        if not nodes or not all(isinstance(node, MessagesNode) for node in nodes):
            raise ConfigurationError(
                f"the nodes are {nodes!r:.120}; expected nodes like trim(tokens=4_000)"
            )
        self._nodes = nodes

    # -- the state

    def before_model(self, state: Any, runtime: Any) -> dict[str, Any] | None:
        """What the nodes change in the state, each upon the other."""
        changes = _Changes(state)
        for node in self._nodes:
            if _changes_state(node):
                changes.add(node, node.update(changes.state, get_config()))
        return changes.made or None

    async def abefore_model(self, state: Any, runtime: Any) -> dict[str, Any] | None:
        """See `before_model`."""
        changes = _Changes(state)
        for node in self._nodes:
            if _changes_state(node):
                changes.add(node, await node.aupdate(changes.state, get_config()))
        return changes.made or None

    # -- what the model is shown

    def wrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], ModelResponse[Any]]
    ) -> ModelResponse[Any]:
        """Show the model what the nodes leave."""
        messages = _all_of(request)
        for node in self._nodes:
            messages = node.shown(messages, request.state, get_config())
        return handler(_with(request, messages))

    async def awrap_model_call(
        self,
        request: ModelRequest[Any],
        handler: Callable[[ModelRequest[Any]], Awaitable[ModelResponse[Any]]],
    ) -> ModelResponse[Any]:
        """See `wrap_model_call`."""
        messages = _all_of(request)
        for node in self._nodes:
            messages = await node.ashown(messages, request.state, get_config())
        return await handler(_with(request, messages))


class _Changes:
    """Updates in the making, and the state as it is after each."""

    def __init__(self, state: Any) -> None:
        self.state: dict[str, Any] = dict(state)
        self.made: dict[str, Any] = {}

    def add(self, node: MessagesNode, update: dict[str, Any]) -> None:
        for name, value in update.items():
            if name == SHOWN:
                continue  # it is asked for at the call
            if name == node.messages_key:
                self.state[name] = add_messages(self.state[name], value)
                value = self.made.get(name, []) + value
            else:
                self.state[name] = value
            self.made[name] = value


def _changes_state(node: MessagesNode) -> bool:
    """Whether a node does more than to show: only then it is run before the model."""
    return getattr(node, "mode", "view") == "state" or isinstance(node, Summarize)


def _all_of(request: ModelRequest[Any]) -> Messages:
    system = request.system_message
    return [system, *request.messages] if system is not None else request.messages


def _with(request: ModelRequest[Any], messages: Messages) -> ModelRequest[Any]:
    system = messages[0] if messages and isinstance(messages[0], SystemMessage) else None
    talk: list[Any] = list(messages[1:] if system is not None else messages)
    return request.override(system_message=system, messages=talk)
