"""Calling a model: by its name or as an object, and the problems of its answers."""

from __future__ import annotations

import asyncio
import socket
import sys
import threading
from typing import Any

import pytest
from langchain_core.language_models.fake_chat_models import FakeListChatModel
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.runnables import RunnableLambda
from langchain_openai import ChatOpenAI
from langgraph.errors import GraphInterrupt
from pydantic import BaseModel

from perdure.errors import ConfigurationError, MissingDependency
from perdure.memory.model_call import (
    ModelCall,
    NamedModel,
    bind_output_schema,
    bind_tools,
    describe_name_and_url_of_failed_model,
    find_reason_for_unusable_answer,
    is_permanent_failure,
    load_chat_model,
)
from tests.openai_server import Answer, OpenAIServer

ASK = [HumanMessage("hello")]


@pytest.fixture(autouse=True)
def no_openai_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_API_KEY", "OPENAI_ADMIN_KEY", "OPENAI_BASE_URL", "OPENAI_API_BASE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(params=["langchain", "no langchain"])
def has_langchain(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the package langchain can be imported."""
    if request.param == "no langchain":
        monkeypatch.setitem(sys.modules, "langchain.chat_models", None)
    return bool(request.param == "langchain")


# -- models by name


def test_model_object_is_used_unchanged() -> None:
    models: list[Any] = [FakeListChatModel(responses=["hi"]), RunnableLambda(lambda asked: "hi")]
    for model in models:
        assert load_chat_model(model) is model


@pytest.mark.parametrize("name", ["openai:gpt-5-mini", "gpt-5-mini"])
def test_named_model_needs_its_key_only_when_it_is_called(
    name: str, has_langchain: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The behaviour is the same with and without langchain, in async calls, and with tools."""
    if not has_langchain and ":" not in name:
        with pytest.raises(
            MissingDependency, match=r'perdure\[agents\].*such as "openai:gpt-5-mini"'
        ):
            load_chat_model(name)
        return
    model: Any = load_chat_model(name)
    assert isinstance(model, NamedModel)
    call = ModelCall(model, backoff_s=0)
    answer = call.request_answer(ASK).blocking()
    assert isinstance(answer, ConfigurationError)
    assert name in str(answer)
    assert is_permanent_failure(answer)

    with OpenAIServer(["one", "two"]) as server:
        monkeypatch.setenv("OPENAI_API_KEY", "any")
        monkeypatch.setenv("OPENAI_BASE_URL", server.base_url)
        bound = ModelCall(model.bind_tools([]))
        assert call.request_answer(ASK).blocking().text == "one"
        assert asyncio.run(_request_async(bound)).text == "two"
        assert isinstance(load_chat_model(name), ChatOpenAI)
    assert [request["model"] for request in server.requests] == ["gpt-5-mini"] * 2


async def _request_async(call: ModelCall) -> Any:
    return await call.request_answer(ASK).awaiting()


@pytest.mark.parametrize("name", ["", " ", "openai:", "nosuch", "nosuch:model", 7, None])
def test_invalid_model_name_is_refused_at_once(name: Any, has_langchain: bool) -> None:
    with pytest.raises(ConfigurationError, match="model"):
        load_chat_model(name)


def test_missing_package_of_a_named_model_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package is the provider's, or langchain, which knows the providers."""
    with pytest.raises(MissingDependency, match="langchain-ollama"):
        load_chat_model("ollama:llama3")
    monkeypatch.setitem(sys.modules, "langchain.chat_models", None)
    with pytest.raises(MissingDependency, match=r"perdure\[agents\]"):
        load_chat_model("anthropic:claude-sonnet-4-5")


def test_structured_output_works_with_a_named_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is created at its first call."""

    class City(BaseModel):
        name: str

    model = bind_output_schema("openai:gpt-5-mini", City, strict=True)
    call = {"name": "City", "arguments": '{"name": "Ghent"}'}
    calls = [{"id": "1", "type": "function", "function": call}]
    with OpenAIServer([Answer({"content": None, "tool_calls": calls}, "tool_calls")]) as server:
        monkeypatch.setenv("OPENAI_API_KEY", "any")
        monkeypatch.setenv("OPENAI_BASE_URL", server.base_url)
        answer = ModelCall(model).request_answer(ASK).blocking()
    assert answer["parsed"] == City(name="Ghent")


def test_model_without_tool_calling_is_refused_by_its_class() -> None:
    """The error names the missing method."""

    class City(BaseModel):
        name: str

    model = FakeListChatModel(responses=["hi"])
    with pytest.raises(ConfigurationError, match=r"FakeListChatModel, which .* bind_tools"):
        bind_tools(model, [])
    with pytest.raises(ConfigurationError, match=r"FakeListChatModel.* with_structured_output"):
        bind_output_schema(model, City, strict=True)


# -- calls


@pytest.mark.parametrize(
    ("options", "expected_message"),
    [
        ({"timeout_s": 0}, "timeout_s is 0"),
        ({"timeout_s": "soon"}, "timeout_s is 'soon'"),
        ({"retries": -1}, "retries is -1"),
        ({"backoff_s": -1}, "backoff_s is -1"),
    ],
)
def test_invalid_options_of_a_model_call_are_refused(options: Any, expected_message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        ModelCall(FakeListChatModel(responses=["hi"]), **options)
    assert expected_message in str(caught.value)


@pytest.mark.parametrize("is_async", [False, True])
def test_hanging_model_call_times_out(is_async: bool) -> None:
    """A blocking call is left in its thread."""
    release = threading.Event()

    async def hang_async(messages: Any) -> Any:
        await asyncio.Event().wait()

    def hang(messages: Any) -> str:
        release.wait()
        return "late"

    call = ModelCall(RunnableLambda(hang, hang_async), timeout_s=0.05)
    try:
        answer = (
            asyncio.run(_request_async(call)) if is_async else call.request_answer(ASK).blocking()
        )
        assert isinstance(answer, TimeoutError)
    finally:
        release.set()


@pytest.mark.parametrize("signal", [GraphInterrupt(()), KeyboardInterrupt(), SystemExit(1)])
def test_interrupts_and_exits_pass_through_a_model_call(signal: BaseException) -> None:
    """Other exceptions become the answer."""

    def request_raising(exc: BaseException) -> Any:
        def invoke(messages: Any) -> Any:
            raise exc

        return ModelCall(RunnableLambda(invoke)).request_answer(ASK)

    with pytest.raises(type(signal)):
        request_raising(signal).blocking()
    answer = request_raising(OSError("no luck")).blocking()
    assert (
        find_reason_for_unusable_answer(answer) == "the call of the model raised OSError: no luck"
    )


def test_failed_call_names_the_model_and_its_address_without_password() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    url = f"http://ann:secret@127.0.0.1:{port}/v1"
    options: Any = {"base_url": url, "api_key": "none", "max_retries": 0}
    answer = ModelCall(ChatOpenAI(model="gpt-x", **options)).request_answer(ASK).blocking()
    description = f"the model 'gpt-x' at http://127.0.0.1:{port}/v1/chat/completions"

    assert describe_name_and_url_of_failed_model(answer) == description
    assert (find_reason_for_unusable_answer(answer) or "").startswith(
        f"the call of {description} raised "
    )


# -- answers


@pytest.mark.parametrize(
    ("metadata", "expected_reason"),
    [
        ({"finish_reason": "stop"}, None),
        ({"stop_reason": "end_turn"}, None),
        ({"status": "completed", "incomplete_details": None}, None),
        ({"finish_reason": "length"}, "cut off"),
        ({"stop_reason": "max_tokens"}, "cut off"),
        ({"stopReason": "max_tokens"}, "cut off"),
        ({"done_reason": "length"}, "cut off"),
        ({"finish_reason": "MAX_TOKENS"}, "cut off"),
        (
            {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}},
            "cut off",
        ),
        ({"finish_reason": "content_filter"}, "withheld"),
        ({"finish_reason": "SAFETY"}, "withheld"),
        ({"stop_reason": "refusal"}, "withheld"),
    ],
)
def test_truncated_or_withheld_answer_is_unusable(
    metadata: Any, expected_reason: str | None
) -> None:
    """The metadata has the names of OpenAI, Anthropic, Bedrock, Google and Ollama."""
    reason = find_reason_for_unusable_answer(AIMessage("I cannot he", response_metadata=metadata))
    assert (reason is None) if expected_reason is None else expected_reason in (reason or "")


@pytest.mark.parametrize("answer", [None, 7, {"content": "hi"}])
def test_answer_that_is_no_message_is_unusable(answer: Any) -> None:
    assert "expected a message" in (find_reason_for_unusable_answer(answer) or "")
