"""Questions of graphs that wait for a person, and the answers with which their runs go on.

langchain's `HumanInTheLoopMiddleware` asks whether a tool may be called, about one call or all
calls of a message. A question of any other form is answered with a text or with JSON.
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
"""What a person may decide on a call of a tool."""


class ToolReview(BaseModel):
    """A call of a tool that a person reviews.

    Attributes:
        name: The name of the tool.
        args: The arguments of the call.
        description: What the middleware says about the call.
        allowed: The decisions that the middleware accepts.
    """

    name: str
    args: dict[str, Any]
    description: str = ""
    allowed: list[Decision] = []


class _Rule(BaseModel):
    action_name: str
    allowed_decisions: list[Decision]


class _Batch(BaseModel):
    """The question about all calls of a message."""

    action_requests: list[ToolReview]
    review_configs: list[_Rule]


def find_reviews(question: Mapping[str, Any]) -> list[ToolReview]:
    """Return the calls that a question is about, or none if it has another form.

    `question` has the `value` of an interrupt, and its `response_schema` if it has one.
    """
    value: Any = question.get("value")
    with suppress(ValidationError):
        if not is_of_one_call(value):
            batch = _Batch.model_validate(value)
            allowed = {rule.action_name: rule.allowed_decisions for rule in batch.review_configs}
            return [
                call.model_copy(update={"allowed": allowed.get(call.name, DECISIONS)})
                for call in batch.action_requests
            ]
        given = question.get("response_schema")
        if not isinstance(given, str):
            given = json.dumps(given, separators=(",", ":"), default=str)
        named = [each for each in DECISIONS if f'"const":"{each}"' in given]
        return [ToolReview.model_validate({**value, "allowed": named or DECISIONS})]
    return []


def is_of_one_call(value: Any) -> bool:
    """Return whether a question is answered by one decision, and not by a list."""
    return isinstance(value, Mapping) and value.get("type") == "tool_approval"


def build_answer(question: Mapping[str, Any], decisions: Sequence[dict[str, Any]]) -> Any:
    """Build the answer to a question about calls from one decision for each call."""
    return decisions[0] if is_of_one_call(question["value"]) else {"decisions": [*decisions]}


def build_decision(
    call: ToolReview, number: int, kind: Any, *, args: Any = None, message: str = ""
) -> dict[str, Any]:
    """Build the decision on a call, of which `number` counts from 1.

    Args:
        call: The call.
        number: Its place in the question.
        kind: The decision.
        args: The new arguments, for `edit`.
        message: What the model is told, for `reject` and `respond`.

    Raises:
        ConfigurationError: The decision is not allowed, or the arguments are no object.
    """
    what = f"the call {number} of {call.name!r}"
    if kind not in call.allowed:
        raise ConfigurationError(
            f"the decision on {what} is {kind!r}; expected one of {', '.join(call.allowed)}"
        )
    if kind == "edit":
        if not isinstance(args, dict):
            raise ConfigurationError(f"the arguments of {what} are {args!r:.80}; expected {{…}}")
        return {"type": kind, "edited_action": {"name": call.name, "args": args}}
    has_message = kind == "respond" or (kind == "reject" and message)
    return {"type": kind, "message": message} if has_message else {"type": kind}


def parse_json(text: str, what: str) -> Any:
    """Parse JSON that a person typed.

    Raises:
        ConfigurationError: It is none; `what` names it in the error.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise ConfigurationError(f"{what} {text!r:.80} is no JSON: {exc}") from exc
