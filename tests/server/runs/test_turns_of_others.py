"""A turn of a colleague uses nobody's memories until it ends, whoever answers or continues it."""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, TypedDict, cast

import pytest
from langchain_core.load import dumpd
from langchain_core.messages import AIMessage, HumanMessage, RemoveMessage, SystemMessage
from langchain_core.runnables import RunnableConfig
from langgraph.func import entrypoint
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.managed import RemainingSteps
from langgraph.types import interrupt
from langgraph_sdk.errors import UnprocessableEntityError

from perdure.checkpointers import open_checkpointer
from perdure.server.http.auth_file import AuthFileAccess
from perdure.server.runs.changes_by_other_users import find_input_channels
from perdure.server.runs.run_request import RunRequest, StoredTexts
from perdure.settings import Settings
from tests.server.http.test_auth_file import write_auth_file
from tests.server.running import wait_until
from tests.server.runs.test_crons import make_due
from tests.server.runs.test_message_authors import access  # noqa: F401 - a fixture
from tests.server.talking import build_input
from tests.server.test_person import (
    FOLLOW_UP,
    REFUND_REQUEST,
    TEAM_AUTH_FILE,
    YES_COMMAND,
    Desk,
    Model,
    build_agent,
    model,  # noqa: F401 - a fixture
    serve_desk,
    team,  # noqa: F401 - a fixture
)

pytestmark = pytest.mark.filterwarnings("ignore:The v3 streaming protocol")
RunStart = Callable[[Desk, str], Any]


def start_thread(desk: Desk) -> str:
    """Start a thread of Mia with one message, and return its id."""
    client = desk.client("mia")
    thread_id: str = client.threads.create()["thread_id"]
    client.runs.wait(thread_id, "desk", input=build_input("Hello."))
    return thread_id


def continue_after_own_update(desk: Desk, thread_id: str) -> None:
    tom = desk.client("tom")
    tom.threads.update_state(thread_id, FOLLOW_UP, as_node="__start__")
    tom.runs.wait(thread_id, "desk", input=None)


def continue_from_checkpoint_of_own_update(desk: Desk, thread_id: str) -> None:
    tom = desk.client("tom")
    first = tom.threads.get_state(thread_id)["checkpoint"]
    updated: Any = tom.threads.update_state(thread_id, FOLLOW_UP, as_node="__start__")
    desk.client("mia").threads.update_state(thread_id, {"messages": []}, checkpoint=first)
    checkpoint = updated["checkpoint"]
    tom.runs.wait(thread_id, "desk", input=None, checkpoint=checkpoint)


def continue_after_update_naming_a_subgraph(desk: Desk, thread_id: str) -> None:
    """The graph has no such subgraph, so the run continues from the thread's head."""
    tom = desk.client("tom")
    tom.threads.update_state(thread_id, FOLLOW_UP, as_node="__start__")
    checkpoint: Any = {"checkpoint_ns": "x"}
    tom.runs.wait(thread_id, "desk", input=None, checkpoint=checkpoint)


def let_person_update_and_continue(desk: Desk, thread_id: str) -> None:
    desk.client("tom").threads.update_state(thread_id, FOLLOW_UP, as_node="__start__")
    mia = desk.client("mia")
    mia.threads.update_state(thread_id, {"messages": []}, as_node="__start__")
    mia.runs.wait(thread_id, "desk", input=None)


def let_person_add_message_by_command(desk: Desk, thread_id: str) -> None:
    """The command continues the pending tasks of the colleague's update."""
    desk.client("tom").threads.update_state(thread_id, FOLLOW_UP, as_node="__start__")
    update: Any = {"messages": [{"role": "user", "content": "Is the refund there?"}]}
    desk.client("mia").runs.wait(thread_id, "desk", command={"update": update})


def go_to_node_after_own_update(desk: Desk, thread_id: str) -> None:
    tom = desk.client("tom")
    tom.threads.update_state(thread_id, FOLLOW_UP, as_node="__start__")
    tom.runs.wait(thread_id, "desk", command={"goto": ["respond"]})


def continue_own_stopped_message(desk: Desk, thread_id: str) -> None:
    tom = desk.client("tom")
    tom.runs.wait(thread_id, "desk", input=FOLLOW_UP, interrupt_before=["respond"])
    tom.runs.wait(thread_id, "desk", input=None)


def let_person_continue_stopped_message(desk: Desk, thread_id: str) -> None:
    options: Any = {"input": FOLLOW_UP, "interrupt_before": ["respond"]}
    desk.client("tom").runs.wait(thread_id, "desk", **options)
    desk.client("mia").runs.wait(thread_id, "desk", input=None)


def let_person_continue_after_update(desk: Desk, thread_id: str) -> None:
    desk.client("tom").threads.update_state(thread_id, FOLLOW_UP, as_node="__start__")
    desk.client("mia").runs.wait(thread_id, "desk", input=None)


def answer_own_question(desk: Desk, thread_id: str) -> None:
    tom = desk.client("tom")
    tom.runs.wait(thread_id, "desk", input=REFUND_REQUEST)
    tom.runs.wait(thread_id, "desk", command=YES_COMMAND)


def let_person_answer_question(desk: Desk, thread_id: str) -> None:
    desk.client("tom").runs.wait(thread_id, "desk", input=REFUND_REQUEST)
    desk.client("mia").runs.wait(thread_id, "desk", command=YES_COMMAND)


@pytest.mark.parametrize(
    "answer",
    [
        {"decisions": [{"type": "edit", "edited_action": {"name": "refund", "args": {}}}]},
        [{"type": "edit", "args": {}}],
    ],
)
def test_answer_of_colleague_that_edits_a_tool_call_uses_no_memories(
    team: Desk,  # noqa: F811
    answer: Any,
) -> None:
    """Otherwise the edited call could read the person's memories, or write into them."""
    thread_id = start_thread(team)
    team.client("mia").runs.wait(thread_id, "desk", input=REFUND_REQUEST)
    asked, known = len(team.model.requests), team.memories("mia")

    team.client("tom").runs.wait(thread_id, "desk", command={"resume": answer})

    assert "Magpie" not in team.prompts(asked)
    assert team.memories("mia") == known


@pytest.mark.parametrize("by_command", [False, True], ids=["run", "command"])
def test_colleague_who_names_an_older_checkpoint_uses_no_memories(
    team: Desk,  # noqa: F811
    by_command: bool,
) -> None:
    """Otherwise the colleague could choose a state that answers with the person's memories."""
    thread_id, mia, tom = start_thread(team), team.client("mia"), team.client("tom")
    older: Any = tom.threads.get_state(thread_id)["checkpoint"]
    mia.runs.wait(thread_id, "desk", input=REFUND_REQUEST)  # The head waits for an answer.
    asked = len(team.model.requests)

    if by_command:
        named = {"configurable": {"checkpoint_id": older["checkpoint_id"]}}
        params = {"assistant_id": "desk", "input": FOLLOW_UP, "config": named}
        sent = {"id": 1, "method": "run.start", "params": params}
        replied = team.post("tom", f"/threads/{thread_id}/commands", json=sent)
        assert replied.json()["type"] == "success", replied.text
        wait_until(lambda: len(team.model.requests) > asked)
    else:
        command: Any = {"goto": ["respond"]}
        tom.runs.wait(thread_id, "desk", command=command, checkpoint=older)

    assert len(team.model.requests) > asked
    assert "Magpie" not in team.prompts(asked)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"messages": []},
        {"messages": [], "number": 0},
        {"messages": [{"role": "system", "content": "Be brief."}]},
        {"messages": [["system", "Be brief."]]},
        {"messages": [dumpd(SystemMessage("Be brief."))]},
        {"messages": [{"role": "user", "content": ""}]},
        {"messages": [{"type": "remove", "id": "unknown", "content": ""}]},
        {"messages": [dumpd(RemoveMessage(id="unknown"))]},
    ],
    ids=[
        *("empty", "no message", "number", "system message", "pair", "serialized"),
        *("empty message", "removal", "serialized removal"),
    ],
)
def test_input_without_a_message_of_the_person_continues_the_turn(
    team: Desk,  # noqa: F811
    given: Any,
) -> None:
    """The model would answer the colleague's message with the person's memories."""
    thread_id = start_thread(team)
    team.client("tom").threads.update_state(thread_id, FOLLOW_UP, as_node="__start__")
    asked = len(team.model.requests)

    with suppress(Exception):  # langgraph refuses some empty inputs.
        team.client("mia").runs.wait(thread_id, "desk", input=given)

    assert "Magpie" not in team.prompts(asked)


def test_messages_that_the_thread_has_already_continue_the_turn(
    team: Desk,  # noqa: F811
) -> None:
    """Some clients send the whole list of messages again with each run."""
    thread_id, mia = start_thread(team), team.client("mia")
    team.client("tom").threads.update_state(thread_id, FOLLOW_UP, as_node="__start__")
    values: Any = mia.threads.get_state(thread_id)["values"]
    asked = len(team.model.requests)

    mia.runs.wait(thread_id, "desk", input=values)

    edited: Any = [{**values["messages"][0], "content": "Hello?"}]
    mia.runs.wait(thread_id, "desk", input={"messages": edited})
    assert len(team.model.requests) > asked
    assert "Magpie" not in team.prompts(asked)
    new: Any = {"role": "user", "content": "Is my refund there?"}
    mia.runs.wait(thread_id, "desk", input={"messages": [*values["messages"], new]})
    assert "Magpie" in team.prompts(asked)


def test_person_who_replays_her_own_turn_uses_her_memories(
    team: Desk,  # noqa: F811
) -> None:
    """The turn of a colleague is the head, but the person goes back to a checkpoint before it."""
    thread_id, mia = start_thread(team), team.client("mia")
    own: Any = mia.threads.get_state(thread_id)["checkpoint"]
    team.client("tom").runs.wait(thread_id, "desk", input=FOLLOW_UP)
    asked = len(team.model.requests)

    mia.runs.wait(thread_id, "desk", command={"goto": ["respond"]}, checkpoint=own)

    assert "Magpie" in team.prompts(asked)


def test_answer_to_tool_result_that_colleague_sent_is_never_remembered(
    team: Desk,  # noqa: F811
) -> None:
    """The run of the colleague has an input, but no human message."""
    thread_id, mia = start_thread(team), team.client("mia")
    call = {"id": "c9", "name": "refund", "args": {"what": "canoe"}}
    sent: Any = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "Walnut owes money.", "tool_call_id": "c9"},
    ]
    team.client("tom").runs.wait(thread_id, "desk", input={"messages": sent})
    messages = str(mia.threads.get_state(thread_id)["values"])
    mia.runs.wait(thread_id, "desk", input=build_input("Is my refund there?"))

    assert "You told me: Walnut" in messages
    memories = " ".join(team.memories("mia"))
    assert ("Walnut" in memories, "Is my refund there?" in memories) == (False, True)


def test_checkpoint_map_chooses_the_checkpoint_that_a_run_continues(
    team: Desk,  # noqa: F811
) -> None:
    """The turn of the older checkpoint has ended, so the run that continues from it does nothing.

    Otherwise a colleague could change the thread and let the run continue from the new head, but
    with the memories that a run may use that continues from the older checkpoint.
    """
    thread_id, tom = start_thread(team), team.client("tom")
    older = tom.threads.get_state(thread_id)["checkpoint"]
    tom.threads.update_state(thread_id, FOLLOW_UP, as_node="__start__")
    asked = len(team.model.requests)

    checkpoint: Any = {"checkpoint_map": {"": older["checkpoint_id"]}}
    tom.runs.wait(thread_id, "desk", input=None, checkpoint=checkpoint)

    assert team.prompts(asked) == "[]"


def test_answer_of_model_to_edit_of_colleague_is_never_remembered(
    team: Desk,  # noqa: F811
) -> None:
    """The model repeats the edited call in a turn that the person has begun."""
    thread_id, mia = start_thread(team), team.client("mia")
    mia.runs.wait(thread_id, "desk", input=REFUND_REQUEST)
    edit: Any = {"resume": [{"type": "edit", "args": {"to": "Walnut"}}]}
    team.client("tom").runs.wait(thread_id, "desk", command=edit)
    messages = str(mia.threads.get_state(thread_id)["values"])
    mia.runs.wait(thread_id, "desk", input=build_input("Is my refund there?"))

    assert "Walnut" in messages
    memories = " ".join(team.memories("mia"))
    assert ("Walnut" in memories, "Is my refund there?" in memories) == (False, True)


@pytest.mark.parametrize("checkpoint", [None, {"checkpoint_ns": "x"}], ids=["head", "subgraph"])
def test_person_who_answers_after_edit_of_colleague_uses_no_memories(
    team: Desk,  # noqa: F811
    checkpoint: Any,
) -> None:
    """The tool asks twice. The colleague's answer to the first question stores no checkpoint."""
    thread_id = start_thread(team)
    request: Any = {"messages": [{"role": "user", "content": "Please refund my canoes."}]}
    team.client("mia").runs.wait(thread_id, "desk", input=request)
    asked, known = len(team.model.requests), team.memories("mia")

    edit: Any = {"resume": [{"type": "edit", "args": {}}]}
    team.client("tom").runs.wait(thread_id, "desk", command=edit, checkpoint=checkpoint)
    team.client("mia").runs.wait(thread_id, "desk", command=YES_COMMAND)

    shown = team.prompts(asked)
    assert ("refund of canoes" in shown, "Magpie" in shown) == (True, False)
    assert team.memories("mia") == known


def test_person_who_rewinds_to_her_own_turn_uses_her_memories(
    team: Desk,  # noqa: F811
) -> None:
    thread_id, mia = start_thread(team), team.client("mia")
    mia.runs.wait(thread_id, "desk", input=REFUND_REQUEST)
    own: Any = mia.threads.get_state(thread_id)["checkpoint"]
    team.client("tom").runs.wait(thread_id, "desk", input=FOLLOW_UP)
    asked = len(team.model.requests)

    rewind = f"/ui/rewind?id={thread_id}&checkpoint={own['checkpoint_id']}"
    assert team.post("mia", rewind).status_code == 303
    mia.runs.wait(thread_id, "desk", command=YES_COMMAND)

    assert "Magpie" in team.prompts(asked)


def test_refused_update_of_colleague_leaves_the_turn_of_the_person(
    team: Desk,  # noqa: F811
) -> None:
    thread_id, mia = start_thread(team), team.client("mia")
    mia.runs.wait(thread_id, "desk", input=REFUND_REQUEST)
    with pytest.raises(UnprocessableEntityError, match="nosuch"):
        team.client("tom").threads.update_state(thread_id, FOLLOW_UP, as_node="nosuch")
    asked = len(team.model.requests)

    mia.runs.wait(thread_id, "desk", command=YES_COMMAND)

    assert "Magpie" in team.prompts(asked)


@pytest.mark.parametrize("copies_checkpoint", [False, True], ids=["thread", "checkpoint"])
def test_copy_of_thread_continues_the_turn_of_colleague_without_memories(
    team: Desk,  # noqa: F811
    copies_checkpoint: bool,
) -> None:
    thread_id = start_thread(team)
    team.client("tom").threads.update_state(thread_id, FOLLOW_UP, as_node="__start__")
    asked, mia = len(team.model.requests), team.client("mia")

    copy = "copy"
    if copies_checkpoint:
        updated: Any = mia.threads.get_state(thread_id)["checkpoint"]
        mia.runs.wait(thread_id, "desk", input=build_input("Is my refund there?"))
        asked = len(team.model.requests)
        fork = f"/ui/fork?id={thread_id}&checkpoint={updated['checkpoint_id']}"
        assert team.post("mia", fork, data={"new": copy}).status_code == 303
    else:
        copy = cast("Any", mia.threads).copy(thread_id)["thread_id"]
    mia.runs.wait(copy, "desk", input=None)

    shown = team.prompts(asked)
    assert ("refund" in shown, "Magpie" in shown) == (True, False)


def test_message_that_is_rolled_back_leaves_the_turn_of_colleague_without_memories(
    team: Desk,  # noqa: F811
) -> None:
    """The colleague could let the person's message be removed, and continue the own update."""
    thread_id, mia, tom = start_thread(team), team.client("mia"), team.client("tom")
    tom.threads.update_state(thread_id, FOLLOW_UP, as_node="__start__")
    asked, released = len(team.model.requests), threading.Event()
    team.model.hold(released)
    run: Any = mia.runs.create(thread_id, "desk", input=build_input("Is my refund there?"))
    wait_until(lambda: len(team.model.requests) > asked)
    assert "Magpie" in team.prompts(asked)
    tom.runs.cancel(thread_id, run["run_id"], wait=True, action="rollback")
    released.set()
    asked = len(team.model.requests)

    tom.runs.wait(thread_id, "desk", input=None)

    shown = team.prompts(asked)
    assert ("refund" in shown, "Magpie" in shown) == (True, False)


def test_update_of_colleagues_older_checkpoint_continues_without_memories(
    team: Desk,  # noqa: F811
) -> None:
    """The person makes the colleague's state the newest one, although she has sent a message."""
    thread_id, mia, tom = start_thread(team), team.client("mia"), team.client("tom")
    updated: Any = tom.threads.update_state(thread_id, FOLLOW_UP, as_node="__start__")
    mia.runs.wait(thread_id, "desk", input=build_input("Thanks."))
    checkpoint = updated["checkpoint"]
    mia.threads.update_state(
        thread_id, {"messages": []}, checkpoint=checkpoint, as_node="__start__"
    )
    asked = len(team.model.requests)

    tom.runs.wait(thread_id, "desk", input=None)

    shown = team.prompts(asked)
    assert ("refund" in shown, "Magpie" in shown) == (True, False)


def test_person_continues_her_failed_message_with_her_memories(
    team: Desk,  # noqa: F811
) -> None:
    """The message was sent after an update of a colleague."""
    thread_id, mia = start_thread(team), team.client("mia")
    team.client("tom").threads.update_state(thread_id, FOLLOW_UP, as_node="__start__")
    team.model.fail_next()
    with suppress(Exception):
        mia.runs.wait(thread_id, "desk", input=build_input("Is my refund there?"))
    asked = len(team.model.requests)

    mia.runs.wait(thread_id, "desk", input=None)

    assert "Magpie" in team.prompts(asked)


def build_graph_that_asks_before_stateful_subgraph() -> Any:
    """Return a graph that asks a question, and whose subgraph then tells which user it serves.

    The subgraph keeps its state between runs.
    """

    def tell_user(_state: Any, config: RunnableConfig) -> Any:
        return {"messages": [AIMessage(f"serves {config['configurable']['user_id']!r}")]}

    def ask(_state: Any) -> Any:
        return {"messages": [HumanMessage(f"The answer is {interrupt('Which boat?')}.")]}

    inner: Any = StateGraph(MessagesState)
    inner.add_node("tell", tell_user).add_edge(START, "tell")
    outer: Any = StateGraph(MessagesState)
    outer.add_node("ask", ask).add_node("inner", inner.compile(checkpointer=True))
    return outer.add_edge(START, "ask").add_edge("ask", "inner").compile()


@pytest.mark.parametrize("chosen_by", ["checkpoint", "rewind"])
@pytest.mark.parametrize("updates_subgraph", [True, False])
def test_older_question_is_answered_without_memories_if_colleague_changed_the_subgraph(
    settings: Settings,
    access: AuthFileAccess,  # noqa: F811
    model: Model,  # noqa: F811
    chosen_by: str,
    updates_subgraph: bool,
) -> None:
    """The subgraph continues from its newest checkpoint, whichever question is answered.

    The colleague's message comes after the question, so without the update the turn belongs to the
    person alone.
    """
    with serve_desk(
        settings, access, model, build_graph_that_asks_before_stateful_subgraph
    ) as desk:
        mia, tom = desk.client("mia"), desk.client("tom")
        thread_id: str = mia.threads.create()["thread_id"]
        mia.runs.wait(thread_id, "desk", input=build_input("Hello."))
        question: Any = mia.threads.get_state(thread_id)["checkpoint"]
        tom.runs.wait(thread_id, "desk", input=build_input("Hello from Tom."))
        if updates_subgraph:
            checkpoint: Any = {"checkpoint_ns": "inner"}
            tom.threads.update_state(
                thread_id, FOLLOW_UP, checkpoint=checkpoint, as_node="__start__"
            )
        mia.runs.wait(thread_id, "desk", input=build_input("Hello again."))
        options: Any = {"checkpoint": question}
        if chosen_by == "rewind":
            rewind = f"/ui/rewind?id={thread_id}&checkpoint={question['checkpoint_id']}"
            assert desk.post("mia", rewind).status_code == 303
            options = {}

        values: Any = mia.runs.wait(thread_id, "desk", command={"resume": "a canoe"}, **options)

    served = "" if updates_subgraph else "mia"
    assert values["messages"][-1]["content"] == f"serves {served!r}"


def test_older_question_is_answered_without_memories_if_subgraph_ran_for_nobody(
    settings: Settings,
    access: AuthFileAccess,  # noqa: F811
    model: Model,  # noqa: F811
) -> None:
    """A colleague may write to a thread whose newest checkpoint belongs to nobody."""
    build_graph = build_graph_that_asks_before_stateful_subgraph
    with serve_desk(settings, access, model, build_graph) as desk:
        mia, tom = desk.client("mia"), desk.client("tom")
        thread_id: str = mia.threads.create()["thread_id"]
        mia.runs.wait(thread_id, "desk", input=build_input("Hello."))
        question: Any = mia.threads.get_state(thread_id)["checkpoint"]
        with open_checkpointer(settings.db) as saver:
            graph = build_graph()
            graph.checkpointer = saver
            nobody: Any = {
                "configurable": {"thread_id": thread_id, "user_id": ""},
                "metadata": {"owner": desk.head(thread_id)["owner"], "graph_id": "desk"},
            }
            graph.update_state(nobody, {"messages": []}, as_node="inner")
        tom.runs.wait(thread_id, "desk", input=build_input("Hello from Tom."))
        tom.runs.wait(thread_id, "desk", command={"resume": "a raft"})
        rewind = f"/ui/rewind?id={thread_id}&checkpoint={question['checkpoint_id']}"
        assert desk.post("mia", rewind).status_code == 303

        mia.runs.wait(thread_id, "desk", input=build_input("Hello again."))
        options: Any = {"command": {"resume": "a canoe"}, "checkpoint": question}

        values: Any = mia.runs.wait(thread_id, "desk", **options)

    assert values["messages"][-1]["content"] == "serves ''"


@pytest.mark.parametrize(
    "start",
    [
        continue_after_own_update,
        continue_from_checkpoint_of_own_update,
        continue_after_update_naming_a_subgraph,
        let_person_update_and_continue,
        let_person_add_message_by_command,
        go_to_node_after_own_update,
        continue_own_stopped_message,
        let_person_continue_stopped_message,
        let_person_continue_after_update,
        answer_own_question,
        let_person_answer_question,
    ],
)
def test_turn_of_colleague_continues_without_memories(
    team: Desk,  # noqa: F811
    start: RunStart,
) -> None:
    """The person's next message recalls memories again."""
    thread_id = start_thread(team)
    before, known = len(team.model.requests), team.memories("mia")

    start(team, thread_id)

    shown = team.prompts(before)
    assert ("refund" in shown, "Magpie" in shown, "Toad" in shown) == (True, False, False)
    assert team.memories("mia") == known
    assert team.head(thread_id)["user_id"] == "mia"

    asked = len(team.model.requests)
    team.client("mia").runs.wait(thread_id, "desk", input=build_input("Is my refund there?"))

    assert "Magpie" in team.prompts(asked)
    assert "user: Is my refund there?" in team.memories("mia")


def list_texts_as_input(desk: Desk, thread_id: str) -> list[Any]:
    """Return the messages of a thread as dicts without ids, as some clients send them again."""
    state: Any = desk.client("mia").threads.get_state(thread_id)["values"]
    roles = {"human": "user", "ai": "assistant"}
    return [
        {"role": roles[message["type"]], "content": message["content"]}
        for message in state["messages"]
    ]


@pytest.mark.parametrize("form", ["dicts", "edited", "strings"])
def test_whole_conversation_without_ids_continues_the_turn(
    team: Desk,  # noqa: F811
    form: str,
) -> None:
    """The graph responds to the last human message, which a colleague has written."""
    thread_id, mia = start_thread(team), team.client("mia")
    team.client("tom").threads.update_state(thread_id, FOLLOW_UP, as_node="__start__")
    messages = list_texts_as_input(team, thread_id)
    given: Any = messages
    if form == "edited":
        given = [{"role": "user", "content": "Hello, there."}, *messages[1:]]
    elif form == "strings":
        given = [message["content"] for message in messages]
    asked = len(team.model.requests)

    mia.runs.wait(thread_id, "desk", input={"messages": given})

    assert len(team.model.requests) > asked
    assert "Magpie" not in team.prompts(asked)
    new: Any = {"role": "user", "content": "Is my refund there?"}
    mia.runs.wait(thread_id, "desk", input={"messages": [*messages, new]})
    assert "Magpie" in team.prompts(asked)


def test_whole_conversation_may_end_with_a_text_that_the_person_repeats(
    team: Desk,  # noqa: F811
) -> None:
    """The last message is new, because no colleague has written its text."""
    thread_id, mia = start_thread(team), team.client("mia")
    team.client("tom").threads.update_state(thread_id, FOLLOW_UP, as_node="__start__")
    repeated: Any = {"role": "user", "content": "Hello."}
    messages: Any = [*list_texts_as_input(team, thread_id), repeated]
    asked = len(team.model.requests)

    mia.runs.wait(thread_id, "desk", input={"messages": messages})

    assert "Magpie" in team.prompts(asked)


def test_person_may_send_the_same_text_twice(
    team: Desk,  # noqa: F811
) -> None:
    """A single message starts a new turn, even if the thread has a message with this text."""
    thread_id, mia = start_thread(team), team.client("mia")
    team.client("tom").threads.update_state(thread_id, FOLLOW_UP, as_node="__start__")
    asked = len(team.model.requests)

    mia.runs.wait(thread_id, "desk", input=build_input("Hello."))

    assert "Magpie" in team.prompts(asked)


@pytest.mark.parametrize("given", [{"nochannel": "a"}, {"messages": [], "nochannel": ["a"]}])
def test_text_for_an_unknown_channel_continues_the_turn(
    team: Desk,  # noqa: F811
    given: Any,
) -> None:
    """langgraph ignores values for names that are not channels of the graph."""
    thread_id = start_thread(team)
    team.client("tom").threads.update_state(thread_id, FOLLOW_UP, as_node="__start__")
    asked = len(team.model.requests)

    with suppress(Exception):  # langgraph refuses inputs that write to no channel.
        team.client("mia").runs.wait(thread_id, "desk", input=given)

    assert "Magpie" not in team.prompts(asked)


def test_graph_factory_gets_the_config_of_the_run(
    settings: Settings,
    tmp_path: Path,
    model: Model,  # noqa: F811
) -> None:
    """The server opens the graph to compare the person's message with the thread's texts."""

    def make(config: RunnableConfig) -> Any:
        assert config["configurable"]["tone"] == "calm"
        return build_agent(model)

    access = AuthFileAccess(write_auth_file(tmp_path, TEAM_AUTH_FILE))  # noqa: F811
    with serve_desk(settings, access, model, cast(Any, make)) as desk:
        mia, config = desk.client("mia"), cast(Any, {"configurable": {"tone": "calm"}})
        thread_id = mia.threads.create()["thread_id"]
        for client in (mia, desk.client("tom"), mia):
            asked = len(model.requests)
            given: Any = build_input("Hello.")
            client.runs.wait(thread_id, "desk", input=given, config=config)

        assert "Magpie" in desk.prompts(asked)


def test_own_question_of_functional_graph_is_answered_with_memories(
    settings: Settings,
    tmp_path: Path,
    model: Model,  # noqa: F811
) -> None:
    """A graph of the functional API stores only one checkpoint until it is answered."""
    seen: list[str] = []

    def make() -> Any:
        @entrypoint()
        def ask(text: str, *, config: RunnableConfig) -> str:
            answer: str = interrupt("May I?")
            seen.append(config["configurable"]["user_id"])
            return answer

        return ask

    access = AuthFileAccess(write_auth_file(tmp_path, TEAM_AUTH_FILE))  # noqa: F811
    with serve_desk(settings, access, model, make) as desk:
        mia, tom = desk.client("mia"), desk.client("tom")
        thread_id: Any = mia.threads.create()["thread_id"]
        yes: Any = {"resume": "yes"}
        for client in (mia, tom, mia):
            client.runs.wait(thread_id, "desk", input=cast(Any, "Hello."))
            client.runs.wait(thread_id, "desk", command=yes)

    assert seen == ["mia", "", "mia"]


def test_daily_cron_with_the_same_messages_uses_memories_each_day(
    team: Desk,  # noqa: F811
) -> None:
    """The input of a cron is new each time, even if the thread contains all its texts."""
    thread_id, mia, tom = start_thread(team), team.client("mia"), team.client("tom")
    daily: Any = {"messages": [{"role": "user", "content": "Hello."}, *FOLLOW_UP["messages"]]}
    cron: Any = mia.crons.create_for_thread(thread_id, "desk", schedule="0 0 1 1 *", input=daily)
    for _ in range(2):
        tom.threads.update_state(thread_id, FOLLOW_UP, as_node="__start__")
        asked, runs = len(team.model.requests), len(mia.runs.list(thread_id))

        make_due(team.settings, cron["cron_id"])

        wait_until(lambda runs=runs: len(mia.runs.list(thread_id)) > runs)  # type: ignore[misc]
        wait_until(lambda: mia.threads.get(thread_id)["status"] == "idle")
        assert "Magpie" in team.prompts(asked)


def test_cron_without_a_message_continues_the_turn_of_the_colleague(
    team: Desk,  # noqa: F811
) -> None:
    """The graph ignores the cron's input, and responds to the colleague's message."""
    thread_id, mia, tom = start_thread(team), team.client("mia"), team.client("tom")
    daily: Any = {"messages": [], "nochannel": "daily"}
    cron: Any = mia.crons.create_for_thread(thread_id, "desk", schedule="0 0 1 1 *", input=daily)
    tom.threads.update_state(thread_id, FOLLOW_UP, as_node="__start__")
    asked, runs = len(team.model.requests), len(mia.runs.list(thread_id))

    make_due(team.settings, cron["cron_id"])

    wait_until(lambda: len(mia.runs.list(thread_id)) > runs)
    wait_until(lambda: mia.threads.get(thread_id)["status"] == "idle")
    shown = team.prompts(asked)
    assert ("refund" in shown, "Magpie" in shown) == (True, False)


def test_person_sends_a_message_to_a_graph_whose_state_is_a_single_value(
    settings: Settings,
    access: AuthFileAccess,  # noqa: F811
    model: Model,  # noqa: F811
) -> None:
    """The input of such a graph can be a dict whose keys are not channels."""

    def tell_user(_state: Any, config: RunnableConfig) -> Any:
        return {"served": config["configurable"]["user_id"]}

    def build_graph(*_args: Any) -> Any:
        state: Any = Annotated[dict[str, Any], operator.or_]
        graph: Any = StateGraph(state)
        graph.add_node("tell", tell_user)
        return graph.add_edge(START, "tell").compile()

    with serve_desk(settings, access, model, build_graph) as desk:
        mia, tom = desk.client("mia"), desk.client("tom")
        thread_id: str = mia.threads.create()["thread_id"]
        mia.runs.wait(thread_id, "desk", input={"question": "Hello."})
        tom.runs.wait(thread_id, "desk", input={"question": "Is the refund there?"})

        values: Any = mia.runs.wait(thread_id, "desk", input={"question": "Is mine there?"})

    assert values == {"question": "Is mine there?", "served": "mia"}


def test_input_channels_contain_no_managed_values() -> None:
    """langgraph ignores input for managed values such as `remaining_steps`."""

    class ManagedState(MessagesState):
        remaining_steps: RemainingSteps

    graph: Any = StateGraph(ManagedState).add_node("respond", lambda _: {})

    assert find_input_channels(graph.add_edge(START, "respond").compile()) == {"messages"}


@pytest.mark.parametrize("asks_again", [False, True])
def test_graph_with_messages_in_dicts_recognises_messages_of_colleague(
    settings: Settings,
    access: AuthFileAccess,  # noqa: F811
    model: Model,  # noqa: F811
    asks_again: bool,
) -> None:
    """A channel without a reducer stores the messages as the client sent them."""

    class DictMessages(TypedDict):
        messages: list[Any]

    def tell_user(state: Any, config: RunnableConfig) -> Any:
        answer = f"serves {config['configurable']['user_id']!r}"
        return {"messages": [*state["messages"], {"role": "assistant", "content": answer}]}

    def build_graph(*_args: Any) -> Any:
        graph: Any = StateGraph(DictMessages).add_node("tell", tell_user)
        return graph.add_edge(START, "tell").compile()

    with serve_desk(settings, access, model, build_graph) as desk:
        mia, tom = desk.client("mia"), desk.client("tom")
        thread_id: str = mia.threads.create()["thread_id"]
        values: Any = mia.runs.wait(thread_id, "desk", input=build_input("Hello."))
        whole: Any = [*values["messages"], {"role": "user", "content": "Is the refund there?"}]
        tom.threads.update_state(thread_id, {"messages": whole}, as_node="__start__")
        if asks_again:
            whole = [*whole, {"role": "user", "content": "Is my refund there?"}]

        values = mia.runs.wait(thread_id, "desk", input={"messages": whole})

    served = "mia" if asks_again else ""
    assert values["messages"][-1]["content"] == f"serves {served!r}"


@pytest.mark.parametrize(
    ("given", "is_new"),
    [
        ({"private": "text"}, False),
        ({"messages": [{"role": "user", "content": "new", "id": "1"}]}, False),
        ({"messages": [["user", "new"], ["user", "from others"]]}, False),
        ({"messages": [["user", "from others"]]}, True),
        ({"messages": [["user", "from others"], ["user", "new"]]}, True),
        ({"messages": ["user", "new"]}, True),
        ({"messages": ["new", "from others"]}, False),
        ({"messages": [["assistant", "Hi."], ["user", "from others"]]}, False),
        ({"messages": [["user", "new"], {"role": "user", "content": "old", "id": "1"}]}, False),
        ({"messages": [{"role": "user", "content": "old", "id": "1"}, ["user", "new"]]}, True),
        ({"messages": [["user", "new"], "from others"]}, False),
        ({"messages": ["new", "from others", {"role": "system", "content": "new"}]}, False),
        ({"messages": [["user", "new"], {"role": "user", "content": " "}]}, True),
        (
            {
                "messages": [
                    ["user", "from others"],
                    {"role": "user", "content": [{"type": "text", "text": " "}]},
                ]
            },
            False,
        ),
        ({"messages": [["user", "from others"], "new"]}, True),
        ({"messages": "stored"}, False),
        ({"messages": {"role": "user", "content": [{"type": "image_url", "image_url": {}}]}}, True),
    ],
)
def test_input_with_a_new_text_is_a_message_of_the_person(given: Any, is_new: bool) -> None:
    """The comparison with the texts of the thread does not depend on the form of the messages."""
    stored = StoredTexts(
        frozenset({"1"}), frozenset({"from others"}), frozenset({"stored"}), frozenset({"messages"})
    )

    assert RunRequest(assistant_id="desk", input=given).continues_turn(stored) is not is_new
