"""Tool calls and their results in all forms: no text and no result is lost."""

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
from perdure.memory.nodes import MessagesNode
from perdure.memory.tool_call_matching import NO_USER_MESSAGE
from perdure.memory.tool_calls import NO_RESULT
from tests.memory.conversations import (
    Talk,
    comparison_keys,
    screenshot,
    search_block,
    search_result_block,
)
from tests.memory.provider_rules import find_refusals

PARTS: dict[str, MessagesNode] = {
    "trim": trim(4_000),
    "trim the oldest": trim(4_000, strategy="first", start_on=None),
    "clearing": view(clear_tool_outputs()),
    "context": assemble(4_000),
    "memories": view(use_memories(InMemoryStore(), namespace=("m",)), trim(4_000)),
    "summary": view(summarize(RunnableLambda(lambda _: "nothing"), trigger=("messages", 99))),
}
for_each_part = pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)
NEXT = HumanMessage("And?", id="next")


def build_calling_message(
    *ids: str | None, text: Any = "", uid: str = "a", **more: Any
) -> AIMessage:
    tool_calls: Any = [
        {"name": "pay", "args": {"of": n}, "id": call_id} for n, call_id in enumerate(ids)
    ]
    return AIMessage(text, tool_calls=tool_calls, id=uid, **more)


def build_result(call_id: str, text: str = "", uid: str | None = None) -> ToolMessage:
    return ToolMessage(text or f"paid {call_id}", tool_call_id=call_id, id=uid or f"r{call_id}")


def build_conversation(*answers: BaseMessage) -> list[BaseMessage]:
    return [HumanMessage("Pay", id="h"), *answers, NEXT]


def list_types_and_texts(messages: list[BaseMessage]) -> list[tuple[str, str]]:
    return [(message.type, message.text) for message in messages]


def apply_node(node: Any, talk: Sequence[BaseMessage]) -> list[BaseMessage]:
    """Return the messages of a state after a graph node ran, under the real reducer."""
    messages: Any = add_messages(list[Any](talk), node.invoke({"messages": talk})["messages"])
    return list[BaseMessage](messages)


# -- results that are missing, late or duplicated


@for_each_part
def test_call_without_a_result_keeps_its_text_and_gets_a_stated_result(part: MessagesNode) -> None:
    """A run was cut off and the user continues. The model learns that the result is unknown."""
    talk = build_conversation(build_calling_message("1", text="90 euros"))
    request = part(talk)

    assert list_types_and_texts(request)[1:] == [
        ("ai", "90 euros"),
        ("tool", NO_RESULT),
        ("human", "And?"),
    ]
    assert find_refusals(request) == []
    assert comparison_keys(part(request)) == comparison_keys(request)
    assert comparison_keys(asyncio.run(part.acall(talk))) == comparison_keys(request)


@for_each_part
def test_existing_results_of_parallel_calls_stay(part: MessagesNode) -> None:
    """A result is stated for the call that has none."""
    request = part(build_conversation(build_calling_message("1", "2"), build_result("2")))

    assert list_types_and_texts(request)[1:4] == [
        ("ai", ""),
        ("tool", "paid 2"),
        ("tool", NO_RESULT),
    ]
    assert [m.tool_call_id for m in request if isinstance(m, ToolMessage)] == ["2", "1"]
    assert find_refusals(request) == []


@for_each_part
def test_late_result_moves_behind_its_call(part: MessagesNode) -> None:
    """The user wrote before the tool finished."""
    request = part(
        build_conversation(
            build_calling_message("1"),
            HumanMessage("There?"),
            build_result("1"),
            AIMessage("Done."),
        )
    )

    assert [text for _, text in list_types_and_texts(request)] == [
        "Pay",
        "",
        "paid 1",
        "There?",
        "Done.",
        "And?",
    ]
    assert find_refusals(request) == []


def test_late_result_belongs_to_the_newest_call_with_its_id() -> None:
    """Some models number the calls of each turn from 0."""
    first, second = build_calling_message("0", uid="a"), build_calling_message("0", uid="b")
    talk = build_conversation(
        first, HumanMessage("Again"), second, HumanMessage("There?"), build_result("0")
    )

    assert [text for _, text in list_types_and_texts(trim(4_000)(talk))] == [
        *("Pay", "", NO_RESULT),
        *("Again", "", "paid 0"),
        *("There?", "And?"),
    ]


def test_first_of_several_results_of_a_call_counts() -> None:
    results = [build_result("1", text, text) for text in ("one", "two", "three")]
    talk = build_conversation(
        build_calling_message("1"), *results[:2], HumanMessage("So?"), results[2]
    )

    assert [text for _, text in list_types_and_texts(trim(4_000)(talk))] == [
        "Pay",
        "",
        "one",
        "So?",
        "And?",
    ]


def test_calls_with_equal_ids_get_distinct_ids_and_their_results() -> None:
    """The new IDs are stable."""
    talk = build_conversation(
        build_calling_message("0", "0"), build_result("0", "sun"), build_result("0", "rain", "r1")
    )
    request = trim(4_000)(talk)

    assert [text for _, text in list_types_and_texts(request)] == ["Pay", "", "sun", "rain", "And?"]
    assert find_refusals(request) == []
    assert trim(4_000)(request) == request == trim(4_000)(talk)
    assert trim(4_000).invoke({"messages": talk}) == {}


def test_identical_call_is_shown_once() -> None:
    """The two calls have the same name, arguments and ID."""
    call: Any = {"name": "pay", "args": {}, "id": "1"}
    request = trim(4_000)(
        build_conversation(AIMessage("", tool_calls=[call, call]), build_result("1"))
    )

    assert [len(m.tool_calls) for m in request if isinstance(m, AIMessage)] == [1]
    assert find_refusals(request) == []


@pytest.mark.parametrize("uid", [None, ""])
def test_call_without_an_id_gets_one_and_a_stated_result(uid: str | None) -> None:
    """No result could name the call otherwise."""
    request = trim(4_000)(build_conversation(build_calling_message(uid, text="90 euros")))

    assert [text for _, text in list_types_and_texts(request)] == [
        "Pay",
        "90 euros",
        NO_RESULT,
        "And?",
    ]
    assert find_refusals(request) == []


def test_invalid_call_is_shown_only_with_a_result() -> None:
    """The text of its message is always shown."""
    bad: Any = {"name": "pay", "args": "{", "id": "1", "error": "bad"}
    talk = build_conversation(AIMessage("90 euros", invalid_tool_calls=[bad], id="a"))
    request = trim(4_000)(talk)
    with_result = trim(4_000)([*talk[:2], build_result("1", "not JSON"), NEXT])

    assert list_types_and_texts(request) == [
        ("human", "Pay"),
        ("ai", "90 euros"),
        ("human", "And?"),
    ]
    assert [m.invalid_tool_calls for m in request if isinstance(m, AIMessage)] == [[]]
    assert [text for _, text in list_types_and_texts(with_result)] == [
        "Pay",
        "90 euros",
        "not JSON",
        "And?",
    ]


def test_results_of_unknown_calls_are_left_out() -> None:
    talk = build_conversation(build_result("8"), AIMessage("Well."), build_result("9"))

    assert list_types_and_texts(trim(4_000)(talk)) == [
        ("human", "Pay"),
        ("ai", "Well."),
        ("human", "And?"),
    ]


def test_pending_calls_at_the_end_are_hidden_until_a_result_exists() -> None:
    """With the first result, the results of the other calls are stated."""
    talk = [HumanMessage("Pay", id="h"), build_calling_message("1", "2", text="90 euros")]

    assert list_types_and_texts(trim(4_000)(talk)) == [("human", "Pay")]
    assert trim(4_000).invoke({"messages": talk}) == {}
    request = trim(4_000)([*talk, build_result("1")])
    assert [text for _, text in list_types_and_texts(request)] == [
        "Pay",
        "90 euros",
        "paid 1",
        NO_RESULT,
    ]


def test_stated_result_is_not_written_to_state_or_history(tmp_path: Any) -> None:
    """`trim` and `clear_tool_outputs` state results only in requests."""
    builder = StateGraph(ChatState)
    builder.add_node("trim", trim(4_000)).add_node("clear", clear_tool_outputs(keep=0))
    builder.add_edge(START, "trim").add_edge("trim", "clear")
    talk = build_conversation(build_calling_message("1", "2"), build_result("1", "found " * 400))
    with SQLiteCheckpointer.open(tmp_path / "a.db") as saver:
        graph = builder.compile(checkpointer=saver)
        thread: Any = {"configurable": {"thread_id": "t"}}
        input: Any = {"messages": talk}
        output = graph.invoke(input, thread)
        history = [item.value.text for item in saver.history("t")]

    assert [m.id for m in output["messages"]] == ["h", "a", "r1", "next"]
    assert output["messages"][2].text.startswith("[The result of")
    assert NO_RESULT not in history


def test_late_result_is_trimmed_from_the_state_with_its_call() -> None:
    talk = build_conversation(
        build_calling_message("1"), HumanMessage("There?", id="h2"), build_result("1")
    )

    assert trim(4_000).invoke({"messages": talk}) == {}
    assert [m.id for m in apply_node(trim(2, token_counter=len), talk)] == ["h2", "next"]


def test_missing_result_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    talk = build_conversation(build_calling_message("logged once"))
    for _ in range(3):
        trim(4_000)(talk)

    assert caplog.text.count("'logged once'") == 1


def test_stated_result_counts_in_the_budget() -> None:
    talk = build_conversation(build_calling_message("1"))
    assert len(trim(4, token_counter=len)(talk)) == 4
    assert list_types_and_texts(trim(3, token_counter=len)(talk)) == [("human", "And?")]


def test_late_result_is_summarized_with_its_call() -> None:
    prompts: list[str] = []

    def summarize_prompt(prompt: Any) -> str:
        prompts.append(str(prompt))
        return "They paid."

    node = summarize(
        RunnableLambda(summarize_prompt), trigger=("messages", 4), keep=("messages", 2)
    )
    talk = build_conversation(
        build_calling_message("1"),
        HumanMessage("There?", id="h2"),
        build_result("1"),
        AIMessage("Ok", id="o"),
    )
    update = node.invoke({"messages": talk})

    assert "paid 1" in prompts[0]
    assert "r1" in update["summarized"]


# -- messages without a question before them


@for_each_part
@pytest.mark.parametrize("first", [AIMessage("Reminder"), ChatMessage(content="t", role="cron")])
def test_messages_without_a_human_message_are_one_turn(
    part: MessagesNode, first: BaseMessage
) -> None:
    """An agent that a schedule starts sees its own calls and their results."""
    talk = [first, build_calling_message("1"), build_result("1")]

    assert comparison_keys(part(talk)) == comparison_keys(talk)
    assert part(talk[1:]) == talk[1:]
    assert trim(4_000).invoke({"messages": talk}) == {}


@for_each_part
def test_messages_before_the_first_question_are_the_oldest_turn(part: MessagesNode) -> None:
    """A stated user message precedes them, because some providers need one."""
    talk = [
        AIMessage("Reminder", id="m"),
        build_calling_message("1"),
        build_result("1"),
        AIMessage("Done", id="d"),
        NEXT,
    ]
    request = part(talk)

    assert list_types_and_texts(request)[0] == ("human", NO_USER_MESSAGE)
    assert comparison_keys(request[1:]) == comparison_keys(talk)
    assert comparison_keys(part(request)) == comparison_keys(request)
    assert trim(4_000).invoke({"messages": talk}) == {}
    assert [m.id for m in apply_node(trim(2, token_counter=len), talk)] == ["next"]


def test_turn_without_a_question_is_trimmed_between_its_ends() -> None:
    """The first message stays unless it calls tools, and so do the newest exchanges."""
    talk: Talk = [AIMessage("Reminder", id="m")]
    for n in range(3):
        talk += [build_calling_message(f"{n}", uid=f"a{n}"), build_result(f"{n}")]

    request = trim(6, token_counter=len)(talk)
    assert "1 earlier step" in request[0].text
    assert [m.id for m in request[1:]] == ["m", "a1", "r1", "a2", "r2"]
    assert [m.id for m in trim(2, token_counter=len)(talk[1:])] == ["a2", "r2"]
    assert [m.id for m in apply_node(trim(3, token_counter=len), [*talk])] == [
        "m",
        "a2",
        "r2",
    ]
    assert [m.id for m in trim(9, token_counter=len, end_on="ai")(talk[:3])] == ["m"]


# -- answers that are neither text nor `tool_calls`


@for_each_part
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
def test_answer_with_audio_refusal_or_provider_blocks_is_shown(
    part: MessagesNode, answer: AIMessage
) -> None:
    talk = build_conversation(answer.model_copy(update={"id": "a"}))

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
def test_answer_with_thoughts_only_is_left_out(answer: AIMessage) -> None:
    """OpenAI and Anthropic refuse a thought that nothing follows."""
    assert trim(4_000)(build_conversation(answer)) == build_conversation()


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
for_each_form = pytest.mark.parametrize("form", BLOCK_EXCHANGES)


def build_block_exchange(form: str) -> Talk:
    return [m.model_copy(update={"id": f"e{n}"}) for n, m in enumerate(BLOCK_EXCHANGES[form])]


@for_each_part
@for_each_form
def test_call_in_a_content_block_and_its_output_are_shown(part: MessagesNode, form: str) -> None:
    talk = build_conversation(*build_block_exchange(form), AIMessage("Done", id="d"))

    assert comparison_keys(part(talk)) == comparison_keys(talk)
    assert trim(4_000).invoke({"messages": talk}) == {}


@for_each_form
@pytest.mark.parametrize("kept_index", [0, 1])
def test_call_in_a_content_block_and_its_output_are_trimmed_together(
    form: str, kept_index: int
) -> None:
    """A window with room for one of the two messages has neither."""
    exchange = build_block_exchange(form)
    talk = [HumanMessage("Pay", id="h"), *exchange, AIMessage("Done", id="d")]
    window = trim(3, token_counter=len)
    request = trim(4_000)(build_conversation(exchange[kept_index], AIMessage("Done", id="d")))

    assert [m.id for m in window(talk)] == ["h", "d"]
    assert [m.id for m in apply_node(window, talk)] == ["h", "d"]
    assert find_refusals(request) == []
    if kept_index == 0 and form != "function":  # no message can stand for such an output
        assert NO_RESULT in request[1].text


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
def test_call_in_the_content_only_becomes_a_tool_call_of_the_request(block: Any, args: Any) -> None:
    """Each provider's client then sends the call with its result, or with a stated one."""
    talk = build_conversation(AIMessage([block], id="a"), build_result("1"))
    shown_with_result = trim(4_000)(talk)
    shown_without_result = trim(4_000)([talk[0], talk[1], NEXT])

    for request in (shown_with_result, shown_without_result):
        [call] = [m for m in request if isinstance(m, AIMessage)]
        assert [(c["name"], c["args"], c["id"]) for c in call.tool_calls] == [("look", args, "1")]
        assert find_refusals(request) == []
    assert shown_with_result[2] is talk[2]
    assert NO_RESULT in str(shown_without_result[2].content)
    assert trim(4_000).invoke({"messages": talk}) == {}


def test_stated_result_of_a_custom_tool_has_openai_form() -> None:
    """OpenAI accepts no other form for a `custom_tool_call`."""
    block = {"type": "custom_tool_call", "call_id": "1", "name": "pay", "input": "q"}
    request = trim(4_000)(build_conversation(build_calling_message("1", text=[block])))

    assert request[2].content == [{"type": "custom_tool_call_output", "output": NO_RESULT}]


def test_screenshot_is_not_cleared() -> None:
    """OpenAI accepts no text in its place."""
    image = screenshot("1").model_copy(update={"content": "data:image/png;base64," + "A" * 9_000})
    talk = [HumanMessage("Look"), AIMessage([COMPUTER]), image, AIMessage("Done")]

    assert clear_tool_outputs(keep=0)(talk) == talk


def test_client_call_within_a_server_call_is_kept_or_trimmed_whole() -> None:
    """Anthropic's code execution calls the application's tools, and ends in a later message."""
    code = {"type": "server_tool_use", "id": "s", "name": "code_execution", "input": {}}
    ended = {"type": "code_execution_tool_result", "tool_use_id": "s", "content": {}}
    talk = build_conversation(
        build_calling_message("1", text=[code]), build_result("1"), AIMessage([ended], id="z")
    )

    assert trim(4_000)(talk) == talk
    assert [m.id for m in trim(3, token_counter=len)(talk)] == ["next"]
    assert [m.id for m in trim(3, token_counter=len, start_on=None)(talk)] == ["next"]


def test_keep_refuses_to_separate_a_block_call_from_its_output() -> None:
    talk = build_conversation(*build_block_exchange("computer"))
    with pytest.raises(InvalidUpdate, match="would separate tool call '1'"):
        messages(talk, Keep(2))
