"""Usage reported by providers: request sizes, model names, and invalid reports."""

from __future__ import annotations

from typing import Any

import pytest
from langchain.agents.middleware import ModelRequest, ModelResponse
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage
from langchain_core.runnables import RunnableLambda
from langchain_openai import ChatOpenAI

from perdure.memory import assemble, trim
from perdure.memory.middleware import MemoryMiddleware
from perdure.memory.short_term.tokens import token_counter
from perdure.memory.usage import (
    is_same_model,
    read_model_name,
    read_reported_output_tokens,
    read_reported_total_tokens,
)

ESTIMATE = token_counter("approximate")
LONG = "word " * 100
BASE = ESTIMATE.count_text(LONG)


def make_answer(usage: Any, text: str = LONG, model: str | None = None) -> AIMessage:
    message = AIMessage(text, response_metadata={"model_name": model} if model else {})
    message.usage_metadata = usage
    return message


@pytest.mark.parametrize(
    ("usage", "tokens"),
    [
        ({"input_tokens": 100, "output_tokens": 20, "total_tokens": 120}, 120),
        ({"input_tokens": 100, "output_tokens": 20}, 120),
        ({"input_tokens": 100, "output_tokens": 0, "total_tokens": 100}, 100),
        (  # tokens of a cache are among those of the input
            {
                "input_tokens": 100,
                "output_tokens": 20,
                "input_token_details": {"cache_read": 60, "cache_creation": 30},
            },
            120,
        ),
        (  # except where an integration reports only the others
            {
                "input_tokens": 10,
                "output_tokens": 20,
                "input_token_details": {"cache_read": 60, "cache_creation": 30},
            },
            120,
        ),
        (None, 0),
        ({}, 0),
        ({"input_tokens": 0, "output_tokens": 0, "total_tokens": 0}, 0),
        ({"input_tokens": 0, "output_tokens": 20, "total_tokens": 20}, 0),
        ({"input_tokens": None, "output_tokens": None}, 0),
        ({"input_tokens": -5, "output_tokens": 20}, 0),
        ({"input_tokens": "100", "output_tokens": 20}, 0),
        ({"input_tokens": 10**12, "output_tokens": 20}, 0),
    ],
)
def test_request_size_is_reported_input_plus_output(usage: Any, tokens: int) -> None:
    """A report without a size, or with an impossible size, is ignored."""
    assert read_reported_total_tokens(make_answer(usage)) == tokens


def test_usage_of_human_message_is_ignored() -> None:
    assert read_reported_total_tokens(HumanMessage("a", usage_metadata={"input_tokens": 9})) == 0


def test_reasoning_tokens_do_not_count_as_answer() -> None:
    """Providers do not get them back with the next request."""
    usage = {"input_tokens": 1, "output_tokens": 90, "output_token_details": {"reasoning": 70}}

    assert read_reported_output_tokens(make_answer(usage)) == 20
    assert (
        read_reported_output_tokens(make_answer({"output_tokens": 5, "output_token_details": None}))
        == 5
    )
    assert read_reported_output_tokens(make_answer({"output_tokens": "5"})) == 0


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        ("gpt-4o", "gpt-4o", True),
        ("gpt-4o", "gpt-4o-2024-08-06", True),
        ("openai:gpt-4o", "gpt-4o-2024-08-06", True),
        ("claude-sonnet-4-5", "claude-sonnet-4-5-20250929", True),
        ("models/gemini-2.5-pro", "gemini-2.5-pro", True),
        ("gemini-1.5-pro-002", "gemini-1.5-pro-latest", True),
        ("mistral:7b", "mistral:7b", True),
        ("gpt-4o-2024-08-06gpt-4o-2024-08-06", "gpt-4o", True),  # chunks of a stream, joined
        (None, "gpt-4o", True),
        ("gpt-4", "gpt-4o", False),
        ("gpt-4o", "gpt-4o-mini", False),
        ("mistral:7b", "qwen:7b", False),
        ("claude-sonnet-4-5", "gpt-5", False),
    ],
)
def test_model_names_with_provider_or_version_are_same_model(
    first: str | None, second: str, same: bool
) -> None:
    assert is_same_model(first, second) is same
    assert is_same_model(second, first) is same


@pytest.mark.parametrize("key", ["model_name", "model", "model_id"])
def test_model_name_is_read_from_each_known_metadata_key(key: str) -> None:
    assert read_model_name(AIMessage("a", response_metadata={key: "m"})) == "m"
    assert read_model_name(AIMessage("a")) is None


# -- calibration


def make_answer_with_scale(scale: float, model: str | None) -> AIMessage:
    tokens = int(scale * BASE)
    return make_answer({"input_tokens": 9, "output_tokens": tokens, "total_tokens": 9}, LONG, model)


def test_estimate_is_scaled_by_model_of_newest_answer() -> None:
    """The reports of an earlier model are ignored."""
    conversation: list[BaseMessage] = [
        make_answer_with_scale(3, "claude-x"),
        make_answer_with_scale(2, "gpt-x"),
    ]

    assert ESTIMATE.scale_to_reported_usage(conversation).scale == 2
    assert ESTIMATE.scale_to_reported_usage([*conversation, HumanMessage("and?")]).scale == 2
    assert ESTIMATE.scale_to_reported_usage(conversation[::-1]).scale == 3
    assert (
        ESTIMATE.scale_to_reported_usage(
            [make_answer_with_scale(2, None), make_answer_with_scale(1, "gpt-x")]
        ).scale
        == 2
    )


def test_counter_for_model_is_scaled_only_by_answers_of_that_model() -> None:
    conversation: list[BaseMessage] = [
        make_answer_with_scale(3, "claude-x"),
        make_answer_with_scale(2, "gpt-x-2026-01-01"),
    ]

    assert (
        ESTIMATE.with_calibration_for_model("claude-x").scale_to_reported_usage(conversation).scale
        == 3
    )
    assert (
        ESTIMATE.with_calibration_for_model("gpt-x").scale_to_reported_usage(conversation).scale
        == 2
    )
    assert (
        ESTIMATE.with_calibration_for_model("other").scale_to_reported_usage(conversation).scale
        == 1
    )
    assert (
        ESTIMATE.with_calibration_for_model("gpt-x").scale_to_reported_usage(conversation).model
        == "gpt-x"
    )
    assert ESTIMATE.model is None


@pytest.mark.parametrize("usage", [None, {}, {"output_tokens": None}, {"output_tokens": -1}])
def test_answer_without_usage_does_not_scale_estimate(usage: Any) -> None:
    """Chunks of a stream may have no usage."""
    assert ESTIMATE.scale_to_reported_usage([make_answer(usage)]) is ESTIMATE


@pytest.mark.parametrize("kind", [trim, assemble])
def test_budget_is_scaled_by_usage_of_request_model(kind: Any) -> None:
    """Tools are scaled too."""
    conversation = [
        message
        for n in range(20)
        for message in (HumanMessage(f"{n}?"), make_answer_with_scale(2, "x"))
    ]
    conversation += [HumanMessage("and?")]
    tools = [{"type": "function", "function": {"name": "f", "description": LONG}}]
    sizes = [
        sum(map(ESTIMATE.count_message_tokens, node.with_tools(tools)(conversation)))
        + ESTIMATE.count_tools(tools)
        for node in (
            kind(2_000),
            kind(2_000).with_calibration_for_model("x-2026-01-01"),
            kind(2_000).with_calibration_for_model("y"),
        )
    ]

    assert 800 < sizes[0] == sizes[1] <= 1_000
    assert 1_700 < sizes[2] <= 2_000


def test_agent_is_scaled_by_answers_of_its_model() -> None:
    """A gateway may answer with another name than the requested one."""
    memory = MemoryMiddleware(trim(2_000))
    conversation = [
        message
        for n in range(20)
        for message in (HumanMessage(f"{n}?"), make_answer_with_scale(2, "x"))
    ]
    conversation += [HumanMessage("and?")]

    def measure_request(model: str, answering_model: str) -> int:
        sizes = []

        def handler(request: Any) -> ModelResponse[Any]:
            sizes.append(sum(map(ESTIMATE.count_message_tokens, request.messages)))
            return ModelResponse(
                [AIMessage("yes", response_metadata={"model_name": answering_model})]
            )

        chat_model = ChatOpenAI(model=model, api_key=lambda: "none")
        request: Any = ModelRequest(
            model=chat_model, messages=list(conversation), tools=[], state=None
        )
        call = RunnableLambda(lambda _: memory.wrap_model_call(request, handler))
        call.invoke(None)
        return int(sizes[0])

    assert 800 < measure_request("x", "x") <= 1_000
    assert 1_700 < measure_request("other", "other") <= 2_000
    assert (
        1_700 < measure_request("gateway", "x-2026-01-01") <= 2_000
    )  # nobody knows yet what answers
    assert 800 < measure_request("gateway", "x-2026-01-01") <= 1_000
