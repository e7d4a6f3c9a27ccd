"""Failed summaries: nothing is removed, and the error says why."""

from __future__ import annotations

import logging
import threading
from typing import Any

import openai
import pytest
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    HumanMessage,
)
from langchain_core.runnables import RunnableLambda
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.errors import GraphInterrupt

from perdure.checkpointers import SQLiteCheckpointer
from perdure.errors import ConfigurationError, InvalidMessages, SummaryFailed
from perdure.memory.short_term.summary import summarize
from tests.memory.conversations import comparison_keys
from tests.memory.scripted_models import (
    BLANK,
    CALLS,
    CUT_OFF,
    EMPTY,
    TOO_LONG,
    ScriptedServer,
)
from tests.memory.summaries import (
    THREAD,
    build_chat_graph,
    invoke_async,
    invoke_sync,
    list_texts,
    make_summarize_node,
    make_turns,
    without_digests,
)
from tests.openai_server import Failure, Held

# -- failures


@pytest.mark.parametrize(
    ("script", "expected_message", "expected_requests"),
    [
        ([EMPTY] * 3, "the answer has no text", 3),
        ([BLANK] * 3, "the answer has no text", 3),
        ([CALLS] * 3, "the answer has no text", 3),
        ([CUT_OFF] * 3, "cut off at the model's limit", 3),
        (["They spoke of trains. " * 1_000] * 3, "tokens; expected at most 400 words", 3),
        ([Failure(500, "no luck")] * 3, "Error code: 500 - no luck", 3),
        ([Failure(400, "no such thing")], "no such thing", 1),
        ([Failure(401, "who are you?")], "who are you?", 1),
        ([TOO_LONG], "cannot be shortened enough", 1),
    ],
)
def test_failed_summary_removes_nothing_and_says_why(
    script: Any, expected_message: str, expected_requests: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The request is repeated if a retry can help. Then the failure is raised or logged."""
    for run in (invoke_sync, invoke_async):
        with ScriptedServer([*script]) as summariser, pytest.raises(SummaryFailed) as caught:
            run(make_summarize_node(summariser, on_failure="raise"), {"messages": make_turns(4)})

        assert expected_message in str(caught.value)
        assert "no message was removed" in str(caught.value)
        assert len(summariser.requests) == expected_requests
        failed = isinstance(script[0], Failure)
        assert isinstance(caught.value.__cause__, openai.OpenAIError) is failed

        caplog.clear()
        with ScriptedServer([*script]) as summariser, caplog.at_level(logging.WARNING, "perdure"):
            kept = run(make_summarize_node(summariser), {"messages": make_turns(4)})

        assert kept == {}
        assert [expected_message in record.message for record in caplog.records] == [True]


@pytest.mark.parametrize("fault", [EMPTY, BLANK, CALLS, Failure(500), Failure(429)])
@pytest.mark.parametrize("invoke", [invoke_sync, invoke_async])
def test_failed_summary_request_is_retried(fault: Any, invoke: Any) -> None:
    with ScriptedServer([fault, "the summary"]) as summariser:
        update = invoke(make_summarize_node(summariser), {"messages": make_turns(4)})

    assert update["summary"]["text"] == "the summary"
    assert summariser.shown(0)[0] == summariser.shown(1)[0]
    assert summariser.read_last_message(1).startswith(
        summariser.read_last_message(0).removesuffix(".")
    )


def test_truncated_summary_is_requested_again_with_fewer_words() -> None:
    """The same request would be cut off again."""
    with ScriptedServer([CUT_OFF, "short"]) as summariser:
        update = make_summarize_node(summariser).invoke({"messages": make_turns(4)})

    assert update["summary"]["text"] == "short"
    assert "in 200 words at most" in summariser.read_last_message()


@pytest.mark.parametrize("invoke", [invoke_sync, invoke_async])
def test_hanging_summariser_times_out(invoke: Any) -> None:
    """The time limit of the node applies to `invoke` and `ainvoke`."""
    release = threading.Event()
    # the first request may come after the second, or never, so each has a server
    with ScriptedServer([Held("late", release)]) as slow, ScriptedServer(["in time"]) as summariser:
        try:
            with pytest.raises(SummaryFailed, match=r"no answer within 0\.2 s") as caught:
                invoke(
                    make_summarize_node(slow, timeout_s=0.2, retries=0, on_failure="raise"),
                    {"messages": make_turns(4)},
                )
            update = invoke(
                make_summarize_node(summariser, timeout_s=None), {"messages": make_turns(4)}
            )
        finally:
            release.set()

    assert isinstance(caught.value.__cause__, TimeoutError)
    assert update["summary"]["text"] == "in time"


def test_failed_summary_in_graph_leaves_state_and_can_be_resumed(
    file_saver: SQLiteCheckpointer,
) -> None:
    with ScriptedServer([EMPTY, "the summary"]) as summariser, ScriptedServer(["answer"]) as server:
        graph = build_chat_graph(
            server,
            make_summarize_node(summariser, retries=0, on_failure="raise"),
            checkpointer=file_saver,
        )
        with pytest.raises(SummaryFailed):
            graph.invoke({"messages": make_turns(4)}, THREAD)
        before = graph.get_state(THREAD).values
        out = graph.invoke(None, THREAD)

    assert list_texts(before["messages"]) == list_texts(make_turns(4))
    assert before.get("summary") is None
    assert before["summarized"] == []
    assert list_texts(out["messages"]) == ["q4", "answer"]


def test_failed_summary_of_list_returns_whole_list() -> None:
    with ScriptedServer([EMPTY] * 3) as summariser:
        shown = make_summarize_node(summariser)(make_turns(4))

    assert comparison_keys(shown) == comparison_keys(make_turns(4))


# -- invalid input


@pytest.mark.parametrize(
    ("options", "expected_message"),
    [
        ({"trigger": {}}, "trigger is {}"),
        ({"keep": ("messages", 0)}, "keep messages is 0"),
        ({"keep": ("messages", True)}, "keep messages is True"),
        ({"keep": ("turns", 3)}, "keep is ('turns', 3)"),
        ({"keep": [("messages", 3)]}, "keep is [('messages', 3)]"),
        ({"keep": ("fraction", 0.5)}, "expected a chat model, or the name of an OpenAI model"),
        ({"token_counter": 7}, "token_counter is 7"),
        ({"summary_prompt": " "}, "summary_prompt is ' '"),
        ({"summary_prompt": 7}, "summary_prompt is 7"),
        ({"summary_prompt": "word " * 20_000}, "that summary_prompt leaves for the conversation"),
        ({"on_failure": "ignore"}, "on_failure is 'ignore'"),
        ({"messages_key": ""}, "messages_key is ''"),
    ],
)
def test_invalid_options_are_refused_by_name(options: Any, expected_message: str) -> None:
    """The error names the option, its value and what was expected."""
    with pytest.raises(ConfigurationError) as caught:
        summarize(RunnableLambda(lambda messages: "text"), **options)

    assert expected_message in str(caught.value)


def test_failed_summary_is_tried_again_in_next_turn(
    file_saver: SQLiteCheckpointer, caplog: pytest.LogCaptureFixture
) -> None:
    """By default the turn continues. All messages are kept until the next turn summarises them."""
    with (
        ScriptedServer([EMPTY, "the summary"]) as summariser,
        ScriptedServer(["one", "two"]) as server,
    ):
        graph = build_chat_graph(
            server, make_summarize_node(summariser, retries=0), checkpointer=file_saver
        )
        failed = graph.invoke({"messages": make_turns(4)}, THREAD)
        out = graph.invoke({"messages": [HumanMessage("q5", id="q5")]}, THREAD)

    assert "the next turn tries again" in caplog.text
    assert list_texts(failed["messages"]) == [*list_texts(make_turns(4)), "one"]
    assert failed.get("summary") is None
    summary = without_digests(out["summary"])
    assert summary == {"text": "the summary", "last": failed["messages"][-1].id, "count": 8}
    for text in ("q1", "a3", "q4", "one"):
        assert text in summariser.read_last_message()


def test_missing_api_key_is_logged_and_does_not_fail_turn(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The node can be built from the model's name alone."""
    for name in ("OPENAI_API_KEY", "OPENAI_ADMIN_KEY"):
        monkeypatch.delenv(name, raising=False)
    summary = summarize("openai:gpt-5-mini", trigger=("fraction", 0.7), keep=("messages", 1))
    assert summary.invoke({"messages": make_turns(4)}) == {}

    summary = summarize("openai:gpt-5-mini", trigger=("messages", 5))
    assert summary.invoke({"messages": make_turns(4)}) == {}
    assert "OPENAI_API_KEY" in caplog.text


@pytest.mark.parametrize("invoke", [invoke_sync, invoke_async])
def test_interrupt_in_model_call_is_not_treated_as_failure(invoke: Any) -> None:
    """Exceptions that langgraph uses as signals pass through a model call."""

    def raise_interrupt(request: Any) -> Any:
        raise GraphInterrupt(())

    summary = summarize(
        RunnableLambda(raise_interrupt), trigger=("messages", 1), keep=("messages", 1)
    )
    with pytest.raises(GraphInterrupt):
        invoke(summary, {"messages": make_turns(4)})


def test_invalid_messages_or_summary_are_refused_before_model_call() -> None:
    """Examples are a message without an id, a missing channel, and a summary of the wrong type."""
    with ScriptedServer([]) as summariser:
        summary = make_summarize_node(summariser)
        without_ids: list[BaseMessage] = [HumanMessage("q1"), AIMessage("a1"), *make_turns(4)]
        with pytest.raises(InvalidMessages, match="messages without ids"):
            summary.invoke({"messages": without_ids})
        with pytest.raises(InvalidMessages, match="no channel 'messages'"):
            summary.invoke({})
        with pytest.raises(InvalidMessages, match=r"the element at index 0 is a str .'hello'"):
            summary.invoke({"messages": ["hello"]})
        with pytest.raises(ConfigurationError, match="channel of the summary is 7"):
            summary.invoke({"messages": make_turns(4), "summary": 7})

    assert summariser.requests == []


def test_summaries_work_with_langgraph_saver() -> None:
    """Only `expand` needs a perdure checkpointer."""
    with ScriptedServer(["the summary", "answer"]) as server:
        graph = build_chat_graph(server, make_summarize_node(server), checkpointer=InMemorySaver())
        out = graph.invoke({"messages": make_turns(4)}, THREAD)

    assert list_texts(out["messages"]) == ["q4", "answer"]
