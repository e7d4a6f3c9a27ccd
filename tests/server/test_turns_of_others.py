"""A turn of a colleague uses nobody's memories until it ends, whoever answers or continues it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from tests.server.running import wait_until
from tests.server.talking import build_input
from tests.server.test_person import (
    FOLLOW_UP,
    REFUND_REQUEST,
    YES_COMMAND,
    Desk,
    model,  # noqa: F401 - a fixture
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
    [{}, {"messages": []}, {"messages": [{"role": "system", "content": "Be brief."}]}],
    ids=["empty", "no message", "system message"],
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
