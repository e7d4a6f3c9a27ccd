"""Serve the pages on which users answer interrupts, send messages to a graph, and list runs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from itertools import chain
from typing import Any, Final, Literal, get_args
from urllib.parse import quote

from langgraph_sdk.schema import RunStatus
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from perdure.errors import ConfigurationError, VersionConflict
from perdure.graphs import questions
from perdure.run_tables.records import RunRow
from perdure.run_tables.runs import LIVE_STATES
from perdure.run_tables.thread_list import ThreadQuery
from perdure.server.api_runs import get_permitted_run
from perdure.server.assistants import choose_thread_assistant
from perdure.server.http.access import Forbidden, Refused, set_required_action
from perdure.server.http.call import Call, CurrentCall
from perdure.server.http.reply import JSONReply, escape_unprintable, wants_json
from perdure.server.pages.rendering import (
    FormText,
    NonNegativeNumber,
    Pages,
    PageValues,
    build_link,
    format_as_json,
    redirect_to,
    render_page,
)
from perdure.server.runs.run import Run, build_run_json, restore_run_request_from_row
from perdure.server.runs.run_manager import RunManager, ServerRuns
from perdure.server.runs.run_request import RunRequest
from perdure.server.runs.run_start import start_run
from perdure.server.thread_person import Sender
from perdure.server.threads import Thread

routes = Pages()
_RUNS_PER_PAGE: Final = 50
# Maximum number of runs listed on a thread's page.
_MAX_THREAD_RUNS: Final = 5
_UNSUCCESSFUL_STATUSES: Final = ("error", "timeout", "interrupted")
# Maximum time, in seconds, that a browser without JavaScript waits for a run to end before it is
# redirected.
_MAX_RUN_WAIT_S: Final = 5

# -- questions of a graph


class ToolReview(questions.ToolReview):
    """A tool call that is waiting for human review, with the data for the review form."""

    @property
    def arguments_json(self) -> str:
        """The tool call's arguments as JSON, formatted for a person to read and edit.

        Invisible characters are escaped.
        """
        return escape_unprintable(format_as_json(self.args))


def find_tool_call_reviews(interrupt_value: Mapping[str, Any]) -> list[ToolReview]:
    """Return the tool calls that an interrupt asks a person to approve, edit or reject.

    The returned list is empty if the interrupt is not a request to review tool calls.
    """
    return [ToolReview(**call.model_dump()) for call in questions.find_reviews(interrupt_value)]


def parse_interrupt_answer(interrupt_value: Mapping[str, Any], form: Mapping[str, str]) -> Any:
    """Build the response to an interrupt from the submitted form fields.

    Args:
        interrupt_value: The value of the interrupt.
        form: The fields of the form.

    Returns:
        The decisions on tool calls, or the text or JSON that was entered.

    Raises:
        ConfigurationError: A decision is missing or not allowed, or text that must be JSON is not
            JSON.
    """
    decisions = [
        _parse_review_decision(call, index, form)
        for index, call in enumerate(find_tool_call_reviews(interrupt_value))
    ]
    if decisions:
        return questions.build_review_answer(interrupt_value, decisions)
    text = _normalize_newlines(form.get("answer", ""))
    return text if form.get("how") == "text" else questions.parse_json(text, "the answer")


def _parse_review_decision(
    tool_call: ToolReview, tool_call_index: int, form: Mapping[str, str]
) -> dict[str, Any]:
    """Build the reviewer's decision about a tool call from the fields of the HTML form.

    For example, the reviewer decides to approve, edit or reject the tool call.

    If the reviewer edited the tool call's arguments, only the decision "edit" is accepted, because
    any other decision would silently discard the edits.
    """
    kind, message = (
        form.get(f"decision-{tool_call_index}"),
        _normalize_newlines(form.get(f"message-{tool_call_index}", "")),
    )
    call_label = f"tool call {tool_call_index + 1} ({tool_call.name!r})"
    args = None
    if kind in tool_call.allowed:
        text = form.get(f"args-{tool_call_index}", tool_call.arguments_json)
        args = questions.parse_json(text, f"the arguments of {call_label}")
    decision = questions.build_review_decision(
        tool_call, tool_call_index + 1, kind, args=args, message=message
    )
    if kind != "edit" and args != json.loads(tool_call.arguments_json):
        raise ConfigurationError(
            f"the arguments of {call_label} were changed, but the decision is {kind!r}; "
            "choose 'edit', or restore the arguments"
        )
    return decision


def _normalize_newlines(text: str) -> str:
    """Replace the CR LF line breaks that browsers send in form data with LF."""
    return text.replace("\r\n", "\n")


def _list_questions(thread: Thread) -> list[dict[str, Any]]:
    """Return the interrupts of all the thread's tasks as one list, in task order."""
    return [*chain.from_iterable(thread["interrupts"].values())]


def _can_resend_input(row: RunRow) -> bool:
    """Return whether a run failed before its input was written to the thread.

    If a run fails before its input is stored in the thread, the request is kept so that the input
    can be resubmitted.
    """
    return row.live.status == "error" and row.request is not None


def build_run_row(row: RunRow) -> PageValues:
    """Build the template data of a run.

    Returns:
        The JSON of the run, and further fields. `events` is the path at which the page's script
            reads the run's output. `stop` is the path that stops the run.
    """
    live, is_delayed = row.live, row.live.status == "delayed"
    thread_path = quote(live.thread_id, safe="", errors="surrogatepass")
    return {
        **build_run_json(row),
        "error": row.error,
        **_build_caller_and_person_fields(row),
        "is_live": live.status in LIVE_STATES,
        "begins_at": datetime.fromtimestamp(row.not_before or 0, UTC) if is_delayed else None,
        "events": f"/threads/{thread_path}/runs/{live.run_id}/stream?stream_mode=messages-tuple",
        "stop": build_link("/ui/stop", id=live.thread_id, run_id=live.run_id),
    }


def _build_caller_and_person_fields(row: RunRow) -> PageValues:
    """Build the template fields that describe who started a run and whose memories it uses.

    The `caller` is the user who started the run, and the `person` is the user whose memories the
    run uses. If `caller` and `person` are different users, `deed` says what the caller did, for
    example `sent by ann`.
    """
    sender, person = Sender.from_row(row.details), row.details.get("person")
    is_other_person = person is not None and person != sender.caller
    return {
        "caller": sender.caller,
        "person": person,
        "deed": f"{sender.deed} by {sender.caller}" if is_other_person else None,
    }


def build_question_row(node: str, question: Mapping[str, Any]) -> PageValues:
    """Build the template data of an interrupt and of the form that answers it.

    Args:
        node: The node that raised the interrupt.
        question: The interrupt in the format of LangGraph's API.
    """
    return {
        "node": node,
        "id": question.get("id"),
        "reviews": find_tool_call_reviews(question),
        "value": question.get("value"),
    }


async def list_assistants_for_next_message(
    call: Call, runs: RunManager, thread: Thread
) -> list[str]:
    """Return the graphs to which the caller can send a message or an answer in a thread.

    If the server serves the graph that last ran in the thread, the list has only this graph. The
    list is empty if the caller may not start runs on the thread.
    """
    if not await call.may_use_thread("threads:create_run", thread):
        return []
    last_graph, served_graphs = thread["metadata"].get("graph_id"), [*runs.graphs]
    return [last_graph] if last_graph in served_graphs else served_graphs


async def load_conversation(
    call: Call, runs: RunManager, thread: Thread, waiting_nodes: Sequence[PageValues]
) -> PageValues:
    """Load the data for the conversation section of a thread's page.

    The conversation section of a thread's page lets a user chat with a graph. The conversation
    section shows the thread's pending interrupts, the graphs that can receive the user's next
    message, and the thread's recent runs. If the server serves the graph that last ran in the
    thread, the user can send messages only to this graph.

    Args:
        call: The permitted call.
        runs: The run manager of the server.
        thread: The thread.
        waiting_nodes: The node and the text of each question, in the order of the interrupts.

    Returns:
        The template data. `assistants` has the names of the graphs to which the user can send the
            next message. It is empty if the caller may not start runs. `unheard` is True if the
            newest run failed before its input was stored in the thread.
    """
    stored_runs = await runs.list_runs(call.identity.tenant, thread["thread_id"])
    run_rows = [*map(build_run_row, stored_runs)]
    live_runs = [row for row in run_rows if row["is_live"] and not row["begins_at"]]
    # Hide pending questions while a run is active, because that run may already be processing the
    # answers.
    questions = [] if live_runs else _list_questions(thread)
    return {
        "last": thread["metadata"].get("graph_id"),
        "assistants": await list_assistants_for_next_message(call, runs, thread),
        "live": live_runs[-1] if live_runs else None,
        "runs": run_rows[:_MAX_THREAD_RUNS],
        "unheard": bool(stored_runs) and _can_resend_input(stored_runs[0]),
        "questions": [
            {**waiting_node, **build_question_row(waiting_node["node"], question)}
            for waiting_node, question in zip(waiting_nodes, questions, strict=False)
        ],
    }


# -- messages to a graph


async def get_new_thread_metadata_if_permitted(call: Call) -> PageValues | None:
    """Return metadata for a new thread, or None if the user cannot create and run threads."""
    with suppress(Refused):
        permitted = await call.authorize_action_arguments({"metadata": {}})
        if await call.may_use_thread("threads:create_run", {"thread_id": None, **permitted}):
            return dict(permitted["metadata"])
    return None


@routes.post("/ui/new")
@set_required_action("threads:create")
async def create_thread(call: CurrentCall) -> Response:
    """Create a thread and redirect to its page, which has a box for the first message."""
    metadata = await get_new_thread_metadata_if_permitted(call)
    if metadata is None:
        raise Forbidden(
            f"the user {call.identity.user!r} is not allowed to create a thread and start runs on "
            "it; ask an admin for this permission"
        )
    thread = await call.threads.create(metadata=metadata)
    call.record_for_audit(thread_id=thread["thread_id"])
    return redirect_to("/ui/thread", id=thread["thread_id"])


@routes.post("/ui/answer")
@set_required_action("threads:create_run")
async def answer_question(
    call: CurrentCall,
    runs: ServerRuns,
    request: Request,
    id: str,
    assistant: FormText,
    listed: bool = False,
) -> Response:
    """Resume a graph with the response to one of its thread's interrupts.

    Args:
        call: The permitted call.
        runs: The run manager of the server.
        request: The request.
        id: The thread.
        assistant: The graph that is resumed.
        listed: Whether to return to the list of waiting questions instead of the thread's page.
    """
    _, thread = await _authorize_read_call_and_load_thread(call, id)
    form = {name: text for name, text in (await request.form()).items() if isinstance(text, str)}
    question = next(
        (
            candidate
            for candidate in _list_questions(thread)
            if candidate.get("id") == form.get("of")
        ),
        None,
    )
    if question is None:
        raise VersionConflict(
            f"thread {id!r} is no longer waiting for this answer; reload the page"
        )
    request_fields = {
        "assistant_id": assistant,
        "command": {"resume": {question["id"]: parse_interrupt_answer(question, form)}},
        "multitask_strategy": "reject",
    }
    if listed and not wants_json(request):
        await _start_run(call, runs, thread, request_fields)
        return redirect_to("/ui/waiting", answered=id)
    return await _start_run_and_respond(call, runs, request, thread, request_fields)


@routes.post("/ui/say")
@set_required_action("threads:create_run")
async def send_message(
    call: CurrentCall,
    runs: ServerRuns,
    request: Request,
    id: str,
    text: FormText,
    assistant: FormText,
) -> Response:
    """Start a run with the user's message as its input."""
    if not text.strip():
        raise ConfigurationError("the message is blank; enter some text")
    request_fields = {
        "assistant_id": assistant,
        "input": {"messages": [{"role": "user", "content": _normalize_newlines(text)}]},
    }
    _, thread = await _authorize_read_call_and_load_thread(call, id)
    return await _start_run_and_respond(call, runs, request, thread, request_fields)


@routes.post("/ui/again")
@set_required_action("threads:create_run")
async def retry_or_continue(
    call: CurrentCall, runs: ServerRuns, request: Request, id: str, assistant: FormText
) -> Response:
    """Continue a thread whose last run did not finish.

    If the last run failed before its input was stored in the thread, start a new run with the same
    input.
    """
    read_call, thread = await _authorize_read_call_and_load_thread(call, id)
    request_fields, author = dict[str, Any](), None
    stored_runs = await runs.list_runs(call.identity.tenant, id)
    if stored_runs and _can_resend_input(stored_runs[0]):
        request_fields = restore_run_request_from_row(stored_runs[0]).model_dump(exclude_unset=True)
        sender = Sender.from_row(stored_runs[0].details)
        author = sender.author or sender.caller
        # Before the request of a failed run is sent again, remove the person's id from the
        # request's `context`, because the server takes the person's id from the thread's metadata.
        person_fields = ("user_id", "owner")
        context = request_fields.get("context") or {}
        request_fields["context"] = {
            name: value for name, value in context.items() if name not in person_fields
        } or None
    elif not (await read_call.saver.astatus(id)).next:
        raise VersionConflict(
            f"thread {id!r} has no unfinished run to continue; send a message instead"
        )
    request_fields |= {"assistant_id": assistant, "multitask_strategy": "reject"}
    return await _start_run_and_respond(call, runs, request, thread, request_fields, author)


@routes.post("/ui/stop")
@set_required_action("threads:update")
async def stop_run(
    call: CurrentCall,
    runs: ServerRuns,
    request: Request,
    id: str,
    run_id: str,
    listed: bool = False,
) -> Response:
    """Stop a run, but keep the checkpoints that it has already stored.

    Args:
        call: The permitted call.
        runs: The run manager of the server.
        request: The request.
        id: The thread.
        run_id: The run.
        listed: Whether to return to the list of runs instead of the thread's page.
    """
    run = await get_permitted_run(call, runs, id, run_id)
    await runs.cancel_run_unless_ended(run.tenant, run.row.live)
    response = await _respond_with_run(request, id, run)
    return redirect_to("/ui/runs") if listed else response


@routes.add_page_and_json_routes("/ui/runs", "threads:search")
async def show_runs(
    request: Request,
    call: CurrentCall,
    id: str = "",
    status: Literal["", RunStatus] = "",
    start: NonNegativeNumber = 0,
) -> Response:
    """Show the runs of one thread or of all permitted threads, newest first."""
    permitted = await call.authorize_action_arguments({"metadata": {}})
    if id:
        await call.threads.get(id)
    conditions = ThreadQuery(metadata=permitted["metadata"], ids=[id] if id else None)
    matching_runs = await call.threads.search_permitted_runs_and_whether_last(
        conditions, status or None, _RUNS_PER_PAGE + 1, start
    )
    rows = [
        {
            **build_run_row(row),
            "title": thread["title"],
            "is_open": is_last
            and row.live.status in _UNSUCCESSFUL_STATUSES
            and not thread["interrupts"],
        }
        for row, is_last, thread in matching_runs[:_RUNS_PER_PAGE]
    ]
    return render_page(
        request,
        "runs.html",
        runs=rows,
        given={"id": id, "status": status},
        statuses=get_args(RunStatus),
        start=start,
        more=len(matching_runs) > _RUNS_PER_PAGE,
    )


async def _authorize_read_call_and_load_thread(call: Call, thread_id: str) -> tuple[Call, Thread]:
    """Check that the caller may read a thread, and load the thread from the database.

    Returns:
        A copy of `call` that is authorized for the action `threads:read`, and the thread.
    """
    read_call = call.with_action("threads:read")
    return read_call, await read_call.permit_thread(thread_id)


async def _start_run_and_respond(
    call: Call,
    runs: RunManager,
    request: Request,
    thread: Thread,
    request_fields: dict[str, Any],
    author: str | None = None,
) -> Response:
    """Start the run that a user requested in an HTML form, and return the response to the form."""
    run = await _start_run(call, runs, thread, request_fields, author)
    return await _respond_with_run(request, thread["thread_id"], run)


async def _start_run(
    call: Call,
    runs: RunManager,
    thread: Thread,
    request_fields: dict[str, Any],
    author: str | None = None,
) -> Run:
    """Start the run that a user requested in an HTML form.

    If the user chose the graph of the thread's last run, the new run uses the same assistant as
    that run.
    """
    thread_id = thread["thread_id"]
    if request_fields["assistant_id"] == thread["metadata"].get("graph_id"):
        request_fields["assistant_id"] = await choose_thread_assistant(call, runs.graphs, thread)
    body = RunRequest.model_validate(
        {
            **request_fields,
            "stream_mode": "messages-tuple",
            "stream_subgraphs": True,
            "stream_resumable": True,
        }
    )
    return await start_run(call, runs, body, thread_id, author=author)


async def _respond_with_run(request: Request, thread_id: str, run: Run) -> Response:
    """Return the response to a form that starts or stops a run.

    The page's JavaScript receives the run as JSON. A browser without JavaScript is redirected to
    the thread's page when the run ends, or after `_MAX_RUN_WAIT_S` seconds at the latest.
    """
    if wants_json(request):
        return JSONReply(build_run_row(run.row))
    with suppress(TimeoutError):
        async with asyncio.timeout(_MAX_RUN_WAIT_S):
            await run.wait_until_ended()
    return RedirectResponse(f"{build_link('/ui/thread', id=thread_id)}#talk", 303)
