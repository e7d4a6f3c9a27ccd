"""Merge the system messages of a request and of its thread into one message.

Many model providers accept only one system message, at the beginning of the request. The merged
system message begins with the content of the request's own system message, followed by the contents
of the thread's system messages in order.
"""

from __future__ import annotations

from collections.abc import Hashable
from itertools import chain
from typing import Any, Final

from langchain_core.messages import BaseMessage, SystemMessage

from perdure.memory.conversation import Messages, has_visible_content

SUMMARY_MARK: Final = "perdure_summary"
"""Key in the additional_kwargs of a system message that contains a summary.

The key is not sent to providers.
"""
INSTRUCTIONS: Final = "instructions"
"""Key in the value of `SUMMARY_MARK` for the content of the message without the summary.

The value is None if the summary is the whole content.
"""


def find_system_messages(messages: Messages) -> list[BaseMessage]:
    """Return the system messages of a list in order, excluding empty messages and duplicates."""
    # To save time, return early if none of the message classes is a system message class, as in
    # most conversations.
    kinds = {kind for kind in set(map(type, messages)) if issubclass(kind, SystemMessage)}
    if not kinds:
        return []
    distinct: dict[Hashable, BaseMessage] = {}
    for message in messages:
        if type(message) in kinds and has_visible_content(message):
            distinct.setdefault(_build_content_comparison_key(message.content), message)
    return list(distinct.values())


def join_system_messages(messages: Messages) -> BaseMessage | None:
    """Join system messages into one message that contains the contents of all of them.

    The returned message is a copy of the first system message, but its content is the joined
    content of all system messages. If there is only one system message, it is returned unchanged.
    If `messages` is empty, None is returned. The content blocks of the system messages are not
    changed, so that the provider's cache markers in these blocks stay valid.
    """
    if len(messages) < 2:
        return messages[0] if messages else None
    content = join_message_contents([message.content for message in messages])
    kwargs = dict(messages[0].additional_kwargs)
    marked = [m for m in messages if m.additional_kwargs.get(SUMMARY_MARK) is not None]
    if marked:
        # Copy the summary mark of the last message that has one to the joined message. When a
        # summary is removed from a message, the message gets the content that is stored in its
        # summary mark. So store the contents of all messages, without their summaries, in the
        # copied mark.
        plain = [_get_content_without_summary(message) for message in messages]
        instructions = join_message_contents([content for content in plain if content is not None])
        kwargs[SUMMARY_MARK] = {
            **marked[-1].additional_kwargs[SUMMARY_MARK],
            INSTRUCTIONS: instructions,
        }
    return messages[0].model_copy(update={"content": content, "additional_kwargs": kwargs})


def join_message_contents(contents: list[Any]) -> Any:
    """Combine the contents of several messages into the content of a single message.

    If all message contents are strings, return one string, in which they are separated by blank
    lines. If the content of any message is a list of content blocks, return a list of content
    blocks. If `contents` is empty, return None.
    """
    if not contents:
        return None
    if all(isinstance(content, str) for content in contents):
        return "\n\n".join(contents)
    return list(chain.from_iterable(map(_to_blocks, contents)))


def read_system_text(message: BaseMessage) -> str:
    """Return the text of a system message, with a blank line between its blocks."""
    texts = (
        block if isinstance(block, str) else block.get("text")
        for block in _to_blocks(message.content)
    )
    return "\n\n".join(text for text in texts if isinstance(text, str) and text)


def _get_content_without_summary(message: BaseMessage) -> Any:
    """Return a system message's content without the summary.

    If `add_summary_to_system_message` has added a summary to the system message, the returned
    content does not contain this summary.

    Return None if the system message contains nothing but a summary.
    """
    mark = message.additional_kwargs.get(SUMMARY_MARK)
    return message.content if mark is None else mark[INSTRUCTIONS]


def _to_blocks(content: Any) -> list[Any]:
    """Return content as a list of blocks."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _build_content_comparison_key(content: Any) -> Hashable:
    """Return a hashable key that is equal for message contents with the same text or blocks."""
    blocks = _to_blocks(content)
    texts = [block if isinstance(block, str) else block.get("text") for block in blocks]
    is_text = all(isinstance(b, str) or b.get("type") == "text" for b in blocks)
    return "\n\n".join(str(text or "").strip() for text in texts) if is_text else repr(content)
