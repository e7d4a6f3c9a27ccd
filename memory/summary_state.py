"""The channels of a summary in a graph's state, and the messages that a summary stands for."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Annotated, Any, Final, NotRequired, Self

from langchain_core.messages import AIMessage, BaseMessage
from typing_extensions import TypedDict  # with typing's, Python 3.11 gives no JSON schema

from perdure.memory.conversation import SHORTENED, Messages, Turn, Unit
from perdure.memory.nodes import Shown, channel
from perdure.memory.options import instance
from perdure.memory.reducers import ChatState, append_new
from perdure.memory.tool_calls import STATED
from perdure.memory.usage import request_tokens

SUMMARY: Final = "summary"
SUMMARIZED: Final = "summarized"
"""The channels of the summary, and of the ids of the messages for which it stands."""
_MAX_DIGESTS: Final = 256  # messages that are recognised by their content; older ones by their id
_DIGEST_BYTES: Final = 4  # of an id, and of a content
_EXPECTED: Final = "what summarize() writes, or text"


class Summary(TypedDict):
    """A summary, as plain JSON."""

    text: str
    last: str | None  # the id of the last message it stands for, if that had one
    count: int  # of the messages it stands for
    digests: NotRequired[list[str]]  # hashes of the newest of these messages, oldest first
    answered: NotRequired[str]  # the id of the newest answer to a request without this summary


def latest_summary(left: Any, right: Any) -> Any:
    """Return the new summary `right`. Reducer of the channel `summary`.

    Subgraphs that run in parallel and share the channel return their summaries in the same step.
    If one of them is the summary that another has extended, the extended one is returned. If two
    of them extend the same summary, the result has the texts of both.
    """
    ours, theirs = _digests_of(left), _digests_of(right)
    if not ours or not theirs or ours[-1] in theirs:
        return right
    if theirs[-1] in ours:
        return left
    known = set(ours)
    added = [digest for digest in theirs if digest not in known]
    joined = Summary(
        text=f"{left['text']}\n\n{right['text']}",
        last=right["last"],
        count=left["count"] + len(added),
        digests=[*ours, *added][-_MAX_DIGESTS:],
    )
    if right.get("answered") is not None:
        joined["answered"] = right["answered"]
    return joined


class SummaryState(ChatState, total=False):
    """A chat with a running summary, and the ids of the messages it stands for, in order."""

    summary: Annotated[Summary | None, latest_summary]
    summarized: Annotated[list[str], append_new]


def summary_of(value: Any) -> Summary | None:
    """Return the summary in a channel. Plain text is a summary that stands for no message."""
    if not value:
        return None
    if isinstance(value, str):
        return Summary(text=value, last=None, count=0)
    stored = instance("the channel of the summary", value, Mapping, _EXPECTED)
    instance("the channel of the summary", stored.get("text"), str, _EXPECTED)
    summary = Summary(text=stored["text"], last=stored.get("last"), count=stored.get("count", 0))
    if stored.get("digests"):
        summary["digests"] = stored["digests"]
    if stored.get("answered") is not None:
        summary["answered"] = stored["answered"]
    return summary


def extend_summary(
    previous: Summary | None,
    text: str,
    messages: Messages,
    summarized: Iterable[str] = (),
    conversation: Messages = (),
) -> Summary:
    """Return a summary with a new text that stands for more messages than the previous one.

    `summarized` are the ids of the messages for which the previous summary stands. A message that
    is summarised a second time, because its content has changed, is counted once. `conversation`
    has all messages that there are now: the usage that its answers report is of requests without
    the new summary.
    """
    again = {message.id for message in messages}.intersection(summarized) if previous else ()
    count = len(messages) - len(again) + (previous["count"] if previous else 0)
    summary = Summary(text=text, last=messages[-1].id, count=count)
    digests = dict.fromkeys(_digests_of(previous))
    for message in messages:
        if message.id is not None and SHORTENED not in message.additional_kwargs:
            digests[_digest_id(message.id) + _digest_content(message)] = None
    summary["digests"] = [*digests][-_MAX_DIGESTS:]
    answer = next(filter(request_tokens, reversed(conversation)), None)
    if answer is not None:
        summary["answered"] = answer.id or ""
    return summary


class SummarizedMessages:
    """The messages for which a summary stands already; `message in summarized` is true for them.

    A graph removes summarised messages from its state. They are still there, or there again, in
    the state of a parent graph or of another subgraph, and where a client sends the whole
    conversation with each turn. A message whose content has changed since it was summarised is not
    among them.
    """

    def __init__(self, summary: Summary | None, ids: Iterable[str] | None) -> None:
        self._ids = frozenset(ids or ()) if summary and summary["text"] else frozenset()
        self._summary = summary
        self._contents: dict[str, set[str]] | None = None  # by the digest of the id

    @classmethod
    def of_state(cls, state: Any) -> Self:
        """Return the messages for which the summary in a state stands."""
        return cls(summary_of(channel(state, SUMMARY)), channel(state, SUMMARIZED))

    def __bool__(self) -> bool:
        return bool(self._ids)

    def __contains__(self, message: object) -> bool:
        if not isinstance(message, BaseMessage):
            return False
        return message.id in self._ids and not self._is_changed(message)

    def hide(self, shown: Shown) -> Shown:
        """Return what is shown without these messages.

        The question of a turn of which anything else is shown is kept, and so are calls and
        results of which one is shown.
        """
        return replace(shown, turns=self._without(shown.turns)) if self._ids else shown

    def _without(self, turns: Iterator[Turn]) -> Iterator[Turn]:
        for turn in turns:
            question, *rest = turn.units
            units = [unit for unit in rest if not self._covers(unit)]
            if units or not self._covers(question):
                yield turn._replace(units=[question, *units])

    def _covers(self, unit: Unit) -> bool:
        """Return whether all messages of a unit are summarised, apart from those of the request."""
        return all(message in self or STATED in message.additional_kwargs for message in unit)

    def _is_changed(self, message: BaseMessage) -> bool:
        if self._contents is None:
            self._contents = {}
            for digest in _digests_of(self._summary):
                about, content = digest[: 2 * _DIGEST_BYTES], digest[2 * _DIGEST_BYTES :]
                self._contents.setdefault(about, set()).add(content)
        contents = self._contents.get(_digest_id(str(message.id)))
        if not contents or SHORTENED in message.additional_kwargs:
            return False
        return _digest_content(message) not in contents


def _digests_of(summary: Any) -> Sequence[str]:
    return (summary.get("digests") or ()) if isinstance(summary, Mapping) else ()


def _digest_id(message_id: str) -> str:
    data = message_id.encode(errors="surrogatepass")
    return blake2b(data, digest_size=_DIGEST_BYTES).hexdigest()


def _digest_content(message: BaseMessage) -> str:
    parts: list[Any] = [message.type, message.content]
    if isinstance(message, AIMessage):
        parts.append([(call["name"], call["args"]) for call in message.tool_calls])
    data = json.dumps(parts, sort_keys=True, default=str).encode()
    return blake2b(data, digest_size=_DIGEST_BYTES).hexdigest()
