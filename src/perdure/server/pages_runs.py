"""Pages on which people talk to graphs: what a graph asks, what is said to it, and its runs."""

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

from perdure.checkpointers.records import RunRow
from perdure.checkpointers.runs import LIVE_STATES
from perdure.checkpointers.thread_list import ThreadQuery
from perdure.errors import ConfigurationError, VersionConflict
from perdure.graphs import questions
from perdure.server.access import Forbidden, Refused, action
from perdure.server.api_runs import get_permitted_run, start_run
from perdure.server.assistants import choose_thread_assistant
from perdure.server.call import Call, CurrentCall
from perdure.server.pages import Number, Pages, Text, Values, as_json_text, go_to, page, query
from perdure.server.person import Sender
from perdure.server.reply import JSONReply, escape_unprintable, wants_json
from perdure.server.run import Run, build_run_json, restore_request
from perdure.server.run_request import RunRequest
from perdure.server.runs import Runs, ServerRuns
from perdure.server.threads import Thread

routes = Pages()
_PAGE: Final = 50  # runs
_SHOWN: Final = 5  # of a thread, on its page
_CUT_OFF: Final = ("error", "timeout", "interrupted")
_WAIT_S: Final = 5  # for the end of a run, before a browser without scripts is shown its thread

# -- what a graph asks


class ToolReview(questions.ToolReview):
    """A call of a tool that a person reviews, as its form shows it."""

    @property
    def shown(self) -> str:
        """The arguments as JSON to be read and edited, in which nothing is hidden."""
        return escape_unprintable(as_json_text(self.args))


def reviews(question: Mapping[str, Any]) -> list[ToolReview]:
    """Return the calls that a question is about, or none if it has another form."""
    return [ToolReview(**call.model_dump()) for call in questions.find_reviews(question)]


def answer_of(question: Mapping[str, Any], form: Mapping[str, str]) -> Any:
    """The answer to a question that a form has.

    Raises:
        ConfigurationError: A decision is missing or not allowed, or what is to be JSON is none.
    """
    decisions = [_decision(call, n, form) for n, call in enumerate(reviews(question))]
    if decisions:
        return questions.build_answer(question, decisions)
    text = _lines(form.get("answer", ""))
    return text if form.get("how") == "text" else questions.parse_json(text, "the answer")


def _decision(call: ToolReview, number: int, form: Mapping[str, str]) -> dict[str, Any]:
    kind, message = form.get(f"decision-{number}"), _lines(form.get(f"message-{number}", ""))
    what = f"the call {number + 1} of {call.name!r}"
    args = None
    if kind in call.allowed:
        text = form.get(f"args-{number}", call.shown)
        args = questions.parse_json(text, f"the arguments of {what}")
    decision = questions.build_decision(call, number + 1, kind, args=args, message=message)
    if kind != "edit" and args != json.loads(call.shown):
        raise ConfigurationError(
            f"the arguments of {what} were changed, and the decision is {kind!r}; "
            "choose 'edit', or leave them as they were"
        )
    return decision


def _lines(text: str) -> str:
    """A text of a form, whose lines browsers end by CR LF."""
    return text.replace("\r\n", "\n")


def _questions(thread: Thread) -> list[dict[str, Any]]:
    """What the tasks of a thread ask, in order."""
    return [*chain.from_iterable(thread["interrupts"].values())]


def _is_unheard(row: RunRow) -> bool:
    """Whether a run failed before its input was stored, which can be sent again."""
    return row.live.status == "error" and row.request is not None


def run_row(row: RunRow) -> Values:
    """A run as pages show it; `events`: where the script reads what it says; `stop`: its form."""
    live, delayed = row.live, row.live.status == "delayed"
    at = quote(live.thread_id, safe="", errors="surrogatepass")
    return {
        **build_run_json(row),
        "error": row.error,
        **_people_of(row),
        "is_live": live.status in LIVE_STATES,
        "begins_at": datetime.fromtimestamp(row.not_before or 0, UTC) if delayed else None,
        "events": f"/threads/{at}/runs/{live.run_id}/stream?stream_mode=messages-tuple",
        "stop": query("/ui/stop", id=live.thread_id, run_id=live.run_id),
    }


def _people_of(row: RunRow) -> Values:
    """The caller and the person of a run, and what the caller did if the person is another."""
    sender, person = Sender.from_row(row.details), row.details.get("person")
    is_other = person is not None and person != sender.caller
    deed = f"{sender.deed} by {sender.caller}" if is_other else None
    return {"caller": sender.caller, "person": person, "deed": deed}


async def talk_of(call: Call, runs: Runs, thread: Thread, waits: Sequence[Values]) -> Values:
    """What the page of a thread has to talk: its questions, and who answers, nobody if it may not.

    A graph that a question is of must answer that; a message is answered by any, if the last one
    is not served.
    """
    last, served = thread["metadata"].get("graph_id"), [*runs.graphs]
    may = await call.may_use_thread("threads:create_run", thread)
    known = await runs.list_runs(call.identity.tenant, thread["thread_id"])
    rows = [*map(run_row, known)]
    live = [row for row in rows if row["is_live"] and not row["begins_at"]]
    questions = [] if live else _questions(thread)  # else they may be answered
    return {
        "last": last,
        "assistants": ([last] if last in served else served) if may else [],
        "live": live[-1] if live else None,
        "runs": rows[:_SHOWN],
        "unheard": bool(known) and _is_unheard(known[0]),
        "questions": [
            {**wait, "id": each.get("id"), "reviews": reviews(each), "value": each.get("value")}
            for wait, each in zip(waits, questions, strict=False)
        ],
    }


# -- what is said to it


async def begins(call: Call) -> Values | None:
    """The metadata of a thread that the user begins; None: they may not, or not talk on it."""
    with suppress(Refused):
        asked = await call.permit({"metadata": {}})
        if await call.may_use_thread("threads:create_run", {"thread_id": None, **asked}):
            return dict(asked["metadata"])
    return None


@routes.post("/ui/new")
@action("threads:create")
async def new(call: CurrentCall) -> Response:
    """Begin a thread, whose page has a box for the first message."""
    metadata = await begins(call)
    if metadata is None:
        raise Forbidden(f"{call.identity.user!r} may not begin a thread and talk on it")
    made = await call.threads.create(metadata=metadata)
    call.record_for_audit(thread_id=made["thread_id"])
    return go_to("/ui/thread", id=made["thread_id"])


@routes.post("/ui/answer")
@action("threads:create_run")
async def answer(
    call: CurrentCall, runs: ServerRuns, request: Request, id: str, assistant: Text
) -> Response:
    """Answer a question of a graph; others that wait go on waiting."""
    _, thread = await _read(call, id)
    form = {name: text for name, text in (await request.form()).items() if isinstance(text, str)}
    question = next((each for each in _questions(thread) if each.get("id") == form.get("of")), None)
    if question is None:
        raise VersionConflict(f"thread {id!r} no longer waits for this answer; load its page again")
    given = {"resume": {question["id"]: answer_of(question, form)}}
    asked_of = {"assistant_id": assistant, "command": given, "multitask_strategy": "reject"}
    return await _begun(call, runs, request, thread, asked_of)


@routes.post("/ui/say")
@action("threads:create_run")
async def say(
    call: CurrentCall, runs: ServerRuns, request: Request, id: str, text: Text, assistant: Text
) -> Response:
    """Say something to a graph: a message of the user is its input."""
    if not text.strip():
        raise ConfigurationError(f"the message is {text!r:.80}; expected some text")
    said = {"messages": [{"role": "user", "content": _lines(text)}]}
    asked = {"assistant_id": assistant, "input": said}
    _, thread = await _read(call, id)
    return await _begun(call, runs, request, thread, asked)


@routes.post("/ui/again")
@action("threads:create_run")
async def again(
    call: CurrentCall, runs: ServerRuns, request: Request, id: str, assistant: Text
) -> Response:
    """Go on where a run failed, was stopped or cut off, or ask again what was not stored."""
    reading, thread = await _read(call, id)
    asked, author = dict[str, Any](), None
    known = await runs.list_runs(call.identity.tenant, id)
    if known and _is_unheard(known[0]):
        asked = restore_request(known[0]).model_dump(exclude_unset=True)
        sender = Sender.from_row(known[0].details)
        author = sender.author or sender.caller
        names = ("user_id", "owner")  # the person of the thread, which the run finds again
        context = asked.get("context") or {}
        asked["context"] = {n: v for n, v in context.items() if n not in names} or None
    elif not (await reading.saver.astatus(id)).next:
        raise VersionConflict(f"thread {id!r} has nothing to go on with; say something to it")
    asked |= {"assistant_id": assistant, "multitask_strategy": "reject"}
    return await _begun(call, runs, request, thread, asked, author)


@routes.post("/ui/stop")
@action("threads:update")
async def stop(
    call: CurrentCall,
    runs: ServerRuns,
    request: Request,
    id: str,
    run_id: str,
    listed: bool = False,
) -> Response:
    """Stop a run, also of the list; what it has stored stays."""
    run = await get_permitted_run(call, runs, id, run_id)
    await runs.cancel_run(run.tenant, run.row.live)
    stopped = await _shown(request, id, run)
    return go_to("/ui/runs") if listed else stopped


@routes.page("/ui/runs", "threads:search")
async def all_runs(
    request: Request,
    call: CurrentCall,
    id: str = "",
    status: Literal["", RunStatus] = "",
    start: Number = 0,
) -> Response:
    """The runs of the threads that may be reached, or of one, newest first."""
    asked = await call.permit({"metadata": {}})
    if id:
        await call.threads.get(id)
    conditions = ThreadQuery(metadata=asked["metadata"], ids=[id] if id else None)
    found = await call.threads.search_runs(conditions, status or None, _PAGE + 1, start)
    rows = []
    for row, is_last, thread in found[:_PAGE]:
        is_cut_off = row.live.status in _CUT_OFF and not thread["interrupts"]
        about = {"title": thread["title"], "is_open": is_last and is_cut_off}
        rows.append(run_row(row) | about)
    return page(
        request,
        "runs.html",
        runs=rows,
        given={"id": id, "status": status},
        statuses=get_args(RunStatus),
        start=start,
        more=len(found) > _PAGE,
    )


async def _read(call: Call, thread_id: str) -> tuple[Call, Thread]:
    """A thread that a form is about, and the call that may read it."""
    reading = call.with_action("threads:read")
    return reading, await reading.permit_thread(thread_id)


async def _begun(
    call: Call,
    runs: Runs,
    request: Request,
    thread: Thread,
    asked: dict[str, Any],
    author: str | None = None,
) -> Response:
    """Begin a run on a thread, of its assistant if it is of the graph that was chosen."""
    thread_id = thread["thread_id"]
    if asked["assistant_id"] == thread["metadata"].get("graph_id"):
        asked["assistant_id"] = await choose_thread_assistant(call, runs.graphs, thread)
    shows = {"stream_mode": "messages-tuple", "stream_subgraphs": True, "stream_resumable": True}
    body = RunRequest.model_validate({**asked, **shows})
    run = await start_run(call, runs, body, thread_id, author=author)
    return await _shown(request, thread_id, run)


async def _shown(request: Request, thread_id: str, run: Run) -> Response:
    """The script of the page is told of a run at once, other browsers once it has ended."""
    if wants_json(request):
        return JSONReply(run_row(run.row))
    with suppress(TimeoutError):
        async with asyncio.timeout(_WAIT_S):
            await run.wait_until_ended()
    return RedirectResponse(f"{query('/ui/thread', id=thread_id)}#talk", 303)
