"""Tool calls and their results in all forms: nothing that was said or found is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    ToolMessage,
)
from langchain_core.runnables import RunnableLambda
from langgraph.graph import START, StateGraph, add_messages
from langgraph.store.memory import InMemoryStore

from perdure import SQLiteCheckpointer
from perdure.errors import InvalidUpdate
from perdure.memory import (
    ChatState,
    Keep,
    assemble,
    clear_tool_outputs,
    messages,
    summarize,
    trim,
    use_memories,
    view,
)
from perdure.memory.exchanges import NO_USER_MESSAGE
from perdure.memory.nodes import MessagesNode
from perdure.memory.tool_calls import NO_RESULT
from tests.memory.conversations import (
    Talk,
    comparison_keys,
    screenshot,
    search_block,
    search_result_block,
)
from tests.memory.providers import find_refusals

PARTS: dict[str, MessagesNode] = {
    "trim": trim(4_000),
    "trim the oldest": trim(4_000, strategy="first", start_on=None),
    "clearing": view(clear_tool_outputs()),
    "context": assemble(4_000),
    "memories": view(use_memories(InMemoryStore(), namespace=("m",)), trim(4_000)),
    "summary": view(summarize(RunnableLambda(lambda _: "nothing"), trigger=("messages", 99))),
}
every_part = pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)
NEXT = HumanMessage("And?", id="next")


def calls(*ids: str | None, text: Any = "", uid: str = "a", **more: Any) -> AIMessage:
    made: Any = [{"name": "pay", "args": {"of": n}, "id": each} for n, each in enumerate(ids)]
    return AIMessage(text, tool_calls=made, id=uid, **more)


def result(call: str, text: str = "", uid: str | None = None) -> ToolMessage:
    return ToolMessage(text or f"paid {call}", tool_call_id=call, id=uid or f"r{call}")


def asked(*talk: BaseMessage) -> list[BaseMessage]:
    return [HumanMessage("Pay", id="h"), *talk, NEXT]


def told(shown: list[BaseMessage]) -> list[tuple[str, str]]:
    return [(message.type, message.text) for message in shown]


def left_by(node: Any, talk: Sequence[BaseMessage]) -> list[BaseMessage]:
    """Return the messages of a state after a node of a graph, under the real reducer."""
    left: Any = add_messages(list[Any](talk), node.invoke({"messages": talk})["messages"])
    return list[BaseMessage](left)


# -- results that are missing, late or doubled


@every_part
def test_the_text_of_a_call_without_its_result_stays(part: MessagesNode) -> None:
    """A run was cut off, and the user goes on: the model is told what is not known."""
    talk = asked(calls("1", text="90 euros"))
    shown = part(talk)

    assert told(shown)[1:] == [("ai", "90 euros"), ("tool", NO_RESULT), ("human", "And?")]
    assert find_refusals(shown) == []
    assert comparison_keys(part(shown)) == comparison_keys(shown)
    assert comparison_keys(asyncio.run(part.acall(talk))) == comparison_keys(shown)


@every_part
def test_the_results_that_exist_stay(part: MessagesNode) -> None:
    """Of two parallel calls one has a result: it is shown, and the other one is stated."""
    shown = part(asked(calls("1", "2"), result("2")))

    assert told(shown)[1:4] == [("ai", ""), ("tool", "paid 2"), ("tool", NO_RESULT)]
    assert [m.tool_call_id for m in shown if isinstance(m, ToolMessage)] == ["2", "1"]
    assert find_refusals(shown) == []


@every_part
def test_a_late_result_moves_behind_its_call(part: MessagesNode) -> None:
    """The user wrote before the tool was done."""
    shown = part(asked(calls("1"), HumanMessage("There?"), result("1"), AIMessage("Done.")))

    assert [text for _, text in told(shown)] == ["Pay", "", "paid 1", "There?", "Done.", "And?"]
    assert find_refusals(shown) == []


def test_a_late_result_belongs_to_the_newest_call_before_it() -> None:
    """Some models number the calls of each turn from 0."""
    first, second = calls("0", uid="a"), calls("0", uid="b")
    talk = asked(first, HumanMessage("Again"), second, HumanMessage("There?"), result("0"))

    assert [text for _, text in told(trim(4_000)(talk))] == [
        *("Pay", "", NO_RESULT),
        *("Again", "", "paid 0"),
        *("There?", "And?"),
    ]


def test_the_first_of_several_results_counts() -> None:
    """Also if the second one comes late."""
    results = [result("1", text, text) for text in ("one", "two", "three")]
    talk = asked(calls("1"), *results[:2], HumanMessage("So?"), results[2])

    assert [text for _, text in told(trim(4_000)(talk))] == ["Pay", "", "one", "So?", "And?"]


def test_calls_with_one_id_are_told_apart() -> None:
    """Each keeps its result, under an id of its own that is the same the next time."""
    talk = asked(calls("0", "0"), result("0", "sun"), result("0", "rain", "r1"))
    shown = trim(4_000)(talk)

    assert [text for _, text in told(shown)] == ["Pay", "", "sun", "rain", "And?"]
    assert find_refusals(shown) == []
    assert trim(4_000)(shown) == shown == trim(4_000)(talk)
    assert trim(4_000).invoke({"messages": talk}) == {}


def test_a_call_that_is_there_twice_is_shown_once() -> None:
    """A call that occurs twice with the same name, arguments and id is shown once."""
    call: Any = {"name": "pay", "args": {}, "id": "1"}
    shown = trim(4_000)(asked(AIMessage("", tool_calls=[call, call]), result("1")))

    assert [len(m.tool_calls) for m in shown if isinstance(m, AIMessage)] == [1]
    assert find_refusals(shown) == []


@pytest.mark.parametrize("uid", [None, ""])
def test_a_call_without_an_id_gets_one(uid: str | None) -> None:
    """No result could name it."""
    shown = trim(4_000)(asked(calls(uid, text="90 euros")))

    assert [text for _, text in told(shown)] == ["Pay", "90 euros", NO_RESULT, "And?"]
    assert find_refusals(shown) == []


def test_a_call_that_could_not_be_parsed_never_ran() -> None:
    """An invalid call is shown only with a result; the text of its message is always shown."""
    bad: Any = {"name": "pay", "args": "{", "id": "1", "error": "bad"}
    talk = asked(AIMessage("90 euros", invalid_tool_calls=[bad], id="a"))
    shown = trim(4_000)(talk)
    with_result = trim(4_000)([*talk[:2], result("1", "not JSON"), NEXT])

    assert told(shown) == [("human", "Pay"), ("ai", "90 euros"), ("human", "And?")]
    assert [m.invalid_tool_calls for m in shown if isinstance(m, AIMessage)] == [[]]
    assert [text for _, text in told(with_result)] == ["Pay", "90 euros", "not JSON", "And?"]


def test_results_of_unknown_calls_are_left_out() -> None:
    """Wherever they stand."""
    talk = asked(result("8"), AIMessage("Well."), result("9"))

    assert told(trim(4_000)(talk)) == [("human", "Pay"), ("ai", "Well."), ("human", "And?")]


def test_a_call_that_waits_at_the_end_is_not_shown_before_its_results() -> None:
    """A run is interrupted before its tools; as soon as one result is there, the rest is stated."""
    talk = [HumanMessage("Pay", id="h"), calls("1", "2", text="90 euros")]

    assert told(trim(4_000)(talk)) == [("human", "Pay")]
    assert trim(4_000).invoke({"messages": talk}) == {}
    shown = trim(4_000)([*talk, result("1")])
    assert [text for _, text in told(shown)] == ["Pay", "90 euros", "paid 1", NO_RESULT]


def test_a_missing_result_is_in_the_request_only(tmp_path: Any) -> None:
    """Neither `trim` nor `clear_tool_outputs` writes it into the state or the history."""
    builder = StateGraph(ChatState)
    builder.add_node("trim", trim(4_000)).add_node("clear", clear_tool_outputs(keep=0))
    builder.add_edge(START, "trim").add_edge("trim", "clear")
    talk = asked(calls("1", "2"), result("1", "found " * 400))
    with SQLiteCheckpointer.open(tmp_path / "a.db") as saver:
        graph = builder.compile(checkpointer=saver)
        thread: Any = {"configurable": {"thread_id": "t"}}
        given: Any = {"messages": talk}
        out = graph.invoke(given, thread)
        said = [item.value.text for item in saver.history("t")]

    assert [m.id for m in out["messages"]] == ["h", "a", "r1", "next"]
    assert out["messages"][2].text.startswith("[The result of")
    assert NO_RESULT not in said


def test_a_late_result_leaves_the_state_with_its_call() -> None:
    """And it stays at its place in the state as long as the call does."""
    talk = asked(calls("1"), HumanMessage("There?", id="h2"), result("1"))

    assert trim(4_000).invoke({"messages": talk}) == {}
    assert [m.id for m in left_by(trim(2, token_counter=len), talk)] == ["h2", "next"]


def test_a_missing_result_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """Not in each of the requests in which it is stated."""
    talk = asked(calls("logged once"))
    for _ in range(3):
        trim(4_000)(talk)

    assert caplog.text.count("'logged once'") == 1


def test_a_stated_result_counts_in_the_budget() -> None:
    """The message that replaces a missing result counts, because it is part of the request."""
    talk = asked(calls("1"))
    assert len(trim(4, token_counter=len)(talk)) == 4
    assert told(trim(3, token_counter=len)(talk)) == [("human", "And?")]


def test_a_late_result_is_summarised_with_its_call() -> None:
    """A late result is summarised with its call, because a result needs its call."""
    heard: list[str] = []

    def sums_up(prompt: Any) -> str:
        heard.append(str(prompt))
        return "They paid."

    node = summarize(RunnableLambda(sums_up), trigger=("messages", 4), keep=("messages", 2))
    talk = asked(calls("1"), HumanMessage("There?", id="h2"), result("1"), AIMessage("Ok", id="o"))
    update = node.invoke({"messages": talk})

    assert "paid 1" in heard[0]
    assert "r1" in update["summarized"]


# -- messages without a question before them


@every_part
@pytest.mark.parametrize("first", [AIMessage("Reminder"), ChatMessage(content="t", role="cron")])
def test_without_a_human_message_all_is_one_turn(part: MessagesNode, first: BaseMessage) -> None:
    """An agent that a schedule starts sees its own calls and their results."""
    talk = [first, calls("1"), result("1")]

    assert comparison_keys(part(talk)) == comparison_keys(talk)
    assert part(talk[1:]) == talk[1:]
    assert trim(4_000).invoke({"messages": talk}) == {}


@every_part
def test_what_precedes_the_first_question_is_the_oldest_turn(part: MessagesNode) -> None:
    """The user asks an agent that has worked by itself; some providers need a question first."""
    talk = [AIMessage("Reminder", id="m"), calls("1"), result("1"), AIMessage("Done", id="d"), NEXT]
    shown = part(talk)

    assert told(shown)[0] == ("human", NO_USER_MESSAGE)
    assert comparison_keys(shown[1:]) == comparison_keys(talk)
    assert comparison_keys(part(shown)) == comparison_keys(shown)
    assert trim(4_000).invoke({"messages": talk}) == {}
    assert [m.id for m in left_by(trim(2, token_counter=len), talk)] == ["next"]


def test_a_turn_without_a_question_is_trimmed_within() -> None:
    """The first message stays unless it calls tools, and so do the newest exchanges."""
    talk: Talk = [AIMessage("Reminder", id="m")]
    for n in range(3):
        talk += [calls(f"{n}", uid=f"a{n}"), result(f"{n}")]

    shown = trim(6, token_counter=len)(talk)
    assert "1 earlier step" in shown[0].text
    assert [m.id for m in shown[1:]] == ["m", "a1", "r1", "a2", "r2"]
    assert [m.id for m in trim(2, token_counter=len)(talk[1:])] == ["a2", "r2"]
    assert [m.id for m in left_by(trim(3, token_counter=len), [*talk])] == ["m", "a2", "r2"]
    assert [m.id for m in trim(9, token_counter=len, end_on="ai")(talk[:3])] == ["m"]


# -- answers that are neither text nor `tool_calls`


@every_part
@pytest.mark.parametrize(
    "answer",
    [
        AIMessage("", additional_kwargs={"audio": {"id": "audio_1", "transcript": "Yes."}}),
        AIMessage("", additional_kwargs={"refusal": "I cannot help with that."}),
        AIMessage([{"type": "refusal", "refusal": "No."}]),
        AIMessage("", additional_kwargs={"tool_outputs": [{"type": "web_search_call", "id": "w"}]}),
        AIMessage([{"type": "image_generation_call", "id": "i", "result": "AAAA"}]),
        AIMessage([{"type": "mcp_call", "id": "m", "name": "look", "output": "found"}]),
        AIMessage([{"type": "code_interpreter_call", "id": "c", "code": "1", "outputs": None}]),
        AIMessage([search_block("1"), search_result_block("1")]),
        AIMessage([{"type": "server_tool_call", "id": "1", "name": "x", "args": {}},
                   {"type": "server_tool_result", "tool_call_id": "1", "output": "y"}]),
        AIMessage([{"type": "executable_code", "executable_code": "1", "language": "PYTHON"}]),
        AIMessage([{"type": "compaction", "encrypted_content": "AAAA"}]),
    ],
    ids=lambda answer: str(answer.content or answer.additional_kwargs)[:30],
)  # fmt: skip
def test_an_answer_without_text_is_shown(part: MessagesNode, answer: AIMessage) -> None:
    """A sound, a refusal, a block of a provider."""
    talk = asked(answer.model_copy(update={"id": "a"}))

    assert part(talk) == talk
    assert trim(4_000).invoke({"messages": talk}) == {}


@pytest.mark.parametrize(
    "answer",
    [
        AIMessage("", additional_kwargs={"refusal": None, "reasoning_content": "Well."}),
        AIMessage([{"type": "reasoning", "id": "rs_1", "summary": []}]),
        AIMessage([{"type": "thinking", "thinking": "Well.", "signature": "s"}]),
        AIMessage([{"index": 0}]),
    ],
)
def test_thoughts_alone_are_not_shown(answer: AIMessage) -> None:
    """OpenAI and Anthropic refuse a thought that nothing follows."""
    assert trim(4_000)(asked(answer)) == asked()


COMPUTER = {"type": "computer_call", "id": "cu_1", "call_id": "1", "action": {"type": "wait"}}
THOUGHT = {"type": "reasoning", "id": "rs_1", "summary": []}
FUNCTION = {"name": "look", "arguments": "{}"}
BLOCK_EXCHANGES: dict[str, Talk] = {
    "computer": [AIMessage([THOUGHT, COMPUTER]), screenshot("1")],
    "v0": [AIMessage("", additional_kwargs={"tool_outputs": [COMPUTER]}), screenshot("1")],
    "v1": [AIMessage([{"type": "non_standard", "value": COMPUTER}]), screenshot("1")],
    "approval": [
        AIMessage([{"type": "mcp_approval_request", "id": "1", "name": "look"}]),
        HumanMessage([{"type": "mcp_approval_response", "approval_request_id": "1"}]),
    ],
    "patch": [
        AIMessage([{"type": "apply_patch_call", "call_id": "1", "operation": {}}]),
        HumanMessage([{"type": "apply_patch_call_output", "call_id": "1"}]),
    ],
    "paused": [AIMessage([search_block("1")]), AIMessage([search_result_block("1")])],
    "function": [
        AIMessage("", additional_kwargs={"function_call": FUNCTION}),
        FunctionMessage(name="look", content="found"),
    ],
}
every_form = pytest.mark.parametrize("form", BLOCK_EXCHANGES)


def exchange(form: str) -> Talk:
    return [m.model_copy(update={"id": f"e{n}"}) for n, m in enumerate(BLOCK_EXCHANGES[form])]


@every_part
@every_form
def test_a_call_in_a_block_and_its_output_are_shown(part: MessagesNode, form: str) -> None:
    """Calls that stand only in content blocks, in all forms of langchain's clients."""
    talk = asked(*exchange(form), AIMessage("Done", id="d"))

    assert comparison_keys(part(talk)) == comparison_keys(talk)
    assert trim(4_000).invoke({"messages": talk}) == {}


@every_form
@pytest.mark.parametrize("kept", [0, 1])
def test_a_call_in_a_block_goes_with_its_output(form: str, kept: int) -> None:
    """A window that has room for one of two messages has neither; one alone is not shown."""
    both = exchange(form)
    talk = [HumanMessage("Pay", id="h"), *both, AIMessage("Done", id="d")]
    window = trim(3, token_counter=len)
    shown = trim(4_000)(asked(both[kept], AIMessage("Done", id="d")))

    assert [m.id for m in window(talk)] == ["h", "d"]
    assert [m.id for m in left_by(window, talk)] == ["h", "d"]
    assert find_refusals(shown) == []
    if kept == 0 and form != "function":  # no message can stand for such an output
        assert NO_RESULT in shown[1].text


@pytest.mark.parametrize(
    ("block", "args"),
    [
        ({"type": "tool_use", "id": "1", "name": "look", "input": {"q": 1}}, {"q": 1}),
        ({"type": "tool_call", "id": "1", "name": "look", "args": {"q": 1}}, {"q": 1}),
        (
            {"type": "function_call", "call_id": "1", "name": "look", "arguments": '{"q": 1}'},
            {"q": 1},
        ),
        (
            {"type": "custom_tool_call", "call_id": "1", "name": "look", "input": "q"},
            {"__arg1": "q"},
        ),
    ],
)
def test_a_call_that_is_only_in_the_content_is_a_tool_call(block: Any, args: Any) -> None:
    """In the request, so that each provider's client sends it; with its result, or a stated one."""
    talk = asked(AIMessage([block], id="a"), result("1"))
    shown = trim(4_000)(talk)
    without = trim(4_000)([talk[0], talk[1], NEXT])

    for request in (shown, without):
        [call] = [m for m in request if isinstance(m, AIMessage)]
        assert [(c["name"], c["args"], c["id"]) for c in call.tool_calls] == [("look", args, "1")]
        assert find_refusals(request) == []
    assert shown[2] is talk[2]
    assert NO_RESULT in str(without[2].content)
    assert trim(4_000).invoke({"messages": talk}) == {}


def test_the_result_of_a_custom_tool_has_its_form() -> None:
    """OpenAI takes no other for a `custom_tool_call`."""
    block = {"type": "custom_tool_call", "call_id": "1", "name": "pay", "input": "q"}
    shown = trim(4_000)(asked(calls("1", text=[block])))

    assert shown[2].content == [{"type": "custom_tool_call_output", "output": NO_RESULT}]


def test_a_screenshot_is_neither_cleared_nor_cut() -> None:
    """OpenAI takes no text in its place."""
    image = screenshot("1").model_copy(update={"content": "data:image/png;base64," + "A" * 9_000})
    talk = [HumanMessage("Look"), AIMessage([COMPUTER]), image, AIMessage("Done")]

    assert clear_tool_outputs(keep=0)(talk) == talk


def test_a_client_call_within_a_server_call() -> None:
    """Anthropic's code execution calls the application's tools, and ends in a later message."""
    code = {"type": "server_tool_use", "id": "s", "name": "code_execution", "input": {}}
    ended = {"type": "code_execution_tool_result", "tool_use_id": "s", "content": {}}
    talk = asked(calls("1", text=[code]), result("1"), AIMessage([ended], id="z"))

    assert trim(4_000)(talk) == talk
    assert [m.id for m in trim(3, token_counter=len)(talk)] == ["next"]
    assert [m.id for m in trim(3, token_counter=len, start_on=None)(talk)] == ["next"]


def test_a_keep_does_not_part_a_call_in_a_block_from_its_output() -> None:
    """As for other calls."""
    talk = asked(*exchange("computer"))
    with pytest.raises(InvalidUpdate, match="would separate tool call '1'"):
        messages(talk, Keep(2))
