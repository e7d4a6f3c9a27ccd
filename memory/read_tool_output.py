"""Provide `read_tool_output`, a tool that lets a model reread the result of an earlier tool call.

If a tool result was cleared, trimmed or summarised, the thread's history still contains the
original result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Final, TypeGuard

from langchain_core.messages import BaseMessage, ToolMessage
from langchain_core.runnables import RunnableConfig, ensure_config
from langchain_core.tools import BaseTool, StructuredTool, ToolException
from langgraph.checkpoint.base import BaseCheckpointSaver
from pydantic import Field, create_model

from perdure.checkpointers.records import VIEWS_NAMESPACE
from perdure.effects import call_method
from perdure.errors import UnknownCheckpoint, UnknownThread
from perdure.memory.conversation import SHORTENED
from perdure.memory.loaded_thread import find_perdure_checkpointer_of_run
from perdure.memory.long_term.tools import Attribution, build_tool
from perdure.memory.options import check_instance, check_text, check_whole_number
from perdure.memory.quotation import read_message_text
from perdure.memory.run_config import Versioned
from perdure.memory.short_term.tool_outputs import ToolOutputReader
from perdure.stores.values import to_prompt_json

DESCRIPTION: Final = """\
Read the full result of an earlier tool call in this conversation whose result was cleared from \
view. Use it instead of calling the tool a second time. It reads results of this conversation \
only, and returns a long result in pages."""
# Default maximum number of characters of a tool result to return in one call.
_DEFAULT_LIMIT: Final = 20_000
# Minimum value of the option `limit`, in characters.
_MIN_LIMIT: Final = 100
# Batch size, in items, for reading a history from the newest item to the oldest.
_PAGE_ITEMS: Final = 256
# Maximum number of characters of an unknown tool call id to quote in the error message for the
# model.
_MAX_SHOWN_ID: Final = 80
_ID: Final = "The id of the tool call whose result to read, as the note about the result gives it."
_START: Final = "The character at which to begin; 0 is the beginning of the result."


class _ReadTool(ToolOutputReader, StructuredTool):
    """The class of the tool that `read_tool_output` returns.

    The node `clear_tool_outputs` identifies the tool by its base class, `ToolOutputReader`.
    """


def read_tool_output(
    checkpointer: BaseCheckpointSaver[Any] | None = None,
    *,
    limit: int = _DEFAULT_LIMIT,
    name: str = "read_tool_output",
    description: str = DESCRIPTION,
    messages_key: str = "messages",
) -> BaseTool:
    """Return a tool that lets a model reread the result of an earlier tool call.

    The model passes the id of the tool call whose result it wants to read. The returned tool first
    looks for the earlier call's result in the run's state. If the run's state contains no result or
    only a shortened one, the tool searches the graph's history up to the run's checkpoint. After
    the graph's own history, the tool searches the histories of the parent graphs. As a last step,
    the tool searches the thread's other checkpoint namespaces if the run's state contains a
    shortened or cleared version of the result. The tool never reads other threads.

    A result of at most `limit` characters is returned unchanged. A longer result is returned in
    pages. The model passes `start` to read the next page. If no result is found, because the id is
    unknown, the result was erased, or the id belongs to another thread, the tool returns a message
    that says so.

    Args:
        checkpointer: A perdure checkpointer. With None, the checkpointer of the graph in which the
            tool runs is used. If the graph's checkpointer is from another library, the tool reads
            only the state of the run.
        limit: The maximum number of characters of a result that one call returns, at least 100.
        name: The name of the tool. No other tool of the agent may have the same name.
        description: The text that tells the model when to use the tool.
        messages_key: The name of the channel with the messages.
    """
    check_whole_number("limit", limit, _MIN_LIMIT)
    channel = check_text("messages_key", messages_key, "the name of a channel")
    if checkpointer is not None:
        check_instance(
            "checkpointer",
            checkpointer,
            Versioned,
            "a perdure checkpointer, which keeps history, such as SQLiteCheckpointer",
        )
    arguments = create_model(
        "ReadToolOutput",
        tool_call_id=(str, Field(description=_ID)),
        start=(int, Field(0, ge=0, description=_START)),
    )

    async def read_result(values: Mapping[str, Any], attribution: Attribution) -> Any:
        """Return the result of the tool call `tool_call_id`, or one page of a long result."""
        call_id = values["tool_call_id"].strip()
        config = ensure_config(attribution.config)
        result = await _find_tool_result(
            checkpointer or find_perdure_checkpointer_of_run(config),
            config,
            channel,
            call_id,
            attribution.messages,
        )
        if result is None:
            raise ToolException(
                f"No result of the tool call {to_prompt_json(call_id[:_MAX_SHOWN_ID])} is stored "
                "in this conversation. Check the id, or continue without the result."
            )
        return _render_result_page(result, values.get("start") or 0, limit, name)

    return build_tool(read_result, name, description, arguments, channel, tool_class=_ReadTool)


def _render_result_page(
    result: ToolMessage, start_char: int, max_chars: int, tool_name: str
) -> Any:
    """Return a short result in full, or the page of a long result that begins at `start_char`."""
    content = result.content
    whole_text = content if isinstance(content, str) else read_message_text(result)
    if start_char == 0 and len(whole_text) <= max_chars:
        return content
    if start_char >= len(whole_text):
        raise ToolException(
            f"The result has {len(whole_text)} characters, so start must be less than "
            f"{len(whole_text)}."
        )
    end = min(start_char + max_chars, len(whole_text))
    note = f"[Characters {start_char} to {end} of {len(whole_text)}."
    if end < len(whole_text):
        note += f" To read on, call {tool_name} with the same id and start={end}."
    return f"{whole_text[start_char:end]}\n\n{note}]"


# -- finding a result


async def _find_tool_result(
    saver: Any,
    config: RunnableConfig,
    channel: str,
    call_id: str,
    state_messages: Sequence[BaseMessage],
) -> ToolMessage | None:
    """Return the newest result of a tool call from the run's state or from the thread's history.

    If the run's state does not contain the original result of the tool call, the thread's history
    is searched for the result. If the original result is not found, return the shortened version
    from the state, if there is one. If the tool result was cleared, the placeholder that replaced
    it is never returned.
    """
    in_state = [m for m in reversed(state_messages) if _is_result(m, call_id)]
    original = next((m for m in in_state if SHORTENED not in m.additional_kwargs), None)
    thread_id = config["configurable"].get("thread_id")
    if original is None and saver is not None and thread_id is not None:
        search = _ResultSearch(saver, str(thread_id), channel, call_id)
        original = await search.find_result(config["configurable"], {m.id for m in in_state})
    if original is not None:
        return original
    return next((m for m in in_state if m.additional_kwargs[SHORTENED] == "cut"), None)


def _is_result(message: Any, call_id: str) -> TypeGuard[ToolMessage]:
    return isinstance(message, ToolMessage) and message.tool_call_id == call_id


@dataclass(slots=True)
class _ResultSearch:
    """Searches the history of one thread for the original result of one tool call."""

    saver: Any
    thread_id: str
    channel: str
    call_id: str

    async def find_result(
        self, configurable: Mapping[str, Any], message_ids: Set[str | None]
    ) -> ToolMessage | None:
        """Search for the tool result in the tool's graph first, then in its parent graphs.

        If none of these graphs has the tool result, search the thread's other checkpoint namespaces
        for it. In the other namespaces, a message counts as the tool result only if its id is in
        `message_ids`.
        """
        # A task's config contains the checkpoint ids of the task's own graph and of all parent
        # graphs.
        checkpoints: Mapping[str, str | None] = configurable.get("checkpoint_map") or {
            configurable.get("checkpoint_ns") or "": configurable.get("checkpoint_id")
        }
        for namespace in sorted(checkpoints, key=len, reverse=True):
            result = await self._find_result_in_namespace(namespace, checkpoints[namespace], None)
            if result is not None:
                return result
        if not message_ids:
            return None
        try:
            thread = await call_method(self.saver, "thread", self.thread_id)
        except UnknownThread:
            return None
        for namespace in {*thread.namespaces} - checkpoints.keys() - {VIEWS_NAMESPACE}:
            result = await self._find_result_in_namespace(namespace, None, message_ids)
            if result is not None:
                return result
        return None

    async def _find_result_in_namespace(
        self, namespace: str, checkpoint_id: str | None, message_ids: Set[str | None] | None
    ) -> ToolMessage | None:
        """Return the tool call's result from one checkpoint namespace, or None if it is not found.

        Search for the tool result in the namespace's history up to the checkpoint `checkpoint_id`.
        If the checkpoint is not stored yet, search for the tool result in the history up to the
        head, which is the newest checkpoint. If this history does not contain the tool result,
        search the thread's other branches.
        """
        for end_id in dict.fromkeys((checkpoint_id, None)):
            try:
                return await self._find_newest_unshortened_result(namespace, end_id, message_ids)
            except UnknownCheckpoint:
                continue
            except UnknownThread:
                return None
        return None

    async def _find_newest_unshortened_result(
        self, namespace: str, checkpoint_id: str | None, message_ids: Set[str | None] | None
    ) -> ToolMessage | None:
        """Search the history up to a checkpoint for the newest complete result of the tool call.

        With `checkpoint_id=None`, the history up to the head is searched. If the history up to the
        checkpoint contains no complete result, return the newest complete result from another
        branch of the thread.
        """
        on_branch: ToolMessage | None = None
        before: int | None = None
        while True:
            items = await call_method(
                self.saver,
                "history",
                self.thread_id,
                channel=self.channel,
                checkpoint_ns=namespace,
                checkpoint_id=checkpoint_id,
                ends=(0, _PAGE_ITEMS),
                before=before,
            )
            for item in reversed(items):
                message = item.value
                if (
                    not _is_result(message, self.call_id)
                    or SHORTENED in message.additional_kwargs
                    or (message_ids is not None and message.id not in message_ids)
                ):
                    continue
                if not item.branch:
                    return message
                on_branch = on_branch or message
            if len(items) < _PAGE_ITEMS:
                return on_branch
            before = items[0].position
