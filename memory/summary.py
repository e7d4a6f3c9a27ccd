"""Summarising: the messages before the newest turns become a text; `expand` gives them back."""

from __future__ import annotations

import logging
from collections.abc import Container, Iterable, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import replace
from math import inf
from threading import Event
from typing import Any, Final, Literal, NamedTuple, Self

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import BaseMessage, SystemMessage
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import BaseCheckpointSaver

from perdure import errors
from perdure.effects import awaiting, blocking, run
from perdure.memory.background_summary import (
    BackgroundSummaries,
    Place,
    find_place,
    is_answered,
    is_ready,
    read_head,
    store_summary,
)
from perdure.memory.conversation import Messages, role, turns
from perdure.memory.exchanges import find_late_results, has_all_results, iter_turns
from perdure.memory.failed_turns import FailedTurns
from perdure.memory.loaded_thread import find_run_thread, is_any_erased
from perdure.memory.message_updates import check_ids, merge_duplicates, update_to
from perdure.memory.model_call import NamedModel, model_call
from perdure.memory.nodes import MessagesNode, Shown, channel, messages_in
from perdure.memory.options import choice, instance, number, text, whole
from perdure.memory.quotation import middle_out, rendered, units_of
from perdure.memory.request_size import RequestParts, RequestSize, measure_request
from perdure.memory.summary_request import PROMPT as PROMPT
from perdure.memory.summary_request import SummaryRequest
from perdure.memory.summary_section import HEADING as HEADING
from perdure.memory.summary_section import section_of
from perdure.memory.summary_section import with_summary as with_summary
from perdure.memory.summary_section import without_summary as without_summary
from perdure.memory.summary_state import (
    SUMMARIZED,
    SUMMARY,
    SummarizedMessages,
    extend_summary,
    summary_of,
)
from perdure.memory.summary_state import Summary as Summary
from perdure.memory.summary_state import SummaryState as SummaryState
from perdure.memory.system_messages import SUMMARY_MARK
from perdure.memory.tokens import Countable, context_window
from perdure.memory.tokens import token_counter as counter_of
from perdure.memory.tool_calls import STATED

OnFailure = Literal["keep", "raise"]
ON_FAILURE: Final = ("keep", "raise")
Size = tuple[Literal["messages", "tokens", "fraction"], float]
"""`("messages", 40)`, `("tokens", 4000)` or `("fraction", 0.7)` of the model's window."""

_INPUT_TOKENS: Final = 16_000  # of a model whose window is not known
_SHARE: Final = 0.75  # of the window: the rest is for the answer, and for counting otherwise
_LOG = logging.getLogger("perdure")

_UNFINISHED: Final = (
    "The assistant is still at work on the last request of the user, and will see the newest steps "
    "again. Say what it has done for this request and found so far, and what it has not done yet."
)
_EARLY: Final = 0.75  # of the trigger, from which a summary is written in the background
_QUESTION_CHARS: Final = 2_000  # characters of that request that the summariser is shown


def _limits(name: str, sizes: Sequence[Any], model: Any) -> tuple[float, float]:
    """The smallest number of messages and of tokens among sizes; infinite: no limit."""
    messages = tokens = inf
    for size in sizes:
        match size:
            case ["messages", value]:
                messages = min(messages, whole(f"{name} messages", value, 1))
            case ["tokens", value]:
                tokens = min(tokens, whole(f"{name} tokens", value, 1))
            case ["fraction", value]:
                share = number(f"{name} fraction", value, 0.01, 1)
                tokens = min(tokens, int(share * context_window(model)))
            case _:
                raise errors.ConfigurationError(
                    f'{name} is {size!r:.80}; expected ("messages", 40), ("tokens", 4000) or '
                    '("fraction", 0.7) of the model\'s window'
                )
    return messages, tokens


class Chosen(NamedTuple):
    """The messages that are to be summarised now."""

    turns: Sequence[BaseMessage]  # whole turns
    steps: Sequence[BaseMessage] = ()  # exchanges of the newest turn, which goes on
    question: BaseMessage | None = None  # that these exchanges are about, if there is one; it stays

    @property
    def messages(self) -> list[BaseMessage]:
        """All of them, in their order."""
        return [*self.turns, *self.steps]


_NOTHING: Final = Chosen(())


class Summarize(MessagesNode):
    """A node that keeps a running summary: `summarize("openai:gpt-5-mini")`.

    In a graph, whose state has the channels of `SummaryState`, it writes the summary and removes
    what that stands for; in a `view` it shows the summary and the rest, and asks no model. Over a
    plain list it gives the summary and the rest at once.

    Args:
        model: Writes the summaries: a chat model, its name, or `ModelCall(model, timeout_s=…)`.
        trigger: When to summarise, counted over what is not summarised yet; a list means any of it.
        keep: How much of the end stays, in whole turns, one at least; None: half of the `trigger`.
        token_counter: Counts tokens; None: the counter that fits the model.
        summary_prompt: Instructions to the model; `{max_words}` in it stands for 400.
        on_failure: Without a summary, `"keep"` everything and log a warning, or `"raise"`.
        background: Whether to write the summary after the turn, in a thread of this process, once
            three quarters of the `trigger` are reached. A turn that reaches the `trigger` before
            that waits for the summary.
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
        call = model_call(model)
        known_model = call.model.model_name if isinstance(call.model, NamedModel) else call.model
        counter, max_input = counter_of(token_counter), _INPUT_TOKENS
        if token_counter is None and isinstance(known_model, BaseChatModel | str):
            with suppress(errors.UnknownModel):  # the estimate counts then
                counter = counter_of(known_model)
        with suppress(errors.ConfigurationError):
            max_input = int(_SHARE * context_window(known_model))
        several = isinstance(trigger, list | tuple) and trigger and not isinstance(trigger[0], str)
        sizes: Sequence[Any] = trigger if several else [trigger]
        limits = _limits("trigger", sizes, known_model)
        halves = ((limits[0] + 1) / 2, (limits[1] + 1) / 2)
        self.request = SummaryRequest(
            call, text("summary_prompt", summary_prompt), counter.text, max_input
        )
        self.trigger = limits  # in messages and tokens, as `keep`
        self.keep = halves if keep is None else _limits("keep", [keep], known_model)
        self.on_failure = choice("on_failure", on_failure, ON_FAILURE)
        self._keeps_half = keep is None
        self._failed, self._warned = FailedTurns(), Event()
        # a counter that was not chosen is that of the model which summarises, and not of the agent
        chosen = token_counter is not None
        self.counter = counter if chosen else counter.for_model(None)
        tools = counter.bound_tools if chosen else 0
        self._parts = RequestParts(tools, model=self.counter.model)
        self._background: BackgroundSummaries | None = None
        if instance("background", background, bool, "True or False"):
            self._background = BackgroundSummaries()

    def with_tools(
        self, tools: Sequence[Any], system_prompt: SystemMessage | str | None = None
    ) -> Self:
        """Return the same node for requests with these tools and this system prompt."""
        prompt = self.counter.prompt(system_prompt)
        parts = replace(self._parts, tools=self.counter.tools(tools), system=prompt)
        return self._with_parts(parts)

    def for_agent(self, agent: str | None, system: BaseMessage | None = None) -> Self:
        """Return the same node for an agent with this name, in whose answers its usage is reported.

        `system` is the whole system message of the last request.
        """
        other = 0
        if system is not None:
            mark = summary_of(system.additional_kwargs.get(SUMMARY_MARK))
            summary = self.counter.text(section_of(mark)) if mark else 0
            other = self._parts.tools + self.counter.message(system) - summary
        return self._with_parts(replace(self._parts, agent=agent, other=other))

    def _with_parts(self, parts: RequestParts) -> Self:
        made = copy(self)
        made._parts = parts
        return made

    async def _applied(
        self, messages: Messages, config: RunnableConfig | None
    ) -> list[BaseMessage]:
        previous, rest = without_summary(messages)
        chosen = (
            _NOTHING if self._failed.has_failed(messages) else self._select_messages(rest, previous)
        )
        text = await self._try_to_write(previous, chosen, messages, config)
        if text is not None:
            answers = self._answers_in(rest)
            previous = extend_summary(previous, text, chosen.messages, conversation=answers)
            summarized = set(map(id, chosen.messages))
            rest = [message for message in rest if id(message) not in summarized]
        return with_summary(Shown.of(rest), previous).messages()

    def through(self, shown: Shown, state: Any, config: RunnableConfig | None) -> Shown:
        """Return what is shown with the state's summary, without what that stands for."""
        shown = SummarizedMessages.of_state(state).hide(shown)
        return with_summary(shown, summary_of(channel(state, SUMMARY)))

    def is_due(self, state: Any) -> bool:
        """Return whether the node would summarise messages of a state now.

        After a failure it would not do so again in the same turn.
        """
        place = self._find_place()
        if place is not None:
            if self._find_summarized(state):
                return True
            if is_answered(messages_in(state, self.messages_key)):
                return False
        return bool(self._select_from_state(state).messages)

    def schedule(self, state: Any) -> None:
        """Write the summary after the run that is under way, with `background=True`.

        Nothing happens in a subgraph and in a run without a checkpointer.
        """
        place = self._find_place()
        if place is None or self._background is None:
            return
        messages = messages_in(state, self.messages_key)
        if self._lower_trigger()._select_from(messages, state).messages:
            ids = (message.id for message in reversed(messages) if message.id is not None)
            newest = next(ids, None)
            self._background.schedule(place, self.messages_key, newest, self._summarize_place)

    async def _flush(self, timeout_s: float | None = None) -> bool:
        """Wait for the summaries that are being written in the background.

        Returns False if some are still being written after `timeout_s` seconds. What the process
        does not wait for is dropped when it ends, and the next turn writes it.
        """
        return self._background is None or await self._background.flush(timeout_s)

    flush, aflush = blocking(_flush), awaiting(_flush)

    async def _summarize_thread(self, saver: BaseCheckpointSaver[Any], thread_id: str) -> bool:
        """Write the summary of a thread on which no run is working, if one is near.

        That is what `background=True` does after a turn, for a job queue or a timer of your own.
        The summary is stored under the thread's lock, and the next run applies it. It is dropped if
        the thread went on meanwhile. Returns whether it was stored.

        Raises:
            UnknownThread: There is no such thread.
            SummaryFailed: The model gave no summary, and `on_failure` is `"raise"`.
        """
        try:
            return await self._write_summary(Place(saver, thread_id))
        except errors.SummaryFailed as exc:
            if self.on_failure == "raise":
                raise
            _LOG.warning("%s; it is tried again the next time", exc)
            return False

    summarize_thread, asummarize_thread = blocking(_summarize_thread), awaiting(_summarize_thread)

    def _summarize_place(self, place: Place) -> None:
        run(self._write_summary(place))

    async def _write_summary(self, place: Place) -> bool:
        head = await read_head(place, self.messages_key)
        if head is None:
            raise errors.UnknownThread(f"there is no thread {place.thread_id!r}")
        if not is_ready(head.tuple):
            return False
        state = head.values
        messages = messages_in(state, self.messages_key)
        chosen = self._lower_trigger()._select_from(messages, state)
        if not chosen.messages:
            return False
        previous = summary_of(channel(state, SUMMARY))
        text = await self._ask_model(previous, chosen, messages, None)
        if text is None:
            return False
        writes = self._build_writes(previous, text, chosen, channel(state, SUMMARIZED), messages)
        return await store_summary(place, head, self.messages_key, writes)

    def _lower_trigger(self) -> Self:
        """Return the node with three quarters of its trigger."""
        early = copy(self)
        early.trigger = self.trigger[0] * _EARLY, self.trigger[1] * _EARLY
        return early

    def _find_place(self) -> Place | None:
        return None if self._background is None else find_place()

    def _find_summarized(self, state: Any) -> list[BaseMessage]:
        """Return the messages of a state for which its summary stands already."""
        summarized = SummarizedMessages.of_state(state)
        messages = messages_in(state, self.messages_key) if summarized else ()
        return [message for message in messages if message in summarized]

    def _check_channels(self, state: Any) -> None:
        """Refuse the state of a graph that would drop the summary and remove the messages."""
        expected = "a list: derive the state from SummaryState"
        instance("the state's channel 'summarized'", channel(state, SUMMARIZED), list, expected)

    def splits_turn(self, state: Any) -> bool:
        """Return whether it would summarise exchanges of the newest turn, which goes on."""
        return bool(self._select_from_state(state).steps)

    def skip_turn(self, state: Any) -> None:
        """Summarise nothing more in the turn that is running, because something failed in it."""
        self._failed.note_failure(messages_in(state, self.messages_key))

    async def _update(self, state: Any, config: RunnableConfig | None) -> dict[str, Any]:
        if "langgraph_node" in ((config or {}).get("metadata") or {}):
            self._check_channels(state)
        messages, place = messages_in(state, self.messages_key), self._find_place()
        gone = [] if place is None else self._find_summarized(state)
        if place is not None and is_answered(messages):
            self.schedule(state)
            chosen, text = _NOTHING, None
        else:
            chosen = self._select_from_state(state)
            check_ids(messages if chosen.messages else (), self.messages_key)
            previous = summary_of(channel(state, SUMMARY))
            text = await self._try_to_write(previous, chosen, messages, config)
        update: dict[str, Any] = {}
        if text is not None:
            known_ids = channel(state, SUMMARIZED) or ()
            self._warn_of_repetitions(known_ids)
            update = self._build_writes(previous, text, chosen, known_ids, messages)
            gone = [*chosen.messages, *self._find_summarized(state)]
        if gone:
            removed = {message.id for message in gone}
            rest = [each for each in merge_duplicates(messages) if each.id not in removed]
            update[self.messages_key] = update_to(rest, messages, self.messages_key)
        return update

    def _build_writes(
        self,
        previous: Summary | None,
        text: str,
        chosen: Chosen,
        known_ids: Sequence[str],
        messages: Messages,
    ) -> dict[str, Any]:
        """Return what a new summary of a conversation writes into its channels."""
        answers, old = self._answers_in(messages), chosen.messages
        return {
            SUMMARIZED: [str(message.id) for message in old],
            SUMMARY: extend_summary(previous, text, old, known_ids or (), answers),
        }

    def _answers_in(self, messages: Messages) -> Messages:
        """Return the messages whose reported usage could reach the trigger."""
        return () if self.trigger[1] == inf or self.counter.counts_messages else messages

    async def _try_to_write(
        self,
        previous: Summary | None,
        chosen: Chosen,
        messages: Messages,
        config: RunnableConfig | None,
    ) -> str | None:
        """Return the text of the next summary; None, after a failure was logged, if there is none.

        `messages` are all messages of the conversation.
        """
        try:
            return await self._ask_model(previous, chosen, messages, config)
        except errors.SummaryFailed as exc:
            if self.on_failure == "raise":
                raise
            _LOG.warning("%s; it is tried again the next time", exc)
            self._failed.note_failure(messages)
            return None

    async def _ask_model(
        self,
        previous: Summary | None,
        chosen: Chosen,
        messages: Messages,
        config: RunnableConfig | None,
    ) -> str | None:
        """Ask the model for a summary of the chosen messages.

        Returns None if they say nothing, or if one of them was erased meanwhile.
        """
        turns, steps = units_of(chosen.turns), units_of(chosen.steps)
        units = [*turns, *steps]
        if not units:
            return None
        request = replace(self.request, call=replace(self.request.call, config=config))
        if steps and not is_answered(messages):
            request = replace(request, note=_UNFINISHED)
        if chosen.question is not None:
            question = middle_out(rendered(chosen.question), _QUESTION_CHARS)
            units = [*turns, question, *steps]
        loaded = find_run_thread(config)
        text = await request.summary(previous["text"] if previous else "", units)
        if await is_any_erased(loaded, chosen.messages):
            self._failed.note_failure(messages)  # the next turn summarises what is left
            return None
        return text

    def _warn_of_repetitions(self, ids: Sequence[str]) -> None:
        """Log once that `summarized` repeats ids, as with the reducer `operator.add`."""
        distinct = len(set(ids))
        if self._warned.is_set() or len(ids) <= 2 * distinct:
            return
        self._warned.set()
        _LOG.warning(
            "the channel 'summarized' has %d ids, of which %d are distinct, and grows with each "
            "call of a subgraph: use perdure.memory.append_new as its reducer, not operator.add",
            len(ids),
            distinct,
        )

    def _select_from_state(self, state: Any) -> Chosen:
        """Return the messages of a state that are to be summarised now."""
        messages = messages_in(state, self.messages_key)
        if self._failed.has_failed(messages):
            return _NOTHING
        return self._select_from(messages, state)

    def _select_from(self, messages: Messages, state: Any) -> Chosen:
        """Return which of these messages of a state are to be summarised, also after a failure."""
        summary = summary_of(channel(state, SUMMARY))
        return self._select_messages(messages, summary, SummarizedMessages.of_state(state))

    def _select_messages(
        self,
        messages: Messages,
        summary: Summary | None,
        summarized: Container[BaseMessage] = (),
    ) -> Chosen:
        """Return the messages that are to be summarised now, if a trigger is reached.

        They are whole turns. If the newest turn alone reaches the trigger, its older exchanges are
        added.
        """
        messages = merge_duplicates(messages)
        messages = [m for m in messages if STATED not in m.additional_kwargs]
        if summarized:
            messages = [message for message in messages if message not in summarized]
        size = self._measure(messages, summary)
        if not self._is_reached(_without_system(messages), size):
            return _NOTHING
        limit = self._kept_tokens(size)
        cut = self._find_cut(messages, limit)
        old, rest = _without_system(messages[:cut]), messages[cut:]
        old += find_late_results(old, rest)
        if len(list(turns(rest))) == 1 and (not old or self._is_alone_reached(rest, size)):
            return Chosen(old, *self._select_exchanges(rest, limit))
        return Chosen(old)

    def _select_exchanges(
        self, turn: Messages, limit: float
    ) -> tuple[list[BaseMessage], BaseMessage | None]:
        """Return the older exchanges of a turn, and its question if there are any.

        Within `keep` and `limit` tokens the question and the newest exchanges stay, one at least.
        An exchange whose results are not all there stays.
        """
        stored = next(iter_turns(turn, purpose="state"), None)
        units = [] if stored is None else stored.units
        if units and not has_all_results(units[-1]):
            units = units[:-1]  # it waits for results
        begin = 1 if units and role(units[0][0]) == "human" else 0
        cost = self._cost_of((unit[0] for unit in units[:begin]), limit)
        start = len(units)
        for unit in reversed(units[begin:]):
            cost = cost[0] + len(unit), cost[1] + self._cost_of(unit, limit)[1]
            if start < len(units) and self._passes_keep(*cost, limit):
                break
            start -= 1
        steps = [m for unit in units[begin:start] if has_all_results(unit) for m in unit]
        return steps, units[0][0] if steps and begin else None

    def _measure(self, messages: Messages, summary: Summary | None) -> RequestSize | None:
        """Return the size of the next request; None if no trigger is in tokens."""
        if self.trigger[1] == inf:
            return None
        section = section_of(summary) if summary and summary["text"] else ""
        return measure_request(messages, self.counter, self._parts, summary, section)

    def _is_reached(self, messages: Sequence[BaseMessage], size: RequestSize | None) -> bool:
        """Return whether a trigger is reached by messages, or by a request of this size."""
        most_messages, most_tokens = self.trigger
        return len(messages) >= most_messages or (size is not None and size.reaches(most_tokens))

    def _is_alone_reached(self, rest: Messages, size: RequestSize | None) -> bool:
        """Return whether these of the messages reach a trigger without the others."""
        own = _without_system(rest)
        if size is not None:
            size = size.with_messages(sum(map(self.counter.message, own)))
        return self._is_reached(own, size)

    def _kept_tokens(self, size: RequestSize | None) -> float:
        """Return how many tokens of messages stay at most."""
        if size is None:
            return self.keep[1]
        room = size.room(self.trigger[1])
        return (room + 1) / 2 if self._keeps_half else min(self.keep[1], room)

    def _find_cut(self, messages: Messages, limit: float) -> int:
        """Return the position at which the turns begin that stay; 0 if all of them stay."""
        count = tokens = cut = 0
        for turn in turns(messages):
            more = self._cost_of(_without_system(messages[turn.start : turn.stop]), limit)
            count, tokens = count + more[0], tokens + more[1]
            if cut and self._passes_keep(count, tokens, limit):
                return cut
            cut = turn.start
        # messages before the first human message are a turn, too
        more = self._cost_of(_without_system(messages[:cut]), limit)
        return cut if self._passes_keep(count + more[0], tokens + more[1], limit) else 0

    def _cost_of(self, messages: Iterable[BaseMessage], limit: float) -> tuple[int, int]:
        """Return the number of messages, and of their tokens if the limit is one."""
        members = list(messages)
        return len(members), sum(map(self.counter.message, members)) if limit < inf else 0

    def _passes_keep(self, count: int, tokens: int, limit: float) -> bool:
        return count > self.keep[0] or tokens > limit


summarize = Summarize


def _without_system(messages: Messages) -> list[BaseMessage]:
    return [message for message in messages if role(message) != "system"]
