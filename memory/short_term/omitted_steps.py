"""Tell the model how many steps of the latest turn were omitted from a request."""

from __future__ import annotations

from typing import Any, Final

from langchain_core.messages import BaseMessage, HumanMessage

from perdure.memory.nodes import append_text_to_content
from perdure.memory.tool_calls import REQUEST_ONLY

# Key in `additional_kwargs` for the number of omitted steps, which the message's last line also
# states.
_COUNT: Final = "perdure_left_out"


def add_omitted_steps_line(question: BaseMessage | None, step_count: int) -> BaseMessage:
    """Return a copy of a question with a line that tells the model how many steps were omitted.

    A step is a message that follows the question in the same turn, or a group of such messages that
    belong together. If the question already ends with a count of omitted steps, `step_count` is
    added to the count. If `question` is None, the returned message contains only the line about
    omitted steps. The line is added after the question's existing content, which is not changed, so
    that the provider's prompt cache stays valid.
    """
    if question is None:
        question = HumanMessage("", additional_kwargs={REQUEST_ONLY: True})
    earlier_count = question.additional_kwargs.get(_COUNT, 0)
    content: Any = (
        _remove_omitted_steps_line(question.content, earlier_count)
        if earlier_count
        else question.content
    )
    total = earlier_count + step_count
    line = _render_omitted_steps_line(total)
    return question.model_copy(
        update={
            "content": append_text_to_content(content, line),
            "additional_kwargs": {**question.additional_kwargs, _COUNT: total},
        }
    )


def _render_omitted_steps_line(step_count: int) -> str:
    """Return the line that tells the model that `step_count` steps of its work were omitted."""
    steps, they = ("step", "It was") if step_count == 1 else ("steps", "They were")
    return (
        f"[{step_count} earlier {steps} of your work on this message left out to save room. "
        f"{they} carried out.]"
    )


def _remove_omitted_steps_line(content: Any, step_count: int) -> Any:
    """Return a question's content without the final line that reports omitted steps."""
    line = _render_omitted_steps_line(step_count)
    if isinstance(content, list):
        is_last = bool(content) and content[-1] == {"type": "text", "text": line}
        return content[:-1] if is_last else content
    return content.removesuffix(line).removesuffix("\n\n")
