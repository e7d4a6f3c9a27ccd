"""Functions that count tokens, and options in the forms that `trim_messages` accepts."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain.agents import create_agent
from langchain_core.language_models import FakeListLLM
from langchain_core.language_models.fake_chat_models import FakeListChatModel
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    AnyMessage,
    BaseMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)
from langchain_core.messages.utils import count_tokens_approximately, trim_messages
from langchain_core.prompt_values import ChatPromptValue
from langchain_core.tools import StructuredTool

from perdure.errors import BudgetExceeded, ConfigurationError, InvalidMessages
from perdure.memory import assemble, clear_tool_outputs, summarize, token_counter, trim
from perdure.memory.middleware import MemoryMiddleware
from perdure.memory.short_term.tokens import count_tokens

ABOUT = "Look up facts in the archive. " * 200
LOOK = StructuredTool.from_function(lambda what: what, name="look", description=ABOUT)


def build_conversation(count: int, words: int = 20) -> list[BaseMessage]:
    """Return `count` turns of a question and an answer, and a last question."""
    messages: list[BaseMessage] = []
    for n in range(count):
        messages += [HumanMessage(f"question {n} " + "word " * words, id=f"h{n}")]
        messages += [AIMessage(f"answer {n} " + "word " * words, id=f"a{n}")]
    return [*messages, HumanMessage("and now?", id="h")]


TALK = build_conversation(10)


def count_words(messages: Any) -> int:
    return sum(len(message.text.split()) for message in messages)


def count_request_of_500(messages: Any) -> int:
    return 500 + count_words(messages)


def count_refusing_empty_list(messages: Any) -> int:
    if not messages:
        raise ValueError("no messages")
    return 500 + count_words(messages)


def count_zero_for_empty_list(messages: Any) -> int:
    return 500 + count_words(messages) if messages else 0


class CountingObject:
    """An object with methods that count tokens."""

    def count(self, messages: list[BaseMessage]) -> int:
        return 500 + count_words(messages)

    def count_one(self, message: BaseMessage) -> int:
        return len(message.text.split())

    def get_num_tokens_from_messages(self, messages: list[BaseMessage]) -> int:
        return 500 + count_words(messages)

    def __call__(self, messages: list[BaseMessage]) -> int:
        return 0


class CountingModel(FakeListChatModel):
    """A user's chat model that counts messages itself."""

    def get_num_tokens_from_messages(self, messages: Any, tools: Any = None) -> int:
        return 500 + count_words(messages)


FIXED: dict[str, Any] = {
    "tools": partial(count_tokens_approximately, tools=[LOOK]),
    "a request": count_request_of_500,
    "no empty list": count_refusing_empty_list,
    "nothing for an empty list": count_zero_for_empty_list,
    "a bound method": CountingObject().count,
    "an object": CountingObject(),
    "a model": CountingModel(responses=[]),
    "a bound model": CountingModel(responses=[]).with_config(tags=["a"]),
    "floats": lambda messages: 500.25 + 0.75 * count_words(messages),
    "numpy": lambda messages: np.float32(500) + np.int64(count_words(messages)),
    "an array": lambda messages: np.array(500 + count_words(messages)),
    "wrapped": functools.wraps(count_request_of_500)(
        lambda messages: count_request_of_500(messages)
    ),
}


def get_counting_function(counter: Any) -> Any:
    """Return the function that `trim_messages` calls."""
    return getattr(counter, "get_num_tokens_from_messages", None) or counter


@pytest.mark.parametrize("name", FIXED)
@pytest.mark.parametrize("budget", [4_000, 2_400, 900, 700, 600])
def test_fixed_cost_of_a_counting_function_is_counted_once(name: str, budget: int) -> None:
    """As many messages are kept as by langchain's function, which counts whole lists."""
    counter = FIXED[name]
    counts = get_counting_function(getattr(counter, "bound", counter))
    by_langchain = trim_messages(
        TALK, max_tokens=budget, token_counter=counts, start_on="human", include_system=True
    )
    if not by_langchain:
        with pytest.raises(BudgetExceeded):
            trim(max_tokens=budget, token_counter=counter)(TALK)
        return
    by_perdure = trim(max_tokens=budget, token_counter=counter)(TALK)

    assert [m.id for m in by_perdure] == [m.id for m in by_langchain]
    assert counts(by_perdure) <= budget
    assert count_tokens(by_perdure, counter) == math.ceil(counts(by_perdure))


def test_counting_function_is_called_lazily_and_with_an_empty_list_once() -> None:
    """A function may call a service, so nothing is counted before it is needed."""
    call_sizes: list[int] = []

    def count(messages: Any) -> int:
        call_sizes.append(len(messages))
        return 500 + count_words(messages)

    node = trim(max_tokens=4_000, token_counter=count)
    small = trim(max_tokens=700, token_counter=node.counter)
    assert call_sizes == []
    for _ in range(3):
        node(TALK)
    assert call_sizes == [len(TALK)] * 3
    for _ in range(3):
        small(TALK)

    assert call_sizes.count(0) == 1
    assert call_sizes.count(1) <= 3 * len(TALK)


@pytest.mark.parametrize("annotation", [BaseMessage, "BaseMessage", AnyMessage, HumanMessage])
def test_function_annotated_for_one_message_is_called_per_message(annotation: Any) -> None:
    """A function, a method, a partial and an object can have the annotation."""

    def count(message: Any, each: int = 1) -> int:
        return each * len(message.text.split())

    count.__annotations__["message"] = annotation

    for counter in (count, partial(count, each=1), CountingObject().count_one):
        assert count_tokens(TALK, counter) == count_words(TALK)
        trimmed = trim(max_tokens=100, token_counter=counter)(TALK)
        assert count_words(trimmed) <= 100
        assert len(trimmed) == 5


COUNTERS: dict[str, Callable[..., Any]] = {
    "squares": lambda messages: sum(len(m.text) for m in messages) ** 2 // 400,
    "the longest": lambda messages: max((len(m.text) for m in messages), default=0),
    "joined": lambda messages: math.ceil(len("\n".join(m.text for m in messages)) / 4),
    "pairs": lambda messages: 7 * len(messages) * len(messages),
    "fewer for more": lambda messages: int(40 * len(messages) ** 0.5),
}


@pytest.mark.parametrize("kind", [trim, assemble])
@pytest.mark.parametrize("name", COUNTERS)
@given(budget=st.integers(1, 3_000), count=st.integers(0, 12))
def test_result_fits_the_budget_of_a_non_additive_counting_function(
    kind: Any, name: str, budget: int, count: int
) -> None:
    """The newest question fits, or `BudgetExceeded` is raised."""
    counter, talk = COUNTERS[name], build_conversation(count)
    try:
        trimmed = kind(max_tokens=budget, token_counter=counter)(talk)
    except BudgetExceeded:
        assert counter(talk[-1:]) > budget
        return
    assert counter(trimmed) <= budget
    assert trimmed[-1] == talk[-1]


def test_shortened_message_fits_the_budget_of_a_counting_function() -> None:
    long = [HumanMessage("word " * 2_000)]
    trimmed = trim(max_tokens=900, token_counter=count_request_of_500, allow_partial=True)(long)
    squares = trim(max_tokens=900, token_counter=COUNTERS["squares"], allow_partial=True)(long)

    assert 800 < count_request_of_500(trimmed) <= 900
    assert 400 < COUNTERS["squares"](squares) <= 900
    assert trimmed[0].text.count("…") == 2  # the ends around the omitted part


async def count_async(messages: Any) -> int:
    return 1


class AsyncCounter:
    async def __call__(self, messages: Any) -> int:
        return 1


@pytest.mark.parametrize(
    "counter", [count_async, AsyncCounter(), partial(count_async), partial(AsyncCounter())]
)
def test_async_counting_function_is_refused(counter: Any) -> None:
    """A coroutine that a lambda returns is refused when it is called."""
    with pytest.raises(ConfigurationError, match="which is an async function"):
        trim(max_tokens=5, token_counter=counter)
    hidden: Any = lambda messages: count_async(messages)  # noqa: E731
    with pytest.raises(ConfigurationError, match="expected a number of tokens"):
        trim(max_tokens=5, token_counter=hidden)(TALK)


def test_error_of_a_counting_function_is_not_wrapped() -> None:
    def fails(messages: Any) -> int:
        raise RuntimeError("no tokenizer")

    with pytest.raises(RuntimeError, match="no tokenizer"):
        trim(max_tokens=5, token_counter=fails)(TALK)


def test_langchain_models_without_a_counter_are_estimated() -> None:
    """Their own methods would download a tokenizer, or call the provider for each message."""
    plain = FakeListChatModel(responses=["yes"])
    completing = FakeListLLM(responses=["yes"])
    estimate = count_tokens(TALK)

    assert count_tokens(TALK, plain) == count_tokens(TALK, completing) == estimate
    own = FakeListLLM(responses=["yes"], custom_get_token_ids=lambda text: [0] * len(text.split()))
    assert count_tokens(TALK, own) == sum(
        own.get_num_tokens_from_messages([message]) for message in TALK
    )


# -- other parts


def test_tools_that_a_counting_function_counts_are_not_counted_twice() -> None:
    request_sizes: list[int] = []

    class Model(FakeListChatModel):
        def bind_tools(self, tools: Any, **options: Any) -> Any:
            return self

        def _call(self, messages: Any, *args: Any, **options: Any) -> str:
            request_sizes.append(len(messages))
            return "yes"

    for budget in (2_300, 1_900):
        memory = MemoryMiddleware(trim(max_tokens=budget, token_counter=FIXED["tools"]))
        agent: Any = create_agent(Model(responses=["yes"]), [LOOK], middleware=[memory])
        agent.invoke({"messages": TALK})

    assert request_sizes[0] == len(TALK)
    assert 1 < request_sizes[1] < len(TALK)


def test_assemble_summarize_and_clear_tool_outputs_handle_a_fixed_cost() -> None:
    """Sections and tool outputs cost what they add. A trigger counts the whole request."""
    assembling = assemble(
        max_tokens=1_000, token_counter=count_request_of_500, memories=["She likes figs."]
    )
    assert len(assembling(TALK)) == len(TALK) + 1
    model = FakeListChatModel(responses=["the summary"])
    size = count_request_of_500(TALK)
    for tokens, due in ((size, True), (size + 1, False)):
        node = summarize(model, trigger=("tokens", tokens), token_counter=count_request_of_500)
        assert node.is_due({"messages": TALK}) is due
    call = AIMessage("", tool_calls=[{"name": "look", "args": {}, "id": "1"}])
    results = [HumanMessage("a"), call, ToolMessage("b " * 90, tool_call_id="1"), *TALK]
    clear = clear_tool_outputs(keep=0, min_tokens=100, token_counter=count_request_of_500)
    assert clear(results)[2].text == results[2].text


# -- options and messages


@pytest.mark.parametrize(
    "start_on",
    ["human", ("human",), ["human"], HumanMessage, [HumanMessage], ("system", HumanMessage)],
)
def test_start_on_human_is_the_default(start_on: Any) -> None:
    """The option takes a type or a class, alone or in a list."""
    for budget in range(1, 12):
        node = trim(max_tokens=budget, token_counter=len, start_on=start_on)
        assert node(TALK) == trim(max_tokens=budget, token_counter=len)(TALK)


@pytest.mark.parametrize(
    "start_on", [None, (), ("human", "ai"), [HumanMessage, AIMessage], BaseMessage]
)
def test_start_on_any_type_may_cut_a_turn_in_two(start_on: Any) -> None:
    """The oldest turn may lose its question."""
    trimmed = trim(max_tokens=4, token_counter=len, start_on=start_on)(TALK)

    assert [m.id for m in trimmed] == ["a8", "h9", "a9", "h"]


@pytest.mark.parametrize(
    ("end_on", "last"),
    [
        (HumanMessage, "h"),
        ([HumanMessage, ToolMessage], "h"),
        (("human", ToolMessage), "h"),
        ("human", "h"),
        (AIMessage, "a9"),
        (AIMessageChunk, "a9"),
        ("ai", "a9"),
        ("AIMessageChunk", "a9"),
        (BaseMessage, "h"),
    ],
)
def test_end_on_takes_types_and_classes(end_on: Any, last: str) -> None:
    assert trim(max_tokens=99, token_counter=len, end_on=end_on)(TALK)[-1].id == last


@pytest.mark.parametrize(
    "invalid_option",
    ["middle", 5, ["human", "middle"], [5], str, SystemMessage, "tool", [AIMessage]],
)
def test_invalid_start_on_is_refused(invalid_option: Any) -> None:
    """Providers need a list that begins with a question."""
    with pytest.raises(ConfigurationError, match="'start_on' is"):
        trim(max_tokens=5, start_on=invalid_option)


@pytest.mark.parametrize(
    "invalid_option", ["middle", 5, ["human", 5], str, "system", ["system", str]]
)
def test_invalid_end_on_is_refused(invalid_option: Any) -> None:
    with pytest.raises(ConfigurationError, match="'end_on' is"):
        trim(max_tokens=5, end_on=invalid_option)


FORMS: list[Any] = [
    ("system", "Be kind."),
    {"role": "user", "content": "When?"},
    {"role": "assistant", "content": "", "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    ]},
    {"role": "tool", "content": "08:14", "tool_call_id": "1"},
    AIMessage("At 08:14."),
    ("human", "And then?"),
]  # fmt: skip


def test_dicts_and_pairs_are_converted_to_messages() -> None:
    types = ["system", "human", "ai", "tool", "ai", "human"]
    node = trim(max_tokens=99, token_counter=len)

    assert [m.type for m in node(FORMS)] == types
    assert [m.type for m in node.invoke(FORMS)] == types
    assert [m.type for m in node.invoke(tuple(FORMS))] == types
    assert [m.type for m in node(ChatPromptValue(messages=node(FORMS)))] == types
    assert count_tokens(FORMS) == count_tokens(node(FORMS))
    assert isinstance(FORMS[0], tuple)  # the input is not changed


@pytest.mark.parametrize(
    "invalid_messages",
    [["hello"], [("human", "a"), "hello"], ("human", "hello"), [{"a": 1}], [("x", "y")]],
)
def test_values_that_are_no_message_are_refused(invalid_messages: Any) -> None:
    """A text alone has no role. `("human", "hello")` is a list of two texts."""
    with pytest.raises(InvalidMessages, match="expected langchain messages"):
        trim(max_tokens=99)(invalid_messages)


def test_token_counter_uses_the_counting_method_of_an_unknown_model() -> None:
    counter = token_counter(CountingModel(responses=[]))

    assert counter.encoding is None
    assert counter.request_overhead == 500
    assert counter.count_message_tokens(HumanMessage("one two")) == 2
