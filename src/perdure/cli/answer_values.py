"""Choose the question that an answer belongs to, and build the value that resumes the graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from perdure.cli.app import exit_with_error
from perdure.cli.output import format_as_single_line, format_count
from perdure.errors import ConfigurationError

# Maximum length, in characters, of a printed question or error message. Longer texts are shortened.
MAX_TEXT: Final = 300


_MISSING_VALUE_MESSAGES: Final = {
    "edit": (
        "'edit' needs a value; pass the new arguments as JSON, such as: "
        """edit '{"city": "Ghent"}'"""
    ),
    "respond": "'respond' needs a value; pass the text, such as: respond 'ask the user first'",
}
"""The error messages for actions that need a value, if no value was passed."""


class Answer(NamedTuple):
    """The answer to a question, as given on the command line.

    Attributes:
        action: `approve`, `edit`, `reject` or `respond`, or None if the answer is JSON.
        value: The text or the JSON that belongs to the action, if any.
        json_text: The complete answer as JSON, or None if there is an action.
        number: The number of the question, from 1, or None for the only question.
    """

    action: str | None
    value: str | None
    json_text: str | None
    number: int | None


class AnsweredQuestion(NamedTuple):
    """A question that was answered, and the state of the thread after the answer.

    Attributes:
        thread_id: The thread.
        question_id: The id of the question, or None if the question has no id.
        resume_value: The value with which the run was resumed.
        status: The status of the thread: `idle`, `waiting` or `unfinished`.
        status_description: The status in words, or "" if the run has ended.
        open_questions: The questions that are open now.
        answer_of_model: The text of the model's last message, or None.
    """

    thread_id: str
    question_id: str | None
    resume_value: Any
    status: str
    status_description: str
    open_questions: list[Any]
    answer_of_model: str | None


def choose_question_id_and_build_resume_value(
    questions: Sequence[Mapping[str, Any]],
    user_answer: Answer,
    thread_id: str,
    status_description: str,
) -> tuple[str | None, Any]:
    """Choose one pending interrupt of a thread, and convert the user's answer to a resume value.

    Args:
        questions: The open questions, each with `id`, `value` and optionally `response_schema`.
        user_answer: The answer, as the user typed it.
        thread_id: The thread, for error messages.
        status_description: The status of the thread in words, for error messages.

    Returns:
        The id of the question, and the value to resume with.

    Raises:
        typer.Exit: No question is open, the question number is missing or too high, or the
            question does not allow the answer.
    """
    if not questions:
        exit_with_error(
            f"the thread {thread_id!r} is not waiting for an answer; it "
            f"{status_description or 'is idle'}"
        )
    if user_answer.number is None and len(questions) > 1:
        numbered = (
            f"{number}. "
            + format_as_single_line(convert_to_str_or_json(question["value"]), MAX_TEXT)
            for number, question in enumerate(questions, 1)
        )
        exit_with_error(
            "the thread has several open questions; choose one with --question N:\n"
            + "\n".join(numbered)
        )
    if (number := user_answer.number or 1) > len(questions):
        exit_with_error(
            f"--question is {number}; expected at most {len(questions)}, the number of open "
            "questions"
        )
    question = questions[number - 1]
    try:
        return question["id"], _build_resume_value(question, user_answer)
    except ConfigurationError as exc:
        exit_with_error(str(exc))


def convert_to_str_or_json(value: Any) -> str:
    """Return a string unchanged, and serialise any other value to JSON."""
    import json

    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _build_resume_value(question: Mapping[str, Any], user_answer: Answer) -> Any:
    """Convert the answer typed by the user to the value that resumes the run.

    Raises:
        ConfigurationError: The question does not allow the answer, or JSON cannot be parsed.
    """
    from perdure.graphs.questions import (
        build_review_answer,
        build_review_decision,
        find_reviews,
        parse_json,
    )

    calls, (action, value, json_text, _) = find_reviews(question), user_answer
    if json_text is not None:
        answer = parse_json(json_text, "--answer")
        if not calls:
            return answer
        inputs = answer.get("decisions", [answer]) if isinstance(answer, dict) else answer
        if not isinstance(inputs, list) or not all(isinstance(item, dict) for item in inputs):
            raise ConfigurationError(
                f"--answer is {answer!r:.80}; expected a JSON object like "
                '{"decisions": [{"type": "approve"}]}'
            )
        if len(inputs) != len(calls):
            raise ConfigurationError(
                f"--answer contains {format_count(len(inputs), 'decision')}, but the interrupt "
                f"asks about {format_count(len(calls), 'tool call')}; pass one decision for each "
                "tool call"
            )
        decisions = [
            build_review_decision(
                call,
                number,
                decision.get("type"),
                args=decision.get("args", (decision.get("edited_action") or {}).get("args")),
                message=str(decision.get("message") or ""),
            )
            for number, (call, decision) in enumerate(zip(calls, inputs, strict=True), 1)
        ]
        return build_review_answer(question, decisions)
    if not calls:
        if action != "respond" or value is None:
            raise ConfigurationError(
                f"the question {convert_to_str_or_json(question['value'])!r:.80} is not about a "
                "tool call; to answer it, use 'respond TEXT' or '--answer JSON'"
            )
        return value
    if action == "approve" and value is not None:
        raise ConfigurationError(
            f"'approve' accepts no value, but the value {value!r:.80} was passed; remove the "
            "value, or use 'edit'"
        )
    if value is None and action in _MISSING_VALUE_MESSAGES:
        raise ConfigurationError(_MISSING_VALUE_MESSAGES[action])
    if action == "edit" and len(calls) > 1:
        raise ConfigurationError(
            f"'edit' works for one tool call, but this interrupt has {len(calls)} tool calls; pass "
            "a decision for each tool call with --answer"
        )
    args = parse_json(value or "", "the value of edit") if action == "edit" else None
    decisions = [
        build_review_decision(call, number, action, args=args, message=value or "")
        for number, call in enumerate(calls, 1)
    ]
    return build_review_answer(question, decisions)


def get_last_model_text(values: Any) -> str | None:
    """Return the text of the state's last message, or None if it was not written by a model."""
    messages = values.get("messages") if isinstance(values, Mapping) else None
    last = messages[-1] if isinstance(messages, list) and messages else None
    # Messages from a server are dicts, because they were parsed from JSON.
    if isinstance(last, Mapping):
        is_model, content = last.get("type") == "ai", last.get("content")
        return content if is_model and isinstance(content, str) and content else None
    return (getattr(last, "text", "") or None) if getattr(last, "type", "") == "ai" else None
