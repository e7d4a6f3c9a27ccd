"""Implement `perdure answer`, which answers a graph's interrupt and resumes the run.

An open question is an interrupt that has not been answered. The run continues in this process, or
on the server given by `--url`.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple, NoReturn

import typer

from perdure.cli.app import (
    CommandDatabase,
    DbOption,
    JsonOption,
    app,
    complete_thread_id,
    find_thread_head,
    open_database,
)
from perdure.cli.history import describe_status
from perdure.cli.output import (
    format_as_single_line,
    format_count,
    print_json_or_sentence,
    print_note,
    show_status,
)
from perdure.errors import (
    ConfigurationError,
    MissingDependency,
    PerdureError,
    StorageUnavailable,
)

if TYPE_CHECKING:
    from langgraph_sdk.client import SyncLangGraphClient

    from perdure.checkpointers import ThreadHead
    from perdure.checkpointers.checkpointer import Checkpointer

# Maximum time, in seconds, to wait for another run of the thread to end.
_LOCK_TIMEOUT_S: Final = 30
# Timeout, in seconds, for connecting to a server and for sending a request.
_CONNECT_TIMEOUT_S: Final = 5
# Maximum length, in characters, of a printed question or error message. Longer texts are shortened.
_MAX_TEXT: Final = 300
_INHERITED_METADATA: Final = (
    *("title", "titled", "create_time", "owner", "graph_id", "assistant_id"),
)
"""Metadata of the head that the checkpoints of the resumed run inherit."""
_KEY_VARIABLE: Final = "PERDURE_API_KEY"
_MISSING_VALUE_MESSAGES: Final = {
    "edit": (
        "'edit' needs a value; pass the new arguments as JSON, such as: "
        """edit '{"city": "Ghent"}'"""
    ),
    "respond": "'respond' needs a value; pass the text, such as: respond 'ask the user first'",
}
"""The error messages for actions that need a value, if no value was passed."""


class _Answer(NamedTuple):
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


class _Outcome(NamedTuple):
    """The state of a thread after an answer.

    Attributes:
        status: `idle`, `waiting` or `unfinished`.
        description: The status in words, or "" if the run has ended.
        waits_for_answers_to: The questions that are open now.
        said: The text of the model's last message, or None.
    """

    status: str
    description: str
    waits_for_answers_to: list[Any]
    said: str | None


class _AnsweredQuestion(NamedTuple):
    """A question that was answered.

    Attributes:
        thread_id: The thread.
        question_id: The id of the question, or None if the question has no id.
        resume_value: The value with which the run was resumed.
        outcome: The state of the thread after the answer.
    """

    thread_id: str
    question_id: str | None
    resume_value: Any
    outcome: _Outcome


@app.command()
def answer(
    thread: Annotated[
        str,
        typer.Argument(
            metavar="ID",
            help="The thread id or an id prefix.",
            autocompletion=complete_thread_id,
        ),
    ],
    action: Annotated[
        str | None,
        typer.Argument(metavar="[ACTION]", help="The decision: approve, edit, reject or respond."),
    ] = None,
    value: Annotated[
        str | None,
        typer.Argument(
            metavar="[VALUE]",
            help="JSON arguments for edit, or a message for reject or respond.",
        ),
    ] = None,
    json_text: Annotated[
        str | None,
        typer.Option(
            "--answer", metavar="JSON", help="The complete resume value as JSON, instead of ACTION."
        ),
    ] = None,
    question: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Which pending interrupt to answer, counting from 1."
        ),
    ] = None,
    graphs: Annotated[
        str | None,
        typer.Option("--graphs", metavar="FILE", help="The langgraph.json that names the graph."),
    ] = None,
    graph: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Resume with this graph instead of the last run's graph."
        ),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(metavar="URL", help="The server that resumes the run; uses PERDURE_API_KEY."),
    ] = None,
    db: DbOption = None,
    json: JsonOption = False,
) -> None:
    """Answer an interrupt of a graph, and resume its run.

    The question is the value that the graph passed to `interrupt()`. The resumed run uses the
    memories of the person to whom the thread belongs, even if somebody else answers. The command
    writes nothing and exits with code 1 if the thread does not exist or is not waiting for an
    answer, if the question does not permit the given action, or if the JSON is invalid.
    """
    user_answer = _Answer(action, value, json_text, question)
    if (action is None) == (json_text is None):
        raise ConfigurationError(
            "pass one of approve, edit, reject and respond, or the complete answer with --answer"
        )
    if url is not None and (graphs, db) != (None, None):
        raise ConfigurationError(
            "--url cannot be combined with --graphs or --db, because the server has its own graphs "
            "and database; remove --graphs and --db"
        )
    if url is not None:
        thread_id, question_id, resume_value, outcome = _answer_question_on_server(
            url, thread, user_answer, graph
        )
    else:
        thread_id, question_id, resume_value, outcome = _answer_question_in_database(
            db, graphs, thread, user_answer, graph
        )
    result = {
        **{"thread_id": thread_id, "question": question_id, "answer": resume_value},
        **outcome._asdict(),
    }
    del result["description"]
    description = (
        f"the thread {outcome.description}" if outcome.description else "the run has ended"
    )
    texts = [] if outcome.said is None else [outcome.said]
    print_json_or_sentence(
        result,
        json,
        "\n".join([f"answered the question of the thread {thread_id!r}; {description}", *texts]),
    )


# -- the answer


def _refuse_answer(text: str) -> NoReturn:
    """Print an error, and exit with code 1."""
    print_note(f"perdure: {text}")
    raise typer.Exit(1)


def _choose_question_id_and_build_resume_value(
    questions: Sequence[Mapping[str, Any]],
    user_answer: _Answer,
    thread_id: str,
    status_description: str,
) -> tuple[str | None, Any]:
    """Choose one of a thread's open questions, and build the value that resumes the run.

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
        _refuse_answer(
            f"the thread {thread_id!r} is not waiting for an answer; it "
            f"{status_description or 'is idle'}"
        )
    if user_answer.number is None and len(questions) > 1:
        numbered = (
            f"{number}. "
            + format_as_single_line(_convert_to_str_or_json(question["value"]), _MAX_TEXT)
            for number, question in enumerate(questions, 1)
        )
        _refuse_answer(
            "the thread has several open questions; choose one with --question N:\n"
            + "\n".join(numbered)
        )
    if (number := user_answer.number or 1) > len(questions):
        _refuse_answer(
            f"--question is {number}; expected at most {len(questions)}, the number of open "
            "questions"
        )
    question = questions[number - 1]
    try:
        return question["id"], _build_resume_value(question, user_answer)
    except ConfigurationError as exc:
        _refuse_answer(str(exc))


def _convert_to_str_or_json(value: Any) -> str:
    """Return a string unchanged, and serialise any other value to JSON."""
    import json

    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _build_resume_value(question: Mapping[str, Any], user_answer: _Answer) -> Any:
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
                f"the question {_convert_to_str_or_json(question['value'])!r:.80} is not about a "
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
            f"'edit' applies to one tool call, but the question is about {len(calls)} tool calls; "
            "pass a decision for each tool call with --answer"
        )
    args = parse_json(value or "", "the value of edit") if action == "edit" else None
    decisions = [
        build_review_decision(call, number, action, args=args, message=value or "")
        for number, call in enumerate(calls, 1)
    ]
    return build_review_answer(question, decisions)


# -- in this process


def _answer_question_in_database(
    db: str | None, graphs: str | None, id_or_prefix: str, user_answer: _Answer, graph: str | None
) -> _AnsweredQuestion:
    """Answer the question of an interrupted run, and resume the run in this process."""
    with open_database(db, graphs=graphs) as database:
        if database.settings.graphs is None:
            raise ConfigurationError(
                "no graphs are configured; pass --graphs FILE with the langgraph.json that names "
                "the graph, or --url with the URL of the server that runs the graph"
            )
        try:
            thread_id = find_thread_head(database, id_or_prefix).thread_id
        except ConfigurationError as exc:
            _refuse_answer(str(exc))
        with show_status(f"running the graph of {thread_id!r} …"):
            return asyncio.run(_resume_run(database, thread_id, user_answer, graph))


async def _resume_run(
    database: CommandDatabase, thread_id: str, user_answer: _Answer, graph_name: str | None
) -> _AnsweredQuestion:
    """Resume a thread's interrupted run with the user's answer to one of its questions."""
    try:
        from perdure.server.graphs import Graphs
    except ImportError as exc:
        raise MissingDependency(
            '--graphs needs additional packages; run pip install ".[server]" in a checkout of '
            "perdure"
        ) from exc
    from langgraph.types import Command

    from perdure.memory import record_views

    assert database.settings.graphs is not None
    served = Graphs.load_langgraph_json(database.settings.graphs)
    saver = database.open_saver(served.saver_options) if served.saver_options else database.saver
    async with _ThreadLock(saver, thread_id):
        head = await saver.ahead(thread_id)
        if head is None:
            _refuse_answer(f"there is no thread {thread_id!r}; run 'perdure threads' for a list")
        questions = [
            {"id": getattr(interrupt, "id", None), "value": getattr(interrupt, "value", interrupt)}
            | {"response_schema": getattr(interrupt, "response_schema", None)}
            for interrupt in head.status.interrupts
        ]
        question_id, resume_value = _choose_question_id_and_build_resume_value(
            questions, user_answer, thread_id, describe_status(head.status)
        )
        name = _choose_graph_name(head, [*served], graph_name)
        person = await asyncio.to_thread(_find_user_id_or_owner_of_thread, saver, head)
        config: Any = {
            **_build_config_of_resumed_run(head, person),
            "callbacks": [record_views(saver)],
        }
        parts: Any = (name, saver, database.store, config)
        async with served.open_graph(*parts, access="threads.create_run") as graph:
            unknown = {task.node for task in head.status.tasks} - {*graph.nodes, ""}
            if unknown:
                _refuse_answer(
                    f"the thread {thread_id!r} is waiting at the node {min(unknown)!r}, which the "
                    f"graph {name!r} does not have; pass the thread's graph with --graph"
                )
            command: Any = Command(
                resume=resume_value if question_id is None else {question_id: resume_value}
            )
            options: dict[str, Any] = {
                "context": _build_context_with_user_id(graph, person),
                "durability": "sync",
            }
            try:
                values: Any = await graph.ainvoke(command, config, **options)
            except PerdureError:
                raise
            except Exception as exc:
                reason = format_as_single_line(f"{type(exc).__name__}: {exc}", _MAX_TEXT)
                _refuse_answer(
                    f"the answer was stored in the thread {thread_id!r}, but the run failed: "
                    f"{reason}"
                )
        new_head = await saver.ahead(thread_id)
    status = new_head.status if new_head is not None else head.status
    outcome = _Outcome(
        status.state,
        describe_status(status),
        [question for _, question in status.questions],
        _get_last_model_text(values),
    )
    return _AnsweredQuestion(thread_id, question_id, resume_value, outcome)


class _ThreadLock:
    """Holds the lock of a thread during an `async with` block.

    If another run holds the lock for more than `_LOCK_TIMEOUT_S` seconds, `StorageUnavailable` is
    raised with a message that says so.
    """

    def __init__(self, saver: Any, thread_id: str) -> None:
        self._thread_id, self._lock = thread_id, saver.lock(thread_id, timeout_s=_LOCK_TIMEOUT_S)

    async def __aenter__(self) -> None:
        try:
            await self._lock.__aenter__()
        except StorageUnavailable as exc:
            if not isinstance(exc.__cause__, TimeoutError):
                raise
            raise StorageUnavailable(
                f"another run of the thread {self._thread_id!r} did not end within "
                f"{_LOCK_TIMEOUT_S} s; wait until that run ends, and try again"
            ) from exc

    async def __aexit__(self, *exc: Any) -> None:
        await self._lock.__aexit__(*exc)


def _choose_graph_name(
    head: ThreadHead, graph_names: Sequence[str], requested_name: str | None
) -> str:
    """Return the name of the graph to run.

    Args:
        head: The head of the thread.
        graph_names: The graphs of the langgraph.json.
        requested_name: The graph that the user named. None means the graph of the thread's last run
            or, if `graph_names` does not contain it, the only graph of the langgraph.json.

    Raises:
        ConfigurationError: The user named no graph, the graph of the last run is unknown, and the
            langgraph.json does not name exactly one graph.
    """
    last = head.metadata.get("graph_id")
    name = requested_name or (
        last if last in graph_names else graph_names[0] if len(graph_names) == 1 else None
    )
    if name is None:
        raise ConfigurationError(
            f"the graph of the thread {head.thread_id!r} is unknown; pass --graph with one of "
            f"{', '.join(graph_names)}"
        )
    return name


def _build_config_of_resumed_run(head: ThreadHead, user_id: Any) -> dict[str, Any]:
    """Build the config for a run that continues a thread and uses the given person's memories."""
    user = {} if user_id is None else {"user_id": user_id}
    metadata = {key: value for key, value in head.metadata.items() if key in _INHERITED_METADATA}
    return {"configurable": {"thread_id": head.thread_id, **user}, "metadata": metadata}


def _find_user_id_or_owner_of_thread(saver: Checkpointer, head: ThreadHead) -> Any:
    """Return the id of the person to whom a thread belongs, or None.

    The person is identified by `user_id` in the metadata of the thread's head, or by `owner` if
    there is no `user_id`. A `user_id` of "" means that memory is disabled for the thread. The
    `owner` is ignored if it might name an organisation rather than a person; see
    `may_owners_be_organisations`.
    """
    from perdure.checkpointers.owner_record import may_owners_be_organisations

    person = head.metadata.get("user_id")
    if person is not None or may_owners_be_organisations(saver.database):
        return person
    return head.metadata.get("owner")


def _build_context_with_user_id(graph: Any, user_id: Any) -> dict[str, Any] | None:
    """Build the runtime context of a resumed run, with `user_id` set to the given id.

    Return None if `user_id` is None or the graph's context schema has no field `user_id`.
    """
    schema = getattr(graph, "context_schema", None)
    fields = {**getattr(schema, "__annotations__", {}), **getattr(schema, "model_fields", {})}
    return {"user_id": user_id} if user_id is not None and "user_id" in fields else None


def _get_last_model_text(values: Any) -> str | None:
    """Return the text of the last message in the state, or None if no model wrote this message."""
    messages = values.get("messages") if isinstance(values, Mapping) else None
    last = messages[-1] if isinstance(messages, list) and messages else None
    # Messages from a server are dicts, because they were parsed from JSON.
    if isinstance(last, Mapping):
        is_model, content = last.get("type") == "ai", last.get("content")
        return content if is_model and isinstance(content, str) and content else None
    return (getattr(last, "text", "") or None) if getattr(last, "type", "") == "ai" else None


# -- on a server


def _answer_question_on_server(
    url: str, thread_id: str, user_answer: _Answer, graph: str | None
) -> _AnsweredQuestion:
    """Send the answer to a server, which resumes the run. The server takes the thread's lock."""
    with _connect_to_server(url, thread_id) as client:
        thread = client.threads.get(thread_id)
        questions = [
            question for interrupts in thread["interrupts"].values() for question in interrupts
        ]
        descriptions = {"busy": "has an active run", "error": "has a failed run"}
        description = descriptions.get(thread["status"], "")
        question_id, resume_value = _choose_question_id_and_build_resume_value(
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
            reason = format_as_single_line(_convert_to_str_or_json(values["__error__"]), _MAX_TEXT)
            _refuse_answer(
                f"the answer was stored in the thread {thread_id!r}, but the run failed: {reason}"
            )
        new_thread = client.threads.get(thread_id)
    open_questions = [
        question.get("value")
        for interrupts in new_thread["interrupts"].values()
        for question in interrupts
    ]
    status_without_questions = "idle" if new_thread["status"] == "idle" else "unfinished"
    status = "waiting" if open_questions else status_without_questions
    texts = "; ".join(
        format_as_single_line(_convert_to_str_or_json(question), _MAX_TEXT)
        for question in open_questions
    )
    descriptions = {"waiting": f"is waiting for an answer ({texts})", "idle": ""}
    description = descriptions.get(status, "has an unfinished run")
    outcome = _Outcome(status, description, open_questions, _get_last_model_text(values))
    return _AnsweredQuestion(thread_id, question_id, resume_value, outcome)


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

    try:
        # `timeouts` contains the connect, read, write and pool timeouts of httpx. There is no read
        # timeout, because the server replies only when the run has ended, which can take
        # arbitrarily long.
        timeouts = (_CONNECT_TIMEOUT_S, None, _CONNECT_TIMEOUT_S, _CONNECT_TIMEOUT_S)
        with get_sync_client(
            url=url, api_key=os.environ.get(_KEY_VARIABLE), timeout=timeouts
        ) as client:
            yield client
    except httpx.HTTPStatusError as exc:
        code = exc.response.status_code
        if code == 404:
            _refuse_answer(
                f"the server {url} has no thread {thread_id!r}, or the thread belongs to another "
                f"user; check the id and {_KEY_VARIABLE}"
            )
        reason = format_as_single_line(_read_error_detail(exc), _MAX_TEXT)
        if code in (409, 422):
            _refuse_answer(f"the server {url} refused the answer: {reason}")
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
    return _convert_to_str_or_json(detail)
