"""Store a summary in a graph's state, and find the messages that it covers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Annotated, Any, Final, NotRequired, Self

from langchain_core.messages import AIMessage, BaseMessage

# Use the `TypedDict` of `typing_extensions`, because on Python 3.11, pydantic creates no JSON
# schema for `typing.TypedDict`.
from typing_extensions import TypedDict

from perdure.memory.conversation import SHORTENED, Messages, Turn, Unit
from perdure.memory.nodes import ModelInput, read_channel
from perdure.memory.options import check_instance
from perdure.memory.short_term.reducers import ChatState, append_new
from perdure.memory.tool_calls import REQUEST_ONLY
from perdure.memory.usage import read_reported_total_tokens

SUMMARY: Final = "summary"
SUMMARIZED: Final = "summarized"
"""The names of two channels of the state: the summary, and the ids of the summarised messages."""
# Maximum number of messages for which a summary stores digests. If the summary covers more
# messages, only the newest of them have digests.
_MAX_DIGESTS: Final = 256
# Length, in bytes, of each of the two hashes in a digest: the hash of the message's id and the hash
# of its content.
_DIGEST_BYTES: Final = 4
_EXPECTED: Final = "a summary that summarize() has written, or text"


class Summary(TypedDict):
    """A conversation summary, in the JSON form stored in the `summary` channel.

    Attributes:
        text: The text of the summary.
        last: The id of the last summarised message, or None if the message has no id.
        count: The number of summarised messages.
        digests: The digests of the newest summarised messages, oldest first. A digest is the hash
            of the message's id, followed by the hash of its content, in hexadecimal. Messages
            without an id and shortened messages have no digest.
        answered: The id of the newest answer that reported its token usage when the summary was
            written, or "" if that answer has no id. Up to this answer, the reported token usage
            belongs to requests without this summary. The field is missing if no answer reported its
            usage.
    """

    text: str
    last: str | None
    count: int
    digests: NotRequired[list[str]]
    answered: NotRequired[str]


def merge_summaries(current_summary: Any, new_summary: Any) -> Any:
    """Merge the current and the new summary, as the reducer of the `summary` channel.

    Usually, `new_summary` is returned and replaces `current_summary`.

    Parallel subgraphs that share the `summary` channel can return two summaries in the same
    superstep. If the newest message summarised in `current_summary` is also summarised in
    `new_summary`, return `new_summary`. Otherwise, if `current_summary` covers the newest message
    that `new_summary` covers, return `current_summary`. If the newest message that each summary
    covers is not covered by the other summary, join the texts of `current_summary` and
    `new_summary`, and return the joined summary. If a summary has no digests of its messages,
    `new_summary` is returned, because no comparison is possible.
    """
    ours, theirs = _get_digests(current_summary), _get_digests(new_summary)
    if not ours or not theirs or ours[-1] in theirs:
        return new_summary
    if theirs[-1] in ours:
        return current_summary
    our_digests = set(ours)
    added = [digest for digest in theirs if digest not in our_digests]
    summary = Summary(
        text=f"{current_summary['text']}\n\n{new_summary['text']}",
        last=new_summary["last"],
        count=current_summary["count"] + len(added),
        digests=[*ours, *added][-_MAX_DIGESTS:],
    )
    if new_summary.get("answered") is not None:
        summary["answered"] = new_summary["answered"]
    return summary


class SummaryState(ChatState, total=False):
    """Chat state with a running summary and the ids of the messages that the summary covers."""

    summary: Annotated[Summary | None, merge_summaries]
    summarized: Annotated[list[str], append_new]


def read_summary(value: Any) -> Summary | None:
    """Parse the value of the `summary` channel. Return None if the value is empty.

    If the value is a string, return a summary that has this text and covers no messages.
    """
    if not value:
        return None
    if isinstance(value, str):
        return Summary(text=value, last=None, count=0)
    stored = check_instance("the channel of the summary", value, Mapping, _EXPECTED)
    check_instance("the channel of the summary", stored.get("text"), str, _EXPECTED)
    summary = Summary(text=stored["text"], last=stored.get("last"), count=stored.get("count", 0))
    if stored.get("digests"):
        summary["digests"] = stored["digests"]
    if stored.get("answered") is not None:
        summary["answered"] = stored["answered"]
    return summary


def extend_summary(
    previous: Summary | None,
    summary_text: str,
    messages: Messages,
    summarized_ids: Iterable[str] = (),
    all_messages: Messages = (),
) -> Summary:
    """Build a new summary that covers `messages` in addition to the messages already covered.

    A message that is summarised again after an edit is counted only once in the summary's `count`.

    Args:
        previous: The previous summary, or None.
        summary_text: The text of the new summary.
        messages: The messages that the new summary covers and the previous one did not.
        summarized_ids: The ids of the messages that the previous summary covers.
        all_messages: All present messages. The token usage that they report belongs to requests
            without the new summary. The summary therefore stores, in `answered`, the id of the
            newest of these messages that reports its usage.
    """
    again = {message.id for message in messages}.intersection(summarized_ids) if previous else ()
    summary = Summary(
        text=summary_text,
        last=messages[-1].id,
        count=len(messages) - len(again) + (previous["count"] if previous else 0),
    )
    digests = dict.fromkeys(_get_digests(previous))
    for message in messages:
        if message.id is not None and SHORTENED not in message.additional_kwargs:
            digests[_hash_id(message.id) + _hash_content(message)] = None
    summary["digests"] = [*digests][-_MAX_DIGESTS:]
    answer = next(filter(read_reported_total_tokens, reversed(all_messages)), None)
    if answer is not None:
        summary["answered"] = answer.id or ""
    return summary


class SummarizedMessages:
    """The set of messages that a summary already covers.

    The set supports membership tests such as `message in summarized`. A message that was edited
    after it was summarised does not count as summarised.

    This class is used to recognise summarised messages that are still in a graph's state. A graph
    removes the messages that it has summarised from its own state, but the messages may still be in
    the state of a parent graph or of a subgraph. A client that resends the whole conversation on
    every turn also adds summarised messages back.
    """

    def __init__(self, summary: Summary | None, ids: Iterable[str] | None) -> None:
        self._ids = frozenset(ids or ()) if summary and summary["text"] else frozenset()
        self._summary = summary
        # Maps the hash of each message id to the hashes of the message's contents. A message that
        # was summarised again after an edit has several content hashes. The mapping is built when
        # it is first used, and is None before.
        self._content_digests: dict[str, set[str]] | None = None

    @classmethod
    def from_state(cls, state: Any) -> Self:
        """Read a graph's state, and create the set of messages that the state's summary covers."""
        return cls(read_summary(read_channel(state, SUMMARY)), read_channel(state, SUMMARIZED))

    def __bool__(self) -> bool:
        return bool(self._ids)

    def __contains__(self, message: object) -> bool:
        return (
            isinstance(message, BaseMessage)
            and message.id in self._ids
            and not self._is_changed_since_summary(message)
        )

    def remove_from(self, model_input: ModelInput) -> ModelInput:
        """Return `model_input` without the messages that have already been summarised.

        The question that began a turn is removed only if all messages of the turn have been
        summarised. A tool call and its result are kept or removed together.
        """
        return (
            replace(model_input, turns=self._iter_remaining_turns(model_input.turns))
            if self._ids
            else model_input
        )

    def _iter_remaining_turns(self, turns: Iterator[Turn]) -> Iterator[Turn]:
        """Yield each turn without the messages that have already been summarised.

        A unit (a group of messages that must be kept or removed together) is removed from its turn
        if all of its messages have been summarised.

        A turn's first unit, which contains the question, is kept if any other unit of the turn is
        kept.
        """
        for turn in turns:
            question, *rest = turn.units
            units = [unit for unit in rest if not self._are_all_messages_summarized(unit)]
            if units or not self._are_all_messages_summarized(question):
                yield turn._replace(units=[question, *units])

    def _are_all_messages_summarized(self, unit: Unit) -> bool:
        """Return whether all messages of a unit, such as a tool call and result, are summarised.

        Temporary messages that perdure adds to a single request are ignored.
        """
        return all(message in self or REQUEST_ONLY in message.additional_kwargs for message in unit)

    def _is_changed_since_summary(self, message: BaseMessage) -> bool:
        """Return whether the content of a message has changed since it was summarised.

        If the summary contains no digest of the message, the message counts as unchanged. Return
        False for a message that perdure has shortened.
        """
        if self._content_digests is None:
            self._content_digests = {}
            for digest in _get_digests(self._summary):
                id_digest, content_digest = digest[: 2 * _DIGEST_BYTES], digest[2 * _DIGEST_BYTES :]
                self._content_digests.setdefault(id_digest, set()).add(content_digest)
        content_digests = self._content_digests.get(_hash_id(str(message.id)))
        if not content_digests or SHORTENED in message.additional_kwargs:
            return False
        return _hash_content(message) not in content_digests


def _get_digests(summary: Any) -> Sequence[str]:
    return (summary.get("digests") or ()) if isinstance(summary, Mapping) else ()


def _hash_id(message_id: str) -> str:
    """Return a short hash of a message id."""
    return blake2b(message_id.encode(errors="surrogatepass"), digest_size=_DIGEST_BYTES).hexdigest()


def _hash_content(message: BaseMessage) -> str:
    """Return a short hash of a message's type, content and tool calls."""
    parts: list[Any] = [message.type, message.content]
    if isinstance(message, AIMessage):
        parts.append([(call["name"], call["args"]) for call in message.tool_calls])
    return blake2b(
        json.dumps(parts, sort_keys=True, default=str).encode(), digest_size=_DIGEST_BYTES
    ).hexdigest()
