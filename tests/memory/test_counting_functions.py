"""Functions that count tokens, and the options, as langchain's `trim_messages` takes them."""

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
from perdure.memory.tokens import count_tokens

ABOUT = "Look up facts in the archive. " * 200
LOOK = StructuredTool.from_function(lambda what: what, name="look", description=ABOUT)


def talk_of(count: int, words: int = 20) -> list[BaseMessage]:
    """Turns of a question and an answer, and a question."""
    said: list[BaseMessage] = []
    for n in range(count):
        said += [HumanMessage(f"question {n} " + "word " * words, id=f"h{n}")]
        said += [AIMessage(f"answer {n} " + "word " * words, id=f"a{n}")]
    return [*said, HumanMessage("and now?", id="h")]


TALK = talk_of(10)


def words_of(messages: Any) -> int:
    return sum(len(message.text.split()) for message in messages)


def request_of_500(messages: Any) -> int:
    return 500 + words_of(messages)


def refuses_none(messages: Any) -> int:
    if not messages:
        raise ValueError("no messages")
    return 500 + words_of(messages)


def nothing_for_none(messages: Any) -> int:
    return 500 + words_of(messages) if messages else 0


class Desk:
    """An object with methods that count."""

    def count(self, messages: list[BaseMessage]) -> int:
        return 500 + words_of(messages)

    def count_one(self, message: BaseMessage) -> int:
        return len(message.text.split())

    def get_num_tokens_from_messages(self, messages: list[BaseMessage]) -> int:
        return 500 + words_of(messages)

    def __call__(self, messages: list[BaseMessage]) -> int:
        return 0


class Counts(FakeListChatModel):
    """A chat model of the user, which counts messages itself."""

    def get_num_tokens_from_messages(self, messages: Any, tools: Any = None) -> int:
        return 500 + words_of(messages)


FIXED: dict[str, Any] = {
    "tools": partial(count_tokens_approximately, tools=[LOOK]),
    "a request": request_of_500,
    "no empty list": refuses_none,
    "nothing for an empty list": nothing_for_none,
    "a bound method": Desk().count,
    "an object": Desk(),
    "a model": Counts(responses=[]),
    "a bound model": Counts(responses=[]).with_config(tags=["a"]),
    "floats": lambda messages: 500.25 + 0.75 * words_of(messages),
    "numpy": lambda messages: np.float32(500) + np.int64(words_of(messages)),
    "an array": lambda messages: np.array(500 + words_of(messages)),
    "wrapped": functools.wraps(request_of_500)(lambda messages: request_of_500(messages)),
}


def as_counter(counter: Any) -> Any:
    """Return the function that `trim_messages` calls."""
    return getattr(counter, "get_num_tokens_from_messages", None) or counter


@pytest.mark.parametrize("name", FIXED)
@pytest.mark.parametrize("budget", [4_000, 2_400, 900, 700, 600])
def test_a_fixed_part_is_counted_once(name: str, budget: int) -> None:
    """As many messages are kept as by langchain's function, which counts whole lists."""
    counter = FIXED[name]
    counts = as_counter(getattr(counter, "bound", counter))
    theirs = trim_messages(
        TALK, max_tokens=budget, token_counter=counts, start_on="human", include_system=True
    )
    if not theirs:
        with pytest.raises(BudgetExceeded):
            trim(max_tokens=budget, token_counter=counter)(TALK)
        return
    ours = trim(max_tokens=budget, token_counter=counter)(TALK)

    assert [m.id for m in ours] == [m.id for m in theirs]
    assert counts(ours) <= budget
    assert count_tokens(ours, counter) == math.ceil(counts(ours))


def test_a_fixed_part_is_measured_once() -> None:
    """A function may ask a service; nothing is asked before something is counted."""
    asked: list[int] = []

    def count(messages: Any) -> int:
        asked.append(len(messages))
        return 500 + words_of(messages)

    node = trim(max_tokens=4_000, token_counter=count)
    small = trim(max_tokens=700, token_counter=node.counter)
    assert asked == []
    for _ in range(3):
        node(TALK)
    assert asked == [len(TALK)] * 3
    for _ in range(3):
        small(TALK)

    assert asked.count(0) == 1
    assert asked.count(1) <= 3 * len(TALK)


@pytest.mark.parametrize("annotation", [BaseMessage, "BaseMessage", AnyMessage, HumanMessage])
def test_a_function_of_one_message(annotation: Any) -> None:
    """Its annotation says so, of a function, a method, a partial and an object."""

    def count(message: Any, each: int = 1) -> int:
        return each * len(message.text.split())

    count.__annotations__["message"] = annotation

    for counter in (count, partial(count, each=1), Desk().count_one):
        assert count_tokens(TALK, counter) == words_of(TALK)
        kept = trim(max_tokens=100, token_counter=counter)(TALK)
        assert words_of(kept) <= 100
        assert len(kept) == 5


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
def test_a_list_that_takes_more_than_its_messages_still_fits(
    kind: Any, name: str, budget: int, count: int
) -> None:
    """Whatever the function adds up to; the newest question fits, or it is refused."""
    counter, talk = COUNTERS[name], talk_of(count)
    try:
        kept = kind(max_tokens=budget, token_counter=counter)(talk)
    except BudgetExceeded:
        assert counter(talk[-1:]) > budget
        return
    assert counter(kept) <= budget
    assert kept[-1] == talk[-1]


def test_what_is_shortened_fits_too() -> None:
    """By a function that counts a list as more than its messages."""
    long = [HumanMessage("word " * 2_000)]
    kept = trim(max_tokens=900, token_counter=request_of_500, allow_partial=True)(long)
    squares = trim(max_tokens=900, token_counter=COUNTERS["squares"], allow_partial=True)(long)

    assert 800 < request_of_500(kept) <= 900
    assert 400 < COUNTERS["squares"](squares) <= 900
    assert kept[0].text.count("…") == 2  # around one gap


async def awaited(messages: Any) -> int:
    return 1


class Awaited:
    async def __call__(self, messages: Any) -> int:
        return 1


@pytest.mark.parametrize("counter", [awaited, Awaited(), partial(awaited), partial(Awaited())])
def test_an_async_function_is_refused(counter: Any) -> None:
    """Before anything runs; one that hides in a lambda, when it is called."""
    with pytest.raises(ConfigurationError, match="which is async"):
        trim(max_tokens=5, token_counter=counter)
    hidden: Any = lambda messages: awaited(messages)  # noqa: E731
    with pytest.raises(ConfigurationError, match="expected a number of tokens"):
        trim(max_tokens=5, token_counter=hidden)(TALK)


def test_an_error_of_the_function_is_raised_as_it_is() -> None:
    """An exception of the user's function is not wrapped."""

    def fails(messages: Any) -> int:
        raise RuntimeError("no tokenizer")

    with pytest.raises(RuntimeError, match="no tokenizer"):
        trim(max_tokens=5, token_counter=fails)(TALK)


def test_models_of_langchain_are_not_asked() -> None:
    """They would download a tokenizer, or ask the provider about each message."""
    plain = FakeListChatModel(responses=["yes"])
    completing = FakeListLLM(responses=["yes"])
    estimate = count_tokens(TALK)

    assert count_tokens(TALK, plain) == count_tokens(TALK, completing) == estimate
    own = FakeListLLM(responses=["yes"], custom_get_token_ids=lambda text: [0] * len(text.split()))
    assert count_tokens(TALK, own) == sum(
        own.get_num_tokens_from_messages([message]) for message in TALK
    )


# -- other parts


def test_the_tools_of_an_agent_are_not_counted_twice() -> None:
    """A function that counts tools, in an agent that has them."""
    shown: list[int] = []

    class Model(FakeListChatModel):
        def bind_tools(self, tools: Any, **options: Any) -> Any:
            return self

        def _call(self, messages: Any, *args: Any, **options: Any) -> str:
            shown.append(len(messages))
            return "yes"

    for budget in (2_300, 1_900):
        memory = MemoryMiddleware(trim(max_tokens=budget, token_counter=FIXED["tools"]))
        agent: Any = create_agent(Model(responses=["yes"]), [LOOK], middleware=[memory])
        agent.invoke({"messages": TALK})

    assert shown[0] == len(TALK)
    assert 1 < shown[1] < len(TALK)


def test_a_fixed_part_in_assemble_summarize_and_clear_tool_outputs() -> None:
    """Sections and results of tools take what they add; a trigger counts the whole request."""
    kept = assemble(max_tokens=1_000, token_counter=request_of_500, memories=["She likes figs."])
    assert len(kept(TALK)) == len(TALK) + 1
    model = FakeListChatModel(responses=["the summary"])
    size = request_of_500(TALK)
    for tokens, due in ((size, True), (size + 1, False)):
        node = summarize(model, trigger=("tokens", tokens), token_counter=request_of_500)
        assert node.is_due({"messages": TALK}) is due
    call = AIMessage("", tool_calls=[{"name": "look", "args": {}, "id": "1"}])
    results = [HumanMessage("a"), call, ToolMessage("b " * 90, tool_call_id="1"), *TALK]
    clear = clear_tool_outputs(keep=0, min_tokens=100, token_counter=request_of_500)
    assert clear(results)[2].text == results[2].text


# -- options and messages


@pytest.mark.parametrize(
    "start_on",
    ["human", ("human",), ["human"], HumanMessage, [HumanMessage], ("system", HumanMessage)],
)
def test_start_on_a_human_message(start_on: Any) -> None:
    """By type or class, alone or in a list."""
    for budget in range(1, 12):
        node = trim(max_tokens=budget, token_counter=len, start_on=start_on)
        assert node(TALK) == trim(max_tokens=budget, token_counter=len)(TALK)


@pytest.mark.parametrize(
    "start_on", [None, (), ("human", "ai"), [HumanMessage, AIMessage], BaseMessage]
)
def test_start_on_any_message(start_on: Any) -> None:
    """The oldest turn may lose its question."""
    kept = trim(max_tokens=4, token_counter=len, start_on=start_on)(TALK)

    assert [m.id for m in kept] == ["a8", "h9", "a9", "h"]


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
def test_end_on_types_and_classes(end_on: Any, last: str) -> None:
    """As `start_on`."""
    assert trim(max_tokens=99, token_counter=len, end_on=end_on)(TALK)[-1].id == last


@pytest.mark.parametrize(
    "wrong", ["middle", 5, ["human", "middle"], [5], str, SystemMessage, "tool", [AIMessage]]
)
def test_what_a_window_cannot_start_on(wrong: Any) -> None:
    """Providers take a list that begins with a question."""
    with pytest.raises(ConfigurationError, match="start_on is"):
        trim(max_tokens=5, start_on=wrong)


@pytest.mark.parametrize("wrong", ["middle", 5, ["human", 5], str, "system", ["system", str]])
def test_what_a_window_cannot_end_on(wrong: Any) -> None:
    """The error names the option."""
    with pytest.raises(ConfigurationError, match="end_on is"):
        trim(max_tokens=5, end_on=wrong)


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


def test_dicts_and_pairs_are_messages() -> None:
    """In every form of a list that langchain converts."""
    types = ["system", "human", "ai", "tool", "ai", "human"]
    node = trim(max_tokens=99, token_counter=len)

    assert [m.type for m in node(FORMS)] == types
    assert [m.type for m in node.invoke(FORMS)] == types
    assert [m.type for m in node.invoke(tuple(FORMS))] == types
    assert [m.type for m in node(ChatPromptValue(messages=node(FORMS)))] == types
    assert count_tokens(FORMS) == count_tokens(node(FORMS))
    assert isinstance(FORMS[0], tuple)  # they stay as they are


@pytest.mark.parametrize(
    "wrong", [["hello"], [("human", "a"), "hello"], ("human", "hello"), [{"a": 1}], [("x", "y")]]
)
def test_what_is_no_form_of_a_message_is_refused(wrong: Any) -> None:
    """A text by itself does not say who said it; `("human", "hello")` is a list of two texts."""
    with pytest.raises(InvalidMessages, match="expected langchain messages"):
        trim(max_tokens=99)(wrong)


def test_a_counter_that_names_an_unknown_model_is_one_of_a_function() -> None:
    """A model of the user whose name nobody knows is asked, and its reported usage is its own."""
    counter = token_counter(Counts(responses=[]))

    assert counter.encoding is None
    assert counter.request_overhead == 500
    assert counter.count_message(HumanMessage("one two")) == 2
