"""Check a request that starts a run, and start the run."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, NamedTuple
from uuid import NAMESPACE_OID, uuid4, uuid5

from perdure.errors import UnknownThread
from perdure.run_tables.records import DueCron
from perdure.run_tables.thread_list import ListedThread
from perdure.server.api_states import build_checkpoint_config, get_checkpoint
from perdure.server.assistants import get_run_assistant
from perdure.server.http.access import (
    Forbidden,
    Identity,
    Refused,
)
from perdure.server.http.acting_for import (
    build_identity_acting_for,
    build_refused_identity,
)
from perdure.server.http.call import Call
from perdure.server.runs.input_checks import (
    find_possibly_malformed_channel_values,
    refuse_malformed_messages,
)
from perdure.server.runs.run import Run
from perdure.server.runs.run_manager import RunManager
from perdure.server.runs.run_request import (
    RunRequest,
)
from perdure.server.teams import check_requested_teams
from perdure.server.thread_person import Sender
from perdure.server.threads import Threads


class CheckedRun(NamedTuple):
    """A run that the caller may start.

    Attributes:
        call: The call of the client, which acts for the user named in the run's context.
        threads: The threads that the caller may access with this run. `call.threads` may differ,
            because the check of another run with the same call replaces the call's filter.
        body: The request, merged with its assistant. It contains only permitted metadata.
        graph_name: The name of the assistant's graph.
        thread_id: The id of the run's thread, which may not exist yet.
        permitted_thread: The thread, if the check has read it, or None.
        may_create: Whether the thread is created if it does not exist.
        deletes_thread: Whether the thread is deleted at the end of the run.
        due: The cron that starts the run, or None.
    """

    call: Call
    threads: Threads
    body: RunRequest
    graph_name: str
    thread_id: str
    permitted_thread: ListedThread | None
    may_create: bool
    deletes_thread: bool
    due: DueCron | None


async def start_run(
    call: Call,
    runs: RunManager,
    body: RunRequest,
    thread_id: str | None,
    protocol: str = "run",
    *,
    recorded: bool = True,
    author: str | None = None,
) -> Run:
    """Start a run for a client.

    If `thread_id` is None, a new thread is created for the run. See `check_run_request` and
    `start_checked_run` for the arguments and the exceptions.
    """
    checked_run = await check_run_request(call, runs, body, thread_id)
    return await start_checked_run(runs, checked_run, protocol, recorded=recorded, author=author)


async def check_run_request(
    call: Call,
    runs: RunManager,
    body: RunRequest,
    thread_id: str | None,
    *,
    due: DueCron | None = None,
) -> CheckedRun:
    """Validate a request for a run. The database is not changed.

    Args:
        call: The call of the client.
        runs: The run manager of the server.
        body: The request. The metadata in the request is replaced by the permitted metadata.
        thread_id: The thread, or None for a new thread.
        due: The cron that starts the run, or None. If a cron starts the run, the new thread of the
            run has the same id at each attempt.

    Raises:
        ConfigurationError: The request sets values that only the server may set.
        UnknownThread: The thread does not exist, and `if_not_exists` is `reject`.
        UnknownCheckpoint: The thread has no checkpoint with the requested id.
        UnknownAssistant: The assistant does not exist, or its graph is not served.
        InvalidUpdate: The input or the command has malformed messages.
        Forbidden: The context names a person for whom the caller may not act, or the thread is
            another person's.
    """
    uses_new_thread = not thread_id
    new_thread_id = str(
        uuid5(NAMESPACE_OID, f"{due.cron.cron_id} {due.cron.next_at}") if due else uuid4()
    )
    thread_id = thread_id or new_thread_id
    call = act_for_user_named_in_context(call, body)
    body.refuse_reserved_config_values(thread_id, call.identity.person)
    if body.webhook:
        runs.shared_state.webhooks.check_url(body.webhook)
    runs.shared_state.check_capacity_for_new_runs(call.identity)
    arguments = {
        "thread_id": thread_id,
        "assistant_id": body.assistant_id,
        "metadata": dict(body.metadata),
        "if_not_exists": "create" if uses_new_thread else body.if_not_exists,
        "multitask_strategy": body.multitask_strategy,
        "kwargs": body.model_dump(exclude={"metadata"}, exclude_unset=True),
    }
    permitted = await call.authorize_action_arguments(
        {**arguments, "metadata": dict(body.metadata)}
    )
    body.metadata = dict(permitted.get("metadata") or {})
    assistant = await get_run_assistant(call.without_acting_for(), runs.graphs, body.assistant_id)
    body = body.merge_with_assistant(assistant)
    teams = runs.shared_state.teams
    if teams is not None and teams.identities_list_teams:
        check_requested_teams(call.identity, body.team_names())
    await _refuse_malformed_input_messages(call, runs, body, assistant["graph_id"], thread_id)
    threads, may_create = call.threads, uses_new_thread or body.if_not_exists == "create"
    permitted_thread: ListedThread | None = None
    if call.identity.acting_for is not None and not uses_new_thread:
        permitted_thread = await _find_thread_for_run_on_behalf_of_person(call, arguments)
        may_create = may_create and permitted_thread is None
    if permitted_thread is None and (body.checkpoint_ids_by_namespace or not may_create):
        permitted_thread = await threads.get_permitted_row(thread_id)
    for namespace, checkpoint_id in body.checkpoint_ids_by_namespace.items():
        await call.require_model_view_access(thread_id, namespace)
        checkpoint = {"checkpoint_ns": namespace, "checkpoint_id": checkpoint_id}
        await get_checkpoint(call, build_checkpoint_config(thread_id, checkpoint))
    return CheckedRun(
        call,
        threads,
        body,
        assistant["graph_id"],
        thread_id,
        permitted_thread,
        may_create,
        uses_new_thread and body.on_completion == "delete",
        due,
    )


async def start_checked_run(
    runs: RunManager,
    checked_run: CheckedRun,
    protocol: str = "run",
    *,
    recorded: bool = True,
    author: str | None = None,
) -> Run:
    """Create the thread of a checked run if the thread does not exist, and start the run.

    Args:
        runs: The run manager of the server.
        checked_run: The run.
        protocol: Whether the events go to readers of the run or of the thread; see `Run.protocol`.
        recorded: Whether the events are stored, so that clients can join the run on any server.
            The endpoints whose paths end in `/runs/stream` and `/runs/wait` pass the client's
            `stream_resumable`. All other callers use the default. The events of a run whose thread
            is deleted at the end of the run are never stored.
        author: The user who wrote the input, if the request sends the input of an earlier run
            again. None means that the caller wrote it.
    """
    call, body, thread_id = checked_run.call, checked_run.body, checked_run.thread_id
    threads, thread = checked_run.threads, checked_run.permitted_thread
    if checked_run.may_create:
        thread = await threads.get_or_create_row(thread_id, body.metadata)
    sender = _build_run_sender(call.identity, body, checked_run.due, author)
    known_person = None if thread is None else threads.find_person_of_thread(thread)
    return await runs.start_run(
        call.identity,
        body,
        checked_run.graph_name,
        thread_id,
        protocol,
        temporary=checked_run.deletes_thread,
        recorded=recorded and not checked_run.deletes_thread,
        due=checked_run.due,
        sender=sender._replace(teams=sorted(call.identity.teams)),
        person=call.identity.acting_for or known_person,
    )


async def _refuse_malformed_input_messages(
    call: Call, runs: RunManager, body: RunRequest, graph_name: str, thread_id: str
) -> None:
    """Raise an error if the input or the command of a run contains malformed messages.

    The messages in a run's input can be validated only with the run's graph. To save time, the
    graph is loaded only if a quick check of the input finds messages that may be malformed.

    Raises:
        InvalidUpdate: See `refuse_malformed_messages`.
    """
    if not (suspects := find_possibly_malformed_channel_values(body)):
        return
    config = body.build_config(
        {"thread_id": thread_id, "user_id": call.identity.person}, is_continued=False
    )
    async with runs.graphs.open_graph(
        *(graph_name, call.saver, call.store, config), user=call.identity.raw_user
    ) as graph:
        refuse_malformed_messages(graph, suspects)


def act_for_user_named_in_context(call: Call, body: RunRequest) -> Call:
    """Return a copy of `call` that acts for the user named by `user_id` in the run's context.

    If the run's context has no `user_id`, or if its `user_id` is the caller, `call` itself is
    returned. The audit log records that the caller sent the request on behalf of this user. If the
    caller is not permitted to act on behalf of the user, the audit log records the refused attempt.

    Raises:
        Forbidden: See `build_identity_acting_for`.
    """
    person = (body.context or {}).get("user_id")
    if person is None:
        return call
    try:
        identity = build_identity_acting_for(call.access, call.identity, person)
    except Forbidden:
        call.audited_identity = build_refused_identity(call.identity, person)
        raise
    call.audited_identity = identity
    return call if identity is call.identity else call.with_identity(identity)


async def _find_thread_for_run_on_behalf_of_person(
    call: Call, run_arguments: dict[str, Any]
) -> ListedThread | None:
    """Find the existing thread that the caller may use for a run on behalf of another person.

    Return the thread if the person has access to it. Also return the thread if the thread has no
    checkpoints yet, the caller has access to the thread, and no other user owns it. When a run on
    behalf of a person starts, a thread without checkpoints is assigned to that person. In all other
    cases, return None.

    Raises:
        Forbidden: The thread belongs to another person.
    """
    thread_id, person = run_arguments["thread_id"], call.identity.acting_for
    try:
        thread = await call.threads.get_permitted_row(thread_id)
    except UnknownThread:
        own_call = call.without_acting_for()
        with suppress(Refused, UnknownThread):
            await own_call.authorize_action_arguments(run_arguments)
            thread = await own_call.threads.get_permitted_row(thread_id)
            is_own = thread.metadata.get("owner") in (None, own_call.identity.user)
            if thread.head_metadata is None and is_own:
                return thread
        return None
    thread_person = call.threads.find_person_of_thread(thread)
    if thread_person not in (None, "", person):
        raise Forbidden(
            f"you are acting for the user {person!r}, but the thread {thread_id!r} belongs to "
            "another user; use a thread of the user for whom you are acting"
        )
    return thread


def _build_run_sender(
    identity: Identity, body: RunRequest, due_cron: DueCron | None, author: str | None
) -> Sender:
    """Return the sender of a run.

    A cron's message is attributed to the user who last changed the cron, or to the person on whose
    behalf that user acted. If an answer to an interrupt edits a tool call, the answer is treated as
    a new message. The reason is that the edited tool call could read or write the memories of the
    person to whom the thread belongs.
    """
    is_answer = body.command is not None and body.command.resume is not None
    edits_call = is_answer and body.answers_interrupt_with_edited_tool_call
    is_author = body.has_new_graph_input or edits_call
    message_author = author or identity.person if is_author else None
    deed = "answered" if is_answer else "continued"
    if body.has_new_graph_input:
        deed = "said" if identity.acting_for is None else "sent"
    if due_cron is not None:
        deed = "scheduled"
    return Sender(
        identity.user, identity.acting_for, identity.may_act_for_others, message_author, deed
    )
