"""Conversations as they occur in practice: parallel calls, lost results, late system messages.

Answers have the forms of langchain-openai, langchain-anthropic and langchain-google-genai.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st
from langchain_core.messages import (
    AIMessage,
    AnyMessage,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)

Talk = list[AnyMessage]

_WORDS = [
    "",
    " ",
    "hello",
    "日本語の文",
    "naïve café",
    "a\nb",
    "🙂🙂",
    "x " * 40,
    "The train. " * 30,
]
texts = st.one_of(st.sampled_from(_WORDS), st.text(max_size=30))
contents: st.SearchStrategy[Any] = st.one_of(
    texts,
    st.just([]),
    st.lists(
        st.one_of(
            texts.map(lambda text: {"type": "text", "text": text}),
            st.just({"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}),
        ),
        min_size=1,
        max_size=3,
    ),
)


@st.composite
def exchanges(draw: st.DrawFn) -> Talk:
    """Draw calls with their results: mostly complete, sometimes not, in any order."""
    count = draw(st.integers(1, 3))
    ids = [f"call{draw(st.integers(0, 10**6))}" for _ in range(count)]
    names = ["" if draw(st.integers(0, 9)) == 0 else call_id for call_id in ids]
    calls = [
        {"name": "look", "args": {"q": draw(texts)}, "id": call_id or None} for call_id in names
    ]
    bad = draw(st.integers(0, 9)) == 0
    caller = AIMessage(
        draw(contents),
        tool_calls=[] if bad else calls,
        invalid_tool_calls=[
            {
                "name": "look",
                "args": "{",
                "id": call["id"],
                "error": "cut",
                "type": "invalid_tool_call",
            }
            for call in calls
        ]
        if bad
        else [],
    )
    results: Talk = [
        ToolMessage(draw(contents), tool_call_id=call_id, name="look") for call_id in ids
    ]
    if draw(st.integers(0, 4)) == 0:
        results.pop()
    if draw(st.integers(0, 9)) == 0:
        results.append(ToolMessage("again", tool_call_id=ids[0]))
    if draw(st.integers(0, 9)) == 0:
        results.insert(0, SystemMessage("in between"))
    return [caller, *draw(st.permutations(results))]


def search_block(uid: str) -> dict[str, Any]:
    """Return a call of Anthropic's web search, which the provider itself executes."""
    return {"type": "server_tool_use", "id": uid, "name": "web_search", "input": {"query": "x"}}


def search_result_block(uid: str) -> dict[str, Any]:
    """Return the result of `search_block(uid)`."""
    return {"type": "web_search_tool_result", "tool_use_id": uid, "content": []}


def screenshot(uid: str) -> ToolMessage:
    """Return the output of a call of OpenAI's computer tool."""
    image: Any = [{"type": "input_image", "image_url": "https://example.org/screen.png"}]
    return ToolMessage(image, tool_call_id=uid, additional_kwargs={"type": "computer_call_output"})


@st.composite
def block_exchanges(draw: st.DrawFn) -> Talk:
    """Draw calls that exist only as content blocks, mostly with their results."""
    uid = f"call{draw(st.integers(0, 10**6))}"
    thought = {"type": "reasoning", "id": "rs_1", "summary": []}
    action = {"type": "click", "x": 1, "y": 2}
    computer = {"type": "computer_call", "id": "cu_1", "call_id": uid, "action": action}
    request = {"type": "mcp_approval_request", "id": uid, "name": "look", "arguments": "{}"}
    reply = {"type": "mcp_approval_response", "approval_request_id": uid, "approve": True}
    custom = {"type": "custom_tool_call", "call_id": uid, "name": "run", "input": "ls"}
    custom_output: Any = [{"type": "custom_tool_call_output", "output": "a.txt"}]
    function = {"type": "function_call", "call_id": uid, "name": "look", "arguments": '{"q": 1}'}
    use = {"type": "tool_use", "id": uid, "name": "look", "input": {"q": 1}}
    text = {"type": "text", "text": draw(texts)}
    older = {"function_call": {"name": "look", "arguments": "{}"}}
    example: Talk = draw(
        st.sampled_from(
            [
                [AIMessage([thought, computer]), screenshot(uid)],
                [AIMessage("", additional_kwargs={"tool_outputs": [computer]}), screenshot(uid)],
                [AIMessage([{"type": "non_standard", "value": computer}]), screenshot(uid)],
                [AIMessage([text, request]), HumanMessage([reply])],
                [AIMessage([custom]), ToolMessage(custom_output, tool_call_id=uid)],
                [AIMessage([text, function]), ToolMessage("found", tool_call_id=uid)],
                [AIMessage([text, use]), ToolMessage("found", tool_call_id=uid)],
                [AIMessage([search_block(uid), search_result_block(uid), text])],
                [AIMessage([text, search_block(uid)]), AIMessage([search_result_block(uid), text])],
                [
                    AIMessage("", additional_kwargs=older),
                    FunctionMessage(content="found", name="look"),
                ],
            ]
        )
    )
    messages: Talk = [message.model_copy(deep=True) for message in example]
    if draw(st.integers(0, 4)) == 0:
        messages.pop(draw(st.integers(0, len(messages) - 1)))
    return messages


_ANSWER_KWARGS: list[dict[str, Any]] = [
    {"audio": {"id": "audio_1", "data": "AAAA", "expires_at": 1, "transcript": "Yes."}},
    {"refusal": "I cannot help with that."},
    {"refusal": None},
    {"tool_outputs": [{"type": "web_search_call", "id": "ws_1", "status": "completed"}]},
    {"reasoning_content": "Well."},
]
_ANSWER_BLOCKS: list[Any] = [
    [{"type": "refusal", "refusal": "No."}],
    [{"type": "reasoning", "id": "rs_1", "summary": []}],
    [{"type": "thinking", "thinking": "Well.", "signature": "s"}],
    [{"type": "code_interpreter_call", "id": "ci_1", "code": "1", "outputs": None}],
    [{"type": "mcp_call", "id": "mcp_1", "name": "look", "output": "found"}],
    [{"type": "executable_code", "executable_code": "1", "language": "PYTHON"}],
]
answers: st.SearchStrategy[AIMessage] = st.one_of(
    st.sampled_from(_ANSWER_KWARGS).map(lambda kwargs: AIMessage("", additional_kwargs=kwargs)),
    st.sampled_from(_ANSWER_BLOCKS).map(AIMessage),
)


pieces: st.SearchStrategy[Talk] = st.one_of(
    contents.map(lambda content: [HumanMessage(content)]),
    contents.map(lambda content: [HumanMessage(content)]),
    contents.map(lambda content: [AIMessage(content)]),
    exchanges(),
    exchanges(),
    block_exchanges(),
    answers.map(lambda answer: [answer.model_copy(deep=True)]),
    texts.map(lambda text: [ChatMessage(content=text, role="critic")]),
    texts.map(lambda text: [SystemMessage(text)]),
    texts.map(lambda text: [ToolMessage(text, tool_call_id="nobody called")]),
)


@st.composite
def conversations(draw: st.DrawFn, *, ids: bool = True, max_pieces: int = 12) -> Talk:
    """Draw a conversation in which some messages are missing or late."""
    talk = list(itertools.chain.from_iterable(draw(st.lists(pieces, max_size=max_pieces))))
    for _ in range(draw(st.integers(0, 2))):
        if talk:
            talk.pop(draw(st.integers(0, len(talk) - 1)))
    results = [place for place, message in enumerate(talk) if isinstance(message, ToolMessage)]
    if results and draw(st.integers(0, 4)) == 0:  # a late result
        talk.insert(draw(st.integers(0, len(talk) - 1)), talk.pop(draw(st.sampled_from(results))))
    for number, message in enumerate(talk):
        message.id = f"m{number}" if ids else None
    return talk


def find_newest_question(messages: list[BaseMessage] | Talk) -> BaseMessage | None:
    """Return the newest question of a user, or None."""
    return next((m for m in reversed(messages) if is_question(m)), None)


def is_question(message: BaseMessage) -> bool:
    """Return whether a message is a question of a user, not the reply to a call."""
    blocks = [block for block in message.content if isinstance(block, dict)]
    is_reply = any(block.get("type") == "mcp_approval_response" for block in blocks)
    return isinstance(message, HumanMessage) and not is_reply


def comparison_keys(messages: list[BaseMessage] | Talk) -> list[object]:
    """Return the values by which tests compare messages."""
    return [(m.type, m.id, m.content) for m in messages]


def total_cost(messages: list[BaseMessage], cost: Callable[[BaseMessage], int]) -> int:
    """Return the total cost of the messages."""
    return sum(map(cost, messages))
