"""A turn of a colleague uses nobody's memories until it ends, whoever answers or continues it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.server.talking import build_input
from tests.server.test_person import (
    FOLLOW_UP,
    REFUND_REQUEST,
    YES_COMMAND,
    Desk,
    model,  # noqa: F401 - a fixture
    team,  # noqa: F401 - a fixture
)

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
