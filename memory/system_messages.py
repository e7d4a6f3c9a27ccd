"""System messages: those of the request and of the thread, joined in one.

Providers accept one system message, in front. In LangChain system messages add up, so none replaces
another: the first is the request's own, and those of the thread follow in their order.
"""

from __future__ import annotations

from collections.abc import Hashable
from itertools import chain
from typing import Any, Final

from langchain_core.messages import BaseMessage, SystemMessage

from perdure.memory.conversation import Messages, says_something

SUMMARY_MARK: Final = "perdure_summary"
"""Key in the additional_kwargs of a system message with a summary. No provider is sent it."""
INSTRUCTIONS: Final = "instructions"
"""Key in the value of `SUMMARY_MARK`: the content of the message without the summary, or None."""


def find_system_messages(messages: Messages) -> list[BaseMessage]:
    """Return the system messages that say something, in their order, equal ones once."""
    # most conversations have none, which their few classes show without a look at each message
    kinds = {kind for kind in set(map(type, messages)) if issubclass(kind, SystemMessage)}
    if not kinds:
        return []
    found: dict[Hashable, BaseMessage] = {}
    for message in messages:
        if type(message) in kinds and says_something(message):
            found.setdefault(_comparison_key(message.content), message)
    return list(found.values())


def join_system_messages(messages: Messages) -> BaseMessage | None:
    """Return one message with the content of all; the message itself if there is only one.

    It is a copy of the first. Content blocks stay as they are, so that a provider's cache marks in
    them keep their places.
    """
    if len(messages) < 2:
        return messages[0] if messages else None
    content = join_contents([message.content for message in messages])
    kwargs = dict(messages[0].additional_kwargs)
    marked = [m for m in messages if m.additional_kwargs.get(SUMMARY_MARK) is not None]
    if marked:
        plain = [_content_without_summary(message) for message in messages]
        instructions = join_contents([each for each in plain if each is not None])
        mark = marked[-1].additional_kwargs[SUMMARY_MARK]
        kwargs[SUMMARY_MARK] = {**mark, INSTRUCTIONS: instructions}
    return messages[0].model_copy(update={"content": content, "additional_kwargs": kwargs})


def join_contents(contents: list[Any]) -> Any:
    """Return the contents of messages as one: text with blank lines between, or a list of blocks.

    None stands for no content.
    """
    if not contents:
        return None
    if all(isinstance(content, str) for content in contents):
        return "\n\n".join(contents)
    return list(chain.from_iterable(map(_as_blocks, contents)))


def system_text(message: BaseMessage) -> str:
    """Return the text of a system message, with a blank line between its blocks."""
    blocks = _as_blocks(message.content)
    texts = (block if isinstance(block, str) else block.get("text") for block in blocks)
    return "\n\n".join(text for text in texts if isinstance(text, str) and text)


def _content_without_summary(message: BaseMessage) -> Any:
    """Return the content of a system message without the summary in it; None if that is all."""
    mark = message.additional_kwargs.get(SUMMARY_MARK)
    return message.content if mark is None else mark[INSTRUCTIONS]


def _as_blocks(content: Any) -> list[Any]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _comparison_key(content: Any) -> Hashable:
    """Return a value that is equal for contents that tell a model the same."""
    blocks = _as_blocks(content)
    texts = [each if isinstance(each, str) else each.get("text") for each in blocks]
    is_text = all(isinstance(b, str) or b.get("type") == "text" for b in blocks)
    return "\n\n".join(str(text or "").strip() for text in texts) if is_text else repr(content)
