"""Views: what a model was shown in each call, recorded with the thread, and its tokens by part.

A view is a checkpoint in a namespace of its own, so a checkpointer of perdure stores a message that
the thread has as a reference, and copies, prunes and encrypts views as it does checkpoints.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
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
from perdure.effects import Effect, awaiting, blocking
from perdure.errors import UnknownModel
from perdure.memory.conversation import role
from perdure.memory.options import check_instance, check_text
from perdure.memory.summary import HEADING
from perdure.memory.tokens import TokenCounter, token_counter

_DATA: Final = {"base64", "data", "file_data", "image_url", "url"}  # keys of content blocks
_LONGEST: Final = 1_000  # characters of their values; longer ones are left out
_SECTION: Final = re.compile(
    rf"^<(memories|summary|profile|examples)>\n.*?^</\1>$|^{re.escape(HEADING)}:\n"
    r".*?(?=\n\n<(?:memories|profile|examples)>\n|\Z)",
    re.DOTALL | re.MULTILINE,
)


class RecordViews(BaseCallbackHandler):
    """A callback that records what chat models are shown in a graph: `record_views(saver)`.

    `graph.invoke(question, {**config, "callbacks": [record_views(saver)]})`, or for each run
    `graph.with_config(callbacks=[record_views(saver)])`. Each call of a model then costs a put.
    The data of images and files is left out. If a view cannot be stored, langchain logs it, and the
    run goes on. Outside of a run with a thread and a checkpointer nothing is recorded.

    Args:
        saver: The graph's checkpointer. Only one of perdure stores each message once.
        messages_key: The channel of the state that holds the messages.
    """

    ignore_llm = ignore_chain = ignore_agent = ignore_retriever = True
    ignore_retry = ignore_custom_event = True

    def __init__(self, saver: BaseCheckpointSaver[Any], *, messages_key: str = "messages") -> None:
        self._saver = _checked(saver)
        self._key = check_text("messages_key", messages_key)

    def on_chat_model_start(
        self, serialized: dict[str, Any], messages: list[list[BaseMessage]], **about: Any
    ) -> None:
        """Store what the model is shown now."""
        if (view := self._view(messages[0], **about)) is not None:
            self._saver.put(*view)

    def _view(
        self,
        shown: list[BaseMessage],
        *,
        run_id: UUID,
        metadata: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> tuple[RunnableConfig, Checkpoint, CheckpointMetadata, ChannelVersions] | None:
        """What is put; None: it is no call of a graph on a thread."""
        place = _place()
        if place is None:
            return None
        thread_id, ns, checkpoint_id, runtime = place
        about, params = metadata or {}, kwargs.get("invocation_params") or {}
        model = about.get("ls_model_name") or params.get("model") or params.get("model_name")
        tools = params.get("tools")
        known: Any = {
            "source": "loop",
            "parents": {ns: checkpoint_id},
            "graph_ns": ns,  # at the top, by which it is found
            "view": {
                "node": about.get("langgraph_node"),
                "model": model,
                "tools": _counter(model).count_tools(tools) if tools else 0,
                "run_id": str(run_id),
                "key": self._key,
            },
        }
        if "run_id" in about:  # of the graph's run: they are deleted together
            known["run_id"] = about["run_id"]
        checkpoint = empty_checkpoint()
        versions: Any = {self._key: checkpoint["id"]}
        checkpoint["channel_values"] = {self._key: [_without_data(each) for each in shown]}
        checkpoint["channel_versions"] = versions
        config = _config(thread_id)
        # from these the checkpointer learns which erasures happened after the run began
        config["configurable"] |= {"checkpoint_map": {ns: checkpoint_id}, "__runtime": runtime}
        return config, checkpoint, known, versions


class AwaitedViews(RecordViews):
    """The same for graphs that are awaited: a model's tokens take no task of their own for it."""

    run_inline = True

    async def on_chat_model_start(  # type: ignore[override]
        self, serialized: dict[str, Any], messages: list[list[BaseMessage]], **about: Any
    ) -> None:
        """Store what the model is shown now."""
        if (view := self._view(messages[0], **about)) is not None:
            await self._saver.aput(*view)


record_views = RecordViews


@dataclass(frozen=True, slots=True)
class ModelView:
    """What a model was shown in one call.

    Attributes:
        id: Of the view.
        checkpoint_id: The checkpoint from which the step of the call ran.
        checkpoint_ns: The namespace of the graph; `""` is the root graph.
        run_id: The id of the call.
        at: When it was made (UTC).
        node: The node that made it.
        model: The name of the model, if it is known.
        messages: What it was shown.
        tools: Tokens of the schemas of its tools.
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
    def parts(self) -> dict[str, int]:
        """Tokens by part, counted anew at each call; parts without tokens are left out.

        The parts of system messages are `"summary"`, `"memories"`, `"profile"`, `"examples"`, and
        `"instructions"` for the rest; the others are `"messages"`, `"tool results"`, `"tools"`.
        """
        totals: dict[str, int] = {}
        counter = _counter(self.model).scale_to_usage(self.messages)
        for part, tokens in (*_parts(self.messages, counter), ("tools", self.tools)):
            totals[part] = totals.get(part, 0) + tokens
        return {part: tokens for part, tokens in totals.items() if tokens}


async def _views(
    saver: BaseCheckpointSaver[Any],
    thread_id: str,
    *,
    checkpoint_ns: str | None = "",
    limit: int = 20,
    before: str | None = None,
) -> list[ModelView]:
    """What models were shown on a thread, as `record_views` recorded it, the newest last.

    Args:
        saver: The checkpointer.
        thread_id: The thread.
        checkpoint_ns: The namespace of the graph; `""` is the root graph, None means all.
        limit: How many at most; the newest are returned.
        before: The id of a view; only older ones are returned.
    """
    saver, config = _checked(saver), _config(thread_id)
    options: dict[str, Any] = {
        "filter": None if checkpoint_ns is None else {"graph_ns": checkpoint_ns},
        "limit": limit,
        "before": None if before is None else _config(thread_id, checkpoint_id=before),
    }

    async def listed() -> list[CheckpointTuple]:
        return [checkpoint async for checkpoint in saver.alist(config, **options)]

    checkpoints = await Effect(lambda: list(saver.list(config, **options)), listed)
    return [_view(checkpoint) for checkpoint in reversed(checkpoints)]


views, aviews = blocking(_views), awaiting(_views)


def _checked(saver: BaseCheckpointSaver[Any]) -> BaseCheckpointSaver[Any]:
    expected = "a checkpointer, like SQLiteCheckpointer.open('agent.db')"
    return check_instance("saver", saver, BaseCheckpointSaver, expected)  # type: ignore[no-any-return]


def _config(thread_id: str, **more: str) -> RunnableConfig:
    return {"configurable": {"thread_id": thread_id, "checkpoint_ns": VIEWS_NAMESPACE, **more}}


def _view(head: CheckpointTuple) -> ModelView:
    checkpoint, metadata = head.checkpoint, head.metadata
    about: Any = metadata["view"]  # type: ignore[typeddict-item]
    [(ns, checkpoint_id)] = metadata["parents"].items()
    return ModelView(
        checkpoint["id"],
        checkpoint_id,
        ns,
        about["run_id"],
        datetime.fromisoformat(checkpoint["ts"]),
        about["node"],
        about["model"],
        checkpoint["channel_values"].get(about["key"], []),
        about["tools"],
    )


def _place() -> tuple[str, str, str, object] | None:
    """Return the thread id, namespace, checkpoint id and runtime of the node that is running.

    None is returned if the run has no checkpointer.
    """
    configurable = ensure_config()["configurable"]
    if not any(isinstance(value, BaseCheckpointSaver) for value in configurable.values()):
        return None
    from langgraph.runtime import get_runtime

    runtime = get_runtime()
    info = getattr(runtime, "execution_info", None)
    if info is None or info.thread_id is None:
        return None
    return info.thread_id, info.checkpoint_ns.rpartition("|")[0], info.checkpoint_id, runtime


def _without_data(message: BaseMessage) -> BaseMessage:
    """A message without the data of its images and files."""
    if isinstance(message.content, str):
        return message
    light = _light(message.content)
    return message if light == message.content else message.model_copy(update={"content": light})


def _light(value: Any, key: Any = None) -> Any:
    if isinstance(value, dict):
        return {name: _light(part, name) for name, part in value.items()}
    if isinstance(value, list):
        return [_light(part) for part in value]
    long = isinstance(value, str) and len(value) > _LONGEST and key in _DATA
    return f"[{len(value):,} characters left out]" if long else value


def _counter(model: str | None) -> TokenCounter:
    try:
        return token_counter(model)
    except UnknownModel:
        return token_counter().for_model(model)


def _parts(messages: Sequence[BaseMessage], counter: TokenCounter) -> Iterator[tuple[str, int]]:
    for message in messages:
        tokens, kind = counter.count_message(message), role(message)
        if kind != "system":
            yield "tool results" if kind == "tool" else "messages", tokens
            continue
        blocks = message.content if isinstance(message.content, list) else [message.content]
        texts = (block if isinstance(block, str) else block.get("text") or "" for block in blocks)
        for match in (each for text in texts for each in _SECTION.finditer(text)):
            section = counter.count_text(match[0])
            tokens -= section
            yield match[1] or "summary", section
        yield "instructions", tokens
