"""Memory for langchain's agents: the parts of a view as one middleware of `create_agent`.

Parts that change the state run before each call of the model, all parts decide what it is shown,
and learners run when the agent is done. It needs the package langchain:
`pip install "perdure[agents]"`.
"""

from __future__ import annotations

import operator
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Final, NotRequired

from langchain_core.messages import RemoveMessage, SystemMessage
from langgraph.channels import UntrackedValue
from langgraph.config import get_config
from langgraph.graph import add_messages
from langgraph.graph.message import REMOVE_ALL_MESSAGES

from perdure.errors import MissingDependency
from perdure.memory.conversation import Messages
from perdure.memory.learner import Learner
from perdure.memory.nodes import SHOWN, MessagesNode
from perdure.memory.options import instance
from perdure.memory.summary import Summary
from perdure.memory.trim import removals
from perdure.memory.view import View, changes_state, parts_of, view

try:
    from langchain.agents.middleware import AgentMiddleware, AgentState, ModelRequest, ModelResponse
except ImportError as exc:
    raise MissingDependency(
        'perdure.memory.middleware needs langchain: pip install "perdure[agents]"'
    ) from exc

_EXPECTED: Final = "parts like trim(max_tokens=4_000) or remember_turns()"


class MemoryState(AgentState[Any]):
    """An agent's state with the channels of a summary and of feedback on a run."""

    summary: NotRequired[Summary | None]
    summarized: NotRequired[Annotated[list[str], operator.add]]
    feedback: NotRequired[Annotated[Any, UntrackedValue]]  # on this run only


class MemoryMiddleware(AgentMiddleware[Any, Any, Any]):
    """Memory around each call of an agent's model.

    `create_agent(model, tools, middleware=[MemoryMiddleware(remember_turns(), use_memories(),
    summarize(model), trim(max_tokens=4_000))], store=store)`

    A budget of tokens is one for the whole request: the agent's system prompt and the schemas of
    its tools count.

    Args:
        parts: What the model is shown, in order, the part that cuts last; one in the mode `"state"`
            changes the thread too. Learners, like `remember_turns()` and `update_instructions(…)`,
            run when the agent is done.

    Raises:
        ConfigurationError: There is no part, one is something else, or they read different
            channels.
    """

    state_schema = MemoryState

    def __init__(self, *parts: MessagesNode | Learner) -> None:
        super().__init__()
        for part in parts or (None,):
            instance("a part of the memory", part, (MessagesNode, Learner), _EXPECTED)
        self._learners = [part for part in parts if isinstance(part, Learner)]
        self._shown = parts_of([part for part in parts if isinstance(part, MessagesNode)])
        self._view = view(*self._shown) if self._shown else None
        self._with_tools: tuple[list[Any], View | None] = ([], self._view)

    # -- the state

    def before_model(self, state: Any, runtime: Any) -> dict[str, Any] | None:
        """What the parts change in the state, one after the other."""
        changes = _Changes(state)
        for part in filter(changes_state, self._shown):
            changes.add(part, part.update(changes.state, get_config()))
        return changes.update() or None

    async def abefore_model(self, state: Any, runtime: Any) -> dict[str, Any] | None:
        """See `before_model`."""
        changes = _Changes(state)
        for part in filter(changes_state, self._shown):
            changes.add(part, await part.aupdate(changes.state, get_config()))
        return changes.update() or None

    # -- what the model is shown

    def wrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], ModelResponse[Any]]
    ) -> ModelResponse[Any]:
        """Show the model what the parts leave."""
        shows = self._view_with(request.tools)
        if shows is None:
            return handler(request)
        return handler(_with(request, shows.shown(_all_of(request), request.state, get_config())))

    async def awrap_model_call(
        self,
        request: ModelRequest[Any],
        handler: Callable[[ModelRequest[Any]], Awaitable[ModelResponse[Any]]],
    ) -> ModelResponse[Any]:
        """See `wrap_model_call`."""
        shows = self._view_with(request.tools)
        if shows is None:
            return await handler(request)
        shown = await shows.ashown(_all_of(request), request.state, get_config())
        return await handler(_with(request, shown))

    def _view_with(self, tools: list[Any]) -> View | None:
        """The view for a request with these tools, which are mostly the same every time."""
        known, shows = self._with_tools
        if len(known) != len(tools) or not all(map(operator.is_, known, tools)):
            shows = None if self._view is None else self._view.with_tools(tools)
            self._with_tools = list(tools), shows
        return shows

    # -- when the agent is done

    def after_agent(self, state: Any, runtime: Any) -> None:
        """Learn from the conversation."""
        for learner in self._learners:
            learner.invoke(state, get_config())

    async def aafter_agent(self, state: Any, runtime: Any) -> None:
        """See `after_agent`."""
        for learner in self._learners:
            await learner.ainvoke(state, get_config())


class _Changes:
    """The changes of several parts as one update, and the state after each.

    Updates of the messages are merged: in one list they would mean something else, as the reducer
    takes what follows a removal of all as it is.
    """

    def __init__(self, state: Any) -> None:
        self.state: dict[str, Any] = dict(state)
        self._before = self.state
        self._made: dict[str, Any] = {}

    def add(self, part: MessagesNode, update: dict[str, Any]) -> None:
        for name, value in update.items():
            if name == SHOWN:
                continue  # it is asked for at the call
            if name == part.messages_key:
                after: Any = add_messages(self.state[name], value)
                if name in self._made:
                    value = _difference(self._before[name], after, name)
            elif isinstance(value, list):  # the ids of summarised messages, which are added
                after = [*(self.state.get(name) or ()), *value]
                value = [*self._made.get(name, ()), *value]
            else:
                after = value
            self.state = {**self.state, name: after}
            self._made[name] = value

    def update(self) -> dict[str, Any]:
        return {name: value for name, value in self._made.items() if value != []}


def _difference(before: Messages, after: list[Any], key: str) -> list[Any]:
    """The update that makes one list of messages of another."""
    there = {message.id for message in after}
    if [m.id for m in before if m.id in there] == [m.id for m in after]:
        update: list[Any] = removals(before, after, key).get(key, [])
        return update
    return [RemoveMessage(id=REMOVE_ALL_MESSAGES), *after]


def _all_of(request: ModelRequest[Any]) -> Messages:
    system = request.system_message
    return [system, *request.messages] if system is not None else request.messages


def _with(request: ModelRequest[Any], messages: Messages) -> ModelRequest[Any]:
    system = messages[0] if messages and isinstance(messages[0], SystemMessage) else None
    talk: list[Any] = list(messages[1:] if system is not None else messages)
    return request.override(system_message=system, messages=talk)
