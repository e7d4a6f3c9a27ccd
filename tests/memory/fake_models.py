"""Chat models that answer with a function, without a server, and record their requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from pydantic import Field

Reply = Callable[[Sequence[BaseMessage]], "str | AIMessage"]


class FakeModel(BaseChatModel):
    """A chat model that returns `reply(messages)`; `requests` are the messages of each call."""

    reply: Any
    requests: list[list[BaseMessage]] = Field(default_factory=list)

    @property
    def _llm_type(self) -> str:
        return "fake"

    def bind_tools(self, tools: Any, **options: Any) -> Any:
        """Return the model, which ignores the tools."""
        return self

    def _generate(self, messages: Any, *args: Any, **options: Any) -> ChatResult:
        self.requests.append(list(messages))
        answer = self.reply(messages)
        message = AIMessage(answer) if isinstance(answer, str) else answer
        return ChatResult(generations=[ChatGeneration(message=message)])


def make_answering_model(prefix: str = "answer") -> FakeModel:
    """Return a model that answers `answer 1`, `answer 2` and so on."""
    numbers = count(1)
    return FakeModel(reply=lambda messages: f"{prefix} {next(numbers)}")


def make_tool_calling_model(calls: int, tool: str = "look", prefix: str = "c") -> FakeModel:
    """Return a model that calls a tool `calls` times in a turn and then answers `done`."""
    numbers = count(1)
    state = {"left": calls}

    def reply(messages: Sequence[BaseMessage]) -> str | AIMessage:
        if state["left"] == 0:
            state["left"] = calls
            return "done"
        state["left"] -= 1
        call = {"name": tool, "args": {"what": "x"}, "id": f"{prefix}{next(numbers)}"}
        return AIMessage("", tool_calls=[call])

    return FakeModel(reply=reply)


def make_failing_model(error: type[Exception] = ConnectionError) -> FakeModel:
    """Return a model whose calls raise an error."""

    def reply(messages: Sequence[BaseMessage]) -> str:
        raise error("the model is down")

    return FakeModel(reply=reply)
