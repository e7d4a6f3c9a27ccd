"""`MemoryMiddleware` adds memory nodes to an agent built with LangChain's `create_agent`."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Annotated, Any, Final, NotRequired

from langchain_core.messages import RemoveMessage, SystemMessage
from langchain_core.runnables import RunnableConfig
from langgraph.channels import UntrackedValue
from langgraph.config import get_config
from langgraph.graph.message import REMOVE_ALL_MESSAGES
from langgraph.types import Command

from perdure.effects import Effect, build_async_function, build_blocking_function, call_method
from perdure.errors import ConfigurationError, MissingDependency
from perdure.memory.long_term.extraction import RememberTurns
from perdure.memory.nodes import Learner, MessagesNode, View, view
from perdure.memory.options import check_instance
from perdure.memory.short_term.reducers import append_new
from perdure.memory.short_term.summary import Summarize
from perdure.memory.short_term.summary_state import SUMMARIZED, SUMMARY, Summary, merge_summaries
from perdure.memory.short_term.tokens import get_model_name
from perdure.memory.usage import read_model_name

try:
    from langchain.agents.middleware import AgentMiddleware, AgentState, ModelRequest
except ImportError as exc:
    raise MissingDependency(
        'perdure.memory.middleware needs langchain; run pip install "perdure[agents]"'
    ) from exc
try:
    from langchain.agents.middleware import ExtendedModelResponse
except ImportError:  # an older version of langchain
    ExtendedModelResponse = None  # type: ignore[assignment, misc]

# Maximum number of entries in each of a middleware's two caches. One cache is keyed by agent, and
# the other by model name.
_MAX_CACHE_ENTRIES: Final = 256


class MemoryState(AgentState[Any]):
    """An agent state schema that adds channels for a summary and for feedback on the run."""

    summary: NotRequired[Annotated[Summary | None, merge_summaries]]
    summarized: NotRequired[Annotated[list[str], append_new]]
    # The feedback channel is not saved in checkpoints, because feedback applies only to the current
    # run.
    feedback: NotRequired[Annotated[Any, UntrackedValue]]


class MemoryMiddleware(AgentMiddleware[Any, Any, Any]):
    """Adds memory to an agent.

    For example, `MemoryMiddleware(trim(max_tokens=4_000))` limits the messages in each model call.

    Token budgets and the trigger of `summarize(…)` apply to the whole request, including the system
    prompt and the schemas of the agent's tools.

    Args:
        parts: Nodes that select the messages for the model, in order, and learners. Of the nodes,
            the one that trims the messages comes last. `summarize(…)` also changes the thread,
            before the model is called or, with `background=True`, after the run. Learners, such as
            `remember_turns()` and `update_instructions(…)`, run when the agent is done.
    """

    state_schema = MemoryState

    def __init__(self, *parts: MessagesNode | Learner) -> None:
        super().__init__()
        if not parts:
            raise ConfigurationError(
                "MemoryMiddleware() needs at least one part, such as trim(max_tokens=4_000) or "
                "remember_turns()"
            )
        expected = "parts such as trim(max_tokens=4_000) or remember_turns()"
        for part in parts:
            check_instance("a part of the memory", part, (MessagesNode, Learner), expected)
        self._learners = [part for part in parts if isinstance(part, Learner)]
        nodes = [part for part in parts if isinstance(part, MessagesNode)]
        self._view = view(*nodes) if nodes else None
        view_parts = self._view.parts if self._view else ()
        self._summarize_nodes = [part for part in view_parts if isinstance(part, Summarize)]
        # A tuple of the last request's tools, the last request's model name, and a copy of the
        # view. The token counter of the copied view is adapted to these tools and this model. The
        # copied view is reused if the next request has the same tools and the same model.
        self._cached: tuple[list[Any], str | None, View | None] = ([], None, self._view)
        # Cache of the view's `Summarize` nodes, copied for each agent and keyed by the agent's key
        # (see `_get_cache_key_and_name_of_running_agent`). The copied nodes estimate the size of
        # the agent's next request, and assume that it has the same tools and system prompt as the
        # agent's last request.
        self._summarize_nodes_by_agent: dict[Any, list[Summarize]] = {}
        # Maps the model name in a request to the model name that the provider's response reported.
        self._reported_names: dict[str, str] = {}

    async def _summarize_state_before_model_if_due(
        self, state: Any, runtime: Any
    ) -> dict[str, Any] | None:
        """Summarise the messages in the state if a summary is due.

        Whether a summary is due depends on the size of the next request. The next request's tools
        and system prompt are assumed to have the same size as those of the agent's last request.
        """
        if not self._summarize_nodes:
            return None
        config = get_config()
        return await self._summarize_if_due(self._get_summarize_nodes(config), state, config)

    async def _summarize_if_due(
        self, summarize_nodes: list[Summarize], state: Any, config: RunnableConfig
    ) -> dict[str, Any] | None:
        """Summarise the messages in the state if a summary is due.

        A summary removes messages from the state, so learners (nodes that learn from messages, such
        as `remember_turns`) must read the messages first. If summarising would remove messages of
        the current turn from the state, all learner nodes (nodes that learn from messages) run
        before the messages are summarised. If only earlier turns are summarised and all messages of
        the current turn are kept, the learner node `remember_turns` runs before the messages are
        summarised. In this case, the other learners do not run before the messages are summarised.
        The other learners have already processed these turns, because the other learners run at the
        end of each turn. If a learner fails, no summary is made.
        """
        due = next((node for node in summarize_nodes if node.is_due(state)), None)
        if due is None:
            return None
        splits_turn = due.would_split_turn(state)
        for learner in self._learners:
            if splits_turn or isinstance(learner, RememberTurns):
                messages = state[learner.messages_key]
                if (await learner.learn_from_messages(messages, state, config)) is None:
                    due.stop_summarizing_in_current_turn(state)
                    return None
        return (await call_method(due, "invoke", state, config)) or None

    async def _wrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], Any]
    ) -> Any:
        """Call the model with the messages that the view selects.

        The size of an agent's tools and system prompt is unknown until the agent's first request
        has been built. After building an agent's first request, the method checks again whether a
        summary is due. If the first request is large enough to need a summary, the messages are
        summarised, and the request is rebuilt from the summary and the remaining messages.
        """
        name = get_model_name(request.model)
        adjusted_view = self._get_view_for_tools_and_model(
            request.tools, self._reported_names.get(name or "", name)
        )
        update: dict[str, Any] | None = None
        if adjusted_view is not None:
            config = get_config()
            changed = await self._apply_view_to_request(adjusted_view, request, config)
            was_size_unknown = self._is_request_size_unknown(config)
            self._cache_tokens_of_tools_and_system_message(
                config, adjusted_view, changed.system_message
            )
            if was_size_unknown and ExtendedModelResponse is not None:
                update = await self._summarize_if_due(
                    self._get_summarize_nodes(config), request.state, config
                )
            if update and not _replaces_all_messages(update):
                shortened = _apply_summary_to_request(request, update)
                changed = await self._apply_view_to_request(adjusted_view, shortened, config)
            request = changed
        response = await Effect(lambda: handler(request), lambda: handler(request))
        if name is not None:
            self._cache_reported_model_name(name, response)
        if update and not _replaces_all_messages(update):
            return ExtendedModelResponse(response, Command(update=update))
        return response

    async def _apply_view_to_request(
        self, adjusted_view: View, request: ModelRequest[Any], config: RunnableConfig
    ) -> ModelRequest[Any]:
        """Return a copy of the request that contains the messages selected by the view."""
        system = [request.system_message] if request.system_message is not None else []
        messages = [*system, *request.messages]
        selected: list[Any] = await call_method(
            adjusted_view, "select_messages", messages, request.state, config
        )
        first = selected[0] if selected and isinstance(selected[0], SystemMessage) else None
        rest = selected[1:] if first is not None else selected
        return request.override(system_message=first, messages=rest)

    def _get_summarize_nodes(self, config: RunnableConfig) -> list[Summarize]:
        """Return copies of the view's `Summarize` nodes for the agent that is running.

        Each agent has its own copies of the `Summarize` nodes, because the sizes of tools and
        system prompts can differ between agents.

        After the agent's first request, `Summarize` nodes include the request's tools and system
        prompt in their size estimates.
        """
        agent, name = _get_cache_key_and_name_of_running_agent(config)
        return self._summarize_nodes_by_agent.get(agent) or [
            part.for_agent(name) for part in self._summarize_nodes
        ]

    def _is_request_size_unknown(self, config: RunnableConfig) -> bool:
        """Return True if summaries need the agent's request size but it is not known yet."""
        agent, _ = _get_cache_key_and_name_of_running_agent(config)
        return bool(self._summarize_nodes) and agent not in self._summarize_nodes_by_agent

    def _cache_tokens_of_tools_and_system_message(
        self, config: RunnableConfig, adjusted_view: View, system: SystemMessage | None
    ) -> None:
        """Cache the token count of an agent's tools and system message.

        To decide whether a summary is due, perdure adds the token count of the tools and the system
        message to that of the messages.
        """
        if not self._summarize_nodes:
            return
        agent, name = _get_cache_key_and_name_of_running_agent(config)
        nodes = (part for part in adjusted_view.parts if isinstance(part, Summarize))
        _set_cache_entry_and_evict_oldest(
            self._summarize_nodes_by_agent, agent, [node.for_agent(name, system) for node in nodes]
        )

    def _cache_reported_model_name(self, requested_name: str, response: Any) -> None:
        """Cache the model name that the provider reports for requests to `requested_name`.

        The reported name can differ from the requested name, for example if the requested name is
        an alias.
        """
        answers = getattr(response, "result", None) or ()
        reported = next(filter(None, map(read_model_name, reversed(answers))), None)
        if reported is not None and self._reported_names.get(requested_name) != reported:
            _set_cache_entry_and_evict_oldest(self._reported_names, requested_name, reported)

    async def _run_learners_and_schedule_summaries(self, state: Any, runtime: Any) -> None:
        """Run the learner nodes at the end of a run, and schedule summaries in the background.

        A model writes the scheduled summaries after the run.

        Learner nodes learn from messages. For example, `remember_turns` stores messages as
        memories.
        """
        for learner in self._learners:
            await call_method(learner, "invoke", state, get_config())
        if self._summarize_nodes:
            for part in self._get_summarize_nodes(get_config()):
                part.schedule_background_summary(state)

    before_model: Any = build_blocking_function(_summarize_state_before_model_if_due)
    abefore_model: Any = build_async_function(_summarize_state_before_model_if_due)
    wrap_model_call: Any = build_blocking_function(_wrap_model_call)
    awrap_model_call: Any = build_async_function(_wrap_model_call)
    after_agent: Any = build_blocking_function(_run_learners_and_schedule_summaries)
    aafter_agent: Any = build_async_function(_run_learners_and_schedule_summaries)

    def _get_view_for_tools_and_model(self, tools: list[Any], model: str | None) -> View | None:
        """Return a copy of the view with a token counter for the given tools and model.

        The view (`self._view`) is a `View` node, which selects the messages that are sent to the
        model.

        None is returned if the middleware has no view, that is, if none of its components selects
        messages. The returned view is cached, and is reused if the next request has the same tools
        and model.
        """
        last_tools, last_model, adjusted_view = self._cached
        same_tools = len(last_tools) == len(tools) and all(map(operator.is_, last_tools, tools))
        if self._view is not None and not (same_tools and last_model == model):
            adjusted_view = self._view.with_tools(tools).with_calibration_for_model(model)
            self._cached = list(tools), model, adjusted_view
        return adjusted_view


def _get_cache_key_and_name_of_running_agent(
    config: RunnableConfig,
) -> tuple[tuple[tuple[str, ...], Any], str | None]:
    """Return the running agent's key and name.

    The middleware keeps separate data for each agent. The returned key identifies the agent if
    several agents share one middleware instance.
    """
    metadata = config.get("metadata") or {}
    namespace = str(metadata.get("langgraph_checkpoint_ns") or "")
    nodes = tuple(node.partition(":")[0] for node in namespace.split("|")[:-1])
    name = metadata.get("lc_agent_name")
    return (nodes, name), name


def _replaces_all_messages(update: dict[str, Any]) -> bool:
    """Return whether a state update removes all messages from the state.

    An update that removes all messages must not be combined with the model's response, because it
    would remove the response too.
    """
    parts = (part for value in update.values() if isinstance(value, list) for part in value)
    return any(isinstance(part, RemoveMessage) and part.id == REMOVE_ALL_MESSAGES for part in parts)


def _apply_summary_to_request(
    request: ModelRequest[Any], summary_update: dict[str, Any]
) -> ModelRequest[Any]:
    """Update a request's messages and state with the result of a `Summarize` node."""
    parts = (part for value in summary_update.values() if isinstance(value, list) for part in value)
    removed = {part.id for part in parts if isinstance(part, RemoveMessage)}
    messages = [message for message in request.messages if message.id not in removed]
    summarized = request.state.get(SUMMARIZED) or []
    state: Any = {**request.state, SUMMARY: summary_update[SUMMARY]}
    state[SUMMARIZED] = append_new(summarized, summary_update[SUMMARIZED])
    return request.override(messages=messages, state=state)


def _set_cache_entry_and_evict_oldest(cache: dict[Any, Any], key: Any, value: Any) -> None:
    """Set an entry of `cache`.

    Evict the oldest entries if `cache` contains more than `_MAX_CACHE_ENTRIES` entries.
    """
    cache.pop(key, None)
    cache[key] = value
    for oldest in list(cache)[:-_MAX_CACHE_ENTRIES]:
        cache.pop(oldest, None)
