"""Replace old, large tool results with placeholders.

The function `expand` returns the original messages that a thread's summary has replaced.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from itertools import chain, islice
from typing import Any, Final, Self

from langchain_core.messages import AIMessage, BaseMessage, SystemMessage, ToolMessage
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import BaseTool
from langgraph.checkpoint.base import BaseCheckpointSaver, CheckpointTuple

from perdure.effects import (
    build_async_function,
    build_blocking_function,
    build_effect_that_calls_function_in_thread,
    call_method,
)
from perdure.errors import UnknownCheckpoint, UnknownThread
from perdure.memory.conversation import SHORTENED, Turn, Unit
from perdure.memory.nodes import MessagesNode, ModelInput, read_messages
from perdure.memory.options import check_instance, check_text, check_whole_number
from perdure.memory.run_config import Versioned
from perdure.memory.short_term.message_updates import (
    build_update_from_current_to_target_messages,
    check_messages_removable_by_id,
    merge_duplicate_messages,
)
from perdure.memory.short_term.tokens import Countable
from perdure.memory.short_term.tokens import token_counter as counter_of
from perdure.memory.tool_calls import (
    REQUEST_ONLY,
    is_tool_result_not_allowed_as_plain_text,
    list_call_ids,
)

_CLEARED: Final = "[The result of {name} was cleared ({tokens} tokens). {hint}]"
_CALL_AGAIN: Final = "Call it again if need be."
_READ_AGAIN: Final = "To read it, call {tool} with tool_call_id {call_id}."
# Minimum value of the option `min_tokens`. A placeholder itself has about this many tokens.
_MIN_TOKENS: Final = 40
_ADDRESS_KEYS: Final = ("thread_id", "checkpoint_ns", "checkpoint_id")


class ToolOutputReader:
    """Base class of the tools returned by `read_tool_output`, used in `isinstance` checks."""


class ClearToolOutputs(MessagesNode):
    """A graph node that replaces old, large tool results with one-line placeholders.

    If you add an instance of this class to a graph with `add_node`, the node replaces tool results
    in the graph's state with placeholders. The original tool results remain in the thread's
    history. If you pass this node to `view`, the node replaces tool results only in the requests to
    the model. The graph's state keeps the original tool results. A tool result is replaced only
    after the model has read it and responded.

    Args:
        keep: The number of newest results that are not replaced, including those that the model has
            not read yet.
        min_tokens: Results with fewer tokens are not replaced. The lowest value is 40.
        exclude_tools: The names of tools whose results are not replaced.
        read_tool: The tool that `read_tool_output` returned, or the tool's name. With `read_tool`,
            the placeholder tells the model to read the result with this tool. Without `read_tool`,
            the placeholder advises the model to repeat the call. With `MemoryMiddleware`, the
            option is not needed, because the middleware finds the tool among the agent's tools. The
            placeholders then never name a tool that the agent does not have.
        token_counter: See `perdure.memory.token_counter`.
    """

    def __init__(
        self,
        *,
        keep: int = 3,
        min_tokens: int = 200,
        exclude_tools: Collection[str] = (),
        read_tool: BaseTool | str | None = None,
        token_counter: Countable | None = None,
        messages_key: str = "messages",
    ) -> None:
        super().__init__(messages_key)
        check_instance(
            "exclude_tools", exclude_tools, (list, tuple, set, frozenset), "a list of tool names"
        )
        self.keep, self.min_tokens = (
            check_whole_number("keep", keep, 0),
            check_whole_number("min_tokens", min_tokens, _MIN_TOKENS),
        )
        self.exclude, self.counter = frozenset(exclude_tools), counter_of(token_counter)
        name = read_tool.name if isinstance(read_tool, BaseTool) else read_tool
        self.read_tool = (
            None if name is None else check_text("read_tool", name, "a tool, or its name")
        )

    def with_tools(
        self, tools: Sequence[Any], system_prompt: SystemMessage | str | None = None
    ) -> Self:
        """Return a copy of the node whose placeholders are adapted to the tools in a request.

        If `tools` contains the tool `read_tool`, the placeholders tell the model to call it. If
        `tools` does not contain `read_tool`, the placeholders name the first tool in `tools` that
        was created by `read_tool_output`. If `tools` contains neither `read_tool` nor a tool
        created by `read_tool_output`, the placeholders advise the model to repeat the original
        call.
        """
        node = copy(self)
        readers = (_get_tool_name(tool) for tool in tools if isinstance(tool, ToolOutputReader))
        present = self.read_tool if self.read_tool in map(_get_tool_name, tools) else None
        node.read_tool = present or next(readers, None)
        return node

    def transform_input(
        self, model_input: ModelInput, state: Any, config: RunnableConfig | None
    ) -> ModelInput:
        """Return the model's input with placeholders in place of old, large tool results."""
        return replace(model_input, turns=self._clear_large_tool_results(model_input.turns))

    async def _build_state_update(
        self, state: Any, config: RunnableConfig | None
    ) -> dict[str, Any]:
        """Build the graph state update that replaces old, large tool results with placeholders."""
        messages = read_messages(state, self.messages_key)

        def build_update() -> list[BaseMessage]:
            cleared = self._clear_large_tool_results(
                ModelInput.from_messages(messages, purpose="state").turns
            )
            result = (message for turn in cleared for unit in turn.units for message in unit)
            present = set(map(id, messages))
            placeholders = [message for message in result if id(message) not in present]
            merged = merge_duplicate_messages(messages)
            if merged is messages:
                check_messages_removable_by_id(placeholders, self.messages_key)
                return placeholders
            placeholders_by_id = {message.id: message for message in placeholders}
            target = [placeholders_by_id.get(message.id, message) for message in merged]
            return build_update_from_current_to_target_messages(target, messages, self.messages_key)

        update = await build_effect_that_calls_function_in_thread(build_update)
        return {self.messages_key: update} if update else {}

    def _clear_large_tool_results(self, turns: Iterator[Turn]) -> Iterator[Turn]:
        """Yield the turns, newest first, replacing old, large tool results with placeholders."""
        result_count = 0
        newest = list(islice(turns, 1))
        # Do not replace tool results that the model has not read yet. An exchange is a message of
        # the model together with the results of its tool calls. The model has not read the results
        # in the last exchange. If a result in the last exchange is missing, the model has also not
        # read the results in the last but one exchange.
        count = 2 if newest and _lacks_results_of_tool_calls(newest[0].units[-1]) else 1
        unread = {id(m) for turn in newest for unit in turn.units[-count:] for m in unit}
        for turn in chain(newest, turns):
            units = []
            for unit in reversed(turn.units):
                messages = []
                for message in reversed(unit):
                    result_count += isinstance(message, ToolMessage)
                    stays = result_count <= self.keep or id(message) in unread
                    messages.append(message if stays else self._clear_large_tool_result(message))
                units.append(tuple(reversed(messages)))
            yield turn._replace(units=units[::-1])

    def _clear_large_tool_result(self, message: BaseMessage) -> BaseMessage:
        """Return a copy of a large tool result with its content replaced by a placeholder.

        Messages other than large tool results are returned unchanged.
        """
        is_cleared = message.additional_kwargs.get(SHORTENED) == "cleared"
        if not isinstance(message, ToolMessage) or is_cleared or message.name in self.exclude:
            return message
        # Keep the tool result if the provider requires a special format for the result, because the
        # placeholder is plain text. For example, OpenAI requires an image as the result of the
        # computer tool.
        if is_tool_result_not_allowed_as_plain_text(message):
            return message
        tokens = self.counter.count_message_tokens(message)
        if tokens < self.min_tokens:
            return message
        hint = _CALL_AGAIN
        if self.read_tool is not None:
            hint = _READ_AGAIN.format(tool=self.read_tool, call_id=json.dumps(message.tool_call_id))
        placeholder = _CLEARED.format(name=message.name or "the tool", tokens=tokens, hint=hint)
        cleared = message.model_copy(
            update={
                "content": placeholder,
                "artifact": None,
                "additional_kwargs": {**message.additional_kwargs, SHORTENED: "cleared"},
            }
        )
        return cleared if self.counter.count_message_tokens(cleared) < tokens else message


clear_tool_outputs = ClearToolOutputs


def _get_tool_name(tool: Any) -> str | None:
    """Return the name of a tool, given as a tool object or as a dict in a provider's format."""
    if isinstance(tool, Mapping):
        function = tool.get("function")
        return function.get("name") if isinstance(function, Mapping) else tool.get("name")
    return getattr(tool, "name", None)


def _lacks_results_of_tool_calls(unit: Unit) -> bool:
    """Return whether an AI message contains a tool call whose result is not stored."""
    call, *results = unit
    stored = [result for result in results if REQUEST_ONLY not in result.additional_kwargs]
    return isinstance(call, AIMessage) and len(list_call_ids(call)) > len(stored)


async def _read_summarized_messages(
    checkpointer: BaseCheckpointSaver[Any],
    config: RunnableConfig,
    *,
    messages_key: str = "messages",
) -> list[BaseMessage]:
    """Return the original messages that a thread's summary has replaced, in chronological order.

    If the thread's history contains several versions of a message, return the latest version that
    was not shortened by `trim` or `clear_tool_outputs`. The returned list does not contain messages
    that were erased after they had been summarised.

    Args:
        checkpointer: A perdure checkpointer.
        config: The config of the thread, or of one of its checkpoints.
        messages_key: The name of the channel with the messages.

    Raises:
        UnknownThread: There is no such thread.
        UnknownCheckpoint: The thread has no such checkpoint.
    """
    saver: Any = check_instance(
        "checkpointer",
        checkpointer,
        Versioned,
        "a perdure checkpointer, which keeps history, such as SQLiteCheckpointer",
    )
    head: CheckpointTuple | None = await call_method(saver, "get_tuple", config)
    if head is None:
        configurable = config["configurable"]
        thread, checkpoint_id = (configurable.get(n) for n in ("thread_id", "checkpoint_id"))
        if checkpoint_id:
            raise UnknownCheckpoint(f"thread {thread!r} has no checkpoint {checkpoint_id!r}")
        raise UnknownThread(f"there is no thread {thread!r}; threads() lists all threads")
    ids: Sequence[str] = head.checkpoint["channel_values"].get("summarized") or []
    if not ids:
        return []
    configurable = head.config["configurable"]
    address = {name: value for name, value in configurable.items() if name in _ADDRESS_KEYS}
    summarized, originals = set(ids), dict[str, BaseMessage]()
    for item in await call_method(saver, "history", channel=messages_key, **address):
        message = item.value
        if (
            isinstance(message, BaseMessage)
            and message.id in summarized
            and (message.id not in originals or SHORTENED not in message.additional_kwargs)
        ):
            originals[message.id] = message
    return list(originals.values())


expand = build_blocking_function(_read_summarized_messages)
aexpand = build_async_function(_read_summarized_messages)
