"""Send a person's answer to a running server, which resumes the interrupted thread."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from perdure.cli.answer_values import (
    MAX_TEXT,
    Answer,
    AnsweredQuestion,
    choose_question_id_and_build_resume_value,
    convert_to_str_or_json,
    get_last_model_text,
)
from perdure.cli.app import exit_with_error
from perdure.cli.output import format_as_single_line, show_status
from perdure.errors import ConfigurationError

if TYPE_CHECKING:
    from langgraph_sdk.client import SyncLangGraphClient


# Timeout, in seconds, for connecting to a server and for sending a request.
CONNECT_TIMEOUT_S: Final = 5


_KEY_VARIABLE: Final = "PERDURE_API_KEY"


def answer_question_on_server(
    url: str, thread_id: str, user_answer: Answer, graph: str | None
) -> AnsweredQuestion:
    """Send the user's answer to a server, which resumes the thread's run.

    The server acquires the thread's lock.
    """
    if not thread_id:
        exit_with_error(f"the thread id is empty; pass the full id of a thread on the server {url}")
    with _connect_to_server(url, thread_id) as client:
        thread = client.threads.get(thread_id)
        questions = [
            question for interrupts in thread["interrupts"].values() for question in interrupts
        ]
        descriptions = {"busy": "has an active run", "error": "has a failed run"}
        description = descriptions.get(thread["status"], "")
        question_id, resume_value = choose_question_id_and_build_resume_value(
            [] if description else questions, user_answer, thread_id, description
        )
        metadata: Mapping[str, Any] = thread["metadata"] or {}
        assistant = graph or metadata.get("assistant_id") or metadata.get("graph_id")
        if not assistant:
            raise ConfigurationError(
                f"the graph of the thread {thread_id!r} is unknown; pass its name with --graph"
            )
        command: Any = {"resume": {question_id: resume_value}}
        with show_status(f"waiting for {url} …"):
            values = client.runs.wait(
                thread_id,
                str(assistant),
                command=command,
                multitask_strategy="reject",
                raise_error=False,
            )
        if isinstance(values, Mapping) and isinstance(values.get("__error__"), Mapping):
            reason = format_as_single_line(convert_to_str_or_json(values["__error__"]), MAX_TEXT)
            exit_with_error(
                f"the answer was stored in the thread {thread_id!r}, but the run failed: {reason}"
            )
        new_thread = client.threads.get(thread_id)
    open_questions = [
        question for interrupts in new_thread["interrupts"].values() for question in interrupts
    ]
    if _is_question_unanswered(question_id, open_questions, values):
        exit_with_error(
            f"the thread {thread_id!r} is still waiting for an answer to the same question, "
            f"because the graph {assistant!r} did not use the answer; pass the graph that asked "
            "the question with --graph"
        )
    status_without_questions = "idle" if new_thread["status"] == "idle" else "unfinished"
    status = "waiting" if open_questions else status_without_questions
    texts = "; ".join(
        format_as_single_line(convert_to_str_or_json(question["value"]), MAX_TEXT)
        for question in open_questions
    )
    descriptions = {"waiting": f"is waiting for an answer ({texts})", "idle": ""}
    description = descriptions.get(status, "has an unfinished run")
    return AnsweredQuestion(
        thread_id,
        question_id,
        resume_value,
        status,
        description,
        [question["value"] for question in open_questions],
        get_last_model_text(values),
    )


def _is_question_unanswered(
    question_id: str | None, open_questions: Sequence[Mapping[str, Any]], output: Any
) -> bool:
    """Return whether an interrupt is still pending after a run that was resumed with an answer.

    A graph ignores an answer to an interrupt that a different graph raised. The interrupt then
    stays pending. A graph can use the answer and then raise a new interrupt with the same id. In
    this case, the run's output contains the new interrupt, and the earlier interrupt counts as
    answered.

    Args:
        question_id: The id of the question.
        open_questions: The questions of the thread that are open after the run.
        output: The output of the run.
    """
    asked_by_run = output.get("__interrupt__", ()) if isinstance(output, Mapping) else ()
    open_ids = {question["id"] for question in open_questions}
    return question_id in open_ids - {question["id"] for question in asked_by_run}


@contextmanager
def _connect_to_server(url: str, thread_id: str) -> Iterator[SyncLangGraphClient]:
    """Connect to a server, and convert its HTTP errors to errors with one-line messages.

    Raises:
        ConfigurationError: The server cannot be reached, refuses the key, or replies with an error
            that does not concern the thread or the answer.
        typer.Exit: The server has no such thread, or refuses the answer.
    """
    import httpx
    from langgraph_sdk import get_sync_client

    key = os.environ.get(_KEY_VARIABLE, "")
    # Validate the API key before it is passed to the HTTP client. For an invalid key, the HTTP
    # client would raise an error whose message contains the secret key.
    if not (key.isascii() and key.isprintable() and key == key.strip()):
        raise ConfigurationError(
            f"the API key in {_KEY_VARIABLE} cannot be sent in an HTTP header; expected printable "
            "ASCII characters without spaces at the beginning and the end; set the variable to the "
            "key that 'perdure serve --new-key' printed"
        )
    try:
        # `timeouts` contains the connect, read, write and pool timeouts of httpx. The read timeout
        # is None, which means no limit, because the server replies only when the run has ended, and
        # a run can take arbitrarily long.
        timeouts = (CONNECT_TIMEOUT_S, None, CONNECT_TIMEOUT_S, CONNECT_TIMEOUT_S)
        with get_sync_client(url=url, api_key=key or None, timeout=timeouts) as client:
            yield client
    except httpx.HTTPStatusError as exc:
        code = exc.response.status_code
        if code == 404:
            exit_with_error(
                f"the server {url} has no thread {thread_id!r}, or the thread belongs to another "
                f"user; check the id and {_KEY_VARIABLE}"
            )
        reason = format_as_single_line(_read_error_detail(exc), MAX_TEXT)
        if code in (409, 422):
            exit_with_error(f"the server {url} refused the answer: {reason}")
        hint = f"; set {_KEY_VARIABLE} to a valid key" if code in (401, 403) else ""
        raise ConfigurationError(
            f"the server {url} replied with status {code}: {reason}{hint}"
        ) from exc
    except (httpx.TransportError, httpx.InvalidURL) as exc:
        raise ConfigurationError(
            f"the server {url} cannot be reached: {exc}; check --url, and check that the server is "
            "running"
        ) from exc


def _read_error_detail(exc: Any) -> str:
    """Return the `detail` of a server's error response, or the text of the exception."""
    try:
        detail = exc.response.json()["detail"]
    except (ValueError, LookupError, TypeError):
        detail = str(exc)
    return convert_to_str_or_json(detail)
