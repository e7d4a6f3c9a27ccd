"""Views: what a model was shown in each call, recorded beside the thread, and its tokens by part."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, Protocol, runtime_checkable
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import BaseMessage
from langchain_core.runnables import RunnableConfig, ensure_config
from langgraph.checkpoint.base import BaseCheckpointSaver

from perdure.checkpointers.reports import RecordedView
from perdure.errors import UnknownModel
from perdure.memory.conversation import role
from perdure.memory.options import instance
from perdure.memory.summary import HEADING
from perdure.memory.tokens import TokenCounter, token_counter

_DATA: Final = {"base64", "data", "file_data", "image_url", "url"}  # keys of content blocks
_LONGEST: Final = 1_000  # characters of their values; longer ones are left out
_SECTION: Final = re.compile(
    rf"^<(memories|summary|profile|examples)>\n.*?^</\1>$|^{re.escape(HEADING)}:\n"
    r".*?(?=\n\n<(?:memories|profile|examples)>\n|\Z)",
    re.DOTALL | re.MULTILINE,
)
_SAVER: Final = "a checkpointer of perdure, like SQLiteCheckpointer.open('agent.db')"


@runtime_checkable
class Recording(Protocol):
    """A checkpointer that stores views, as perdure's do."""

    def put_view(self, config: RunnableConfig, run_id: str, view: Mapping[str, Any]) -> None: ...

    def views(
        self,
        thread_id: str,
        *,
        checkpoint_ns: str = "",
        limit: int = 20,
        before: tuple[str, str] | None = None,
    ) -> list[RecordedView]: ...

    async def aviews(
        self,
        thread_id: str,
        *,
        checkpoint_ns: str = "",
        limit: int = 20,
        before: tuple[str, str] | None = None,
    ) -> list[RecordedView]: ...


class RecordViews(BaseCallbackHandler):
    """A callback that records what chat models are shown within a graph: `record_views(saver)`.

    `graph.invoke(question, {**config, "callbacks": [record_views(saver)]})`, or once for a graph:
    `graph.with_config(callbacks=[record_views(saver)])`. Each call costs one small write. Messages
    that the state's channel holds are stored as references to it, others in full; the data of
    images and files is left out. If a view cannot be stored, langchain logs it and the run goes on.
    Outside of a run with a thread and a checkpointer nothing is recorded.

    Args:
        saver: The checkpointer of the graph.
        messages_key: The channel of the state that holds messages.
    """

    ignore_llm = ignore_chain = ignore_agent = ignore_retriever = True  # type: ignore[assignment]
    ignore_retry = ignore_custom_event = True  # type: ignore[assignment]

    def __init__(self, saver: Any, *, messages_key: str = "messages") -> None:
        self._saver: Recording = instance("saver", saver, Recording, _SAVER)
        self._key = messages_key

    def on_chat_model_start(
        self,
        serialized: dict[str, Any],
        messages: list[list[BaseMessage]],
        *,
        run_id: UUID,
        metadata: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Store what the model is shown now."""
        config = _checkpoint_config()
        if config is None:
            return
        params = kwargs.get("invocation_params") or {}
        about = metadata or {}
        model = about.get("ls_model_name") or params.get("model") or params.get("model_name")
        view = {
            self._key: [_without_data(message) for message in messages[0]],
            "about": {
                "at": datetime.now(UTC).isoformat(timespec="milliseconds"),
                "node": about.get("langgraph_node"),
                "model": model,
                "tools": _counter(model).tools(params["tools"]) if params.get("tools") else 0,
                "key": self._key,
            },
        }
        self._saver.put_view(config, str(run_id), view)


record_views = RecordViews


@dataclass(frozen=True, slots=True)
class ModelView:
    """What a model was shown in one call.

    Attributes:
        checkpoint_id: The checkpoint from which the call's step ran.
        run_id: The id of the call.
        at: When it was made.
        node: The node that made it.
        model: The name of the model, if it is known.
        messages: What the model was shown.
        tools: Tokens of the schemas of its tools.
    """

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
        """Tokens by part, those that there are.

        `"instructions"`, `"summary"`, `"memories"`, `"profile"` and `"examples"` are of system
        messages; `"messages"`, `"tool results"` and `"tools"` the rest.
        """
        found: dict[str, int] = {}
        counter = _counter(self.model).fitted(self.messages)
        for part, tokens in (*_parts(self.messages, counter), ("tools", self.tools)):
            found[part] = found.get(part, 0) + tokens
        return {part: tokens for part, tokens in found.items() if tokens}


def views(
    saver: Any,
    thread_id: str,
    *,
    checkpoint_ns: str = "",
    limit: int = 20,
    before: ModelView | None = None,
) -> list[ModelView]:
    """What models were shown on a thread, as far as `record_views` recorded it, the newest last.

    Args:
        saver: The checkpointer.
        thread_id: The thread.
        checkpoint_ns: The namespace of a subgraph; `""` is the root graph.
        limit: At most so many, the newest.
        before: Only views before this one, the first of the page that is known.

    Raises:
        UnknownThread: There is no such thread or namespace.
    """
    recorded: Recording = instance("saver", saver, Recording, _SAVER)
    at = before and (before.checkpoint_id, before.run_id)
    page = recorded.views(thread_id, checkpoint_ns=checkpoint_ns, limit=limit, before=at)
    return [_model_view(checkpoint_ns, each) for each in reversed(page)]


async def aviews(
    saver: Any,
    thread_id: str,
    *,
    checkpoint_ns: str = "",
    limit: int = 20,
    before: ModelView | None = None,
) -> list[ModelView]:
    """See `views`."""
    recorded: Recording = instance("saver", saver, Recording, _SAVER)
    at = before and (before.checkpoint_id, before.run_id)
    page = await recorded.aviews(thread_id, checkpoint_ns=checkpoint_ns, limit=limit, before=at)
    return [_model_view(checkpoint_ns, each) for each in reversed(page)]


def _model_view(ns: str, recorded: RecordedView) -> ModelView:
    about = recorded.value["about"]
    at, messages = datetime.fromisoformat(about["at"]), recorded.value[about["key"]]
    said = (at, about["node"], about["model"], messages, about["tools"])
    return ModelView(recorded.checkpoint_id, ns, recorded.run_id, *said)


def _checkpoint_config() -> RunnableConfig | None:
    """The checkpoint from which the node runs; None: this is no node of a thread that is saved."""
    configurable = ensure_config()["configurable"]
    if not any(isinstance(value, BaseCheckpointSaver) for value in configurable.values()):
        return None
    from langgraph.runtime import get_runtime

    info = getattr(get_runtime(), "execution_info", None)
    if info is None or info.thread_id is None:
        return None
    at = {"thread_id": info.thread_id, "checkpoint_id": info.checkpoint_id}
    return {"configurable": {**at, "checkpoint_ns": info.checkpoint_ns.rpartition("|")[0]}}


def _without_data(message: BaseMessage) -> BaseMessage:
    """A message without the data of its images and files, which the thread has."""
    if isinstance(message.content, str):
        return message
    light = _light(message.content)
    return message if light == message.content else message.model_copy(update={"content": light})


def _light(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _light_text(key, part) for key, part in value.items()}
    return [_light(part) for part in value] if isinstance(value, list) else value


def _light_text(key: Any, part: Any) -> Any:
    if not isinstance(part, str) or len(part) <= _LONGEST or key not in _DATA:
        return _light(part)
    return f"[{len(part):,} characters left out]"


def _counter(model: str | None) -> TokenCounter:
    try:
        return token_counter(model)
    except UnknownModel:
        return token_counter()


def _parts(messages: Sequence[BaseMessage], counter: TokenCounter) -> Iterator[tuple[str, int]]:
    for message in messages:
        tokens, kind = counter.message(message), role(message)
        if kind == "system":
            blocks = message.content if isinstance(message.content, list) else [message.content]
            texts = (each if isinstance(each, str) else each.get("text") or "" for each in blocks)
            for found in (each for text in texts for each in _SECTION.finditer(text)):
                section = counter.text(found[0])
                tokens -= section
                yield found[1] or "summary", section
            yield "instructions", tokens
        else:
            yield "tool results" if kind == "tool" else "messages", tokens
