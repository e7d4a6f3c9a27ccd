"""Implement `perdure answer`, which answers a graph's interrupt and resumes the run.

An open question is an interrupt that has not been answered. The run continues in this process, or
on the server given by `--url`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from perdure.cli.answer_on_server import answer_question_on_server
from perdure.cli.answer_values import (
    MAX_TEXT,
    Answer,
    AnsweredQuestion,
    choose_question_id_and_build_resume_value,
    get_last_model_text,
)
from perdure.cli.app import (
    CommandDatabase,
    DbOption,
    JsonOption,
    ThreadArgument,
    app,
    exit_with_error,
    explain_lock_timeout,
    explain_missing_server_packages,
    find_thread_head,
    open_database,
)
from perdure.cli.history import describe_status
from perdure.cli.output import format_as_single_line, print_json_or_sentence, show_status
from perdure.errors import ConfigurationError, PerdureError

if TYPE_CHECKING:
    from perdure.checkpointers import ThreadHead
    from perdure.checkpointers.checkpointer import Checkpointer

# Maximum time, in seconds, to wait for another run of the thread to end.
_LOCK_TIMEOUT_S: Final = 30
_INHERITED_METADATA: Final = (
    *("title", "titled", "create_time", "owner", "graph_id", "assistant_id"),
)
"""Metadata of the head that the checkpoints of the resumed run inherit."""


@app.command()
def answer(
    thread: ThreadArgument,
    action: Annotated[
        str | None,
        typer.Argument(metavar="[ACTION]", help="The decision: approve, edit, reject or respond."),
    ] = None,
    value: Annotated[
        str | None,
        typer.Argument(
            metavar="[VALUE]",
            help="New arguments as JSON for edit; a message for reject and respond.",
        ),
    ] = None,
    json_text: Annotated[
        str | None,
        typer.Option(
            "--answer",
            metavar="JSON",
            help="The complete resume value as JSON. Replaces ACTION and VALUE.",
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
        typer.Option(
            "--graphs", metavar="FILE", help="The langgraph.json file that defines the graph."
        ),
    ] = None,
    graph: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Resume with this graph instead of the last run's graph."
        ),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="Resume on this server, with the API key in PERDURE_API_KEY."
        ),
    ] = None,
    db: DbOption = None,
    json: JsonOption = False,
) -> None:
    """Answer a graph's interrupt, and resume the run.

    The question is the value that the graph passed to `interrupt()`. The resumed run uses the
    memories of the person to whom the thread belongs, even if another person answers the question.
    The command writes nothing and exits with code 1 if the thread does not exist or is not waiting
    for an answer, if the question does not permit the given action, or if the JSON is invalid.
    """
    user_answer = Answer(action, value, json_text, question)
    if (action is None) == (json_text is None):
        raise ConfigurationError(
            "pass one of approve, edit, reject and respond, or the complete answer with --answer"
        )
    if url is not None and (graphs, db) != (None, None):
        raise ConfigurationError(
            "--url cannot be combined with --graphs or --db, because the server has its own graphs "
            "and database; remove --graphs and --db"
        )
    answered = (
        _answer_question_in_database(db, graphs, thread, user_answer, graph)
        if url is None
        else answer_question_on_server(url, thread, user_answer, graph)
    )
    result = {
        "thread_id": answered.thread_id,
        "question": answered.question_id,
        "answer": answered.resume_value,
        "status": answered.status,
        "waits_for_answers_to": answered.open_questions,
        "said": answered.answer_of_model,
    }
    description = (
        f"the thread {answered.status_description}"
        if answered.status_description
        else "the run has ended"
    )
    sentence = f"answered the question of the thread {answered.thread_id!r}; {description}"
    texts = [] if answered.answer_of_model is None else [answered.answer_of_model]
    print_json_or_sentence(result, json, "\n".join([sentence, *texts]))


# -- in this process


def _answer_question_in_database(
    db: str | None, graphs: str | None, id_or_prefix: str, user_answer: Answer, graph: str | None
) -> AnsweredQuestion:
    """Answer the question of an interrupted run, and resume the run in this process."""
    with open_database(db, graphs=graphs) as database:
        if database.settings.graphs is None:
            raise ConfigurationError(
                "no graphs are configured; pass --graphs with the langgraph.json file that defines "
                "the graph, or --url with the URL of the server that runs the graph"
            )
        try:
            thread_id = find_thread_head(database, id_or_prefix).thread_id
        except ConfigurationError as exc:
            exit_with_error(str(exc))
        with show_status(f"running the graph of {thread_id!r} …"):
            return asyncio.run(_resume_run(database, thread_id, user_answer, graph))


async def _resume_run(
    database: CommandDatabase, thread_id: str, user_answer: Answer, graph_name: str | None
) -> AnsweredQuestion:
    """Resume a thread's interrupted run with the user's answer to one of its questions."""
    with explain_missing_server_packages("--graphs"):
        from perdure.server.graphs import Graphs
        from perdure.server.runs.changes_by_other_users import (
            does_run_continue_changes_by_other_users,
        )
        from perdure.server.runs.message_authors import OtherAuthorMarker
    from langgraph.types import Command

    from perdure.checkpointers.address import WITHOUT_MEMORY_KEY
    from perdure.checkpointers.labels import TURN_WITHOUT_MEMORY
    from perdure.memory import record_views
    from perdure.run_tables.thread_list import ThreadList

    assert database.settings.graphs is not None
    served = Graphs.load_langgraph_json(database.settings.graphs)
    saver = database.open_saver(served.saver_options) if served.saver_options else database.saver
    async with AsyncExitStack() as stack:
        with explain_lock_timeout(thread_id, _LOCK_TIMEOUT_S):
            await stack.enter_async_context(saver.lock(thread_id, timeout_s=_LOCK_TIMEOUT_S))
        head = await saver.ahead(thread_id)
        if head is None:
            exit_with_error(f"there is no thread {thread_id!r}; run 'perdure threads' for a list")
        questions = [
            {"id": getattr(interrupt, "id", None), "value": getattr(interrupt, "value", interrupt)}
            | {"response_schema": getattr(interrupt, "response_schema", None)}
            for interrupt in head.status.interrupts
        ]
        question_id, resume_value = choose_question_id_and_build_resume_value(
            questions, user_answer, thread_id, describe_status(head.status)
        )
        name = _choose_graph_name(head, [*served], graph_name)
        person = await asyncio.to_thread(_find_user_id_or_owner_of_thread, saver, head)
        config: Any = {
            **_build_config_of_resumed_run(head, person),
            "callbacks": [record_views(saver)],
        }
        thread = await ThreadList(saver).aget(thread_id)
        without_memory = thread is not None and await does_run_continue_changes_by_other_users(
            saver, thread, {}
        )
        if without_memory:
            config["configurable"] |= {"user_id": "", WITHOUT_MEMORY_KEY: True}
            # The thread still belongs to the person.
            config["metadata"] |= {} if person is None else {"user_id": person}
            config["metadata"][TURN_WITHOUT_MEMORY] = True
        marker = OtherAuthorMarker(
            thread_id,
            (),
            is_active=thread is not None and thread.changes_by_other_users != "none",
            excludes_answers=without_memory,
        )
        async with served.open_graph(
            name, saver, database.store, config, access="threads.create_run"
        ) as graph:
            unknown = {task.node for task in head.status.tasks} - {*graph.nodes, ""}
            if unknown:
                exit_with_error(
                    f"the thread {thread_id!r} is waiting at the node {min(unknown)!r}, which the "
                    f"graph {name!r} does not have; pass the thread's graph with --graph"
                )
            command: Any = Command(
                resume=resume_value if question_id is None else {question_id: resume_value}
            )
            options: dict[str, Any] = {
                "context": _build_context_with_user_id(graph, "" if without_memory else person),
                "durability": "sync",
            }
            try:
                with marker.mark_messages_during_block():
                    values: Any = await graph.ainvoke(command, config, **options)
            except PerdureError:
                raise
            except Exception as exc:
                reason = format_as_single_line(f"{type(exc).__name__}: {exc}", MAX_TEXT)
                exit_with_error(
                    f"the answer was stored in the thread {thread_id!r}, but the run failed: "
                    f"{reason}"
                )
        new_head = await saver.ahead(thread_id)
    status = new_head.status if new_head is not None else head.status
    return AnsweredQuestion(
        thread_id,
        question_id,
        resume_value,
        status.state,
        describe_status(status),
        [question for _, question in status.questions],
        get_last_model_text(values),
    )


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
    return {
        "configurable": {"thread_id": head.thread_id, **user},
        "metadata": {
            key: value for key, value in head.metadata.items() if key in _INHERITED_METADATA
        },
    }


def _find_user_id_or_owner_of_thread(saver: Checkpointer, head: ThreadHead) -> Any:
    """Return the id of the person to whom a thread belongs, or None.

    The person is identified by `user_id` in the metadata of the thread's head, or by `owner` if
    there is no `user_id`. A `user_id` of "" means that memory is disabled for the thread. If the
    `owner` in the metadata might be an organisation and not a person, it is ignored; see
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
