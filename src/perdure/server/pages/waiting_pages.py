"""Serve the page with all questions that wait for an answer, and the forms that answer them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from perdure.run_tables.thread_list import ThreadQuery
from perdure.server.http.call import Call, CurrentCall
from perdure.server.pages.rendering import NonNegativeNumber, Pages, PageValues, render_page
from perdure.server.pages.run_pages import build_question_row, list_assistants_for_next_message
from perdure.server.runs.run_manager import RunManager, ServerRuns
from perdure.server.threads import WaitingThread

routes = Pages()
_THREADS_PER_PAGE: Final = 25


@routes.add_page_and_json_routes("/ui/waiting", "threads:search")
async def show_waiting_questions(
    request: Request,
    call: CurrentCall,
    runs: ServerRuns,
    answered: str = "",
    start: NonNegativeNumber = 0,
) -> Response:
    """Show the questions that wait for an answer on all permitted threads, oldest first.

    Args:
        request: The request.
        call: The permitted call.
        runs: The run manager of the server.
        answered: The id of the thread whose question was answered before this page was opened.
        start: The number of threads to skip.
    """
    permitted = await call.authorize_action_arguments({"metadata": {}})
    conditions = ThreadQuery(metadata=permitted["metadata"])
    waiting = await call.threads.search_waiting(conditions, _THREADS_PER_PAGE + 1, start)
    rows = await asyncio.gather(
        *(_build_waiting_thread_row(call, runs, row) for row in waiting[:_THREADS_PER_PAGE])
    )
    answered_threads = (
        await call.threads.search(replace(conditions, ids=[answered]), 1) if answered else []
    )
    return render_page(
        request,
        "waiting.html",
        threads=rows,
        answered=[
            {"thread_id": thread["thread_id"], "title": thread["title"]}
            for thread in answered_threads
        ],
        start=start,
        more=len(waiting) > _THREADS_PER_PAGE,
    )


async def _build_waiting_thread_row(
    call: Call, runs: RunManager, waiting: WaitingThread
) -> PageValues:
    """Build the template data for a thread with its questions.

    `assistants` has the graphs with which the caller can answer the questions. It is empty if the
    caller may not start runs on the thread.
    """
    thread = waiting.thread
    metadata: dict[str, Any] = thread["metadata"]
    return {
        "thread_id": thread["thread_id"],
        "title": thread["title"],
        "person": metadata.get("owner"),
        "since": thread["updated_at"],
        "last_graph": metadata.get("graph_id"),
        "assistants": await list_assistants_for_next_message(call, runs, thread),
        "questions": [build_question_row(node, question) for node, question in waiting.questions],
    }
