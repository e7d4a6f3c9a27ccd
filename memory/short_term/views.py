"""Record the messages that are sent to a model in each call, and count their tokens by category.

A view is the record of the messages that a model received in one call. A view is stored as a
checkpoint of the thread, in a separate checkpoint namespace. If a message in a view is already
stored in the thread, perdure's checkpointers store only a reference to the stored message. The
message itself is not stored a second time. Checkpoints that contain views are copied, pruned and
encrypted like all other checkpoints.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import chain
from typing import Any, Final
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import BaseMessage
from langchain_core.runnables import RunnableConfig, ensure_config
from langgraph.checkpoint.base import (
    BaseCheckpointSaver,
    ChannelVersions,
    Checkpoint,
    CheckpointMetadata,
    CheckpointTuple,
    empty_checkpoint,
)

from perdure.checkpointers.records import VIEWS_NAMESPACE
from perdure.effects import Effect, build_async_function, build_blocking_function
from perdure.errors import UnknownModel
from perdure.memory.conversation import get_role
from perdure.memory.options import check_instance, check_text
from perdure.memory.short_term.summary import HEADING
from perdure.memory.short_term.tokens import TokenCounter, token_counter

RequestPart = str
TokenCount = int
# Keys of content-block fields that can contain the binary data of an image or a file.
_DATA_KEYS: Final = {"base64", "data", "file_data", "image_url", "url"}
# Maximum length, in characters, of a recorded string whose key is in `_DATA_KEYS`. A longer string
# is replaced with a placeholder that states its length.
_MAX_DATA_CHARS: Final = 1_000
# Matches a section that perdure adds to a system message, such as `<memories>…</memories>`.
_SECTION: Final = re.compile(
    rf"^<(memories|summary|profile|examples)>\n.*?^</\1>$|^{re.escape(HEADING)}:\n"
    r".*?(?=\n\n<(?:memories|profile|examples)>\n|\Z)",
    re.DOTALL | re.MULTILINE,
)


class RecordViews(BaseCallbackHandler):
    """A callback that records the messages sent to chat models in a graph.

    To record one run, pass the callback in the config: `graph.invoke(question, {**config,
    "callbacks": [record_views(saver)]})`. To record all runs, use
    `graph.with_config(callbacks=[record_views(saver)])`. The callback adds one checkpoint to the
    thread for each model call. The callback does not store the binary data of images and files. If
    the record of a model call cannot be stored, LangChain logs the error and the run continues. A
    model call is recorded only if its run has a thread and a checkpointer.

    Args:
        saver: The graph's checkpointer. A checkpointer of another library stores all messages again
            in each view.
        messages_key: The name of the channel with the messages.
    """

    ignore_llm = ignore_chain = ignore_agent = ignore_retriever = True
    ignore_retry = ignore_custom_event = True

    def __init__(self, saver: BaseCheckpointSaver[Any], *, messages_key: str = "messages") -> None:
        self._saver = _check_saver(saver)
        self._key = check_text("messages_key", messages_key)

    def on_chat_model_start(
        self, serialized: dict[str, Any], messages: list[list[BaseMessage]], **call_info: Any
    ) -> None:
        """Record the messages sent to the model."""
        if (view := self._build_view_put_arguments(messages[0], **call_info)) is not None:
            self._saver.put(*view)

    def _build_view_put_arguments(
        self,
        messages: list[BaseMessage],
        *,
        run_id: UUID,
        metadata: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> tuple[RunnableConfig, Checkpoint, CheckpointMetadata, ChannelVersions] | None:
        """Build the arguments of the `put` call that stores a model call's messages in the thread.

        Return None if the model was called outside a graph, or in a graph run without a thread or
        without a checkpointer.
        """
        node = _find_running_node()
        if node is None:
            return None
        thread_id, namespace, checkpoint_id, runtime = node
        call_metadata, params = metadata or {}, kwargs.get("invocation_params") or {}
        model = (
            call_metadata.get("ls_model_name") or params.get("model") or params.get("model_name")
        )
        tools = params.get("tools")
        view_metadata: Any = {
            "source": "loop",
            "parents": {namespace: checkpoint_id},
            # Store the graph's namespace under a key at the top level of the metadata, because the
            # checkpointer's `list` method can filter only by top-level keys.
            "graph_ns": namespace,
            "view": {
                "node": call_metadata.get("langgraph_node"),
                "model": model,
                "tools": _create_token_counter(model).count_tools(tools) if tools else 0,
                "run_id": str(run_id),
                "key": self._key,
            },
        }
        # A view is the record of one model call. Copy the graph run's `run_id` to the view's
        # metadata, so that the view is deleted together with the run's checkpoints.
        if "run_id" in call_metadata:
            view_metadata["run_id"] = call_metadata["run_id"]
        checkpoint = empty_checkpoint()
        versions: Any = {self._key: checkpoint["id"]}
        checkpoint["channel_values"] = {
            self._key: [_remove_media_data(message) for message in messages]
        }
        checkpoint["channel_versions"] = versions
        config = _build_config(thread_id)
        # The checkpointer uses the config keys `checkpoint_map` and `__runtime` to detect messages
        # that were erased after the run began.
        config["configurable"] |= {
            "checkpoint_map": {namespace: checkpoint_id},
            "__runtime": runtime,
        }
        return config, checkpoint, view_metadata, versions


class AwaitedViews(RecordViews):
    """A variant of `RecordViews` for graphs that are run asynchronously, as with `ainvoke`.

    With `run_inline`, LangChain calls the callback in the task that runs the model, and does not
    start a new task for each streamed token.
    """

    run_inline = True

    async def on_chat_model_start(  # type: ignore[override]
        self, serialized: dict[str, Any], messages: list[list[BaseMessage]], **call_info: Any
    ) -> None:
        """Record the messages sent to the model, without blocking the event loop."""
        if (view := self._build_view_put_arguments(messages[0], **call_info)) is not None:
            await self._saver.aput(*view)


record_views = RecordViews


@dataclass(frozen=True, slots=True)
class ModelView:
    """The messages sent to a model in one call.

    Attributes:
        id: The id of the view.
        checkpoint_id: The checkpoint at which the node that called the model was started.
        checkpoint_ns: The namespace of the graph. `""` is the root graph.
        run_id: The id that langchain gave to the call.
        at: The time of the call (UTC).
        node: The node that called the model.
        model: The name of the model, or None if it is unknown.
        messages: The messages that the model received.
        tools: The number of tokens of the schemas of its tools.
    """

    id: str
    checkpoint_id: str
    checkpoint_ns: str
    run_id: str
    at: datetime
    node: str | None
    model: str | None
    messages: Sequence[BaseMessage]
    tools: int

    @property
    def parts(self) -> dict[RequestPart, TokenCount]:
        """The token count of each part of the request, without the parts that have no tokens.

        The text of the system messages is split into the parts `"summary"`, `"memories"`,
        `"profile"`, `"examples"` and `"instructions"`. The part `"instructions"` contains the
        system message text that belongs to no other part. The parts `"messages"`, `"tool results"`
        and `"tools"` cover the rest of the request, which is everything except the system messages.
        Each access to this property counts the tokens again, because the token counts are not
        cached.
        """
        totals: dict[str, int] = {}
        counter = _create_token_counter(self.model).scale_to_reported_usage(self.messages)
        for part, tokens in (
            *_iter_part_names_with_token_counts(self.messages, counter),
            ("tools", self.tools),
        ):
            totals[part] = totals.get(part, 0) + tokens
        return {part: tokens for part, tokens in totals.items() if tokens}


async def _list_views(
    saver: BaseCheckpointSaver[Any],
    thread_id: str,
    *,
    checkpoint_ns: str | None = "",
    limit: int = 20,
    before: str | None = None,
) -> list[ModelView]:
    """Return the model views that `record_views` recorded in a thread, in chronological order.

    Args:
        saver: The checkpointer.
        thread_id: The id of the thread.
        checkpoint_ns: The namespace of the graph. `""` is the root graph, and None means all
            graphs.
        limit: The maximum number of views. The newest are returned.
        before: The id of a view. Only older views are returned.
    """
    saver, config = _check_saver(saver), _build_config(thread_id)
    options: dict[str, Any] = {
        "filter": None if checkpoint_ns is None else {"graph_ns": checkpoint_ns},
        "limit": limit,
        "before": None if before is None else _build_config(thread_id, checkpoint_id=before),
    }

    async def list_checkpoints() -> list[CheckpointTuple]:
        return [checkpoint async for checkpoint in saver.alist(config, **options)]

    checkpoints = await Effect(lambda: list(saver.list(config, **options)), list_checkpoints)
    return [_convert_checkpoint_to_model_view(checkpoint) for checkpoint in reversed(checkpoints)]


views, aviews = build_blocking_function(_list_views), build_async_function(_list_views)


def _check_saver(saver: BaseCheckpointSaver[Any]) -> BaseCheckpointSaver[Any]:
    return check_instance(  # type: ignore[no-any-return]
        "saver",
        saver,
        BaseCheckpointSaver,
        "a checkpointer, such as SQLiteCheckpointer.open('agent.db')",
    )


def _build_config(thread_id: str, **more: str) -> RunnableConfig:
    return {"configurable": {"thread_id": thread_id, "checkpoint_ns": VIEWS_NAMESPACE, **more}}


def _convert_checkpoint_to_model_view(stored_checkpoint: CheckpointTuple) -> ModelView:
    """Build a `ModelView` from a checkpoint that records the messages of a model call."""
    checkpoint, metadata = stored_checkpoint.checkpoint, stored_checkpoint.metadata
    details: Any = metadata["view"]  # type: ignore[typeddict-item]
    [(namespace, checkpoint_id)] = metadata["parents"].items()
    return ModelView(
        checkpoint["id"],
        checkpoint_id,
        namespace,
        details["run_id"],
        datetime.fromisoformat(checkpoint["ts"]),
        details["node"],
        details["model"],
        checkpoint["channel_values"].get(details["key"], []),
        details["tools"],
    )


def _find_running_node() -> tuple[str, str, str, object] | None:
    """Find the node that is running.

    Returns:
        The id of the run's thread, the checkpoint namespace of the graph that contains the node,
        the id of the checkpoint at which the node was started, and the node's runtime. None if the
        run has no checkpointer or no thread.
    """
    if not any(
        isinstance(value, BaseCheckpointSaver) for value in ensure_config()["configurable"].values()
    ):
        return None
    from langgraph.runtime import get_runtime

    runtime = get_runtime()
    info = getattr(runtime, "execution_info", None)
    if info is None or info.thread_id is None:
        return None
    return info.thread_id, info.checkpoint_ns.rpartition("|")[0], info.checkpoint_id, runtime


def _remove_media_data(message: BaseMessage) -> BaseMessage:
    """Return a message without the binary data of its images and files."""
    if isinstance(message.content, str):
        return message
    content = _replace_long_binary_data(message.content)
    if content == message.content:
        return message
    return message.model_copy(update={"content": content})


def _replace_long_binary_data(value: Any, key: Any = None) -> Any:
    """Replace long binary data in message content with a placeholder.

    If `value` is stored in a dict, `key` is its key in the dict. Otherwise, `key` is None.
    """
    if isinstance(value, dict):
        return {name: _replace_long_binary_data(part, name) for name, part in value.items()}
    if isinstance(value, list):
        return [_replace_long_binary_data(part) for part in value]
    is_long = isinstance(value, str) and len(value) > _MAX_DATA_CHARS and key in _DATA_KEYS
    return f"[{len(value):,} characters left out]" if is_long else value


def _create_token_counter(model: str | None) -> TokenCounter:
    """Return the token counter for a model.

    The counter estimates tokens if the encoding of the model is unknown.
    """
    try:
        return token_counter(model)
    except UnknownModel:
        return token_counter().with_calibration_for_model(model)


def _iter_part_names_with_token_counts(
    messages: Sequence[BaseMessage], counter: TokenCounter
) -> Iterator[tuple[str, int]]:
    """Yield a (part name, token count) tuple for each part of each message in a request."""
    for message in messages:
        tokens, kind = counter.count_message_tokens(message), get_role(message)
        if kind != "system":
            yield "tool results" if kind == "tool" else "messages", tokens
            continue
        blocks = message.content if isinstance(message.content, list) else [message.content]
        texts = (block if isinstance(block, str) else block.get("text") or "" for block in blocks)
        for match in chain.from_iterable(map(_SECTION.finditer, texts)):
            section = counter.count_text(match[0])
            tokens -= section
            yield match[1] or "summary", section
        yield "instructions", tokens
