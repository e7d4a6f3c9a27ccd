"""Short-term memory for langchain's agents: the same nodes, as a middleware of `create_agent`.

Nodes that change the state run before each call of the model, views decide what it is shown, and
what learns from the conversation runs when the agent is done. Needs the package langchain:
`pip install "perdure[agents]"`.
"""

from __future__ import annotations

import operator
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, NotRequired

from langchain_core.messages import RemoveMessage, SystemMessage
from langgraph.channels import UntrackedValue
from langgraph.config import get_config
from langgraph.graph import add_messages
from langgraph.graph.message import REMOVE_ALL_MESSAGES

from perdure.errors import ConfigurationError, MissingDependency
from perdure.memory.conversation import Messages
from perdure.memory.learner import Learner
from perdure.memory.nodes import SHOWN, MessagesNode
from perdure.memory.summary import Summarize, Summary
from perdure.memory.trim import removals
from perdure.memory.view import View, view

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
    """An agent's state with the channels of a summary, and of what to learn from a run."""

    summary: NotRequired[Summary | None]
    summarized: NotRequired[Annotated[list[str], operator.add]]
    feedback: NotRequired[Annotated[Any, UntrackedValue]]  # on this run, not on those after it


class MemoryMiddleware(AgentMiddleware[Any, Any, Any]):
    """Nodes of short-term memory around each call of an agent's model.

    `create_agent(model, tools, middleware=[MemoryMiddleware(trim(tokens=4_000))])`

    A budget of tokens is one for the whole request: the agent's system prompt and the schemas of
    its tools count, whether or not `trim` was told of them.

    Args:
        nodes: In order, what cuts last. A node in the mode `"state"` changes the thread, one that
            is a view changes what the model is shown of it; `view(…)` stands for its parts, each
            in its own mode. `update_instructions(…)` and `update_profile(…)` learn when the
            agent is done.

    Raises:
        ConfigurationError: There is none, one is no node of perdure's, or they read different
            channels.
    """

    state_schema = MemoryState

    def __init__(self, *nodes: MessagesNode | Learner) -> None:
        super().__init__()
        kinds = (MessagesNode, Learner)
        if not nodes or not all(isinstance(node, kinds) for node in nodes):
            raise ConfigurationError(
                f"the nodes are {nodes!r:.120}; expected nodes like trim(tokens=4_000)"
            )
        self._learns = [node for node in nodes if isinstance(node, Learner)]
        shown = [node for node in nodes if isinstance(node, MessagesNode)]
        self._nodes = [part for node in shown for part in _parts(node)]
        self._shows = view(*self._nodes) if self._nodes else None
        self._with_tools: tuple[list[Any], View | None] = ([], self._shows)

    # -- the state

    def before_model(self, state: Any, runtime: Any) -> dict[str, Any] | None:
        """What the nodes change in the state, each upon the other."""
        changes = _Changes(state)
        for node in self._nodes:
            if _changes_state(node):
                changes.add(node, node.update(changes.state, get_config()))
        return changes.made() or None

    async def abefore_model(self, state: Any, runtime: Any) -> dict[str, Any] | None:
        """See `before_model`."""
        changes = _Changes(state)
        for node in self._nodes:
            if _changes_state(node):
                changes.add(node, await node.aupdate(changes.state, get_config()))
        return changes.made() or None

    # -- what the model is shown

    def wrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], ModelResponse[Any]]
    ) -> ModelResponse[Any]:
        """Show the model what the nodes leave."""
        shows = self._shows_beside(request.tools)
        if shows is None:
            return handler(request)
        return handler(_with(request, shows.shown(_all_of(request), request.state, get_config())))

    async def awrap_model_call(
        self,
        request: ModelRequest[Any],
        handler: Callable[[ModelRequest[Any]], Awaitable[ModelResponse[Any]]],
    ) -> ModelResponse[Any]:
        """See `wrap_model_call`."""
        shows = self._shows_beside(request.tools)
        if shows is None:
            return await handler(request)
        shown = await shows.ashown(_all_of(request), request.state, get_config())
        return await handler(_with(request, shown))

    def _shows_beside(self, tools: list[Any]) -> View | None:
        """The view for a request with these tools: an agent's are mostly the same every time."""
        if not tools:
            return self._shows
        known, shows = self._with_tools
        if len(known) == len(tools) and all(map(operator.is_, known, tools)):
            return shows
        shows = None if self._shows is None else self._shows.with_tools(tools)
        self._with_tools = list(tools), shows
        return shows

    # -- when the agent is done

    def after_agent(self, state: Any, runtime: Any) -> None:
        """Learn from the conversation."""
        for learns in self._learns:
            learns.invoke(state, get_config())

    async def aafter_agent(self, state: Any, runtime: Any) -> None:
        """See `after_agent`."""
        for learns in self._learns:
            await learns.ainvoke(state, get_config())


class _Changes:
    """What several nodes change, and the state as it is after each.

    Several updates of the messages are merged into one: in one list they would not mean the same,
    since the reducer takes what follows a removal of all as it is.
    """

    def __init__(self, state: Any) -> None:
        self.state: dict[str, Any] = dict(state)
        self._before = self.state
        self._made: dict[str, Any] = {}

    def add(self, node: MessagesNode, update: dict[str, Any]) -> None:
        for name, value in update.items():
            if name == SHOWN:
                continue  # it is asked for at the call
            if name == node.messages_key:
                after: Any = add_messages(self.state[name], value)
                if name in self._made:
                    value = _difference(self._before[name], after, name)
            elif isinstance(value, list):  # the ids that were summarised, which are added
                after = [*(self.state.get(name) or ()), *value]
                value = [*self._made.get(name, ()), *value]
            else:
                after = value
            self.state = {**self.state, name: after}
            self._made[name] = value

    def made(self) -> dict[str, Any]:
        """One update for all of it."""
        return {name: value for name, value in self._made.items() if value != []}


def _difference(before: Messages, after: list[Any], key: str) -> list[Any]:
    """The update that makes one list of messages of another."""
    there = {message.id for message in after}
    if [m.id for m in before if m.id in there] == [m.id for m in after]:
        update: list[Any] = removals(before, after, key).get(key, [])
        return update
    return [RemoveMessage(id=REMOVE_ALL_MESSAGES), *after]


def _parts(node: MessagesNode) -> list[MessagesNode]:
    """The parts of a view, those of views in it as well; of another node, itself."""
    if not isinstance(node, View):
        return [node]
    return [part for each in node.parts for part in _parts(each)]


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
