"""`perdure answer`: answer what a graph asks, and let its run go on, here or on a server."""

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
from perdure.cli.output import format_count, format_line, print_note, print_result, show_status
from perdure.errors import (
    ConfigurationError,
    MissingDependency,
    PerdureError,
    StorageUnavailable,
)

if TYPE_CHECKING:
    from langgraph_sdk.client import SyncLangGraphClient

    from perdure.checkpointers import ThreadHead

_WAIT_S: Final = 30  # for the end of another run of the thread
_CONNECT_S: Final = 5
_SHOWN: Final = 300  # characters of a question, or of an error, that are printed
_CARRIED: Final = ("title", "titled", "create_time", "owner", "graph_id", "assistant_id")
_KEY: Final = "PERDURE_API_KEY"


class _Answer(NamedTuple):
    """What the options of a command say.

    Attributes:
        action: `approve`, `edit`, `reject` or `respond`, or None if the answer is JSON.
        value: The text or the JSON that belongs to the action.
        whole: The whole answer as JSON.
        number: Which of the open questions it answers, from 1 on, or None for the only one.
    """

    action: str | None
    value: str | None
    whole: str | None
    number: int | None


class _Outcome(NamedTuple):
    """Where a thread stands after an answer."""

    status: str
    stands: str
    waits_for_answers_to: list[Any]
    said: str | None


@app.command()
def answer(
    thread: Annotated[
        str,
        typer.Argument(
            metavar="ID",
            help="The thread, or the beginning of its id.",
            autocompletion=complete_thread_id,
        ),
    ],
    action: Annotated[
        str | None,
        typer.Argument(metavar="[ACTION]", help="approve, edit, reject or respond."),
    ] = None,
    value: Annotated[
        str | None,
        typer.Argument(
            metavar="[VALUE]",
            help="The new arguments as JSON for edit, a text for reject and respond.",
        ),
    ] = None,
    whole: Annotated[
        str | None,
        typer.Option("--answer", metavar="JSON", help="The whole answer, in place of an action."),
    ] = None,
    question: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Which question, if several wait for an answer."),
    ] = None,
    graphs: Annotated[
        str | None,
        typer.Option("--graphs", metavar="FILE", help="The langgraph.json with the graph to run."),
    ] = None,
    graph: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The graph, if the thread does not name it."),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Ask the server there, with PERDURE_API_KEY."),
    ] = None,
    db: DbOption = None,
    json: JsonOption = False,
) -> None:
    """Answer the question of a graph, and let its run go on.

    The run uses the memories of the person whose thread it is, whoever answers. Exit code 1, and
    nothing is written, if there is no such thread, nothing is open, the action is not allowed, or
    JSON cannot be read.
    """
    given = _Answer(action, value, whole, question)
    if (action is None) == (whole is None):
        raise ConfigurationError(
            "give approve, edit, reject or respond, or the whole answer with --answer"
        )
    if url is not None and (graphs, db) != (None, None):
        raise ConfigurationError("--url names a server: leave --graphs and --db out")
    if url is not None:
        thread_id, of, resumed, outcome = _answer_by_server(url, thread, given, graph)
    else:
        thread_id, of, resumed, outcome = _answer_here(db, graphs, thread, given, graph)
    done = {"thread_id": thread_id, "question": of, "answer": resumed, **outcome._asdict()}
    del done["stands"]
    now = outcome.stands or "its run has ended"
    said = [] if outcome.said is None else [outcome.said]
    print_result(done, json, "\n".join([f"{thread_id!r} is answered; {now}", *said]))


# -- what is answered


def _refuse(text: str) -> NoReturn:
    """End the command with exit code 1, before anything is written."""
    print_note(f"perdure: {text}")
    raise typer.Exit(1)


def _choose(questions: Sequence[Mapping[str, Any]], given: _Answer, thread: str, now: str) -> Any:
    """Return the id of the question that is answered, and the answer.

    `questions` have an `id`, a `value` and perhaps a `response_schema`; `now` says where the
    thread stands.
    """
    if not questions:
        _refuse(f"the thread {thread!r} waits for no answer: it {now or 'is idle'}")
    if given.number is None and len(questions) > 1:
        listed = (
            f"{number}. {format_line(_as_text(each['value']), _SHOWN)}"
            for number, each in enumerate(questions, 1)
        )
        _refuse("give --question N, as several wait:\n" + "\n".join(listed))
    if (number := given.number or 1) > len(questions):
        _refuse(f"--question is {number}, and {format_count(len(questions), 'question')} waits")
    chosen = questions[number - 1]
    try:
        return chosen["id"], _build_answer(chosen, given)
    except ConfigurationError as exc:
        _refuse(str(exc))


def _as_text(value: Any) -> str:
    import json

    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _build_answer(question: Mapping[str, Any], given: _Answer) -> Any:
    """Build the answer to a question.

    Raises:
        ConfigurationError: The question does not allow it, or JSON cannot be read.
    """
    from perdure.graphs.questions import build_answer, build_decision, find_reviews, parse_json

    calls, (action, value, whole, _) = find_reviews(question), given
    if whole is not None:
        answer = parse_json(whole, "--answer")
        if not calls:
            return answer
        listed = answer.get("decisions", [answer]) if isinstance(answer, dict) else answer
        if not isinstance(listed, list) or not all(isinstance(each, dict) for each in listed):
            raise ConfigurationError(
                f'--answer is {answer!r:.80}; expected {{"decisions": [{{"type": "approve"}}]}}'
            )
        if len(listed) != len(calls):
            raise ConfigurationError(
                f"--answer has {format_count(len(listed), 'decision')}, and the question is about "
                f"{format_count(len(calls), 'call')}; expected one for each"
            )
        decisions = [
            build_decision(
                call,
                number,
                each.get("type"),
                args=each.get("args", (each.get("edited_action") or {}).get("args")),
                message=str(each.get("message") or ""),
            )
            for number, (call, each) in enumerate(zip(calls, listed, strict=True), 1)
        ]
        return build_answer(question, decisions)
    if not calls:
        if action != "respond" or value is None:
            raise ConfigurationError(
                f"the question {_as_text(question['value'])!r:.80} is no review of a tool's call; "
                "expected respond TEXT, or --answer JSON"
            )
        return value
    if action == "approve" and value is not None:
        raise ConfigurationError(f"approve takes no {value!r:.80}; leave it out, or choose edit")
    if action in ("edit", "respond") and value is None:
        needs = "the new arguments as JSON" if action == "edit" else "a text"
        raise ConfigurationError(f"{action} needs {needs}")
    if action == "edit" and len(calls) > 1:
        raise ConfigurationError(
            f"the question is about {len(calls)} calls; give a decision on each with --answer"
        )
    args = parse_json(value or "", "the new arguments") if action == "edit" else None
    decided = [
        build_decision(call, number, action, args=args, message=value or "")
        for number, call in enumerate(calls, 1)
    ]
    return build_answer(question, decided)


# -- here


def _answer_here(
    db: str | None, graphs: str | None, typed: str, given: _Answer, graph: str | None
) -> tuple[str, Any, Any, _Outcome]:
    """Answer a question in this process, under the lock of the thread."""
    with open_database(db, graphs=graphs) as file:
        if file.settings.graphs is None:
            raise ConfigurationError(
                "nothing says which graph goes on: give --graphs FILE, a langgraph.json, or --url "
                "URL of the server that serves it"
            )
        try:
            thread_id = find_thread_head(file, typed).thread_id
        except ConfigurationError as exc:
            _refuse(str(exc))
        with show_status(f"running the graph of {thread_id!r} …"):
            return thread_id, *asyncio.run(_resume(file, thread_id, given, graph))


async def _resume(
    file: CommandDatabase, thread_id: str, given: _Answer, graph: str | None
) -> tuple[Any, Any, _Outcome]:
    """Run the graph of a thread with the answer to one of its questions."""
    try:
        from perdure.server.graphs import Graphs
    except ImportError as exc:
        raise MissingDependency('--graphs needs: pip install ".[server]" in a checkout') from exc
    from langgraph.types import Command

    from perdure.memory import record_views

    assert file.settings.graphs is not None
    served = Graphs.load(file.settings.graphs)
    saver = file.open_saver(served.saver_options) if served.saver_options else file.saver
    async with _locked(saver, thread_id):
        head = await saver.ahead(thread_id)
        if head is None:
            _refuse(f"there is no thread {thread_id!r}")
        questions = [
            {"id": getattr(each, "id", None), "value": getattr(each, "value", each)}
            | {"response_schema": getattr(each, "response_schema", None)}
            for each in head.status.interrupts
        ]
        chosen, resumed = _choose(questions, given, thread_id, describe_status(head.status))
        name = _name_graph(head, [*served], graph)
        config: Any = {**_config_of(head), "callbacks": [record_views(saver)]}
        parts: Any = (name, saver, file.store, config)
        async with served.open_graph(*parts, access="threads.create_run") as made:
            unknown = {task.node for task in head.status.tasks} - {*made.nodes, ""}
            if unknown:
                _refuse(
                    f"the thread {thread_id!r} waits at {min(unknown)!r}, which the graph {name!r} "
                    "has not; name the graph that asked with --graph"
                )
            command: Any = Command(resume=resumed if chosen is None else {chosen: resumed})
            options: dict[str, Any] = {"context": _context_of(made, head), "durability": "sync"}
            try:
                values: Any = await made.ainvoke(command, config, **options)
            except PerdureError:
                raise
            except Exception as exc:
                why = format_line(f"{type(exc).__name__}: {exc}", _SHOWN)
                _refuse(f"the answer to {thread_id!r} is stored, and its run failed: {why}")
        after = await saver.ahead(thread_id)
    status = after.status if after is not None else head.status
    waits = [question for _, question in status.questions]
    outcome = _Outcome(status.state, describe_status(status), waits, _last_said(values))
    return chosen, resumed, outcome


class _locked:
    """The lock of a thread, with an error that says how long it was waited for."""

    def __init__(self, saver: Any, thread_id: str) -> None:
        self._thread_id, self._lock = thread_id, saver.lock(thread_id, timeout_s=_WAIT_S)

    async def __aenter__(self) -> None:
        try:
            await self._lock.__aenter__()
        except StorageUnavailable as exc:
            if not isinstance(exc.__cause__, TimeoutError):
                raise
            raise StorageUnavailable(
                f"another run of the thread {self._thread_id!r} has not ended for {_WAIT_S} s; "
                "wait for its end, and try again"
            ) from exc

    async def __aexit__(self, *exc: Any) -> None:
        await self._lock.__aexit__(*exc)


def _name_graph(head: ThreadHead, served: Sequence[str], given: str | None) -> str:
    """Return the name of the graph of a thread: the given one, or that of its last run."""
    last = head.metadata.get("graph_id")
    name = given or (last if last in served else served[0] if len(served) == 1 else None)
    if name is None:
        raise ConfigurationError(
            f"nothing says of which graph the thread {head.thread_id!r} is; give --graph with one "
            f"of {', '.join(served)}"
        )
    return name


def _config_of(head: ThreadHead) -> Any:
    """Build the config of a run that goes on with a thread as its person."""
    person = _person_of(head)
    named = {} if person is None else {"user_id": person}
    carried = {name: value for name, value in head.metadata.items() if name in _CARRIED}
    return {"configurable": {"thread_id": head.thread_id, **named}, "metadata": carried}


def _person_of(head: ThreadHead) -> Any:
    """Return the `user_id` of a thread, which is "" if it has no memory, else its `owner`."""
    person = head.metadata.get("user_id")
    return head.metadata.get("owner") if person is None else person


def _context_of(graph: Any, head: ThreadHead) -> Any:
    """Return the context of a run, with the person, if the graph's context has a `user_id`."""
    schema = getattr(graph, "context_schema", None)
    fields = {**getattr(schema, "__annotations__", {}), **getattr(schema, "model_fields", {})}
    person = _person_of(head)
    return {"user_id": person} if person is not None and "user_id" in fields else None


def _last_said(values: Any) -> str | None:
    """Return the text of the last message of a state, if a model said it."""
    messages = values.get("messages") if isinstance(values, Mapping) else None
    last = messages[-1] if isinstance(messages, list) and messages else None
    if isinstance(last, Mapping):  # of a server
        is_model, content = last.get("type") == "ai", last.get("content")
        return content if is_model and isinstance(content, str) and content else None
    return (getattr(last, "text", "") or None) if getattr(last, "type", "") == "ai" else None


# -- on a server


def _answer_by_server(
    url: str, thread_id: str, given: _Answer, graph: str | None
) -> tuple[str, Any, Any, _Outcome]:
    """Answer a question through a server, which takes the thread's lock and runs its graph."""
    with _asking(url, thread_id) as client:
        thread = client.threads.get(thread_id)
        asked = [each for some in thread["interrupts"].values() for each in some]
        now = {"busy": "has a run under way", "error": "failed"}.get(thread["status"], "")
        chosen, resumed = _choose(asked if not now else [], given, thread_id, now)
        metadata: Mapping[str, Any] = thread["metadata"] or {}
        assistant = graph or metadata.get("assistant_id") or metadata.get("graph_id")
        if not assistant:
            raise ConfigurationError(f"nothing says of which graph {thread_id!r} is; give --graph")
        command: Any = {"resume": {chosen: resumed}}
        with show_status(f"asking {url} …"):
            values = client.runs.wait(
                thread_id,
                str(assistant),
                command=command,
                multitask_strategy="reject",
                raise_error=False,
            )
        if isinstance(values, Mapping) and isinstance(values.get("__error__"), Mapping):
            why = format_line(_as_text(values["__error__"]), _SHOWN)
            _refuse(f"the answer to {thread_id!r} is stored, and its run failed: {why}")
        after = client.threads.get(thread_id)
    waits = [each.get("value") for some in after["interrupts"].values() for each in some]
    status = "waiting" if waits else "idle" if after["status"] == "idle" else "unfinished"
    texts = "; ".join(format_line(_as_text(each), _SHOWN) for each in waits)
    now = f"waits for an answer ({texts})" if waits else "" if status == "idle" else "was cut off"
    return thread_id, chosen, resumed, _Outcome(status, now, waits, _last_said(values))


@contextmanager
def _asking(url: str, thread_id: str) -> Iterator[SyncLangGraphClient]:
    """Connect to a server, and say in one line what it refuses.

    Raises:
        ConfigurationError: It cannot be reached, or refuses the key.
    """
    import httpx
    from langgraph_sdk import get_sync_client

    try:
        waits = (_CONNECT_S, None, _CONNECT_S, _CONNECT_S)  # a run may take any time
        with get_sync_client(url=url, api_key=os.environ.get(_KEY), timeout=waits) as client:
            yield client
    except httpx.HTTPStatusError as exc:
        code = exc.response.status_code
        if code == 404:
            _refuse(f"there is no thread {thread_id!r} at {url}, or it is not yours")
        why = format_line(_detail_of(exc), _SHOWN)
        if code in (409, 422):
            _refuse(f"{url} refuses the answer: {why}")
        hint = f"; {_KEY} has the key" if code in (401, 403) else ""
        raise ConfigurationError(f"{url} replies with {code}: {why}{hint}") from exc
    except (httpx.TransportError, httpx.InvalidURL) as exc:
        raise ConfigurationError(f"{url} cannot be reached: {exc}") from exc


def _detail_of(exc: Any) -> str:
    try:
        detail = exc.response.json()["detail"]
    except (ValueError, LookupError, TypeError):
        detail = str(exc)
    return _as_text(detail)
