"""Counting: as OpenAI counts, without a network; estimates that hold; content, never identity."""

# ruff: noqa: RUF001 - letters of other alphabets are meant
from __future__ import annotations

import json
import logging
import sys
import warnings
from collections.abc import Iterator
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)
from langchain_core.messages.ai import UsageMetadata
from langchain_core.messages.utils import count_tokens_approximately
from langchain_core.runnables import RunnableLambda
from langchain_core.tools import tool
from langchain_core.utils.function_calling import convert_to_openai_tool
from langchain_openai import ChatOpenAI

from perdure.errors import ConfigurationError, InvalidMessages, UnknownModel
from perdure.memory import tokens
from perdure.memory.tokens import TokenCounter, context_window, count_tokens, token_counter
from tests.rounds import rounds

with warnings.catch_warnings():  # its way to read its files is deprecated in Python 3.11
    warnings.simplefilter("ignore", DeprecationWarning)
    bpe_openai = import_module("bpe_openai")
O200K = bpe_openai.get_encoding("o200k_base")
CL100K = bpe_openai.get_encoding("cl100k_base")
GPT = token_counter("gpt-4o")
ESTIMATE = token_counter("approximate")

texts = st.text(max_size=300)
ids = st.none() | st.sampled_from(["a", "b", "c"])
arguments = st.dictionaries(texts, st.integers() | texts, max_size=3)
calls = st.lists(
    st.builds(
        lambda name, args: {"name": name, "args": args, "id": "x", "type": "tool_call"},
        texts,
        arguments,
    ),
    max_size=3,
)
blocks: st.SearchStrategy[Any] = st.lists(
    texts
    | st.builds(lambda t: {"type": "text", "text": t}, texts)
    | st.builds(lambda t: {"type": "reasoning", "reasoning": t}, texts)
    | st.builds(lambda t: {"type": "image_url", "image_url": {"url": t}}, texts)
    | st.builds(lambda t: {"type": "image", "base64": t, "mime_type": "image/png"}, texts)
    | st.builds(lambda t: {"type": "file", "base64": t, "mime_type": "application/pdf"}, texts)
    | st.builds(lambda t: {"type": "something", "else": [t, 1, None]}, texts),
    max_size=4,
)
contents = texts | blocks
answers = st.builds(
    lambda text, reported: AIMessage(text, usage_metadata=used(reported)),
    st.text(max_size=2000),
    st.integers(0, 5000),
)
messages: st.SearchStrategy[BaseMessage] = (
    st.builds(HumanMessage, contents, id=ids, name=st.none() | texts)
    | st.builds(SystemMessage, contents, id=ids)
    | st.builds(AIMessage, contents, id=ids, tool_calls=calls)
    | st.builds(ToolMessage, contents, id=ids, tool_call_id=texts)
    | st.builds(ChatMessage, texts, role=texts)
)


def used(output: int, reasoning: int | None = None) -> UsageMetadata:
    usage = UsageMetadata(input_tokens=1, output_tokens=output, total_tokens=output + 1)
    if reasoning is not None:
        usage["output_token_details"] = {"reasoning": reasoning}
    return usage


def n(text: str, encoding: Any = O200K) -> int:
    return len(encoding.encode_ordinary(text))


def total(counter: TokenCounter, talk: list[BaseMessage]) -> int:
    return counter.request_overhead + sum(map(counter.count_message, talk))


def image(**block: Any) -> HumanMessage:
    return HumanMessage([block])


# -- as OpenAI counts: the examples of its cookbook, with what its API reported

JARGON: list[BaseMessage] = [
    SystemMessage(
        "You are a helpful, pattern-following assistant that translates corporate jargon into "
        "plain English."
    ),
    SystemMessage("New synergies will help drive top-line growth.", name="example_user"),
    SystemMessage("Things working well together will increase revenue.", name="example_assistant"),
    SystemMessage(
        "Let's circle back when we have more bandwidth to touch base on opportunities for "
        "increased leverage.",
        name="example_user",
    ),
    SystemMessage(
        "Let's talk later when we're less busy about how to do better.", name="example_assistant"
    ),
    HumanMessage(
        "This late pivot means we don't have time to boil the ocean for the client deliverable."
    ),
]
WEATHER: list[BaseMessage] = [
    SystemMessage("You are a helpful assistant that can answer to questions about the weather."),
    HumanMessage("What's the weather like in San Francisco?"),
]
WEATHER_TOOL = {
    "type": "function",
    "function": {
        "name": "get_current_weather",
        "description": "Get the current weather in a given location",
        "parameters": {
            "type": "object",
            "properties": {
                "location": {
                    "type": "string",
                    "description": "The city and state, e.g. San Francisco, CA",
                },
                "unit": {
                    "type": "string",
                    "description": "The unit of temperature to return",
                    "enum": ["celsius", "fahrenheit"],
                },
            },
            "required": ["location"],
        },
    },
}


@pytest.mark.parametrize(("model", "reported"), [("gpt-4o", 124), ("gpt-4-0613", 129)])
def test_messages_count_as_the_api_reported(model: str, reported: int) -> None:
    assert total(token_counter(model), JARGON) == reported


@pytest.mark.parametrize(("model", "reported"), [("gpt-4o", 101), ("gpt-4", 105)])
def test_tools_count_at_least_as_the_api_reported(model: str, reported: int) -> None:
    """By the JSON of their schemas, which providers shorten."""
    counted = count_tokens(WEATHER, model, [WEATHER_TOOL])

    assert reported <= counted <= 1.5 * reported


def test_a_call_and_its_result() -> None:
    """Frame and role, then name and arguments of each call; a result has an id besides."""
    call = {"name": "look_up", "args": {"city": "Zürich"}, "id": "1", "type": "tool_call"}
    calling = AIMessage("Let me see.", tool_calls=[call, call | {"id": "2"}])

    one = 3 + n("look_up") + n('{"city": "Zürich"}')
    assert GPT.count_message(calling) == 4 + n("Let me see.") + 2 * one
    assert GPT.count_message(ToolMessage("12 °C", tool_call_id="1")) == 4 + n("12 °C") + 3


def test_a_call_that_is_in_the_content_too_counts_once() -> None:
    call = {"name": "f", "args": {"a": 1}, "id": "1", "type": "tool_call"}
    block = {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}}
    text = {"type": "text", "text": "Well"}

    assert GPT.count_message(AIMessage([text, block], tool_calls=[call])) == GPT.count_message(
        AIMessage("Well", tool_calls=[call])
    )


def test_thoughts_count_as_text() -> None:
    block = {"type": "reasoning", "reasoning": "First, the weather."}

    assert GPT.count_message(AIMessage([block])) == 4 + n("First, the weather.")


@pytest.mark.parametrize(
    ("model", "encoding"),
    [
        ("gpt-4o-2024-08-06", "o200k_base"),
        ("chatgpt-4o-latest", "o200k_base"),
        ("gpt-4.1-mini", "o200k_base"),
        ("gpt-4.5-preview", "o200k_base"),
        ("gpt-5", "o200k_base"),
        ("gpt-5.1-codex", "o200k_base"),
        ("o1", "o200k_base"),
        ("o3-mini-2025-01-31", "o200k_base"),
        ("o4-mini", "o200k_base"),
        ("openai:gpt-4o", "o200k_base"),
        ("ft:gpt-4o-mini-2024-07-18:acme::9x2", "o200k_base"),
        ("ft:gpt-3.5-turbo-0125:acme::9x2", "cl100k_base"),
        ("gpt-4-turbo-2024-04-09", "cl100k_base"),
        ("gpt-35-turbo", "cl100k_base"),
    ],
)
def test_models_and_their_encodings(model: str, encoding: str) -> None:
    counter = token_counter(model)

    assert counter.encoding == encoding


def test_what_looks_like_a_special_token_is_text() -> None:
    assert GPT.count_text("<|endoftext|>") == n("<|endoftext|>") > 1


def test_a_text_longer_than_the_tokenizer_takes() -> None:
    text = "memory " * 200_000

    assert abs(GPT.count_text(text) - 200_000) <= len(text) / 50_000 + 1


# -- images and tools


def test_an_image_counts_the_same_by_url_and_by_data() -> None:
    """An image has 765 tokens, as OpenAI counts one of 1024 pixels, and 85 in low detail."""
    url = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}
    low = {"type": "image_url", "image_url": {"url": "https://example.com/a.png", "detail": "low"}}
    data = {"type": "image", "base64": "x" * 10_000, "mime_type": "image/png"}

    for counter in (GPT, ESTIMATE):
        assert (
            counter.count_message(image(**url)) == counter.count_message(image(**data)) == 4 + 765
        )
        assert counter.count_message(image(**low)) == 4 + 85


def test_tools_in_any_form() -> None:
    @tool
    def look_up(city: str, days: list[int] | None = None) -> str:
        """Look up the weather."""
        return city

    assert GPT.count_tools([look_up]) == GPT.count_text(json.dumps(convert_to_openai_tool(look_up)))
    assert GPT.count_tools([]) == 0
    assert GPT.count_tools([{"type": "web_search"}]) == n('{"type": "web_search"}')


def test_what_is_no_tool_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"tools is 5; expected a tool"):
        GPT.count_tools([5])


# -- encodings without a network


@pytest.fixture
def fresh() -> Iterator[None]:
    """No encoding loaded, nothing warned of."""
    tokens._load_encoding.cache_clear()
    yield
    tokens._load_encoding.cache_clear()


def forbid(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    for package in packages:
        monkeypatch.setitem(sys.modules, package, None)


@pytest.mark.usefixtures("fresh")
def test_without_an_encoding_tokens_are_estimated_and_a_warning_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    forbid(monkeypatch, "bpe_openai")

    with caplog.at_level(logging.WARNING, "perdure"):
        counters = [token_counter("gpt-4o") for _ in range(3)]

    assert all(counter.encoding is None for counter in counters)
    assert [".[tokens]" in r.getMessage() for r in caplog.records] == [True]


# -- what token_counter takes


def test_a_chat_model_counts_by_its_name() -> None:
    ours = token_counter(ChatOpenAI(model="gpt-4", api_key=lambda: "none"))
    other = token_counter(ChatOpenAI(model="llama-4", api_key=lambda: "none"))

    assert ours.encoding == "cl100k_base"
    assert other.encoding is None


@pytest.mark.parametrize("bound", ["tools", "config", "both"])
def test_a_model_with_something_bound_is_that_model(bound: str) -> None:
    model: Any = ChatOpenAI(model="gpt-4", api_key=lambda: "none")
    if bound != "config":
        model = model.bind_tools([WEATHER_TOOL])
    if bound != "tools":
        model = model.with_config(tags=["a"])

    counter = token_counter(model)
    assert counter.encoding == "cl100k_base"
    assert context_window(model) == 8_192


def test_a_runnable_that_is_no_model_names_no_counter() -> None:
    chain: Any = RunnableLambda(lambda said: said).with_config(tags=["a"])

    for ask in (token_counter, context_window):
        with pytest.raises(ConfigurationError, match="expected"):
            ask(chain)


# -- a request as a whole


def test_a_request_counts_the_tools_that_are_bound_to_its_model() -> None:
    model = ChatOpenAI(model="gpt-4o", api_key=lambda: "none").bind_tools([WEATHER_TOOL])
    bound = count_tokens(WEATHER, model)

    assert (
        bound == count_tokens(WEATHER, "gpt-4o", [WEATHER_TOOL]) > count_tokens(WEATHER, "gpt-4o")
    )


def test_a_request_is_estimated_as_its_answers_call_for() -> None:
    talk: list[BaseMessage] = [HumanMessage("a"), answer(LONG, 2 * ESTIMATE.count_text(LONG))]

    assert count_tokens(talk) == total(ESTIMATE.scale_to_usage(talk), talk) > total(ESTIMATE, talk)
    assert count_tokens([]) == ESTIMATE.request_overhead


@pytest.mark.parametrize("wrong", ["hello", HumanMessage("a"), ["hello"], None])
def test_a_request_is_a_list_of_messages(wrong: Any) -> None:
    with pytest.raises(InvalidMessages, match="langchain messages"):
        count_tokens(wrong)


def test_a_counter_is_itself_and_a_callable_counts_messages() -> None:
    def count(messages: list[BaseMessage]) -> int:
        return 7 * len(messages)

    counter = token_counter(count)
    talk: list[BaseMessage] = [HumanMessage("a", id="1"), AIMessage("b", id="2")]

    assert token_counter(counter) is counter
    assert counter.count_message(talk[0]) == 7
    assert total(counter, talk) == count_tokens(talk, count) == 14
    assert counter.count_text("x") == counter.count_tools([WEATHER_TOOL]) == 7
    assert counter.scale_to_usage(talk) is counter


def test_a_callable_for_one_message() -> None:
    def count(message: BaseMessage) -> int:
        return len(message.content)

    assert token_counter(count).count_message(HumanMessage("four")) == 4
    assert token_counter(len).count_message(HumanMessage("four")) == 1


@pytest.mark.parametrize("returned", [None, float("nan"), float("inf"), True, -1, -0.5, "7", [7]])
def test_a_callable_that_returns_no_number(returned: Any) -> None:
    counter = token_counter(lambda _: returned)

    with pytest.raises(ConfigurationError, match="expected a number of tokens"):
        counter.count_message(HumanMessage("a"))


@pytest.mark.parametrize("counter", [GPT, ESTIMATE, token_counter(len)])
def test_what_is_no_message_is_refused(counter: TokenCounter) -> None:
    with pytest.raises(InvalidMessages, match="expected langchain messages"):
        counter.count_message("hello")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["claude-sonnet-4", "gpt-4oo", "", "o1x", "text-davinci-003"])
def test_an_unknown_name_says_what_to_pass(name: str) -> None:
    with pytest.raises(UnknownModel, match="pass 'approximate', a chat model"):
        token_counter(name)


@pytest.mark.parametrize("wrong", [5, 1.5, object(), ["gpt-4o"]])
def test_what_names_no_counter(wrong: Any) -> None:
    with pytest.raises(ConfigurationError, match="expected"):
        token_counter(wrong)


# -- windows


def test_windows() -> None:
    small = ChatOpenAI(model="llama", api_key=lambda: "none", profile={"max_input_tokens": 9})

    assert context_window(small) == 9
    assert context_window(ChatOpenAI(model="gpt-4", api_key=lambda: "none")) == 8_192
    assert context_window("gpt-4o") == context_window("openai:gpt-4o-2024-08-06") == 128_000


@pytest.mark.parametrize("wrong", [0, True, None, len])
def test_what_has_no_window(wrong: Any) -> None:
    with pytest.raises(ConfigurationError, match="expected a chat model, or the name"):
        context_window(wrong)


def test_a_window_that_nobody_knows() -> None:
    for unknown in ("claude", "gpt-4-nope", ChatOpenAI(model="llama", api_key=lambda: "none")):
        with pytest.raises(UnknownModel, match="pass a number of tokens"):
            context_window(unknown)


# -- estimates


@given(
    st.text(st.sampled_from("abcdefgh "), max_size=500), st.sampled_from([HumanMessage, AIMessage])
)
def test_words_are_estimated_as_langchain_does(text: str, kind: Any) -> None:
    """Letters and spaces have a token for four; langchain rounds role and text together."""
    assert 0 <= count_tokens_approximately([kind(text)]) - ESTIMATE.count_message(kind(text)) <= 2


@pytest.mark.parametrize(
    "text",
    [
        "The doctor called on Tuesday and moved the appointment to half past three.",
        "def add(left: int, right: int) -> int:\n    return left + right\n",
        "人人生而自由,在尊严和权利上一律平等。",
        "すべての人間は、生まれながらにして自由であり、かつ、尊厳と権利とについて平等である。",
        "모든 인간은 태어날 때부터 자유로우며 그 존엄과 권리에 있어 동등하다.",
        "Все люди рождаются свободными и равными в своем достоинстве и правах.",
        "Alle Menschen sind frei und gleich an Würde und Rechten geboren.",
        "Tất cả mọi người sinh ra đều được tự do và bình đẳng về nhân phẩm và quyền lợi.",
    ],
)
def test_estimates_are_near(text: str) -> None:
    """Of other scripts too, of which langchain's characters would make a quarter."""
    assert 0.8 <= ESTIMATE.count_text(text) / n(text) <= 2.0


def answer(text: str, reported: int, reasoning: int | None = None) -> AIMessage:
    return AIMessage(text, usage_metadata=used(reported, reasoning))


LONG = "word " * 100


def test_estimates_fit_what_the_provider_reported() -> None:
    base = ESTIMATE.count_text(LONG)
    talk = [HumanMessage("a"), answer(LONG, 2 * base), answer(LONG, base)]
    fitted = ESTIMATE.scale_to_usage(talk)

    assert fitted.count_text(LONG) == 2 * base
    assert fitted.scale_to_usage([]).count_text(LONG) == base


@pytest.mark.parametrize(
    "message",
    [
        answer("too short", 40),
        answer(LONG, 10),
        answer(LONG, 900, reasoning=850),
        AIMessage([{"type": "thinking", "thinking": "?"}, LONG], usage_metadata=used(900)),
        AIMessage(LONG),
    ],
)
def test_what_an_estimate_is_not_raised_by(message: AIMessage) -> None:
    assert ESTIMATE.scale_to_usage([message]).count_text(LONG) == ESTIMATE.count_text(LONG)


def test_a_scale_is_at_most_four() -> None:
    assert ESTIMATE.scale_to_usage([answer(LONG, 10**6)]).count_text(
        LONG
    ) == 4 * ESTIMATE.count_text(LONG)


@given(st.lists(answers, max_size=5), st.data(), texts)
def test_leaving_messages_out_never_makes_the_rest_count_more(
    talk: list[AIMessage], data: st.DataObject, text: str
) -> None:
    kept = [m for m in talk if data.draw(st.booleans())]
    fewer = ESTIMATE.scale_to_usage(kept)

    assert fewer.count_text(text) <= ESTIMATE.scale_to_usage(talk).count_text(text)
    assert fewer.count_text(text) >= ESTIMATE.count_text(text)


# -- what is remembered


def exactly(message: BaseMessage) -> int:
    """What a message takes, by a counter that has counted nothing yet."""
    tokens._load_encoding.cache_clear()
    return TokenCounter("o200k_base").count_message(message)


@settings(max_examples=rounds(20))
@given(messages, texts)
def test_a_message_changed_in_place_counts_anew(message: BaseMessage, text: str) -> None:
    """Counts are remembered by content; fresh copies count the same."""
    assert (
        GPT.count_message(message)
        == GPT.count_message(message.model_copy(deep=True))
        == exactly(message)
    )
    message.content = text

    assert GPT.count_message(message) == exactly(message)


def test_a_second_pass_counts_only_what_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[str] = []
    module = SimpleNamespace(
        get_encoding=lambda name: SimpleNamespace(
            encode_ordinary=lambda text: counted.append(text) or [1]  # type: ignore[func-returns-value]
        )
    )
    monkeypatch.setitem(sys.modules, "bpe_openai", module)
    monkeypatch.setattr(tokens, "_MAX_CACHED_COUNTS", 300)
    tokens._load_encoding.cache_clear()
    counter = TokenCounter("o200k_base")
    tokens._load_encoding.cache_clear()
    talk: list[BaseMessage] = [HumanMessage(f"h{i}", id=f"{i}") for i in range(200)]
    total(counter, talk)
    counted.clear()

    again = [m.model_copy(deep=True) for m in talk]
    total(counter, [*again, HumanMessage("new")])

    assert counted == ["new"]
    assert total(counter, [HumanMessage(f"g{i}") for i in range(1_000)]) == 3 + 5_000
