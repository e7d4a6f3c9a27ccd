"""Match the tool calls in a conversation with their results, as model providers require.

If a tool call has no result, a placeholder message saying so is added, or the call is removed. If a
tool result arrived after the user's next message, the result is moved directly after its call.
Messages are never changed in place; instead, the request contains modified copies of them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any, Final, Literal, NamedTuple

from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage

from perdure.memory.conversation import (
    Messages,
    Role,
    Turn,
    Unit,
    get_role,
    has_visible_content,
    iter_turn_ranges,
)
from perdure.memory.tool_calls import (
    ANSWERED_BY_MESSAGE,
    REQUEST_ONLY,
    Call,
    build_call_id,
    build_missing_result_message,
    find_tool_calls,
    list_call_ids,
    list_call_ids_of_results,
    remove_stray_result_blocks,
    rewrite_tool_calls,
)

Purpose = Literal["request", "window", "state"]
"""The purpose for which a conversation is read.

With `"request"`, the messages are sent to a model, which answers them now. With `"window"`, more
messages are appended before the messages are sent, so calls at the end may still lack results. With
`"state"`, the caller decides which messages of a state to keep. No message is added or changed for
the purpose `"state"`, and calls at the end may lack results.
"""

NO_USER_MESSAGE: Final = "[No message from the user precedes what follows.]"
"""The text of the human message that is added if a request would begin with another message."""
# keys of `additional_kwargs` in which older LangChain versions store tool calls and results
_CALL_KEYS: Final = frozenset({"tool_outputs", "function_call"})
# Maximum size of `_logged_calls`, which prevents repeated warnings about a tool call.
# `_logged_calls` is cleared when it reaches the maximum size.
_MAX_LOGGED_CALLS: Final = 10_000
_logged_calls: set[tuple[str | None, str]] = set()  # pairs of call id and tool name
_LOG: Final = logging.getLogger("perdure")


def iter_turns(messages: Messages, *, purpose: Purpose = "request") -> Iterator[Turn]:
    """Yield the turns of a conversation, newest first, in a form that model providers accept.

    Messages before the first human message form the oldest turn. If the oldest turn has no human
    message, `NO_USER_MESSAGE` is prepended, except with `purpose="state"`. Some providers require a
    request to begin with a human message. If a conversation has no human message, all messages form
    a single turn, and `NO_USER_MESSAGE` is not prepended to this turn.
    """
    # Tool results whose tool call has not been found yet, keyed by tool call id. Turns are
    # processed from newest to oldest, so the tool call may be found in an older turn.
    unmatched_results: dict[str, BaseMessage] = {}
    start, stop = len(messages), len(messages)
    for turn in iter_turn_ranges(messages):
        start = turn.start
        turn_messages = messages[start : turn.stop]
        units = _group_turn_into_inseparable_units(
            turn_messages, unmatched_results, purpose, is_newest=turn.stop == stop
        )
        if units:
            yield Turn(units, turn_messages)
    if 0 < start < stop:
        first_messages = messages[:start]
        units = _group_turn_into_inseparable_units(
            first_messages, unmatched_results, purpose, lacks_question=True
        )
        if units and purpose != "state":
            units.insert(
                0, (HumanMessage(NO_USER_MESSAGE, additional_kwargs={REQUEST_ONLY: True}),)
            )
        if units:
            yield Turn(units, first_messages)


def has_results_of_all_tool_calls(unit: Unit) -> bool:
    """Return whether every tool call in `unit`, a group of inseparable messages, has a result.

    Tool calls whose results are stored in the AI message itself are not checked.
    """
    answered = {call_id for message in unit for call_id in list_call_ids_of_results(message)}
    calls = [
        call
        for message in unit
        if isinstance(message, AIMessage)
        for call in find_tool_calls(message)
    ]
    return all(call.id in answered for call in calls if call.kind in ANSWERED_BY_MESSAGE)


def find_remaining_results_of_removed_calls(
    removed: Messages, remaining: Messages
) -> list[BaseMessage]:
    """Return the tool results in `remaining` that belong to tool calls in `removed`.

    The caller removes the returned results, because a tool result must not be kept without its
    call.
    """
    missing = {call_id for m in removed if isinstance(m, AIMessage) for call_id in list_call_ids(m)}
    missing -= {m.tool_call_id for m in removed if isinstance(m, ToolMessage)}
    results: list[BaseMessage] = []
    for message in remaining if missing else ():
        if isinstance(message, AIMessage):
            # If an AI message reuses a removed tool call's id, later results belong to the new
            # call.
            missing.difference_update(list_call_ids(message))
        elif isinstance(message, ToolMessage) and message.tool_call_id in missing:
            missing.discard(message.tool_call_id)
            results.append(message)
    return results


def _group_turn_into_inseparable_units(
    turn: Messages,
    unmatched_results: dict[str, BaseMessage],
    purpose: Purpose,
    *,
    is_newest: bool = False,
    lacks_question: bool = False,
) -> list[Unit]:
    """Group the messages of a turn into units that are kept or removed together.

    If `unmatched_results` contains the result of a tool call in this turn, the result is
    moved directly after the call. A result whose tool call is not in this turn is moved to
    `unmatched_results`, because its call may be in an earlier turn. `lacks_question` is True
    for the messages before the conversation's first human message.
    """
    if (
        not unmatched_results
        and not lacks_question
        and (regular := _group_well_formed_turn_into_units(turn)) is not None
    ):
        return regular
    grouper = _TurnGrouper()
    for message in turn:
        grouper.add_message(message)
    grouper.attach_matching_results_and_add_unmatched_ones(unmatched_results)
    units: list[Unit] = []
    for group in grouper.groups:
        unit: list[BaseMessage] = []
        for step in group:
            is_end = is_newest and group is grouper.groups[-1] and step is group[-1]
            unit += step.build_messages_that_providers_accept(purpose, is_end)
        first = group[0]
        is_blank = get_role(first.message) == "human" and not first.stray_result_call_ids
        if unit:
            units.append(tuple(unit))
        elif is_blank and first.message is turn[0] and not lacks_question:
            # A turn's units include the human message that begins the turn, even if it is blank.
            units.append((turn[0],))
    return units


def _group_well_formed_turn_into_units(turn: Messages) -> list[Unit] | None:
    """Group a turn's messages into units, or return None if a provider would reject a message.

    Most turns are well formed. For a well-formed turn, this function is three times as fast as the
    class `_TurnGrouper`.
    """
    units: list[Unit] = []
    exchange: list[BaseMessage] = []
    waiting = set[str]()
    message: Any
    for message in turn:
        kind = get_role(message)
        if kind == "system":
            continue
        if kind == "tool":
            if message.tool_call_id not in waiting:
                return None
            waiting.discard(message.tool_call_id)
            exchange.append(message)
            if not waiting:
                units.append(tuple(exchange))
        elif (
            waiting
            or (units and kind == "human")
            or not _has_only_plain_text_and_tool_calls(message, kind)
        ):
            return None
        elif kind == "ai" and message.tool_calls:
            waiting = {call["id"] for call in message.tool_calls if call["id"]}
            if len(waiting) < len(message.tool_calls):
                return None
            exchange = [message]
        else:
            units.append((message,))
    return None if waiting else units


def _has_only_plain_text_and_tool_calls(message: Any, message_role: Role) -> bool:
    """Return whether a message contains nothing but text and the calls in `tool_calls`.

    If the message is blank and contains no tool calls, the function returns False.
    """
    content, kwargs = message.content, message.additional_kwargs
    if not isinstance(content, str) or message_role == "other":
        return False
    if message_role == "ai":
        if message.invalid_tool_calls or (kwargs and not _CALL_KEYS.isdisjoint(kwargs)):
            return False
        if message.tool_calls:
            return True
    return bool(content) and not content.isspace()


class _MessageWithResults:
    """A message, together with the results of its tool calls. The code below calls it a step."""

    __slots__ = ("calls", "message", "result_messages", "results", "stray_result_call_ids")

    def __init__(
        self, message: BaseMessage, calls: list[Call], stray_result_call_ids: list[str]
    ) -> None:
        self.message, self.calls = message, calls
        # The call ids of tool results in `message` that have no matching tool call in the turn.
        self.stray_result_call_ids = stray_result_call_ids
        # Maps the index of a tool call in `calls` to the message that contains the call's result.
        self.results: dict[int, BaseMessage] = {}
        # The messages in `results`, without duplicates. AI messages are left out, because each AI
        # message has a `_MessageWithResults` object of its own.
        self.result_messages: list[BaseMessage] = []

    def add_call_result(self, call_position: int, message: BaseMessage) -> None:
        """Record `message` as the result of `calls[call_position]`."""
        self.results[call_position] = message
        is_recorded = any(message is result for result in self.result_messages)
        if not isinstance(message, AIMessage) and not is_recorded:
            self.result_messages.append(message)

    def build_messages_that_providers_accept(
        self, purpose: Purpose, is_at_end_of_conversation: bool
    ) -> list[BaseMessage]:
        """Return the message and its tool results in a form that providers accept.

        Return an empty list if no part of the message can be sent to a provider. With
        `purpose="request"`, also return an empty list for a final AI message whose tool calls all
        lack results. If `purpose` is `"state"`, the messages are returned unchanged.
        `is_at_end_of_conversation` is True if the message is the last one in the conversation, not
        counting its tool results.
        """
        message, calls = self.message, self.calls
        if not calls and not self.stray_result_call_ids:
            return [message] if has_visible_content(message) else []
        missing = [n for n in range(len(calls)) if n not in self.results]
        if not missing and not self.stray_result_call_ids and _are_all_in_tool_calls(calls):
            return [message, *self.result_messages]
        is_waiting = is_at_end_of_conversation and any(
            calls[n].kind not in ("server", "unparsed") for n in missing
        )
        if is_waiting and purpose != "request":
            return [message, *self.result_messages]
        if is_waiting and not self.result_messages:
            return []
        request_messages = self._build_request_messages(missing, is_at_end_of_conversation)
        if purpose == "state":
            return [message, *self.result_messages] if request_messages else []
        if purpose == "request":
            _log_missing_results([calls[n] for n in missing if calls[n].kind != "unparsed"])
        return request_messages

    def _build_request_messages(
        self, positions_of_unanswered_calls: list[int], is_at_end: bool
    ) -> list[BaseMessage]:
        """Return copies of the message and its tool results, with placeholders for missing results.

        A tool call without a result is removed, given a placeholder result, or left for the
        provider to continue, depending on the kind of call. A tool call gets a new id if it has no
        id, or if an earlier tool call in the same message has the same id.
        `positions_of_unanswered_calls` contains the indices in `calls` of the calls that have no
        result.
        """
        message, calls = self.message, self.calls
        if not isinstance(message, AIMessage):
            changed = remove_stray_result_blocks(message, self.stray_result_call_ids)
            return [changed] if has_visible_content(changed) else []
        removed, new_ids = set[int](), dict[int, str]()
        missing_results: list[BaseMessage] = []
        seen: set[str | None] = {None, ""}
        for n, call in enumerate(calls):
            if n in positions_of_unanswered_calls:
                if call.kind == "server" and is_at_end:
                    # Do not remove the tool call from the message, although the tool call has no
                    # result yet. The provider runs the tool call itself, and continues the tool
                    # call in its next response.
                    continue
                if call.kind in ("client", "server", "unparsed") or _is_duplicate_call(
                    message, calls, n
                ):
                    removed.add(n)
                    continue
            call_id = call.id
            if call_id in seen and call.kind in ("tool", "custom", "unparsed"):
                new_ids[n] = call_id = build_call_id(message, call, n)
            seen.add(call_id)
            if n in positions_of_unanswered_calls:
                missing_results.append(build_missing_result_message(call, call_id or ""))
        changed = rewrite_tool_calls(
            message,
            calls,
            removed_positions=removed,
            new_ids=new_ids,
            stray_result_call_ids=self.stray_result_call_ids,
        )
        results = self._replace_call_ids_of_results(new_ids) + missing_results
        is_empty = not results and not changed.tool_calls and not has_visible_content(changed)
        return [] if is_empty else [changed, *results]

    def _replace_call_ids_of_results(self, new_call_ids: dict[int, str]) -> list[BaseMessage]:
        """Return the tool results with their call ids replaced according to `new_call_ids`.

        `new_call_ids` maps the index of a call in `calls` to the call's new id.
        """
        if not new_call_ids:
            return self.result_messages
        new_id_of = {
            id(self.results[n]): call_id for n, call_id in new_call_ids.items() if n in self.results
        }
        return [
            result.model_copy(update={"tool_call_id": new_id_of[id(result)]})
            if isinstance(result, ToolMessage) and id(result) in new_id_of
            else result
            for result in self.result_messages
        ]


class _PendingCall(NamedTuple):
    """A tool call whose result has not been found yet.

    Attributes:
        group: The group of steps that contains the call.
        step: The step that contains the call.
        position: The position of the call in `step.calls`.
    """

    group: list[_MessageWithResults]
    step: _MessageWithResults
    position: int


class _TurnGrouper:
    """Reads the messages of a turn and groups those that must be kept or removed together."""

    def __init__(self) -> None:
        # Each group is a list of messages of the turn (with their tool results) that must be kept
        # or removed together.
        self.groups: list[list[_MessageWithResults]] = []
        # Maps each tool call id to the tool calls that have this id and no result yet. Several tool
        # calls in one message can have the same id.
        self._pending: dict[str, list[_PendingCall]] = {}
        # tool messages whose tool call is not in this turn, but may be in an earlier turn
        self._strays: list[ToolMessage] = []

    def add_message(self, message: BaseMessage) -> None:
        """Add the next message of the turn.

        If the message contains the result of a tool call in this turn, the result is attached to
        the call. An AI message that contains the result of an earlier tool call is added to that
        call's group. A human, AI or chat message that contains no result of an earlier tool call
        begins a new group. System messages are skipped.
        """
        kind = get_role(message)
        if kind == "system":
            return
        calls = find_tool_calls(message) if isinstance(message, AIMessage) else []
        result_ids = [] if kind == "chat" else list_call_ids_of_results(message)
        # Some providers put a tool call and its result into the same message.
        own = {call.id for call in calls}.intersection(result_ids)
        group, stray_result_call_ids = self._attach_results_and_get_call_group_and_unmatched_ids(
            message, [u for u in result_ids if u not in own]
        )
        if kind in ("tool", "other") or (kind == "human" and group is not None):
            return
        if group is None:
            group = []
            self.groups.append(group)
        step = _MessageWithResults(message, calls, stray_result_call_ids)
        group.append(step)
        pending: dict[str, list[_PendingCall]] = {}
        for position, call in enumerate(calls):
            same_id = pending.setdefault(call.id or "", [])
            if call.id in own:
                step.add_call_result(position, message)
            elif call.id is not None:
                same_id.append(_PendingCall(group, step, position))
        # If several messages contain calls with the same id, a result belongs to the latest of
        # these calls.
        self._pending |= pending

    def _attach_results_and_get_call_group_and_unmatched_ids(
        self, message: BaseMessage, result_ids: list[str]
    ) -> tuple[list[_MessageWithResults] | None, list[str]]:
        """Match the tool results in a message to their tool calls.

        Return the group of messages that contains a tool call answered by one of the results.
        Return None if the results match no tool call. Also return the call ids of results whose
        tool call is missing or has already been answered. A tool message whose call may be in an
        earlier turn is added to `self._strays` instead.
        """
        group: list[_MessageWithResults] | None = None
        stray_result_call_ids: list[str] = []
        for call_id in result_ids:
            if self._pending.get(call_id):
                group, step, position = self._pending[call_id].pop(0)
                step.add_call_result(position, message)
            elif isinstance(message, ToolMessage) and call_id not in self._pending:
                self._strays.append(message)
            else:
                stray_result_call_ids.append(call_id)
        return group, stray_result_call_ids

    def attach_matching_results_and_add_unmatched_ones(
        self, unmatched_results: dict[str, BaseMessage]
    ) -> None:
        """Match tool results from later turns to this turn's calls, and collect unmatched results.

        Each result in `unmatched_results` is attached to this turn's unanswered call with the same
        id. If this turn contains a tool result but not the tool call that the result answers, the
        result is added to `unmatched_results`. The tool call may be in an earlier turn.
        """
        for call_id in self._pending.keys() & unmatched_results.keys():
            result = unmatched_results.pop(call_id)
            if self._pending[call_id]:
                _, step, position = self._pending[call_id].pop(0)
                step.add_call_result(position, result)
        for stray in reversed(self._strays):
            # If several results have the same call id, keep the first one.
            unmatched_results[stray.tool_call_id] = stray


def _are_all_in_tool_calls(calls: list[Call]) -> bool:
    """Return whether all calls have unique ids and are listed in their message's `tool_calls`."""
    ids = {call.id for call in calls if call.id and call.place is not None}
    return len(ids) == len(calls)


def _is_duplicate_call(message: AIMessage, calls: list[Call], position: int) -> bool:
    """Return whether a tool call duplicates an earlier call in the same message.

    A duplicate tool call has the same id, name and arguments as an earlier call in the message.
    """
    entries, place = message.tool_calls, calls[position].place
    if calls[position].kind == "unparsed" or place is None:
        return False
    return any(entries[place] == entry for entry in entries[:place])


def _log_missing_results(calls: list[Call]) -> None:
    """Log a warning for each tool call without a result, at most once per call in this process."""
    for call in calls:
        if len(_logged_calls) >= _MAX_LOGGED_CALLS:
            _logged_calls.clear()
        if (call.id, call.name) not in _logged_calls:
            _logged_calls.add((call.id, call.name))
            _LOG.warning(
                "the tool call %r of %r has no stored result; the model is told that it is not "
                "known whether the call took effect",
                call.id,
                call.name,
            )
