"""Replace the messages before the newest turns with a summary.

The function `perdure.memory.expand` returns the original messages that a summary has replaced.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Iterable, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import replace
from itertools import chain, pairwise
from math import inf
from threading import Event
from typing import Any, Final, Literal, NamedTuple, Self

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import BaseMessage, SystemMessage
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import BaseCheckpointSaver

from perdure import errors
from perdure.effects import build_async_function, build_blocking_function, run_operation
from perdure.memory.conversation import Messages, get_role, iter_turn_ranges
from perdure.memory.loaded_thread import find_run_thread, has_erased_message
from perdure.memory.model_call import NamedModel, make_model_call
from perdure.memory.nodes import MessagesNode, ModelInput, read_channel, read_messages
from perdure.memory.options import (
    check_choice,
    check_instance,
    check_number,
    check_text,
    check_whole_number,
)
from perdure.memory.quotation import cut_middle, render_message, render_messages_with_tool_results
from perdure.memory.short_term.background_summary import (
    BackgroundSummaries,
    SavedThread,
    can_store_summary_at_head_checkpoint,
    ends_with_answer,
    find_thread_of_current_run,
    read_head_checkpoint,
    store_summary_if_head_unchanged,
)
from perdure.memory.short_term.failed_turns import FailedTurns
from perdure.memory.short_term.message_updates import (
    build_update_from_current_to_target_messages,
    check_messages_removable_by_id,
    merge_duplicate_messages,
)
from perdure.memory.short_term.request_size import RequestParts, RequestSize, measure_request
from perdure.memory.short_term.summary_request import PROMPT as PROMPT
from perdure.memory.short_term.summary_request import SummaryRequest
from perdure.memory.short_term.summary_section import HEADING as HEADING
from perdure.memory.short_term.summary_section import (
    add_summary_to_system_message as add_summary_to_system_message,
)
from perdure.memory.short_term.summary_section import render_section
from perdure.memory.short_term.summary_section import (
    separate_summary_from_messages as separate_summary_from_messages,
)
from perdure.memory.short_term.summary_state import (
    SUMMARIZED,
    SUMMARY,
    SummarizedMessages,
    extend_summary,
    read_summary,
)
from perdure.memory.short_term.summary_state import Summary as Summary
from perdure.memory.short_term.summary_state import SummaryState as SummaryState
from perdure.memory.short_term.system_messages import SUMMARY_MARK
from perdure.memory.short_term.tokens import Countable, context_window
from perdure.memory.short_term.tokens import token_counter as counter_of
from perdure.memory.tool_call_matching import (
    find_remaining_results_of_removed_calls,
    has_results_of_all_tool_calls,
    iter_turns,
)
from perdure.memory.tool_calls import REQUEST_ONLY

OnFailure = Literal["keep", "raise"]
ON_FAILURE: Final = ("keep", "raise")
Size = tuple[Literal["messages", "tokens", "fraction"], float]
"""A size such as `("messages", 40)`, `("tokens", 4000)` or `("fraction", 0.7)`.

A fraction is a share of the model's context window.
"""

# Maximum number of tokens in a summary request if the model's context window is unknown.
_DEFAULT_INPUT_TOKENS: Final = 16_000
# Maximum fraction of the model's context window that a summary request may fill. The rest is left
# for the model's response.
_REQUEST_SHARE: Final = 0.75
_LOG = logging.getLogger("perdure")

# Extra instruction for summarising the first steps of a turn that is still in progress.
_UNFINISHED: Final = (
    "The assistant is still at work on the last request of the user, and will see the newest steps "
    "again. Say what it has done for this request and found so far, and what it has not done yet."
)
# Fraction of the trigger at which a summary is written in the background. If a thread reaches this
# fraction of the trigger size in a turn, the turn does not wait for the summary. A turn that
# reaches the full trigger size waits until the summary has been written.
_BACKGROUND_SHARE: Final = 0.75
# Maximum length, in characters, of the user's question in a summary request. The request includes
# the question if only part of its turn is summarised. A longer question is shortened in the middle.
_MAX_QUESTION_CHARS: Final = 2_000


def _find_smallest_message_and_token_limits(
    option_name: str, sizes: Sequence[Any], model: Any
) -> tuple[float, float]:
    """Return the lowest number of messages and the lowest number of tokens in `sizes`.

    A fraction of the model's context window is converted to a number of tokens. The message limit
    is infinity if `sizes` contains no message count, such as `("messages", 40)`. The token limit is
    infinity if `sizes` contains neither a token count, such as `("tokens", 4000)`, nor a fraction
    of the context window, such as `("fraction", 0.7)`. `option_name` is used in error messages.
    """
    messages = tokens = inf
    for size in sizes:
        match size:
            case ["messages", value]:
                messages = min(messages, check_whole_number(f"{option_name} messages", value, 1))
            case ["tokens", value]:
                tokens = min(tokens, check_whole_number(f"{option_name} tokens", value, 1))
            case ["fraction", value]:
                share = check_number(f"{option_name} fraction", value, 0.01, 1)
                tokens = min(tokens, int(share * context_window(model)))
            case _:
                raise errors.ConfigurationError(
                    f"{option_name} is {size!r:.80}; expected a number of messages, such as "
                    '("messages", 40), a number of tokens, such as ("tokens", 4000), or a fraction '
                    'of the model\'s context window, such as ("fraction", 0.7)'
                )
    return messages, tokens


class Selection(NamedTuple):
    """The messages that the next summary will replace.

    An exchange is an AI message with the results of its tool calls.

    Attributes:
        turns: The messages of whole turns.
        steps: The messages of the older exchanges in the newest turn, which may still be in
            progress. Empty unless the newest turn alone is too long.
        question: The human message that began the newest turn, or None if no steps are selected.
            The question itself is not summarised.
    """

    turns: Sequence[BaseMessage]
    steps: Sequence[BaseMessage] = ()
    question: BaseMessage | None = None

    @property
    def messages(self) -> list[BaseMessage]:
        """All messages that the next summary will replace, in chronological order."""
        return [*self.turns, *self.steps]


_NOTHING: Final = Selection(())


class Summarize(MessagesNode):
    """A node that maintains a running summary of a thread: `summarize("openai:gpt-5-mini")`.

    In a graph, the node writes the summary to the state and removes the summarised messages from
    the state. The graph's state must have the channels of `SummaryState`. If the node is part of a
    `view`, the node does not call a model. In a view, the node returns the stored summary followed
    by the unsummarised messages. When called with a list of messages, as in `node(messages)`, the
    node writes a summary if one is due, and returns the summary and the unsummarised messages.

    Args:
        model: The model that writes the summaries, as a chat model, the name of one, or
            `ModelCall(model, timeout_s=…)`.
        trigger: The size at which a summary is written, either as a count of unsummarised messages
            or as the token count of the request. With a list, reaching any of the sizes triggers a
            summary.
        keep: The maximum size of the newest messages that are kept. Whole turns are kept, and at
            least the newest turn, unless that turn alone reaches the `trigger`. The default is half
            of the `trigger`.
        token_counter: The token counter. The default is the counter for the model.
        summary_prompt: The instructions to the model. `{max_words}` is replaced by 400.
        on_failure: The action if no summary was written. `"keep"` keeps all messages and logs a
            warning, and `"raise"` raises `SummaryFailed`.
        background: Whether to write the summary after the turn, in an OS thread of this process,
            when three quarters of the `trigger` are reached. A turn that reaches the `trigger`
            before the summary is stored waits for its summary.
    """

    def __init__(
        self,
        model: Any,
        *,
        trigger: Size | Sequence[Size] = ("messages", 40),
        keep: Size | None = None,
        token_counter: Countable | None = None,
        summary_prompt: str = PROMPT,
        on_failure: OnFailure = "keep",
        background: bool = False,
        messages_key: str = "messages",
    ) -> None:
        super().__init__(messages_key)
        call = make_model_call(model)
        known_model = call.model.model_name if isinstance(call.model, NamedModel) else call.model
        counter, max_input = counter_of(token_counter), _DEFAULT_INPUT_TOKENS
        if token_counter is None and isinstance(known_model, BaseChatModel | str):
            # If the model is unknown, tokens are estimated.
            with suppress(errors.UnknownModel):
                counter = counter_of(known_model)
        with suppress(errors.ConfigurationError):
            max_input = int(_REQUEST_SHARE * context_window(known_model))
        is_list_of_sizes = (
            isinstance(trigger, list | tuple) and trigger and not isinstance(trigger[0], str)
        )
        sizes: Sequence[Any] = trigger if is_list_of_sizes else [trigger]
        # The attributes `trigger` and `keep` each contain two limits, a number of messages and a
        # number of tokens.
        self.trigger = _find_smallest_message_and_token_limits("trigger", sizes, known_model)
        self.request = SummaryRequest(
            call, check_text("summary_prompt", summary_prompt), counter.count_text, max_input
        )
        self.keep = (
            ((self.trigger[0] + 1) / 2, (self.trigger[1] + 1) / 2)
            if keep is None
            else _find_smallest_message_and_token_limits("keep", [keep], known_model)
        )
        self.on_failure = check_choice("on_failure", on_failure, ON_FAILURE)
        self._keeps_half = keep is None
        self._failed, self._warned = FailedTurns(), Event()
        # `counter` is either the user's token counter or a counter for the model that writes the
        # summaries. The node has to count the tokens of requests to the agent's model, which is not
        # known yet. So if the user supplied no token counter, use a copy of `counter` that is not
        # calibrated for a specific model.
        is_user_counter = token_counter is not None
        self.counter = counter if is_user_counter else counter.with_calibration_for_model(None)
        tools = counter.bound_tool_tokens if is_user_counter else 0
        self._parts = RequestParts(tools, model=self.counter.model)
        self._background = (
            BackgroundSummaries()
            if check_instance("background", background, bool, "True or False")
            else None
        )

    def with_tools(
        self, tools: Sequence[Any], system_prompt: SystemMessage | str | None = None
    ) -> Self:
        """Return a copy of this node for requests with the given tools and system prompt."""
        return self._with_request_parts(
            replace(
                self._parts,
                tools=self.counter.count_tools(tools),
                system=self.counter.count_system_prompt(system_prompt),
            )
        )

    def for_agent(self, agent: str | None, system: BaseMessage | None = None) -> Self:
        """Return a copy of this node for the agent named `agent`.

        To estimate the size of a request, the returned node uses the token usage that the model
        reported to the agent named `agent`. The node ignores the token usage that the model
        reported to other agents. `system` is the complete system message of the agent's latest
        request, or None if there is none.
        """
        other = 0
        if system is not None:
            mark = read_summary(system.additional_kwargs.get(SUMMARY_MARK))
            summary = self.counter.count_text(render_section(mark)) if mark else 0
            other = self._parts.tools + self.counter.count_message_tokens(system) - summary
        return self._with_request_parts(replace(self._parts, agent=agent, other=other))

    def _with_request_parts(self, parts: RequestParts) -> Self:
        node = copy(self)
        node._parts = parts
        return node

    async def _transform_plain_message_list_for_model(
        self, messages: Messages, config: RunnableConfig | None
    ) -> list[BaseMessage]:
        """Write a new summary if one is due. Return the summary and the unsummarised messages."""
        previous, rest = separate_summary_from_messages(messages)
        selection = (
            _NOTHING
            if self._failed.has_current_turn_failed(messages)
            else self._select_messages_if_trigger_reached(rest, previous)
        )
        text = await self._try_to_write_summary(previous, selection, messages, config)
        if text is not None:
            previous = extend_summary(
                previous,
                text,
                selection.messages,
                all_messages=rest if self._needs_reported_token_usage else (),
            )
            summarized = set(map(id, selection.messages))
            rest = [message for message in rest if id(message) not in summarized]
        return add_summary_to_system_message(ModelInput.from_messages(rest), previous).to_messages()

    def transform_input(
        self, model_input: ModelInput, state: Any, config: RunnableConfig | None
    ) -> ModelInput:
        """Replace the summarised messages in `model_input` with the state's summary."""
        model_input = SummarizedMessages.from_state(state).remove_from(model_input)
        return add_summary_to_system_message(
            model_input, read_summary(read_channel(state, SUMMARY))
        )

    def is_due(self, state: Any) -> bool:
        """Return whether calling the node with `state` would summarise or remove messages.

        The node removes messages from the state if a summary that was written in the background
        covers them. With `background=True`, a summary that becomes due at the end of a turn is
        written in the background. After a failed attempt to write a summary, the node does not try
        again in the same turn.
        """
        if self._find_saved_thread() is not None:
            if self._list_messages_covered_by_summary(state):
                return True
            if ends_with_answer(read_messages(state, self.messages_key)):
                return False
        return bool(self._select_messages_to_summarize(state).messages)

    def schedule_background_summary(self, state: Any) -> None:
        """Schedule a summary to be written after the current run, if one will soon be needed.

        A summary is scheduled only if the node has `background=True`, the graph is not a subgraph,
        and the run has a checkpointer.
        """
        thread = self._find_saved_thread()
        if thread is None or self._background is None:
            return
        messages = read_messages(state, self.messages_key)
        if self._select_messages_for_early_summary(messages, state).messages:
            self._background.schedule_summary(
                thread,
                self.messages_key,
                next((m.id for m in reversed(messages) if m.id is not None), None),
                lambda thread: run_operation(self._write_summary_of_idle_thread_if_due(thread)),
            )

    async def _wait_for_background_summaries(self, timeout_s: float | None = None) -> bool:
        """Wait until all summaries that are being written in the background are finished.

        Return False if a summary is still being written after `timeout_s` seconds. A summary that
        is still being written when the process exits is lost, and the next turn writes a new one.
        """
        return self._background is None or await self._background.flush(timeout_s)

    flush = build_blocking_function(_wait_for_background_summaries)
    aflush = build_async_function(_wait_for_background_summaries)

    async def _summarize_thread(self, saver: BaseCheckpointSaver[Any], thread_id: str) -> bool:
        """Summarise an idle thread that has reached three quarters of `trigger`.

        Call `summarize_thread` from your own job queue or timer. With `background=True`, you need
        not call `summarize_thread`. A background node writes the summary after the turn in which
        the thread reaches three quarters of `trigger`. The summary is stored while the thread is
        locked, and is used from the thread's next run on. The summary is discarded if new
        checkpoints are added to the thread while the model is writing.

        Returns:
            Whether a summary was stored.

        Raises:
            UnknownThread: There is no such thread.
            SummaryFailed: The model returned no summary, and `on_failure` is `"raise"`.
        """
        try:
            return await self._write_summary_of_idle_thread_if_due(SavedThread(saver, thread_id))
        except errors.SummaryFailed as exc:
            if self.on_failure == "raise":
                raise
            _LOG.warning("%s; the next call tries again", exc)
            return False

    summarize_thread = build_blocking_function(_summarize_thread)
    asummarize_thread = build_async_function(_summarize_thread)

    async def _write_summary_of_idle_thread_if_due(self, thread: SavedThread) -> bool:
        """Summarise an idle thread if its size is at least 75 % of a summary trigger's threshold.

        A summary trigger is a number of messages, or a number of tokens in a request.

        Return whether a summary was stored.

        Raises:
            UnknownThread: There is no such thread.
            SummaryFailed: The model returned no summary.
        """
        head = await read_head_checkpoint(thread)
        if head is None:
            raise errors.UnknownThread(f"there is no thread {thread.thread_id!r}")
        if not can_store_summary_at_head_checkpoint(head.tuple):
            return False
        state = head.values
        messages = read_messages(state, self.messages_key)
        selection = self._select_messages_for_early_summary(messages, state)
        previous = read_summary(read_channel(state, SUMMARY))
        text = await self._request_summary(previous, selection, messages, None)
        if text is None:
            return False
        writes = self._build_summary_update(
            previous, text, selection, read_channel(state, SUMMARIZED), messages
        )
        return await store_summary_if_head_unchanged(thread, head, self.messages_key, writes)

    def _select_messages_for_early_summary(self, messages: Messages, state: Any) -> Selection:
        """Select the messages to summarise if 75 % of a summary trigger's threshold is reached.

        The threshold of a summary trigger is a number of messages, or a number of tokens in a
        request.
        """
        early = copy(self)
        early.trigger = self.trigger[0] * _BACKGROUND_SHARE, self.trigger[1] * _BACKGROUND_SHARE
        return early._select_messages_despite_failed_summary(messages, state)

    def _find_saved_thread(self) -> SavedThread | None:
        return None if self._background is None else find_thread_of_current_run()

    def _list_messages_covered_by_summary(self, state: Any) -> list[BaseMessage]:
        """Return the messages of a state that its summary already covers."""
        summarized = SummarizedMessages.from_state(state)
        messages = read_messages(state, self.messages_key) if summarized else ()
        return [message for message in messages if message in summarized]

    def would_split_turn(self, state: Any) -> bool:
        """Return whether the node would summarise part of the newest turn."""
        return bool(self._select_messages_to_summarize(state).steps)

    def stop_summarizing_in_current_turn(self, state: Any) -> None:
        """Prevent the node from summarising messages during the current turn.

        If a model call, or a node that extracts memories from messages, failed during the turn,
        call `stop_summarizing_in_current_turn`. The turn's messages remain in the state, so that a
        node can extract memories from them later.
        """
        self._failed.record_failure_in_current_turn(read_messages(state, self.messages_key))

    async def _build_state_update(
        self, state: Any, config: RunnableConfig | None
    ) -> dict[str, Any]:
        """Return the state update that stores a new summary and removes the summarised messages.

        If a summary was written in the background, the returned update removes the messages that
        this summary covers. With `background=True`, a node that is called at the end of a turn
        schedules the next summary instead of writing it. If there is no summary to store and no
        message to remove, an empty update is returned.
        """
        if "langgraph_node" in ((config or {}).get("metadata") or {}):
            # Without a `summarized` channel, the state would lose the summarised messages and the
            # summary.
            check_instance(
                "the state's channel 'summarized'",
                read_channel(state, SUMMARIZED),
                list,
                "a list; derive the state from SummaryState",
            )
        messages, thread = read_messages(state, self.messages_key), self._find_saved_thread()
        messages_to_remove = [] if thread is None else self._list_messages_covered_by_summary(state)
        if thread is not None and ends_with_answer(messages):
            self.schedule_background_summary(state)
            selection, text = _NOTHING, None
        else:
            selection = self._select_messages_to_summarize(state)
            check_messages_removable_by_id(
                messages if selection.messages else (), self.messages_key
            )
            previous = read_summary(read_channel(state, SUMMARY))
            text = await self._try_to_write_summary(previous, selection, messages, config)
        update: dict[str, Any] = {}
        if text is not None:
            known_ids = read_channel(state, SUMMARIZED) or ()
            self._warn_of_repeated_ids(known_ids)
            update = self._build_summary_update(previous, text, selection, known_ids, messages)
            messages_to_remove = [
                *selection.messages,
                *self._list_messages_covered_by_summary(state),
            ]
        if messages_to_remove:
            removed_ids = {message.id for message in messages_to_remove}
            rest = [m for m in merge_duplicate_messages(messages) if m.id not in removed_ids]
            update[self.messages_key] = build_update_from_current_to_target_messages(
                rest, messages, self.messages_key
            )
        return update

    def _build_summary_update(
        self,
        previous: Summary | None,
        text: str,
        selection: Selection,
        known_ids: Sequence[str],
        messages: Messages,
    ) -> dict[str, Any]:
        """Build the state update with a new summary and the ids of the messages it covers."""
        old = selection.messages
        answers = messages if self._needs_reported_token_usage else ()
        return {
            SUMMARIZED: [str(message.id) for message in old],
            SUMMARY: extend_summary(previous, text, old, known_ids or (), answers),
        }

    @property
    def _needs_reported_token_usage(self) -> bool:
        """Whether the node needs the token usage that model responses report.

        The reported token usage is needed only if the option `trigger` sets a token limit and the
        token counter counts tokens, not messages.
        """
        return self.trigger[1] != inf and not self.counter.counts_messages

    async def _try_to_write_summary(
        self,
        previous: Summary | None,
        selection: Selection,
        messages: Messages,
        config: RunnableConfig | None,
    ) -> str | None:
        """Write the next summary, unless `selection` contains no messages.

        Return the text of the new summary, or None if no summary was written.

        By default, a failure to write the summary is only logged. With `on_failure="raise"`,
        SummaryFailed is raised if the summary cannot be written. `messages` contains all messages
        of the conversation.
        """
        try:
            return await self._request_summary(previous, selection, messages, config)
        except errors.SummaryFailed as exc:
            if self.on_failure == "raise":
                raise
            _LOG.warning("%s; the next turn tries again", exc)
            self._failed.record_failure_in_current_turn(messages)
            return None

    async def _request_summary(
        self,
        previous: Summary | None,
        selection: Selection,
        messages: Messages,
        config: RunnableConfig | None,
    ) -> str | None:
        """Ask the model for a summary of the selected messages.

        Return None if the selected messages have no content, or if one of them was erased while the
        model was writing the summary.
        """
        turns, steps = (
            render_messages_with_tool_results(selection.turns),
            render_messages_with_tool_results(selection.steps),
        )
        units = [*turns, *steps]
        if not units:
            return None
        request = replace(self.request, call=replace(self.request.call, config=config))
        if steps and not ends_with_answer(messages):
            request = replace(request, note=_UNFINISHED)
        if selection.question is not None:
            question = cut_middle(render_message(selection.question), _MAX_QUESTION_CHARS)
            units = [*turns, question, *steps]
        loaded = find_run_thread(config)
        text = await request.write_summary(previous["text"] if previous else "", units)
        if await has_erased_message(loaded, selection.messages):
            # A message was erased while the summary was being written. Discard the summary, because
            # it may repeat the erased message. In the next turn, the node can summarise the
            # remaining messages.
            self._failed.record_failure_in_current_turn(messages)
            return None
        return text

    def _warn_of_repeated_ids(self, ids: Sequence[str]) -> None:
        """Log a warning, at most once, if the `summarized` channel contains many duplicate ids.

        Duplicate ids usually come from the reducer `operator.add`, which appends ids to the channel
        even if the channel already contains these ids.
        """
        distinct = len(set(ids))
        if self._warned.is_set() or len(ids) <= 2 * distinct:
            return
        self._warned.set()
        _LOG.warning(
            "the channel 'summarized' has %d ids, of which %d are distinct, and grows with each "
            "call of a subgraph; use perdure.memory.append_new as its reducer, not operator.add",
            len(ids),
            distinct,
        )

    def _select_messages_to_summarize(self, state: Any) -> Selection:
        """Select the messages in a state that the node would summarise if it were called now."""
        messages = read_messages(state, self.messages_key)
        if self._failed.has_current_turn_failed(messages):
            return _NOTHING
        return self._select_messages_despite_failed_summary(messages, state)

    def _select_messages_despite_failed_summary(self, messages: Messages, state: Any) -> Selection:
        """Select the messages to summarise, even if an earlier attempt in this turn failed."""
        return self._select_messages_if_trigger_reached(
            messages,
            read_summary(read_channel(state, SUMMARY)),
            SummarizedMessages.from_state(state),
        )

    def _select_messages_if_trigger_reached(
        self,
        messages: Messages,
        summary: Summary | None,
        summarized_messages: Container[BaseMessage] = (),
    ) -> Selection:
        """Select the messages to summarise, or none if no trigger is reached.

        Normally, only whole turns are selected to be summarised. Older exchanges within the newest
        turn are summarised only in one of two cases: no earlier turn remains to be summarised, or
        the newest turn alone is large enough to trigger a summary. An exchange is an AI message
        with the results of its tool calls.
        """
        if self.trigger[1] == inf and len(messages) < self.trigger[0]:
            # Return early, without counting tokens, if a message count is the only trigger and it
            # is not reached.
            return _NOTHING
        messages = [
            message
            for message in merge_duplicate_messages(messages)
            if REQUEST_ONLY not in message.additional_kwargs and message not in summarized_messages
        ]
        size = self._measure_request(messages, summary)
        if not self._is_trigger_reached(_exclude_system_messages(messages), size):
            return _NOTHING
        limit = self._compute_max_kept_tokens(size)
        first_kept = self._find_first_kept_position(messages, limit)
        old, rest = _exclude_system_messages(messages[:first_kept]), messages[first_kept:]
        old += find_remaining_results_of_removed_calls(old, rest)
        if len(list(iter_turn_ranges(rest))) == 1 and (
            not old or self._newest_turn_reaches_trigger(rest, size)
        ):
            return Selection(old, *self._select_older_messages_and_question(rest, limit))
        return Selection(old)

    def _select_older_messages_and_question(
        self, turn: Messages, max_kept_tokens: float
    ) -> tuple[list[BaseMessage], BaseMessage | None]:
        """Select the older exchanges of a long turn for the next summary.

        Return the messages of the selected exchanges, and the human message that began the turn, if
        there is one. The human message that began the turn is not summarised itself. If no exchange
        is selected to be summarised, return ([], None). The newest exchange is always kept. Further
        exchanges are kept, newest first, as long as `keep` and `max_kept_tokens` allow. Older
        exchanges are selected for the summary, except exchanges with a tool call that has no
        result.
        """
        stored = next(iter_turns(turn, purpose="state"), None)
        units = [] if stored is None else stored.units
        if units and not has_results_of_all_tool_calls(units[-1]):
            # Do not summarise the last exchange if any of its tool calls has no result yet.
            units = units[:-1]
        begin = 1 if units and get_role(units[0][0]) == "human" else 0
        kept_count = self._count_groups_to_keep(
            reversed(units[begin:]), max_kept_tokens, [unit[0] for unit in units[:begin]]
        )
        steps = [
            message
            for unit in units[begin : len(units) - kept_count]
            if has_results_of_all_tool_calls(unit)
            for message in unit
        ]
        return steps, units[0][0] if steps and begin else None

    def _measure_request(self, messages: Messages, summary: Summary | None) -> RequestSize | None:
        """Return the size of the next request, or None if the node has no token-based trigger."""
        if self.trigger[1] == inf:
            return None
        section = render_section(summary) if summary and summary["text"] else ""
        return measure_request(messages, self.counter, self._parts, summary, section)

    def _is_trigger_reached(
        self, messages: Sequence[BaseMessage], size: RequestSize | None
    ) -> bool:
        """Return whether the message count or the request size has reached the trigger."""
        message_limit, token_limit = self.trigger
        return len(messages) >= message_limit or (
            size is not None and size.reaches_trigger(token_limit)
        )

    def _newest_turn_reaches_trigger(
        self, newest_messages: Messages, size: RequestSize | None
    ) -> bool:
        """Return whether the newest turn alone is large enough to trigger a summary."""
        messages = _exclude_system_messages(newest_messages)
        if size is not None:
            size = size.with_message_tokens(sum(map(self.counter.count_message_tokens, messages)))
        return self._is_trigger_reached(messages, size)

    def _compute_max_kept_tokens(self, size: RequestSize | None) -> float:
        """Return the maximum number of tokens that the unsummarised messages may have."""
        if size is None:
            return self.keep[1]
        room = size.max_message_tokens_below_trigger(self.trigger[1])
        return (room + 1) / 2 if self._keeps_half else min(self.keep[1], room)

    def _find_first_kept_position(self, messages: Messages, max_kept_tokens: float) -> int:
        """Return the index of the first message to keep, or 0 if there is nothing to summarise."""
        starts = (turn.start for turn in iter_turn_ranges(messages))
        # If there are messages before the first human message, they count as the oldest turn.
        bounds = [*dict.fromkeys((len(messages), *starts, 0))]
        turns = (_exclude_system_messages(messages[start:stop]) for stop, start in pairwise(bounds))
        return bounds[self._count_groups_to_keep(turns, max_kept_tokens)]

    def _count_groups_to_keep(
        self,
        groups: Iterable[Sequence[BaseMessage]],
        max_kept_tokens: float,
        required_messages: Sequence[BaseMessage] = (),
    ) -> int:
        """Return the number of message groups to keep, counted from the newest group.

        If there are any groups, the newest group is always kept, so the number is at least 1.

        `self.keep[0]` is the maximum number of messages to keep, and `max_kept_tokens` is the
        maximum number of their tokens. If `max_kept_tokens` is infinite, tokens are not counted.

        Args:
            groups: The groups, for example turns, newest first.
            max_kept_tokens: The maximum number of tokens.
            required_messages: Messages that are kept in addition to the groups.
        """
        message_count = token_count = number = 0
        for number, group in enumerate(chain([required_messages], groups)):
            message_count += len(group)
            if max_kept_tokens < inf:
                token_count += sum(map(self.counter.count_message_tokens, group))
            is_over = message_count > self.keep[0] or token_count > max_kept_tokens
            if is_over and number > 1:
                return number - 1
        return number


summarize = Summarize


def _exclude_system_messages(messages: Messages) -> list[BaseMessage]:
    return [message for message in messages if get_role(message) != "system"]
