"""The node that summarises: what is due, what changes in a state, what the model is shown of it."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice, takewhile
from typing import Any, Final, Literal, NamedTuple

from langchain_core.messages import BaseMessage, RemoveMessage, SystemMessage
from langchain_core.runnables import RunnableConfig

from perdure.errors import ConfigurationError, SummaryFailed
from perdure.memory.conversation import Messages, Turn, role, turns
from perdure.memory.effects import Effects, arun, run
from perdure.memory.nodes import SHOWN, MessagesNode, Mode, Shown, channel
from perdure.memory.presenting import Form, Summary, present, presented, summary_of, taken_apart
from perdure.memory.summarizing import Summarizer
from perdure.memory.tokens import TokenCounter
from perdure.memory.transcript import units_of
from perdure.memory.triggers import Trigger

OnFailure = Literal["raise", "keep"]
ON_FAILURE: Final = ("raise", "keep")
_LOG = logging.getLogger("perdure")


class Summarize(MessagesNode):
    """See `summarize`, which makes it."""

    def __init__(
        self,
        summarizer: Summarizer,
        due: Due,
        channels: Channels,
        *,
        form: Form,
        mode: Mode,
        on_failure: OnFailure,
    ) -> None:
        super().__init__(channels.messages)
        channels.check()
        self._summarizer, self._due = summarizer, due
        self._channels, self._on_failure = channels, on_failure
        self.form, self.mode = form, mode

    # -- over a plain list

    def applied(
        self, messages: Messages, config: RunnableConfig | None = None
    ) -> list[BaseMessage]:
        """What the model is to be shown of messages: summarised, if they are many."""
        return run(self._applied(messages, config))

    async def aapplied(
        self, messages: Messages, config: RunnableConfig | None = None
    ) -> list[BaseMessage]:
        """See `applied`."""
        return await arun(self._applied(messages, config))

    def _applied(
        self, messages: Messages, config: RunnableConfig | None
    ) -> Effects[list[BaseMessage]]:
        former, said = taken_apart(messages)
        old = self._due.old(said, range(len(said)))
        extended = yield from self._extended(former, [said[i] for i in old], config)
        if extended is not None:
            gone = set(old)
            said = [message for i, message in enumerate(said) if i not in gone]
        return present(said, extended or former, self.form)

    # -- as a node

    def through(self, shown: Shown, state: Any, config: RunnableConfig | None) -> Shown:
        """A state's summary, and the turns that it does not stand for.

        It asks no model: the node does that, when it runs.
        """
        turns = self._fresh_turns(shown.turns, state)
        return presented(replace(shown, turns=turns), self._former(state), self.form)

    def is_due(self, state: Any) -> bool:
        """Whether the node would summarise something of a state now."""
        messages = self.messages_in(state)
        return bool(self._due.old(messages, self._fresh(messages, state)))

    def update(self, state: Any, config: RunnableConfig | None) -> dict[str, Any]:
        """The new summary, and what is removed or shown, as the mode has it."""
        return self._with_shown(run(self._changes(state, config)), state, config)

    async def aupdate(self, state: Any, config: RunnableConfig | None) -> dict[str, Any]:
        """See `update`."""
        return self._with_shown(await arun(self._changes(state, config)), state, config)

    def changes(self, state: Any, config: RunnableConfig | None) -> dict[str, Any]:
        """An update without what is shown: what it leaves to be asked for by `shown`."""
        return run(self._changes(state, config))

    async def achanges(self, state: Any, config: RunnableConfig | None) -> dict[str, Any]:
        """See `changes`."""
        return await arun(self._changes(state, config))

    def _with_shown(
        self, changes: dict[str, Any], state: Any, config: RunnableConfig | None
    ) -> dict[str, Any]:
        if self.mode == "state":
            return changes
        messages, (_, summary, summarized) = self.messages_in(state), self._channels
        after = {
            self.messages_key: messages,
            summary: changes.get(summary, channel(state, summary)),
            summarized: [*self._done(state), *changes.get(summarized, ())],
        }
        return {**changes, SHOWN: self.shown(messages, after, config)}

    def _changes(self, state: Any, config: RunnableConfig | None) -> Effects[dict[str, Any]]:
        messages = self.messages_in(state)
        self._channels.check_state(state, config)
        former = self._former(state)
        old = self._due.old(messages, self._fresh(messages, state))
        ids = [self.id_of(messages[i]) for i in old]
        extended = yield from self._extended(former, [messages[i] for i in old], config)
        if extended is None:
            return {}
        changes: dict[str, Any] = {
            self._channels.summary: extended,
            self._channels.summarized: ids,
        }
        if self.mode == "state":
            # with it what a view left in the state
            gone = (m for m in messages[: old[-1] + 1] if not isinstance(m, SystemMessage))
            changes[self.messages_key] = [RemoveMessage(id=self.id_of(m)) for m in gone]
        return changes

    def _extended(
        self, former: Summary | None, old: list[BaseMessage], config: RunnableConfig | None
    ) -> Effects[Summary | None]:
        """The summary of a former one and of messages; None: there is nothing to add."""
        units = units_of(old)
        if not units:
            return None
        summarizer = self._summarizer.within(config)
        try:
            text = yield from summarizer.summary(former["text"] if former else "", units)
        except SummaryFailed as exc:
            if self._on_failure == "raise":
                raise
            _LOG.warning("%s, and the conversation goes on as it is", exc)
            return None
        count = len(old) + (former["count"] if former else 0)
        return Summary(text=text, last=old[-1].id, count=count)

    # -- what a summary stands for

    def _former(self, state: Any) -> Summary | None:
        return summary_of(channel(state, self._channels.summary))

    def _done(self, state: Any) -> Sequence[str]:
        return channel(state, self._channels.summarized) or ()

    def _fresh(self, messages: Messages, state: Any) -> range:
        """Where the messages stand that the summary does not stand for.

        It stands for those before the first that it does not know. What follows that one is fresh
        even under an id that was summarised: it was said anew. In the mode `"state"` what is
        summarised is gone, unless all of it is there: then the thread was a view.
        """
        former = self._former(state)
        done = list(self._done(state)) if former and former["last"] is not None else []
        if done and [message.id for message in messages[: len(done)]] == done:
            return range(len(done), len(messages))  # as in nearly every view
        known, found, start = set(done), 0, 0
        for index, message in enumerate(messages):
            if message.id in known:
                found, start = found + 1, index + 1
            elif role(message) != "system":
                break
        if self.mode == "state" and found < len(known):
            start = 0
        return range(start, len(messages))

    def _fresh_turns(self, turns: Iterator[Turn], state: Any) -> Iterator[Turn]:
        """The turns, newest first, up to those that the summary stands for."""
        messages = channel(state, self.messages_key)
        if messages is None:
            every = list(turns)
            messages = [message for turn in reversed(every) for message in turn.messages]
            turns = iter(every)
        fresh = self._fresh(messages, state)
        if not fresh.start:
            return turns
        gone = {message.id for message in messages[: fresh.start]}
        newest = islice(turns, 1)  # whatever a summary says it stands for
        return chain(
            newest, takewhile(lambda turn: not all(m.id in gone for m in turn.messages), turns)
        )


@dataclass(frozen=True, slots=True)
class Due:
    """Says what is to be summarised."""

    trigger: Trigger
    counter: TokenCounter
    keep_turns: int

    def old(self, messages: Messages, fresh: Sequence[int]) -> list[int]:
        """Where what is to be summarised stands: before the turns that stay, if it is time."""
        said = [i for i in fresh if role(messages[i]) != "system"]
        if not self.trigger.fires([messages[i] for i in said], self.counter):
            return []
        kept = list(islice(turns(messages), self.keep_turns))
        cut = kept[-1].start if len(kept) == self.keep_turns else 0
        return [i for i in said if i < cut]


class Channels(NamedTuple):
    """The channels of a state that the node reads and writes."""

    messages: str
    summary: str
    summarized: str

    def check(self) -> None:
        """Refuse names that are none, or the same."""
        for name, key in (("summary_key", self.summary), ("summarized_key", self.summarized)):
            if not isinstance(key, str) or not key:
                raise ConfigurationError(f"{name} is {key!r}; expected a channel's name")
        if len(set(self)) < len(self):
            raise ConfigurationError(
                f"messages, summary and the summarised ids need a channel each; given: {list(self)}"
            )

    def check_state(self, state: Any, config: RunnableConfig | None) -> None:
        """Refuse a graph that would drop the summary and remove the messages all the same."""
        in_graph = "langgraph_node" in ((config or {}).get("metadata") or {})
        if in_graph and channel(state, self.summarized) is None:
            raise ConfigurationError(
                f"the graph's state has no channel {self.summarized!r}; a summary needs "
                f"{self.summary!r} and {self.summarized!r}: derive the state from SummaryState"
            )
