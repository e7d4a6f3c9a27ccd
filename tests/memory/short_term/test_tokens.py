"""Token counts: like OpenAI without a network, reliable estimates, and caching by content."""

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
from perdure.memory import trim
from perdure.memory.short_term import tokens
from perdure.memory.short_term.tokens import (
    TokenCounter,
    context_window,
    count_tokens,
    token_counter,
)
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
    lambda text, reported: AIMessage(text, usage_metadata=make_usage(reported)),
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


def make_usage(output: int, reasoning: int | None = None) -> UsageMetadata:
    usage = UsageMetadata(input_tokens=1, output_tokens=output, total_tokens=output + 1)
    if reasoning is not None:
        usage["output_token_details"] = {"reasoning": reasoning}
    return usage


def count_real_tokens(text: str, encoding: Any = O200K) -> int:
    return len(encoding.encode_ordinary(text))


def count_request_tokens(counter: TokenCounter, conversation: list[BaseMessage]) -> int:
    return counter.request_overhead + sum(map(counter.count_message_tokens, conversation))


def make_image_message(**block: Any) -> HumanMessage:
    return HumanMessage([block])


# -- examples of OpenAI's cookbook, with the counts that its API reported

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


@pytest.mark.parametrize(("model", "expected_tokens"), [("gpt-4o", 124), ("gpt-4-0613", 129)])
def test_message_count_equals_count_reported_by_api(model: str, expected_tokens: int) -> None:
    assert count_request_tokens(token_counter(model), JARGON) == expected_tokens


@pytest.mark.parametrize(("model", "expected_tokens"), [("gpt-4o", 101), ("gpt-4", 105)])
def test_tool_count_is_at_least_count_reported_by_api(model: str, expected_tokens: int) -> None:
    """Tools are counted by the JSON of their schemas, which providers shorten."""
    counted = count_tokens(WEATHER, model, [WEATHER_TOOL])

    assert expected_tokens <= counted <= 1.5 * expected_tokens


def test_tool_call_counts_frame_name_and_arguments_and_result_counts_id() -> None:
    call = {"name": "look_up", "args": {"city": "Zürich"}, "id": "1", "type": "tool_call"}
    tool_call_message = AIMessage("Let me see.", tool_calls=[call, call | {"id": "2"}])

    call_tokens = 3 + count_real_tokens("look_up") + count_real_tokens('{"city": "Zürich"}')
    assert (
        GPT.count_message_tokens(tool_call_message)
        == 4 + count_real_tokens("Let me see.") + 2 * call_tokens
    )
    assert (
        GPT.count_message_tokens(ToolMessage("12 °C", tool_call_id="1"))
        == 4 + count_real_tokens("12 °C") + 3
    )


def test_tool_call_also_present_in_content_counts_once() -> None:
    call = {"name": "f", "args": {"a": 1}, "id": "1", "type": "tool_call"}
    block = {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}}
    text = {"type": "text", "text": "Well"}

    assert GPT.count_message_tokens(
        AIMessage([text, block], tool_calls=[call])
    ) == GPT.count_message_tokens(AIMessage("Well", tool_calls=[call]))


def test_reasoning_block_counts_as_text() -> None:
    block = {"type": "reasoning", "reasoning": "First, the weather."}

    assert GPT.count_message_tokens(AIMessage([block])) == 4 + count_real_tokens(
        "First, the weather."
    )


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
def test_token_counter_chooses_encoding_by_model_name(model: str, encoding: str) -> None:
    counter = token_counter(model)

    assert counter.encoding == encoding


def test_special_token_in_text_counts_as_text() -> None:
    assert GPT.count_text("<|endoftext|>") == count_real_tokens("<|endoftext|>") > 1


def test_text_longer_than_tokenizer_limit_is_counted() -> None:
    text = "memory " * 200_000

    assert abs(GPT.count_text(text) - 200_000) <= len(text) / 50_000 + 1


# -- images and tools


def test_image_counts_same_by_url_and_by_data() -> None:
    """An image has 765 tokens, as OpenAI counts one of 1024 pixels, and 85 in low detail."""
    url = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}
    low = {"type": "image_url", "image_url": {"url": "https://example.com/a.png", "detail": "low"}}
    data = {"type": "image", "base64": "x" * 10_000, "mime_type": "image/png"}

    for counter in (GPT, ESTIMATE):
        assert (
            counter.count_message_tokens(make_image_message(**url))
            == counter.count_message_tokens(make_image_message(**data))
            == 4 + 765
        )
        assert counter.count_message_tokens(make_image_message(**low)) == 4 + 85


def test_tools_are_counted_as_functions_or_dicts() -> None:
    @tool
    def look_up(city: str, days: list[int] | None = None) -> str:
        """Look up the weather."""
        return city

    assert GPT.count_tools([look_up]) == GPT.count_text(json.dumps(convert_to_openai_tool(look_up)))
    assert GPT.count_tools([]) == 0
    assert GPT.count_tools([{"type": "web_search"}]) == count_real_tokens('{"type": "web_search"}')


def test_count_tools_refuses_other_values() -> None:
    with pytest.raises(ConfigurationError, match=r"tools is 5; expected a tool"):
        GPT.count_tools([5])


# -- encodings without a network


@pytest.fixture
def no_loaded_encoding() -> Iterator[None]:
    """Start and end with no loaded encoding and no logged warning."""
    tokens._load_token_counting_function.cache_clear()
    yield
    tokens._load_token_counting_function.cache_clear()


def hide_packages(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    for package in packages:
        monkeypatch.setitem(sys.modules, package, None)


@pytest.mark.usefixtures("no_loaded_encoding")
def test_missing_encoding_falls_back_to_estimate_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hide_packages(monkeypatch, "bpe_openai")

    with caplog.at_level(logging.WARNING, "perdure"):
        counters = [token_counter("gpt-4o") for _ in range(3)]

    assert all(counter.encoding is None for counter in counters)
    assert ["perdure[tokens]" in r.getMessage() for r in caplog.records] == [True]


# -- arguments of token_counter


def test_chat_model_is_counted_by_its_name() -> None:
    gpt_counter = token_counter(ChatOpenAI(model="gpt-4", api_key=lambda: "none"))
    llama_counter = token_counter(ChatOpenAI(model="llama-4", api_key=lambda: "none"))

    assert gpt_counter.encoding == "cl100k_base"
    assert llama_counter.encoding is None


@pytest.mark.parametrize("bound", ["tools", "config", "both"])
def test_bound_model_is_counted_like_model_itself(bound: str) -> None:
    model: Any = ChatOpenAI(model="gpt-4", api_key=lambda: "none")
    if bound != "config":
        model = model.bind_tools([WEATHER_TOOL])
    if bound != "tools":
        model = model.with_config(tags=["a"])

    counter = token_counter(model)
    assert counter.encoding == "cl100k_base"
    assert context_window(model) == 8_192


def test_runnable_without_model_is_refused() -> None:
    chain: Any = RunnableLambda(lambda said: said).with_config(tags=["a"])

    for ask in (token_counter, context_window):
        with pytest.raises(ConfigurationError, match="expected"):
            ask(chain)


# -- whole requests


def test_request_counts_tools_bound_to_model() -> None:
    model = ChatOpenAI(model="gpt-4o", api_key=lambda: "none").bind_tools([WEATHER_TOOL])
    bound = count_tokens(WEATHER, model)

    assert (
        bound == count_tokens(WEATHER, "gpt-4o", [WEATHER_TOOL]) > count_tokens(WEATHER, "gpt-4o")
    )


def test_trim_scales_tools_bound_to_model_once() -> None:
    """A budget of the scaled tokens of the whole request is enough for the whole request."""
    model = ChatOpenAI(model="unknown", api_key=lambda: "none").bind_tools([WEATHER_TOOL])
    talk: list[BaseMessage] = [
        HumanMessage("a"),
        make_answer_with_usage(LONG, 2 * ESTIMATE.count_text(LONG)),
        HumanMessage("b"),
    ]
    needed = count_tokens(talk, model)

    assert needed > count_tokens([], model) + sum(map(ESTIMATE.count_message_tokens, talk))
    assert trim(max_tokens=needed, token_counter=model)(talk) == talk


def test_request_estimate_is_scaled_to_reported_usage() -> None:
    talk: list[BaseMessage] = [
        HumanMessage("a"),
        make_answer_with_usage(LONG, 2 * ESTIMATE.count_text(LONG)),
    ]

    assert (
        count_tokens(talk)
        == count_request_tokens(ESTIMATE.scale_to_reported_usage(talk), talk)
        > count_request_tokens(ESTIMATE, talk)
    )
    assert count_tokens([]) == ESTIMATE.request_overhead


@pytest.mark.parametrize("invalid_value", ["hello", HumanMessage("a"), ["hello"], None])
def test_count_tokens_refuses_anything_but_list_of_messages(invalid_value: Any) -> None:
    with pytest.raises(InvalidMessages, match="langchain messages"):
        count_tokens(invalid_value)


def test_token_counter_keeps_counter_and_wraps_callable_for_lists() -> None:
    def count(messages: list[BaseMessage]) -> int:
        return 7 * len(messages)

    counter = token_counter(count)
    talk: list[BaseMessage] = [HumanMessage("a", id="1"), AIMessage("b", id="2")]

    assert token_counter(counter) is counter
    assert counter.count_message_tokens(talk[0]) == 7
    assert count_request_tokens(counter, talk) == count_tokens(talk, count) == 14
    assert counter.count_text("x") == counter.count_tools([WEATHER_TOOL]) == 7
    assert counter.scale_to_reported_usage(talk) is counter


def test_callable_may_count_single_message() -> None:
    def count(message: BaseMessage) -> int:
        return len(message.content)

    assert token_counter(count).count_message_tokens(HumanMessage("four")) == 4
    assert token_counter(len).count_message_tokens(HumanMessage("four")) == 1


@pytest.mark.parametrize("returned", [None, float("nan"), float("inf"), True, -1, -0.5, "7", [7]])
def test_callable_that_returns_no_token_number_is_refused(returned: Any) -> None:
    counter = token_counter(lambda _: returned)

    with pytest.raises(ConfigurationError, match="expected a number of tokens"):
        counter.count_message_tokens(HumanMessage("a"))


@pytest.mark.parametrize("counter", [GPT, ESTIMATE, token_counter(len)])
def test_count_message_refuses_value_that_is_no_message(counter: TokenCounter) -> None:
    with pytest.raises(InvalidMessages, match="expected langchain messages"):
        counter.count_message_tokens("hello")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["claude-sonnet-4", "gpt-4oo", "", "o1x", "text-davinci-003"])
def test_unknown_model_name_is_refused_with_advice(name: str) -> None:
    with pytest.raises(UnknownModel, match="pass 'approximate', a chat model"):
        token_counter(name)


@pytest.mark.parametrize("invalid_value", [5, 1.5, object(), ["gpt-4o"]])
def test_token_counter_refuses_other_types(invalid_value: Any) -> None:
    with pytest.raises(ConfigurationError, match="expected"):
        token_counter(invalid_value)


# -- context windows


def test_context_window_comes_from_profile_or_model_name() -> None:
    small = ChatOpenAI(model="llama", api_key=lambda: "none", profile={"max_input_tokens": 9})

    assert context_window(small) == 9
    assert context_window(ChatOpenAI(model="gpt-4", api_key=lambda: "none")) == 8_192
    assert context_window("gpt-4o") == context_window("openai:gpt-4o-2024-08-06") == 128_000


@pytest.mark.parametrize("invalid_value", [0, True, None, len])
def test_context_window_refuses_values_that_are_no_model(invalid_value: Any) -> None:
    with pytest.raises(ConfigurationError, match="expected a chat model, or the name"):
        context_window(invalid_value)


def test_unknown_context_window_is_refused_with_advice() -> None:
    for unknown in ("claude", "gpt-4-nope", ChatOpenAI(model="llama", api_key=lambda: "none")):
        with pytest.raises(UnknownModel, match="pass a number of tokens"):
            context_window(unknown)


# -- estimates


@given(
    st.text(st.sampled_from("abcdefgh "), max_size=500), st.sampled_from([HumanMessage, AIMessage])
)
def test_words_are_estimated_like_langchain(text: str, kind: Any) -> None:
    """Letters and spaces count a token for four.

    langchain rounds the role and the text together.
    """
    assert (
        0
        <= count_tokens_approximately([kind(text)]) - ESTIMATE.count_message_tokens(kind(text))
        <= 2
    )


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
def test_estimate_is_near_real_count_in_each_script(text: str) -> None:
    """For other scripts, langchain's count of characters would give a quarter."""
    assert 0.8 <= ESTIMATE.count_text(text) / count_real_tokens(text) <= 2.0


def make_answer_with_usage(
    text: str, expected_tokens: int, reasoning: int | None = None
) -> AIMessage:
    return AIMessage(text, usage_metadata=make_usage(expected_tokens, reasoning))


LONG = "word " * 100


def test_estimate_is_scaled_to_largest_reported_usage() -> None:
    base = ESTIMATE.count_text(LONG)
    talk = [
        HumanMessage("a"),
        make_answer_with_usage(LONG, 2 * base),
        make_answer_with_usage(LONG, base),
    ]
    scaled = ESTIMATE.scale_to_reported_usage(talk)

    assert scaled.count_text(LONG) == 2 * base
    assert scaled.scale_to_reported_usage([]).count_text(LONG) == base


@pytest.mark.parametrize(
    "message",
    [
        make_answer_with_usage("too short", 40),
        make_answer_with_usage(LONG, 10),
        make_answer_with_usage(LONG, 900, reasoning=850),
        AIMessage([{"type": "thinking", "thinking": "?"}, LONG], usage_metadata=make_usage(900)),
        AIMessage(LONG),
    ],
)
def test_short_small_or_reasoning_answers_do_not_scale_estimate(message: AIMessage) -> None:
    assert ESTIMATE.scale_to_reported_usage([message]).count_text(LONG) == ESTIMATE.count_text(LONG)


def test_estimate_is_scaled_by_at_most_four() -> None:
    assert ESTIMATE.scale_to_reported_usage([make_answer_with_usage(LONG, 10**6)]).count_text(
        LONG
    ) == 4 * ESTIMATE.count_text(LONG)


@given(st.lists(answers, max_size=5), st.data(), texts)
def test_omitting_messages_never_increases_scale(
    conversation: list[AIMessage], data: st.DataObject, text: str
) -> None:
    remaining = [m for m in conversation if data.draw(st.booleans())]
    fewer = ESTIMATE.scale_to_reported_usage(remaining)

    assert fewer.count_text(text) <= ESTIMATE.scale_to_reported_usage(conversation).count_text(text)
    assert fewer.count_text(text) >= ESTIMATE.count_text(text)


# -- cached counts


def count_without_cache(message: BaseMessage) -> int:
    """Return the tokens of a message by a counter without cached counts."""
    tokens._load_token_counting_function.cache_clear()
    return TokenCounter("o200k_base").count_message_tokens(message)


@settings(max_examples=rounds(20))
@given(messages, texts)
def test_message_changed_in_place_is_counted_again(message: BaseMessage, text: str) -> None:
    """Counts are cached by content, so copies count the same."""
    assert (
        GPT.count_message_tokens(message)
        == GPT.count_message_tokens(message.model_copy(deep=True))
        == count_without_cache(message)
    )
    message.content = text

    assert GPT.count_message_tokens(message) == count_without_cache(message)


def test_second_count_tokenizes_only_new_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[str] = []
    module = SimpleNamespace(
        get_encoding=lambda name: SimpleNamespace(
            encode_ordinary=lambda text: counted.append(text) or [1]  # type: ignore[func-returns-value]
        )
    )
    monkeypatch.setitem(sys.modules, "bpe_openai", module)
    monkeypatch.setattr(tokens, "_MAX_CACHED_COUNTS", 300)
    tokens._load_token_counting_function.cache_clear()
    counter = TokenCounter("o200k_base")
    tokens._load_token_counting_function.cache_clear()
    talk: list[BaseMessage] = [HumanMessage(f"h{i}", id=f"{i}") for i in range(200)]
    count_request_tokens(counter, talk)
    counted.clear()

    again = [m.model_copy(deep=True) for m in talk]
    count_request_tokens(counter, [*again, HumanMessage("new")])

    assert counted == ["new"]
    assert count_request_tokens(counter, [HumanMessage(f"g{i}") for i in range(1_000)]) == 3 + 5_000
