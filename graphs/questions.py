"""Interpret interrupts that ask a person a question, and build the answers that resume the runs.

LangChain's `HumanInTheLoopMiddleware` interrupts a run to have tool calls approved. The option
`interrupt_on` of the human-in-the-loop middleware selects the tools whose calls need a person's
approval. Calls of all other tools run without approval. The option `interrupt_mode` of the
human-in-the-loop middleware decides whether each tool call that needs approval gets its own
interrupt, or whether one interrupt covers all such tool calls in a message. Interrupts that the
middleware did not raise are answered with text or JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, Literal, get_args

from pydantic import BaseModel, ValidationError

from perdure.errors import ConfigurationError

Decision = Literal["approve", "edit", "reject", "respond"]
DECISIONS: Final[tuple[Decision, ...]] = get_args(Decision)
"""The decisions that a person can make about a tool call."""


class ToolReview(BaseModel):
    """A tool call that a person reviews.

    Attributes:
        name: The name of the tool.
        args: The arguments of the call.
        description: The middleware's description of the call.
        allowed: The decisions that the middleware accepts.
    """

    name: str
    args: dict[str, Any]
    description: str = ""
    allowed: list[Decision] = []


class _AllowedDecisions(BaseModel):
    action_name: str
    allowed_decisions: list[Decision]


class _BatchReview(BaseModel):
    """Asks a person to review an AI message's tool calls.

    One interrupt contains all tool calls of the AI message that need approval.
    """

    action_requests: list[ToolReview]
    review_configs: list[_AllowedDecisions]


def find_reviews(question: Mapping[str, Any]) -> list[ToolReview]:
    """Return the tool calls that an interrupt asks a person to review, or [] if there are none.

    Args:
        question: A dict with the `value` of an interrupt, and its `response_schema`, if any.
    """
    value: Any = question.get("value")
    with suppress(ValidationError):
        if not is_single_review(value):
            batch = _BatchReview.model_validate(value)
            allowed = {rule.action_name: rule.allowed_decisions for rule in batch.review_configs}
            return [
                call.model_copy(update={"allowed": allowed.get(call.name, DECISIONS)})
                for call in batch.action_requests
            ]
        response_schema = question.get("response_schema")
        if not isinstance(response_schema, str):
            response_schema = json.dumps(response_schema, separators=(",", ":"), default=str)
        # The JSON schema of a response contains each allowed decision as a `const` value.
        allowed_decisions = [
            decision for decision in DECISIONS if f'"const":"{decision}"' in response_schema
        ]
        return [ToolReview.model_validate({**value, "allowed": allowed_decisions or DECISIONS})]
    return []


def is_single_review(value: Any) -> bool:
    """Return whether an interrupt asks about a single tool call and so needs one decision."""
    return isinstance(value, Mapping) and value.get("type") == "tool_approval"


def build_review_answer(question: Mapping[str, Any], decisions: Sequence[dict[str, Any]]) -> Any:
    """Build the answer to an interrupt about tool calls.

    `decisions` contains one decision for each call, in the order of the calls.
    """
    return decisions[0] if is_single_review(question["value"]) else {"decisions": [*decisions]}


def build_review_decision(
    call: ToolReview, call_number: int, kind: Any, *, args: Any = None, message: str = ""
) -> dict[str, Any]:
    """Build the decision for a call.

    Args:
        call: The call.
        call_number: The number of the call in the question, counted from 1.
        kind: The decision.
        args: The new arguments, for `edit`.
        message: The message to the model, for `reject` and `respond`.

    Raises:
        ConfigurationError: The decision is not allowed, or the arguments are not an object.
    """
    call_name = f"tool call {call_number} ({call.name!r})"
    if kind not in call.allowed:
        raise ConfigurationError(
            f"the decision for {call_name} is {kind!r}; expected one of {', '.join(call.allowed)}"
        )
    if kind == "edit":
        if not isinstance(args, dict):
            raise ConfigurationError(
                f"the arguments of {call_name} are {args!r:.80}; expected a JSON object"
            )
        return {"type": kind, "edited_action": {"name": call.name, "args": args}}
    has_message = kind == "respond" or (kind == "reject" and message)
    return {"type": kind, "message": message} if has_message else {"type": kind}


def parse_json(text: str, description: str) -> Any:
    """Parse JSON that a person typed.

    Args:
        text: The text.
        description: The name of the text in the error message.

    Raises:
        ConfigurationError: The text is not valid JSON.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise ConfigurationError(f"{description} {text!r:.80} is not valid JSON: {exc}") from exc
