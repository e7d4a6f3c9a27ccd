"""Memory for langchain's agents: the parts of a view as one middleware of `create_agent`."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Annotated, Any, NotRequired

from langchain_core.messages import SystemMessage
from langgraph.channels import UntrackedValue
from langgraph.config import get_config

from perdure.effects import Effect, awaiting, blocking, calling
from perdure.errors import ConfigurationError, MissingDependency
from perdure.memory.extraction import RememberTurns
from perdure.memory.nodes import Learner, MessagesNode, View, view
from perdure.memory.options import instance
from perdure.memory.reducers import append_new
from perdure.memory.summary import Summarize
from perdure.memory.summary_state import Summary, latest_summary

try:
    from langchain.agents.middleware import AgentMiddleware, AgentState, ModelRequest
except ImportError as exc:
    raise MissingDependency(
        'perdure.memory.middleware needs langchain: pip install ".[agents]" in a checkout'
    ) from exc


class MemoryState(AgentState[Any]):
    """An agent's state with the channels of a summary and of feedback on a run."""

    summary: NotRequired[Annotated[Summary | None, latest_summary]]
    summarized: NotRequired[Annotated[list[str], append_new]]
    feedback: NotRequired[Annotated[Any, UntrackedValue]]  # on this run only


class MemoryMiddleware(AgentMiddleware[Any, Any, Any]):
    """Memory around each call of an agent's model: `MemoryMiddleware(trim(max_tokens=4_000))`.

    A budget of tokens is one for the whole request, the schemas of the agent's tools included.

    Args:
        parts: What the model is shown, in order, the part that cuts last. `summarize(…)` also
            changes the thread, before the model is called or, with `background=True`, after the
            run. Learners, like `remember_turns()` and `update_instructions(…)`, run when the agent
            is done.
    """

    state_schema = MemoryState

    def __init__(self, *parts: MessagesNode | Learner) -> None:
        super().__init__()
        expected = "parts like trim(max_tokens=4_000) or remember_turns()"
        if not parts:
            raise ConfigurationError(f"MemoryMiddleware() has no parts; expected {expected}")
        for part in parts:
            instance("a part of the memory", part, (MessagesNode, Learner), expected)
        self._learners = [part for part in parts if isinstance(part, Learner)]
        shown = [part for part in parts if isinstance(part, MessagesNode)]
        self._view = view(*shown) if shown else None
        self._with_tools: tuple[list[Any], View | None] = ([], self._view)

    async def _before_model(self, state: Any, runtime: Any) -> dict[str, Any] | None:
        """Summarise, if that is due and everything that will be removed has been learned from.

        Within a turn all learners run first. Before whole turns are removed only `remember_turns`
        runs, because the others have run at the end of these turns.
        """
        parts = self._view.parts if self._view else ()
        summaries = (part for part in parts if isinstance(part, Summarize))
        due = next((summary for summary in summaries if summary.is_due(state)), None)
        if due is None:
            return None
        config = get_config()
        splits = due.splits_turn(state)
        for learner in self._learners:
            if splits or isinstance(learner, RememberTurns):
                messages = state[learner.messages_key]
                if (await learner.learning(messages, state, config)) is None:
                    due.skip_turn(state)
                    return None
        return (await calling(due, "invoke", state, config)) or None

    async def _wrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], Any]
    ) -> Any:
        shows = self._view_with(request.tools)
        if shows is not None:
            system = [request.system_message] if request.system_message is not None else []
            given = [*system, *request.messages], request.state, get_config()
            shown: list[Any] = await calling(shows, "shown", *given)
            first = shown[0] if shown and isinstance(shown[0], SystemMessage) else None
            rest = shown[1:] if first is not None else shown
            request = request.override(system_message=first, messages=rest)
        return await Effect(lambda: handler(request), lambda: handler(request))

    async def _after_agent(self, state: Any, runtime: Any) -> None:
        for learner in self._learners:
            await calling(learner, "invoke", state, get_config())
        for part in self._view.parts if self._view else ():
            if isinstance(part, Summarize):
                part.schedule(state)

    before_model: Any = blocking(_before_model)
    abefore_model: Any = awaiting(_before_model)
    wrap_model_call: Any = blocking(_wrap_model_call)
    awrap_model_call: Any = awaiting(_wrap_model_call)
    after_agent: Any = blocking(_after_agent)
    aafter_agent: Any = awaiting(_after_agent)

    def _view_with(self, tools: list[Any]) -> View | None:
        before, shows = self._with_tools
        if len(before) != len(tools) or not all(map(operator.is_, before, tools)):
            shows = None if self._view is None else self._view.with_tools(tools)
            self._with_tools = list(tools), shows
        return shows
