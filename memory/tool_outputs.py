"""Tool outputs: old bulky results become a line, and `expand` reads originals from history."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Final

from langchain_core.messages import BaseMessage, ToolMessage
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import BaseCheckpointSaver, CheckpointTuple

from perdure.errors import ConfigurationError, UnknownCheckpoint, UnknownThread
from perdure.memory.conversation import Turn, backwards
from perdure.memory.effects import Effect, Effects, awaiting, blocking
from perdure.memory.nodes import MODES, MessagesNode, Mode, Shown
from perdure.memory.options import choice, instance, whole
from perdure.memory.shortening import SHORTENED
from perdure.memory.tokens import Countable, TokenCounter
from perdure.memory.tokens import token_counter as counter_of

if TYPE_CHECKING:
    from perdure.memory.summary import Summary

_PLACEHOLDER: Final = (
    "[The result of {name} was cleared ({tokens} tokens). Call it again if need be.]"
)
_LEAST: Final = 40  # tokens, so that the placeholder is shorter than what it stands for
_AT: Final = ("thread_id", "checkpoint_ns", "checkpoint_id")


def clear_tool_outputs(
    *,
    keep: int = 3,
    min_tokens: int = 200,
    exclude_tools: Collection[str] = (),
    token_counter: Countable | None = None,
    mode: Mode = "view",
    messages_key: str = "messages",
) -> ClearToolOutputs:
    """A node that replaces old, bulky results of tools by a line.

    A call and its (now short) result stay a pair, so the sequence stays valid. Results that the
    model has not answered yet are never cleared, however many they are.

    Args:
        keep: How many of the newest results stay as they are, unanswered ones included.
        min_tokens: Tokens from which a result is cleared, 40 at least.
        exclude_tools: Names of tools whose results stay.
        token_counter: What counts tokens; see `perdure.memory.token_counter`.
        mode: `"view"`: only what the model is shown changes. `"state"`: the message of the state
            is replaced; a perdure checkpointer's history still has the original.
        messages_key: The channel of the messages.

    Raises:
        ConfigurationError: An option is wrong.
        InvalidMessages: When it runs in the mode `"state"`: a result to clear has no id.
    """
    expected = "names of tools, in a list"
    instance("exclude_tools", exclude_tools, (list, tuple, set, frozenset), expected)
    whole("keep", keep, 0)
    whole("min_tokens", min_tokens, _LEAST)
    choice("mode", mode, MODES)
    counter = counter_of(token_counter)
    return ClearToolOutputs(keep, min_tokens, frozenset(exclude_tools), counter, mode, messages_key)


class ClearToolOutputs(MessagesNode):
    """See `clear_tool_outputs`, which makes it."""

    def __init__(
        self,
        keep: int,
        min_tokens: int,
        exclude: frozenset[str],
        counter: TokenCounter,
        mode: Mode,
        messages_key: str,
    ) -> None:
        super().__init__(messages_key)
        self._keep, self._min_tokens, self._exclude = keep, min_tokens, exclude
        self._counter, self.mode = counter, mode

    def through(self, shown: Shown, state: Any, config: RunnableConfig | None) -> Shown:
        """The turns, with old bulky results replaced."""
        return replace(shown, turns=self._cleared(shown.turns))

    def update(self, state: Any, config: RunnableConfig | None) -> dict[str, Any]:
        """What the model is shown, or the replaced messages, as the mode has it."""
        if self.mode == "view":
            return super().update(state, config)
        messages = self.messages_in(state)
        clear = self._clear(list(islice(backwards(messages, to_answer=False), 1)))
        made = [(message, clear(message)) for message in reversed(messages)]
        cleared = [new for message, new in reversed(made) if new is not message]
        for message in cleared:
            self.id_of(message)
        return {self.messages_key: cleared} if cleared else {}

    def _cleared(self, turns: Iterator[Turn]) -> Iterator[Turn]:
        newest = list(islice(turns, 1))
        clear = self._clear(newest)
        for turn in chain(newest, turns):
            units = list(turn.units)
            for number in range(len(units) - 1, -1, -1):
                unit = units[number]
                if unit.kind == "exchange":
                    made = [clear(message) for message in reversed(unit.messages)]
                    units[number] = unit._replace(messages=tuple(reversed(made)))
            yield turn._replace(units=units)

    def _clear(self, newest: list[Turn]) -> Callable[[BaseMessage], BaseMessage]:
        """A function that replaces bulky results; it is called with messages, newest first."""
        seen = 0
        unread = {id(message) for turn in newest for message in turn.units[-1].messages}

        def clear(message: BaseMessage) -> BaseMessage:
            nonlocal seen
            if not isinstance(message, ToolMessage):
                return message
            seen += 1
            if seen <= self._keep or message.name in self._exclude or id(message) in unread:
                return message
            if message.additional_kwargs.get(SHORTENED) == "cleared":
                return message
            tokens = self._counter.message(message)
            return message if tokens < self._min_tokens else _short(message, tokens)

        return clear


def _short(message: ToolMessage, tokens: int) -> ToolMessage:
    return message.model_copy(
        update={
            "content": _PLACEHOLDER.format(name=message.name or "the tool", tokens=tokens),
            "artifact": None,
            "additional_kwargs": {**message.additional_kwargs, SHORTENED: "cleared"},
        }
    )


def _expand(
    checkpointer: BaseCheckpointSaver[Any],
    config: RunnableConfig,
    summary: Summary | None = None,
    *,
    messages_key: str = "messages",
    summarized_key: str = "summarized",
) -> Effects[list[BaseMessage]]:
    """The messages that a thread's summary stands for, in their order.

    Of a message that was changed, the last form that `trim` and `clear_tool_outputs` have not
    shortened. Messages that were erased since are left out.

    Args:
        checkpointer: A perdure checkpointer; it has the history.
        config: Names the thread, and the checkpoint if it is not the newest.
        summary: An earlier summary of the thread; None: the one at the checkpoint.
        messages_key: The channel of the messages.
        summarized_key: The channel of the ids of what the summary stands for.

    Raises:
        ConfigurationError: The checkpointer keeps no history.
        InvalidConfig: The config names no thread.
        UnknownThread: There is no such thread.
        UnknownCheckpoint: It has no such checkpoint.
    """
    saver: Any = checkpointer
    if not callable(getattr(saver, "history", None)):
        raise ConfigurationError(
            f"checkpointer is a {type(saver).__name__}, which keeps no history of messages that "
            "left the state; expected a perdure checkpointer, such as SQLiteCheckpointer"
        )
    found: CheckpointTuple | None = yield Effect(
        partial(saver.get_tuple, config), partial(saver.aget_tuple, config)
    )
    if found is None:
        raise _unknown(config)
    values = found.checkpoint["channel_values"]
    ids: Sequence[str] = values.get(summarized_key) or []
    if summary is not None:
        ids = ids[: summary["count"]]
    if not ids:
        return []
    configurable: dict[str, Any] = dict(found.config["configurable"])
    at = {name: configurable[name] for name in _AT if name in configurable}
    read = {**at, "channel": messages_key}
    history = yield Effect(partial(saver.history, **read), partial(saver.ahistory, **read))
    return _originals(history, ids)


expand = blocking(_expand)
aexpand = awaiting(_expand)


def _unknown(config: RunnableConfig) -> UnknownCheckpoint | UnknownThread:
    wanted = config.get("configurable", {})
    thread_id = wanted.get("thread_id")
    if wanted.get("checkpoint_id"):
        return UnknownCheckpoint(
            f"thread {thread_id!r} has no checkpoint {wanted['checkpoint_id']!r}"
        )
    return UnknownThread(f"there is no thread {thread_id!r}; threads() lists them")


def _originals(history: Iterable[Any], ids: Sequence[str]) -> list[BaseMessage]:
    wanted = set(ids)
    found: dict[str, BaseMessage] = {}
    for item in history:
        message = item.value
        if not isinstance(message, BaseMessage) or message.id not in wanted:
            continue
        if message.id not in found or SHORTENED not in message.additional_kwargs:
            found[message.id] = message
    return [found[uid] for uid in dict.fromkeys(ids) if uid in found]
