"""Counting: as OpenAI counts, without a network; estimates that hold; content, never identity."""

# ruff: noqa: RUF001 - letters of other alphabets are meant
from __future__ import annotations

import base64
import gzip
import hashlib
import logging
import struct
import sys
import warnings
from importlib import import_module, resources
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
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
from langchain_core.runnables import RunnableLambda
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

from perdure.errors import ConfigurationError, InvalidMessages, UnknownModel
from perdure.memory import openai_tokens
from perdure.memory.estimated_tokens import EstimatedCounter, estimate
from perdure.memory.message_tokens import Memo
from perdure.memory.openai_tokens import OpenAICounter
from perdure.memory.tokens import (
    CallableCounter,
    TokenCounter,
    context_window,
    count_tokens,
    token_counter,
)

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
    return counter.request + sum(map(counter.message, talk))


def png(width: int, height: int) -> str:
    head = b"\x89PNG\r\n\x1a\n" + struct.pack(">I4sII", 13, b"IHDR", width, height)
    return base64.b64encode(head + b"\x08\x06" + bytes(100)).decode()


def jpeg(width: int, height: int) -> str:
    exif = b"\xff\xe1" + struct.pack(">H", 5002) + bytes(5000)
    frame = b"\xff\xc0" + struct.pack(">HBHH", 17, 8, height, width) + bytes(20)
    return base64.b64encode(b"\xff\xd8" + exif + frame).decode()


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
def test_tools_count_as_the_api_reported(model: str, reported: int) -> None:
    counter = token_counter(model)

    assert total(counter, WEATHER) + counter.tools([WEATHER_TOOL]) == reported


def test_a_call_and_its_result() -> None:
    """Frame and role, then name and arguments of each call; a result has an id besides."""
    call = {"name": "look_up", "args": {"city": "Zürich"}, "id": "1", "type": "tool_call"}
    calling = AIMessage("Let me see.", tool_calls=[call, call | {"id": "2"}])

    one = 3 + n("look_up") + n('{"city": "Zürich"}')
    assert GPT.message(calling) == 4 + n("Let me see.") + 2 * one
    assert GPT.message(ToolMessage("12 °C", tool_call_id="1")) == 4 + n("12 °C") + 3


def test_a_call_that_is_in_the_content_too_counts_once() -> None:
    call = {"name": "f", "args": {"a": 1}, "id": "1", "type": "tool_call"}
    block = {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}}
    text = {"type": "text", "text": "Well"}

    assert GPT.message(AIMessage([text, block], tool_calls=[call])) == GPT.message(
        AIMessage("Well", tool_calls=[call])
    )


def test_thoughts_count_as_text() -> None:
    block = {"type": "reasoning", "reasoning": "First, the weather."}

    assert GPT.message(AIMessage([block])) == 4 + n("First, the weather.")


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

    assert isinstance(counter, OpenAICounter)
    assert counter.encoding == encoding


def test_what_looks_like_a_special_token_is_text() -> None:
    assert GPT.text("<|endoftext|>") == n("<|endoftext|>") > 1


def test_a_text_longer_than_the_tokenizer_takes() -> None:
    text = "memory " * 200_000

    assert abs(GPT.text(text) - 200_000) <= len(text) / 50_000 + 1


# -- images and files


@pytest.mark.parametrize(
    ("size", "tokens"),
    [((1024, 1024), 765), ((2048, 4096), 1105), ((2049, 513), 1445), ((2050, 513), 765)],
)
def test_images_count_as_openai_documents_and_bills(size: tuple[int, int], tokens: int) -> None:
    """The first two are of its guide, the others were billed (community.openai.com/t/1281361)."""
    for data in (png(*size), jpeg(*size)):
        url = f"data:image/png;base64,{data}"
        forms: list[dict[str, Any]] = [
            {"type": "image_url", "image_url": {"url": url}},
            {"type": "image", "base64": data, "mime_type": "image/png"},
            {"type": "image", "source": {"type": "base64", "data": data}},
            {"type": "input_image", "image_url": url},
        ]
        assert [GPT.message(image(**form)) - 4 for form in forms] == [tokens] * 4


def test_an_image_of_low_detail_and_one_out_of_sight() -> None:
    url = "https://example.com/a.png"

    assert GPT.message(image(type="image_url", image_url={"url": url, "detail": "low"})) == 4 + 85
    assert GPT.message(image(type="image_url", image_url={"url": url})) == 4 + 85 + 8 * 170
    assert ESTIMATE.message(image(type="image", url=url)) == 4 + 1600


def test_models_that_see_patches() -> None:
    mini = token_counter("gpt-4.1-mini")

    assert mini.message(image(type="image", base64=png(1024, 1024))) == 4 + 1659  # 1024 · 1.62
    assert mini.message(image(type="image", base64="no image")) == 4 + 2489  # 1536 · 1.62


def test_files_are_bounded_by_their_size() -> None:
    data = base64.b64encode(bytes(96_000)).decode()
    pdf = {"type": "file", "base64": data, "mime_type": "application/pdf"}
    sound = {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}

    assert GPT.message(image(**pdf)) == 4 + 12_000
    assert GPT.message(image(**sound)) == 4 + 3_000
    assert GPT.message(image(type="file", file_id="file-1")) == 4 + 4_000


# -- tools


def test_tools_in_any_form() -> None:
    @tool
    def look_up(city: str, days: list[int] | None = None) -> str:
        """Look up the weather."""
        return city

    fields = n("city:string:") + n("days:array|null:")
    expected = 12 + 7 + n("look_up:Look up the weather") + 3 + 2 * 3 + fields
    assert GPT.tools([look_up]) == expected
    assert GPT.tools([]) == 0
    assert GPT.tools([{"type": "web_search"}]) == 12 + n('{"type": "web_search"}')


def test_nested_properties_count() -> None:
    flat = {"type": "object", "properties": {"a": {"type": "object"}}}
    inner = {"type": "object", "properties": {"b": {"type": "string", "description": "A word"}}}
    deep = {"type": "object", "properties": {"a": inner}}

    def counted(parameters: dict[str, Any]) -> int:
        function = {"name": "f", "description": "d", "parameters": parameters}
        return GPT.tools([{"type": "function", "function": function}])

    assert counted(deep) - counted(flat) == 3 + 3 + n("b:string:A word")


def test_what_is_no_tool_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"5 is no tool"):
        GPT.tools([5])
    with pytest.raises(ConfigurationError, match=r"expected a list"):
        GPT.tools("f")


# -- encodings without a network


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No encoding loaded, nothing warned of, and an empty folder as tiktoken's cache."""
    monkeypatch.setattr(openai_tokens, "_memos", {})
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    openai_tokens._warn.cache_clear()
    return tmp_path


def cache_file(folder: Path, name: str) -> Path:
    url = f"https://openaipublic.blob.core.windows.net/encodings/{name}.tiktoken"
    return folder / hashlib.sha1(url.encode()).hexdigest()


def forbid(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    for package in packages:
        monkeypatch.setitem(sys.modules, package, None)


def test_tiktoken_is_used_if_its_file_is_there(
    fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = resources.files("bpe_openai.data").joinpath("cl100k_base.tiktoken.gz").read_bytes()
    cache_file(fresh, "cl100k_base").write_bytes(gzip.decompress(packed))
    forbid(monkeypatch, "bpe_openai")
    text = "Grüße, 世界! def f(x): return x ** 2  # 12345"

    assert token_counter("gpt-4").text(text) == n(text, CL100K)


def test_a_damaged_file_is_left_alone(fresh: Path) -> None:
    """tiktoken would fetch another."""
    file = cache_file(fresh, "o200k_base")
    file.write_bytes(b"aGVsbG8= 0\n")

    assert token_counter("gpt-4o").text("hello world") == n("hello world")
    assert file.read_bytes() == b"aGVsbG8= 0\n"


def test_without_an_encoding_tokens_are_estimated_and_a_warning_says_so_once(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    forbid(monkeypatch, "bpe_openai", "tiktoken")

    with caplog.at_level(logging.WARNING, "perdure"):
        counters = [token_counter("gpt-4o") for _ in range(3)]

    assert all(isinstance(counter, EstimatedCounter) for counter in counters)
    assert ["perdure[tokens]" in r.getMessage() for r in caplog.records] == [True]


# -- what token_counter takes


def test_a_chat_model_counts_by_its_name() -> None:
    ours = token_counter(ChatOpenAI(model="gpt-4", api_key=lambda: "none"))
    other = token_counter(ChatOpenAI(model="llama-4", api_key=lambda: "none"))

    assert isinstance(ours, OpenAICounter)
    assert ours.encoding == "cl100k_base"
    assert isinstance(other, EstimatedCounter)


@pytest.mark.parametrize("bound", ["tools", "config", "both"])
def test_a_model_with_something_bound_is_that_model(bound: str) -> None:
    model: Any = ChatOpenAI(model="gpt-4", api_key=lambda: "none")
    if bound != "config":
        model = model.bind_tools([WEATHER_TOOL])
    if bound != "tools":
        model = model.with_config(tags=["a"])

    counter = token_counter(model)
    assert isinstance(counter, OpenAICounter)
    assert counter.encoding == "cl100k_base"
    assert context_window(model) == 8_192


def test_a_runnable_that_is_no_model_names_no_counter() -> None:
    chain: Any = RunnableLambda(lambda said: said).with_config(tags=["a"])

    for ask in (token_counter, context_window):
        with pytest.raises(ConfigurationError, match="expected"):
            ask(chain)


# -- a request as a whole


@pytest.mark.parametrize(("model", "reported"), [("gpt-4o", 101), ("gpt-4", 105)])
def test_a_request_counts_as_the_api_reported(model: str, reported: int) -> None:
    """With its tools, in one call; by name, or by a counter that is used again."""
    assert count_tokens(WEATHER, model, [WEATHER_TOOL]) == reported
    assert count_tokens(WEATHER, token_counter(model), tools=[WEATHER_TOOL]) == reported
    assert count_tokens(WEATHER, model) < reported


def test_a_request_is_estimated_as_its_answers_call_for() -> None:
    talk: list[BaseMessage] = [HumanMessage("a"), answer(LONG, 2 * ESTIMATE.text(LONG))]

    assert count_tokens(talk) == total(ESTIMATE.fitted(talk), talk) > total(ESTIMATE, talk)
    assert count_tokens([]) == ESTIMATE.request


@pytest.mark.parametrize("wrong", ["hello", HumanMessage("a"), ["hello"], None])
def test_a_request_is_a_list_of_messages(wrong: Any) -> None:
    with pytest.raises(InvalidMessages, match="langchain messages"):
        count_tokens(wrong)


def test_a_counter_is_itself_and_a_callable_is_asked_once_a_message() -> None:
    asked: list[int] = []

    def count(messages: list[BaseMessage]) -> int:
        asked.append(len(messages))
        return 7

    counter = token_counter(count)
    talk: list[BaseMessage] = [HumanMessage("a", id="1"), AIMessage("b", id="2")]

    assert token_counter(counter) is counter
    assert [total(counter, talk) for _ in range(3)] == [14, 14, 14]
    assert asked == [1, 1]
    assert counter.text("x") == counter.tools([WEATHER_TOOL]) == 7
    assert counter.fitted(talk) is counter


def test_a_callable_for_one_message() -> None:
    def count(message: BaseMessage) -> int:
        return len(message.content)

    assert token_counter(count).message(HumanMessage("four")) == 4  # type: ignore[arg-type]
    assert token_counter(len).message(HumanMessage("four")) == 1


@pytest.mark.parametrize("returned", [None, 1.5, True, -1, "7"])
def test_a_callable_that_returns_no_number(returned: Any) -> None:
    counter = token_counter(lambda _: returned)

    with pytest.raises(ConfigurationError, match="expected a whole number"):
        counter.message(HumanMessage("a"))


@pytest.mark.parametrize("counter", [GPT, ESTIMATE, CallableCounter(len)])
def test_what_is_no_message_is_refused(counter: TokenCounter) -> None:
    with pytest.raises(InvalidMessages, match="expected a langchain message"):
        counter.message("hello")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["claude-sonnet-4", "gpt-4oo", "", "o1x", "text-davinci-003"])
def test_an_unknown_name_says_what_to_pass(name: str) -> None:
    with pytest.raises(UnknownModel, match="pass 'estimate', a callable"):
        token_counter(name)


@pytest.mark.parametrize("wrong", [5, 1.5, object(), ["gpt-4o"], OpenAICounter])
def test_what_names_no_counter(wrong: Any) -> None:
    with pytest.raises(ConfigurationError, match="expected"):
        token_counter(wrong)


# -- windows


def test_windows() -> None:
    small = ChatOpenAI(model="llama", api_key=lambda: "none", profile={"max_input_tokens": 9})

    assert context_window(4_096) == 4_096
    assert context_window(small) == 9
    assert context_window(ChatOpenAI(model="gpt-4", api_key=lambda: "none")) == 8_192
    assert context_window("gpt-4o") == context_window("ft:gpt-4o-mini-2024-07-18:a::b") == 128_000


@pytest.mark.parametrize("wrong", [0, -1, True, None, 1.5])
def test_what_is_no_window(wrong: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"expected a (whole )?number"):
        context_window(wrong)


def test_a_window_that_nobody_knows() -> None:
    for unknown in ("claude", "gpt-4-nope", ChatOpenAI(model="llama", api_key=lambda: "none")):
        with pytest.raises(UnknownModel, match="pass the number"):
            context_window(unknown)


# -- estimates


@pytest.mark.parametrize(
    "text",
    [
        "The doctor called on Tuesday and moved the appointment to half past three.",
        "def add(left: int, right: int) -> int:\n    return left + right\n",
        '{"orders": [{"id": 48213, "total": 129.95, "paid": true}], "next": null}',
        "人人生而自由,在尊严和权利上一律平等。",
        "すべての人間は、生まれながらにして自由であり、かつ、尊厳と権利とについて平等である。",
        "모든 인간은 태어날 때부터 자유로우며 그 존엄과 권리에 있어 동등하다.",
        "Все люди рождаются свободными и равными в своем достоинстве и правах.",
        "Alle Menschen sind frei und gleich an Würde und Rechten geboren.",
        "Tất cả mọi người sinh ra đều được tự do và bình đẳng về nhân phẩm và quyền lợi.",
        "0123456789" * 20,
        "🎉🚀 party 🥳",
    ],
)
def test_estimates_are_near(text: str) -> None:
    assert 0.8 <= estimate(text) / n(text) <= 2.0


def answer(text: str, reported: int, reasoning: int | None = None) -> AIMessage:
    return AIMessage(text, usage_metadata=used(reported, reasoning))


LONG = "word " * 100


def test_estimates_fit_what_the_provider_reported() -> None:
    base = ESTIMATE.text(LONG)
    talk = [HumanMessage("a"), answer(LONG, 2 * base), answer(LONG, base)]
    fitted = ESTIMATE.fitted(talk)

    assert fitted.text(LONG) == 2 * base
    assert fitted.fitted([]).text(LONG) == base


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
    assert ESTIMATE.fitted([message]).text(LONG) == ESTIMATE.text(LONG)


def test_a_scale_is_at_most_four() -> None:
    assert ESTIMATE.fitted([answer(LONG, 10**6)]).text(LONG) == 4 * ESTIMATE.text(LONG)


@given(st.lists(answers, max_size=5), st.data(), texts)
def test_leaving_messages_out_never_makes_the_rest_count_more(
    talk: list[AIMessage], data: st.DataObject, text: str
) -> None:
    kept = [m for m in talk if data.draw(st.booleans())]
    fewer = ESTIMATE.fitted(kept)

    assert fewer.text(text) <= ESTIMATE.fitted(talk).text(text)
    assert fewer.text(text) >= ESTIMATE.text(text)


# -- what is remembered


@given(st.lists(messages, max_size=6))
def test_remembered_counts_are_the_counts(talk: list[BaseMessage]) -> None:
    """Same ids on other contents, and fresh copies, included."""
    copies = [message.model_copy(deep=True) for message in talk]
    new = OpenAICounter("o200k_base", Memo(n))

    assert [GPT.message(m) for m in talk] == [new.message(m) for m in copies]
    assert [ESTIMATE.message(m) for m in talk] == [EstimatedCounter().message(m) for m in copies]


@given(messages, texts)
def test_a_message_changed_in_place_counts_anew(message: BaseMessage, text: str) -> None:
    GPT.message(message)
    message.content = text

    assert GPT.message(message) == OpenAICounter("o200k_base", Memo(n)).message(message)


def test_a_second_pass_counts_only_what_is_new() -> None:
    counted: list[str] = []
    memo = Memo[str](lambda text: counted.append(text) or 1)  # type: ignore[func-returns-value]
    counter = OpenAICounter("o200k_base", memo)
    talk: list[BaseMessage] = [HumanMessage(f"h{i}", id=f"{i}") for i in range(5_000)]
    total(counter, talk)
    counted.clear()

    again = [m.model_copy(deep=True) for m in talk]
    total(counter, [*again, HumanMessage("new")])

    assert counted == ["new"]


def test_a_memo_is_bounded_and_keeps_what_is_used() -> None:
    counted: list[str] = []
    memo = Memo[str](lambda text: counted.append(text) or 1, size=10)  # type: ignore[func-returns-value]
    for i in range(100):
        memo("used", "used")
        memo(str(i), str(i))
    counted.clear()
    for text in ("used", "0"):
        memo(text, text)

    assert counted == ["0"]
