"""Calling a model: by its name or as an object, and what is wrong with its answers."""

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
    describe_failed_model,
    find_reason_for_unusable_answer,
    is_permanent_failure,
    load_chat_model,
)
from tests.openai_server import Answer, OpenAIServer

ASK = [HumanMessage("hello")]


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_API_KEY", "OPENAI_ADMIN_KEY", "OPENAI_BASE_URL", "OPENAI_API_BASE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(params=["langchain", "no langchain"])
def installed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if request.param == "no langchain":
        monkeypatch.setitem(sys.modules, "langchain.chat_models", None)
    return bool(request.param == "langchain")


# -- models by name


def test_an_object_is_taken_as_it_is() -> None:
    models: list[Any] = [FakeListChatModel(responses=["hi"]), RunnableLambda(lambda asked: "hi")]
    for model in models:
        assert load_chat_model(model) is model


@pytest.mark.parametrize("name", ["openai:gpt-5-mini", "gpt-5-mini"])
def test_a_name_needs_a_key_only_when_it_is_called(
    name: str, installed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With langchain and without; awaited too, and with tools bound."""
    if not installed and ":" not in name:
        with pytest.raises(MissingDependency, match=r'\.\[agents\].*such as "openai:gpt-5-mini"'):
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
        assert asyncio.run(_awaited(bound)).text == "two"
        assert isinstance(load_chat_model(name), ChatOpenAI)
    assert [request["model"] for request in server.requests] == ["gpt-5-mini"] * 2


async def _awaited(call: ModelCall) -> Any:
    return await call.request_answer(ASK).awaiting()


@pytest.mark.parametrize("name", ["", " ", "openai:", "nosuch", "nosuch:model", 7, None])
def test_a_name_that_can_never_work_is_refused_at_once(name: Any, installed: bool) -> None:
    with pytest.raises(ConfigurationError, match="model"):
        load_chat_model(name)


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The provider's, or langchain, which knows the providers."""
    with pytest.raises(MissingDependency, match="langchain-ollama"):
        load_chat_model("ollama:llama3")
    monkeypatch.setitem(sys.modules, "langchain.chat_models", None)
    with pytest.raises(MissingDependency, match=r"\.\[agents\]"):
        load_chat_model("anthropic:claude-sonnet-4-5")


def test_a_structured_model_may_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """It too is made at its first call."""

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


def test_a_model_that_calls_no_tools_is_refused_by_its_class() -> None:
    """When a graph or a node is made with it, and in words that say what it lacks."""

    class City(BaseModel):
        name: str

    mute = FakeListChatModel(responses=["hi"])
    with pytest.raises(ConfigurationError, match=r"FakeListChatModel, which .* bind_tools"):
        bind_tools(mute, [])
    with pytest.raises(ConfigurationError, match=r"FakeListChatModel.* with_structured_output"):
        bind_output_schema(mute, City, strict=True)


# -- calls


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"timeout_s": 0}, "timeout_s is 0"),
        ({"timeout_s": "soon"}, "timeout_s is 'soon'"),
        ({"retries": -1}, "retries is -1"),
        ({"backoff_s": -1}, "backoff_s is -1"),
    ],
)
def test_an_option_that_cannot_work_is_refused(options: Any, named: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        ModelCall(FakeListChatModel(responses=["hi"]), **options)
    assert named in str(caught.value)


@pytest.mark.parametrize("awaited", [False, True])
def test_a_call_that_hangs_is_left_behind(awaited: bool) -> None:
    """The blocking one in its thread; the caller goes on after the limit."""
    release = threading.Event()

    async def ahangs(messages: Any) -> Any:
        await asyncio.Event().wait()

    def hangs(messages: Any) -> str:
        release.wait()
        return "late"

    call = ModelCall(RunnableLambda(hangs, ahangs), timeout_s=0.05)
    try:
        answer = asyncio.run(_awaited(call)) if awaited else call.request_answer(ASK).blocking()
        assert isinstance(answer, TimeoutError)
    finally:
        release.set()


@pytest.mark.parametrize("signal", [GraphInterrupt(()), KeyboardInterrupt(), SystemExit(1)])
def test_a_signal_is_no_answer(signal: BaseException) -> None:
    """langgraph's and the process's pass through; an error is the answer."""

    def raises(exc: BaseException) -> Any:
        def invoke(messages: Any) -> Any:
            raise exc

        return ModelCall(RunnableLambda(invoke)).request_answer(ASK)

    with pytest.raises(type(signal)):
        raises(signal).blocking()
    answer = raises(OSError("no luck")).blocking()
    assert (
        find_reason_for_unusable_answer(answer) == "the call of the model raised OSError: no luck"
    )


def test_a_failed_call_names_the_model_and_its_address() -> None:
    """As its client knows them, without a password; also when nothing is there."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    url = f"http://ann:secret@127.0.0.1:{port}/v1"
    options: Any = {"base_url": url, "api_key": "none", "max_retries": 0}
    answer = ModelCall(ChatOpenAI(model="gpt-x", **options)).request_answer(ASK).blocking()
    named = f"the model 'gpt-x' at http://127.0.0.1:{port}/v1/chat/completions"

    assert describe_failed_model(answer) == named
    assert (find_reason_for_unusable_answer(answer) or "").startswith(
        f"the call of {named} raised "
    )


# -- answers


@pytest.mark.parametrize(
    ("metadata", "fault"),
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
def test_an_answer_that_did_not_end_by_itself_is_none(metadata: Any, fault: str | None) -> None:
    """Under the names that OpenAI, Anthropic, Bedrock, Google and Ollama give it."""
    found = find_reason_for_unusable_answer(AIMessage("I cannot he", response_metadata=metadata))
    assert (found is None) if fault is None else fault in (found or "")


@pytest.mark.parametrize("answer", [None, 7, {"content": "hi"}])
def test_an_answer_that_is_no_message_is_none(answer: Any) -> None:
    assert "expected a message" in (find_reason_for_unusable_answer(answer) or "")
