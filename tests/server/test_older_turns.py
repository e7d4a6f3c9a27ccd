"""The person continues from an older checkpoint of a thread that a colleague has changed."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from langchain_core.language_models import FakeListChatModel
from langgraph.graph import START, MessagesState, StateGraph

from perdure.checkpointers import open_checkpointer
from perdure.graphs import chat_graph
from perdure.run_tables.thread_list import ThreadList
from tests.server.runs.test_turns_of_others import start_thread
from tests.server.talking import build_input
from tests.server.test_person import (
    FOLLOW_UP,
    REFUND_REQUEST,
    YES_COMMAND,
    Desk,
    model,
    team,
)

__all__ = ["model", "team"]


def read_checkpoint(desk: Desk, user: str, thread_id: str) -> Any:
    return desk.client(user).threads.get_state(thread_id)["checkpoint"]


def rewind(desk: Desk, user: str, thread_id: str, checkpoint: Any) -> None:
    path = f"/ui/rewind?id={thread_id}&checkpoint={checkpoint['checkpoint_id']}"
    assert desk.post(user, path).status_code == 303


@pytest.mark.parametrize("names_interrupt", [False, True], ids=["answer", "map of answers"])
@pytest.mark.parametrize("chosen_by", ["checkpoint", "rewind"])
def test_question_that_colleague_answered_by_an_edit_is_continued_without_memories(
    team: Desk, names_interrupt: bool, chosen_by: str
) -> None:
    """langgraph uses the stored answer of the colleague again."""
    thread_id, mia, tom = start_thread(team), team.client("mia"), team.client("tom")
    mia.runs.wait(thread_id, "desk", input=REFUND_REQUEST)
    state: Any = mia.threads.get_state(thread_id)
    question, interrupt_id = state["checkpoint"], state["interrupts"][0]["id"]
    edit: Any = [{"type": "edit", "args": {"to": "Walnut"}}]
    answer: Any = {"resume": {interrupt_id: edit} if names_interrupt else edit}
    tom.runs.wait(thread_id, "desk", command=answer)
    mia.runs.wait(thread_id, "desk", input=build_input("Is my refund there?"))
    asked = len(team.model.requests)

    options: Any = {"checkpoint": question}
    if chosen_by == "rewind":
        rewind(team, "mia", thread_id, question)
        options = {}
    mia.runs.wait(thread_id, "desk", command=YES_COMMAND, **options)

    shown = team.prompts(asked)
    assert ("refund" in shown, "Magpie" in shown) == (True, False)


def test_copy_of_colleagues_checkpoint_is_continued_without_memories(team: Desk) -> None:
    """langgraph stores such a copy without the metadata that names the colleague."""
    thread_id, mia, tom = start_thread(team), team.client("mia"), team.client("tom")
    tom.threads.update_state(thread_id, FOLLOW_UP, as_node="__start__")
    tom.threads.update_state(thread_id, None, as_node="__copy__")
    copied = read_checkpoint(team, "tom", thread_id)
    mia.runs.wait(thread_id, "desk", input=build_input("Thanks."))
    asked = len(team.model.requests)

    mia.runs.wait(thread_id, "desk", input=None, checkpoint=copied)

    shown = team.prompts(asked)
    assert ("refund" in shown, "Magpie" in shown) == (True, False)


def test_answer_in_repeated_turn_of_colleague_uses_no_memories(team: Desk) -> None:
    """The person lets the colleague's turn run again, and then answers its question."""
    thread_id, mia, tom = start_thread(team), team.client("mia"), team.client("tom")
    tom.runs.wait(thread_id, "desk", input=REFUND_REQUEST, interrupt_before=["respond"])
    stopped = read_checkpoint(team, "tom", thread_id)
    mia.runs.wait(thread_id, "desk", input=build_input("Never mind."))
    asked = len(team.model.requests)

    mia.runs.wait(thread_id, "desk", input=None, checkpoint=stopped)
    mia.runs.wait(thread_id, "desk", command=YES_COMMAND)

    shown = team.prompts(asked)
    assert ("refund" in shown, "Magpie" in shown) == (True, False)


@pytest.mark.parametrize(("user", "uses_memories"), [("tom", False), ("mia", True)])
def test_fork_by_colleague_is_continued_without_memories(
    team: Desk, user: str, uses_memories: bool
) -> None:
    """A fork continues from an older checkpoint that the colleague has chosen."""
    thread_id, mia = start_thread(team), team.client("mia")
    mia.runs.wait(thread_id, "desk", input=REFUND_REQUEST)
    question = read_checkpoint(team, "mia", thread_id)
    mia.runs.wait(thread_id, "desk", input=build_input("Never mind."))
    asked = len(team.model.requests)

    fork = f"/ui/fork?id={thread_id}&checkpoint={question['checkpoint_id']}"
    assert team.post(user, fork, data={"new": "fork"}).status_code == 303
    team.client(user).runs.wait("fork", "desk", command=YES_COMMAND)

    shown = team.prompts(asked)
    assert ("refund" in shown, "Magpie" in shown) == (True, uses_memories)


@pytest.mark.parametrize("way", ["run", "rewind", "update"])
def test_turn_of_person_that_is_newest_again_uses_her_memories(team: Desk, way: str) -> None:
    """The newest turn was the colleague's, until the person went back to her own turn."""
    thread_id, mia, tom = start_thread(team), team.client("mia"), team.client("tom")
    mia.runs.wait(thread_id, "desk", input=REFUND_REQUEST, interrupt_before=["respond"])
    own = read_checkpoint(team, "mia", thread_id)
    tom.runs.wait(thread_id, "desk", input=FOLLOW_UP)
    asked = len(team.model.requests)

    options: Any = {}
    if way == "run":
        options = {"checkpoint": own}
    elif way == "rewind":
        rewind(team, "mia", thread_id, own)
    else:
        mia.threads.update_state(thread_id, {"messages": []}, checkpoint=own, as_node="__start__")
    mia.runs.wait(thread_id, "desk", input=None, **options)
    answered = len(team.model.requests)
    assert "Magpie" in team.prompts(asked)
    mia.runs.wait(thread_id, "desk", command=YES_COMMAND)

    assert "Magpie" in team.prompts(answered)


def test_run_without_new_message_is_repeated_without_memories(team: Desk) -> None:
    """The input checkpoint of such a run begins no turn of the person."""
    thread_id, mia, tom = start_thread(team), team.client("mia"), team.client("tom")
    tom.threads.update_state(thread_id, FOLLOW_UP, as_node="__start__")
    empty: Any = {"messages": []}
    mia.runs.wait(thread_id, "desk", input=empty, interrupt_before=["respond"])
    stopped = read_checkpoint(team, "mia", thread_id)
    mia.runs.wait(thread_id, "desk", input=build_input("Thanks."))
    asked = len(team.model.requests)

    mia.runs.wait(thread_id, "desk", input=None, checkpoint=stopped)

    shown = team.prompts(asked)
    assert ("refund" in shown, "Magpie" in shown) == (True, False)


def test_message_that_the_reducer_refuses_starts_no_turn_of_the_person(team: Desk) -> None:
    thread_id, mia, tom = start_thread(team), team.client("mia"), team.client("tom")
    tom.threads.update_state(thread_id, FOLLOW_UP, as_node="__start__")
    removal = {"type": "remove", "id": "unknown", "content": ""}
    sent: Any = {"messages": [{"role": "user", "content": "Thanks."}, removal]}
    with suppress(Exception):
        mia.runs.wait(thread_id, "desk", input=sent)

    with open_checkpointer(team.settings.db) as saver:
        thread = ThreadList(saver).get(thread_id)
    assert thread is not None
    assert thread.changes_by_other_users == "since_last_message"


def test_rewind_from_state_of_nobody_to_turn_of_person_uses_no_memories(team: Desk) -> None:
    """`perdure chat --no-memory` makes nobody the user of the thread's newest checkpoint."""
    thread_id, mia = start_thread(team), team.client("mia")
    mia.runs.wait(thread_id, "desk", input=REFUND_REQUEST)
    question = read_checkpoint(team, "mia", thread_id)
    with open_checkpointer(team.settings.db) as saver:
        builder: Any = StateGraph(MessagesState).add_node("respond", lambda _: {})
        graph = builder.add_edge(START, "respond").compile(checkpointer=saver)
        nobody: Any = {
            "configurable": {"thread_id": thread_id, "user_id": ""},
            "metadata": {"owner": team.head(thread_id)["owner"], "graph_id": "desk"},
        }
        graph.update_state(nobody, {"messages": []}, as_node="respond")
    assert team.head(thread_id)["user_id"] == ""
    asked = len(team.model.requests)

    rewind(team, "tom", thread_id, question)
    team.client("tom").runs.wait(thread_id, "desk", command=YES_COMMAND)

    shown = team.prompts(asked)
    assert ("refund" in shown, "Magpie" in shown) == (True, False)


@pytest.mark.parametrize("has_earlier_changes", [False, True])
@pytest.mark.parametrize("changes_by", ["update", "run"])
def test_changes_of_a_thread_of_nobody_are_recorded(
    team: Desk, changes_by: str, has_earlier_changes: bool
) -> None:
    """`perdure rewind` can make a checkpoint of the person the head again."""
    thread_id, tom = start_thread(team), team.client("tom")
    if has_earlier_changes:
        tom.runs.wait(thread_id, "desk", input=FOLLOW_UP)
        own: Any = build_input("Is my refund there?")
        team.client("mia").runs.wait(thread_id, "desk", input=own)
    with open_checkpointer(team.settings.db) as saver:
        graph: Any = chat_graph(FakeListChatModel(responses=["Hi."]), checkpointer=saver)
        config: Any = {
            "configurable": {"thread_id": thread_id, "user_id": ""},
            "metadata": {"owner": team.head(thread_id)["owner"], "graph_id": "desk"},
        }
        graph.invoke({"messages": ["Hello."]}, config)
    assert team.head(thread_id)["user_id"] == ""

    if changes_by == "update":
        tom.threads.update_state(thread_id, FOLLOW_UP, as_node="__start__")
    else:
        tom.runs.wait(thread_id, "desk", input=FOLLOW_UP)

    with open_checkpointer(team.settings.db) as saver:
        thread = ThreadList(saver).get(thread_id)
    assert thread is not None
    assert thread.changes_by_other_users == "since_last_message"
