"""Usage that providers report: the size of requests, the model that reported it, odd reports."""

from __future__ import annotations

from typing import Any

import pytest
from langchain.agents.middleware import ModelRequest, ModelResponse
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage
from langchain_core.runnables import RunnableLambda
from langchain_openai import ChatOpenAI

from perdure.memory import assemble, trim
from perdure.memory.middleware import MemoryMiddleware
from perdure.memory.tokens import token_counter
from perdure.memory.usage import (
    is_same_model,
    read_answer_tokens,
    read_model_name,
    read_request_tokens,
)

ESTIMATE = token_counter("approximate")
LONG = "word " * 100
BASE = ESTIMATE.count_text(LONG)


def answer(usage: Any, text: str = LONG, model: str | None = None) -> AIMessage:
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
def test_the_size_of_a_request_is_input_and_output(usage: Any, tokens: int) -> None:
    """A report without a size, or with an impossible one, is none."""
    assert read_request_tokens(answer(usage)) == tokens


def test_only_answers_report_usage() -> None:
    """A person's message with the same attribute says nothing of a request."""
    assert read_request_tokens(HumanMessage("a", usage_metadata={"input_tokens": 9})) == 0


def test_thoughts_are_no_part_of_an_answer() -> None:
    """Providers do not take them back with the next request."""
    usage = {"input_tokens": 1, "output_tokens": 90, "output_token_details": {"reasoning": 70}}

    assert read_answer_tokens(answer(usage)) == 20
    assert read_answer_tokens(answer({"output_tokens": 5, "output_token_details": None})) == 5
    assert read_answer_tokens(answer({"output_tokens": "5"})) == 0


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
def test_names_of_models(first: str | None, second: str, same: bool) -> None:
    """The provider and the version do not make another model."""
    assert is_same_model(first, second) is same
    assert is_same_model(second, first) is same


@pytest.mark.parametrize("key", ["model_name", "model", "model_id"])
def test_the_model_of_an_answer(key: str) -> None:
    """Integrations name it by one of three keys."""
    assert read_model_name(AIMessage("a", response_metadata={key: "m"})) == "m"
    assert read_model_name(AIMessage("a")) is None


# -- calibration


def reported(times: float, model: str | None) -> AIMessage:
    tokens = int(times * BASE)
    return answer({"input_tokens": 9, "output_tokens": tokens, "total_tokens": 9}, LONG, model)


def test_the_model_of_the_newest_answer_scales_an_estimate() -> None:
    """What another model reported for its answers counts no more after a change of the model."""
    talk: list[BaseMessage] = [reported(3, "claude-x"), reported(2, "gpt-x")]

    assert ESTIMATE.scale_to_usage(talk).scale == 2
    assert ESTIMATE.scale_to_usage([*talk, HumanMessage("and?")]).scale == 2
    assert ESTIMATE.scale_to_usage(talk[::-1]).scale == 3
    assert ESTIMATE.scale_to_usage([reported(2, None), reported(1, "gpt-x")]).scale == 2


def test_a_counter_for_a_model_is_scaled_by_its_answers_only() -> None:
    """Only answers of the counter's chat model, or of the request's model, scale its counts."""
    talk: list[BaseMessage] = [reported(3, "claude-x"), reported(2, "gpt-x-2026-01-01")]

    assert ESTIMATE.for_model("claude-x").scale_to_usage(talk).scale == 3
    assert ESTIMATE.for_model("gpt-x").scale_to_usage(talk).scale == 2
    assert ESTIMATE.for_model("other").scale_to_usage(talk).scale == 1
    assert ESTIMATE.for_model("gpt-x").scale_to_usage(talk).model == "gpt-x"
    assert ESTIMATE.model is None


@pytest.mark.parametrize("usage", [None, {}, {"output_tokens": None}, {"output_tokens": -1}])
def test_an_answer_without_usage_scales_nothing(usage: Any) -> None:
    """Chunks of a stream may have none."""
    assert ESTIMATE.scale_to_usage([answer(usage)]) is ESTIMATE


@pytest.mark.parametrize("kind", [trim, assemble])
def test_a_budget_holds_by_what_the_model_reported(kind: Any) -> None:
    """A node is scaled to the model of its requests; tools are scaled too."""
    talk = [message for n in range(20) for message in (HumanMessage(f"{n}?"), reported(2, "x"))]
    talk += [HumanMessage("and?")]
    tools = [{"type": "function", "function": {"name": "f", "description": LONG}}]
    sizes = [
        sum(map(ESTIMATE.count_message, node.with_tools(tools)(talk))) + ESTIMATE.count_tools(tools)
        for node in (kind(2_000), kind(2_000).for_model("x-2026-01-01"), kind(2_000).for_model("y"))
    ]

    assert 800 < sizes[0] == sizes[1] <= 1_000
    assert 1_700 < sizes[2] <= 2_000


def test_an_agent_is_scaled_by_the_answers_of_its_model() -> None:
    """A gateway may answer by another name than the one it is asked for."""
    memory = MemoryMiddleware(trim(2_000))
    talk = [message for n in range(20) for message in (HumanMessage(f"{n}?"), reported(2, "x"))]
    talk += [HumanMessage("and?")]

    def shown(model: str, answered: str) -> int:
        sizes = []

        def handler(request: Any) -> ModelResponse[Any]:
            sizes.append(sum(map(ESTIMATE.count_message, request.messages)))
            return ModelResponse([AIMessage("yes", response_metadata={"model_name": answered})])

        named = ChatOpenAI(model=model, api_key=lambda: "none")
        request: Any = ModelRequest(model=named, messages=list(talk), tools=[], state=None)
        call = RunnableLambda(lambda _: memory.wrap_model_call(request, handler))
        call.invoke(None)
        return int(sizes[0])

    assert 800 < shown("x", "x") <= 1_000
    assert 1_700 < shown("other", "other") <= 2_000
    assert 1_700 < shown("gateway", "x-2026-01-01") <= 2_000  # nobody knows yet what answers
    assert 800 < shown("gateway", "x-2026-01-01") <= 1_000
