"""Exchanges: the tool calls of a conversation joined with their results, as providers accept them.

Where a result is missing, a request says so; where it came late, it moves behind its call. The
messages themselves stay as they are: a request has copies.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any, Final, Literal

from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage

from perdure.memory.conversation import (
    Messages,
    Role,
    Turn,
    Unit,
    role,
    says_something,
    turns,
)
from perdure.memory.tool_calls import (
    ANSWERED_BY_MESSAGE,
    STATED,
    Call,
    call_ids,
    find_calls,
    find_result_ids,
    new_call_id,
    remove_result_blocks,
    rewrite_calls,
    state_missing_result,
)

Purpose = Literal["request", "window", "state"]
"""Why a conversation is read.

`"request"`: a model is to answer it now. `"window"`: it is the beginning of a request, so a call at
the end may wait for its results. `"state"`: to find out which messages of a state stay. Then no
message is added or changed, and a call at the end may wait for its results.
"""

NOT_ASKED: Final = "[No message from the user precedes what follows.]"
"""The text of the human message before the messages that no human message precedes."""
_HIDING_CALLS: Final = frozenset({"tool_outputs", "function_call"})  # keys of additional_kwargs
_LOGGED_CALLS: Final = 10_000  # ids of calls that are remembered as logged; then all are forgotten
_logged: set[tuple[str | None, str]] = set()
_LOG: Final = logging.getLogger("perdure")


def iter_turns(messages: Messages, *, purpose: Purpose = "request") -> Iterator[Turn]:
    """Yield the turns, newest first, with the messages that a provider accepts.

    Messages before the first human message are the oldest turn. In a request it begins with a
    human message that says so, because some providers refuse others as the first message.
    """
    late: dict[str, BaseMessage] = {}  # results whose call is in an earlier turn, by its id
    start, stop = len(messages), len(messages)
    for turn in turns(messages):
        start = turn.start
        own = messages[start : turn.stop]
        units = _group_units(own, late, purpose, is_newest=turn.stop == stop)
        if units:
            yield Turn(units, own)
    if 0 < start < stop:
        own = messages[:start]
        units = _group_units(own, late, purpose, begins_anywhere=True)
        if units and purpose != "state":
            units.insert(0, (HumanMessage(NOT_ASKED, additional_kwargs={STATED: True}),))
        if units:
            yield Turn(units, own)


def has_all_results(unit: Unit) -> bool:
    """Return whether no call in a unit waits for a message with its result."""
    answered = {uid for message in unit for uid in find_result_ids(message)}
    calls = [call for each in unit if isinstance(each, AIMessage) for call in find_calls(each)]
    return all(call.id in answered for call in calls if call.kind in ANSWERED_BY_MESSAGE)


def find_late_results(old: Messages, rest: Messages) -> list[BaseMessage]:
    """Return the results in `rest` of calls in `old`, which go into the same summary."""
    missing = {uid for m in old if isinstance(m, AIMessage) for uid in call_ids(m)}
    missing -= {m.tool_call_id for m in old if isinstance(m, ToolMessage)}
    late: list[BaseMessage] = []
    for message in rest if missing else ():
        if isinstance(message, AIMessage):
            missing.difference_update(call_ids(message))  # results belong to the newer call
        elif isinstance(message, ToolMessage) and message.tool_call_id in missing:
            missing.discard(message.tool_call_id)
            late.append(message)
    return late


def _group_units(
    turn: Messages,
    late: dict[str, BaseMessage],
    purpose: Purpose,
    *,
    is_newest: bool = False,
    begins_anywhere: bool = False,
) -> list[Unit]:
    """Return the units of a turn.

    Results in `late` are added to their calls. Results without a call in the turn move there.
    """
    if not late and not begins_anywhere and (regular := _group_regular_turn(turn)) is not None:
        return regular
    reader = _TurnReader()
    for message in turn:
        reader.add_message(message)
    reader.move_late_results(late)
    units: list[Unit] = []
    for group in reader.groups:
        unit: list[BaseMessage] = []
        for step in group:
            is_end = is_newest and group is reader.groups[-1] and step is group[-1]
            unit += step.provider_messages(purpose, is_end)
        first = group[0]
        is_blank = role(first.message) == "human" and not first.stray_ids
        if unit:
            units.append(tuple(unit))
        elif is_blank and first.message is turn[0] and not begins_anywhere:
            units.append((turn[0],))  # the newest human message counts, although it is blank
    return units


def _group_regular_turn(turn: Messages) -> list[Unit] | None:
    """Return the units of a turn in which nothing has to change; None if it is another turn.

    Most turns are like this, and this takes a third of the time of reading each message in full.
    """
    units: list[Unit] = []
    exchange: list[BaseMessage] = []
    waiting = set[str]()
    each: Any
    for each in turn:
        kind = role(each)
        if kind == "system":
            continue
        if kind == "tool":
            if each.tool_call_id not in waiting:
                return None
            waiting.discard(each.tool_call_id)
            exchange.append(each)
            if not waiting:
                units.append(tuple(exchange))
        elif waiting or (units and kind == "human") or not _is_regular(each, kind):
            return None
        elif kind == "ai" and each.tool_calls:
            waiting = {call["id"] for call in each.tool_calls if call["id"]}
            if len(waiting) < len(each.tool_calls):
                return None
            exchange = [each]
        else:
            units.append((each,))
    return None if waiting else units


def _is_regular(message: Any, kind: Role) -> bool:
    """Return whether a message has nothing but text, and calls that stand in `tool_calls`."""
    content, kwargs = message.content, message.additional_kwargs
    if not isinstance(content, str) or kind == "other":
        return False
    if kind == "ai":
        if message.invalid_tool_calls or (kwargs and not _HIDING_CALLS.isdisjoint(kwargs)):
            return False
        if message.tool_calls:
            return True
    return bool(content) and not content.isspace()


class _Step:
    """A message with the results of its calls."""

    __slots__ = ("answers", "calls", "message", "results", "stray_ids")

    def __init__(self, message: BaseMessage, calls: list[Call], stray_ids: list[str]) -> None:
        self.message, self.calls = message, calls
        self.stray_ids = stray_ids  # of calls that are missing, whose results the message brings
        self.results: dict[int, BaseMessage] = {}  # by the position of the call in `calls`
        self.answers: list[BaseMessage] = []  # the messages with results, except AI messages

    def add_result(self, position: int, message: BaseMessage) -> None:
        """Note the message that has the result of a call."""
        self.results[position] = message
        is_noted = any(message is each for each in self.answers)
        if not isinstance(message, AIMessage) and not is_noted:  # those have steps of their own
            self.answers.append(message)

    def provider_messages(self, purpose: Purpose, is_end: bool) -> list[BaseMessage]:
        """Return the message and the results, for a provider; nothing if it would refuse them.

        `is_end` says that nothing but results follows the message.
        """
        message, calls = self.message, self.calls
        if not calls and not self.stray_ids:
            return [message] if says_something(message) else []
        missing = [n for n in range(len(calls)) if n not in self.results]
        if not missing and not self.stray_ids and _are_plain(calls):
            return [message, *self.answers]
        waits = is_end and any(calls[n].kind not in ("server", "unparsed") for n in missing)
        if waits and purpose != "request":
            return [message, *self.answers]
        if waits and not self.answers:
            return []
        made = self._request_messages(missing, is_end)
        if purpose == "state":
            return [message, *self.answers] if made else []
        if purpose == "request":
            _log_missing([calls[n] for n in missing if calls[n].kind != "unparsed"])
        return made

    def _request_messages(self, missing: list[int], is_end: bool) -> list[BaseMessage]:
        message, calls = self.message, self.calls
        if not isinstance(message, AIMessage):
            changed = remove_result_blocks(message, self.stray_ids)
            return [changed] if says_something(changed) else []
        removed, new_ids = set[int](), dict[int, str]()
        stated: list[BaseMessage] = []
        seen: set[str | None] = {None, ""}
        for n, call in enumerate(calls):
            if n in missing:
                if call.kind == "server" and is_end:
                    continue  # the provider goes on with it
                if call.kind in ("client", "server", "unparsed") or _is_repetition(
                    message, calls, n
                ):
                    removed.add(n)
                    continue
            uid = call.id
            if uid in seen and call.kind in ("tool", "custom", "unparsed"):
                new_ids[n] = uid = new_call_id(message, call, n)
            seen.add(uid)
            if n in missing:
                stated.append(state_missing_result(call, uid or ""))
        changed = rewrite_calls(
            message, calls, removed=removed, new_ids=new_ids, stray_ids=self.stray_ids
        )
        answers = self._rename_results(new_ids) + stated
        is_empty = not answers and not changed.tool_calls and not says_something(changed)
        return [] if is_empty else [changed, *answers]

    def _rename_results(self, new_ids: dict[int, str]) -> list[BaseMessage]:
        """Return the results, under the new ids of their calls."""
        if not new_ids:
            return self.answers
        named = {id(self.results[n]): uid for n, uid in new_ids.items() if n in self.results}
        return [
            each.model_copy(update={"tool_call_id": named[id(each)]})
            if isinstance(each, ToolMessage) and id(each) in named
            else each
            for each in self.answers
        ]


class _TurnReader:
    """Joins the messages of one turn to groups that stay or go together."""

    def __init__(self) -> None:
        self.groups: list[list[_Step]] = []
        # by the id of a call that the turn has: the places that wait for its result
        self._waiting: dict[str, list[tuple[list[_Step], _Step, int]]] = {}
        self._strays: list[ToolMessage] = []  # results whose call the turn does not have

    def add_message(self, message: BaseMessage) -> None:
        """Add the next message of the turn to a group, or to a new one."""
        kind = role(message)
        if kind == "system":
            return
        calls = find_calls(message) if isinstance(message, AIMessage) else []
        result_ids = [] if kind == "chat" else find_result_ids(message)
        # a provider may call and answer within one message
        own = {call.id for call in calls}.intersection(result_ids)
        group, stray_ids = self._add_results(message, [u for u in result_ids if u not in own])
        if kind in ("tool", "other") or (kind == "human" and group is not None):
            return
        if group is None:
            group = []
            self.groups.append(group)
        step = _Step(message, calls, stray_ids)
        group.append(step)
        waiting: dict[str, list[tuple[list[_Step], _Step, int]]] = {}
        for position, call in enumerate(calls):
            places = waiting.setdefault(call.id or "", [])
            if call.id in own:
                step.add_result(position, message)
            elif call.id is not None:
                places.append((group, step, position))
        self._waiting |= waiting  # results belong to the last call with their id

    def _add_results(
        self, message: BaseMessage, result_ids: list[str]
    ) -> tuple[list[_Step] | None, list[str]]:
        """Add the results in a message to their calls.

        Return the group of the calls, None without one, and the ids whose call is missing.
        """
        group: list[_Step] | None = None
        stray_ids: list[str] = []
        for uid in result_ids:
            if self._waiting.get(uid):
                group, step, position = self._waiting[uid].pop(0)
                step.add_result(position, message)
            elif isinstance(message, ToolMessage) and uid not in self._waiting:
                self._strays.append(message)
            else:
                stray_ids.append(uid)
        return group, stray_ids

    def move_late_results(self, late: dict[str, BaseMessage]) -> None:
        """Add late results to the calls that lack one. Move this turn's strays to `late`."""
        for uid in self._waiting.keys() & late.keys():
            result = late.pop(uid)
            if self._waiting[uid]:
                _, step, position = self._waiting[uid].pop(0)
                step.add_result(position, result)
        for stray in reversed(self._strays):
            late[stray.tool_call_id] = stray  # the first of several counts


def _are_plain(calls: list[Call]) -> bool:
    """Return whether calls stand in `tool_calls`, each with an id of its own."""
    ids = {call.id for call in calls if call.id and call.place is not None}
    return len(ids) == len(calls)


def _is_repetition(message: AIMessage, calls: list[Call], position: int) -> bool:
    """Return whether a call is the same as an earlier one of the message, its id included."""
    entries, place = message.tool_calls, calls[position].place
    if calls[position].kind == "unparsed" or place is None:
        return False
    return any(entries[place] == entry for entry in entries[:place])


def _log_missing(calls: list[Call]) -> None:
    """Log each call without a result once."""
    for call in calls:
        if len(_logged) >= _LOGGED_CALLS:
            _logged.clear()
        if (call.id, call.name) not in _logged:
            _logged.add((call.id, call.name))
            _LOG.warning(
                "the tool call %r of %r has no stored result; the model is told that it is not "
                "known whether the call took effect",
                call.id,
                call.name,
            )
