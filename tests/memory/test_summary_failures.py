"""Summaries that fail: nothing is removed, and the error says why."""

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
from perdure.memory.summary import summarize
from tests.memory.conversations import comparison_keys
from tests.memory.scripted import (
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
    ("script", "named", "asked"),
    [
        ([EMPTY] * 3, "the answer has no text", 3),
        ([BLANK] * 3, "the answer has no text", 3),
        ([CALLS] * 3, "the answer has no text", 3),
        ([CUT_OFF] * 3, "cut off at the model's limit", 3),
        (["They spoke of trains. " * 1_000] * 3, "tokens; expected at most 400 words", 3),
        ([Failure(500, "no luck")] * 3, "Error code: 500 - no luck", 3),
        ([Failure(400, "no such thing")], "no such thing", 1),
        ([Failure(401, "who are you?")], "who are you?", 1),
        ([TOO_LONG], "no request is short enough", 1),
    ],
)
def test_a_summary_that_fails_removes_nothing(
    script: Any, named: str, asked: int, caplog: pytest.LogCaptureFixture
) -> None:
    """It is asked for again where that can help; then the error says what happened, or a log."""
    for run in (invoke_sync, invoke_async):
        with ScriptedServer([*script]) as scribe, pytest.raises(SummaryFailed) as caught:
            run(make_summarize_node(scribe, on_failure="raise"), {"messages": make_turns(4)})

        assert named in str(caught.value)
        assert "nothing was removed" in str(caught.value)
        assert len(scribe.requests) == asked
        failed = isinstance(script[0], Failure)
        assert isinstance(caught.value.__cause__, openai.OpenAIError) is failed

        caplog.clear()
        with ScriptedServer([*script]) as scribe, caplog.at_level(logging.WARNING, "perdure"):
            kept = run(make_summarize_node(scribe), {"messages": make_turns(4)})

        assert kept == {}
        assert [named in record.message for record in caplog.records] == [True]


@pytest.mark.parametrize("fault", [EMPTY, BLANK, CALLS, Failure(500), Failure(429)])
@pytest.mark.parametrize("run", [invoke_sync, invoke_async])
def test_a_summary_is_asked_for_again(fault: Any, run: Any) -> None:
    """What fails once may be had the second time."""
    with ScriptedServer([fault, "the summary"]) as scribe:
        update = run(make_summarize_node(scribe), {"messages": make_turns(4)})

    assert update["summary"]["text"] == "the summary"
    assert scribe.shown(0)[0] == scribe.shown(1)[0]
    assert scribe.read_last_message(1).startswith(scribe.read_last_message(0).removesuffix("."))


def test_a_summary_that_is_cut_off_is_asked_for_in_fewer_words() -> None:
    """The same request would be cut off again."""
    with ScriptedServer([CUT_OFF, "short"]) as scribe:
        update = make_summarize_node(scribe).invoke({"messages": make_turns(4)})

    assert update["summary"]["text"] == "short"
    assert "in 200 words at most" in scribe.read_last_message()


@pytest.mark.parametrize("run", [invoke_sync, invoke_async])
def test_a_summariser_that_hangs_is_left_behind(run: Any) -> None:
    """Blocking and awaited, the time limit is the node's."""
    let_go = threading.Event()
    # the first request may come after the second, or never, so each has a server
    with ScriptedServer([Held("late", let_go)]) as slow, ScriptedServer(["in time"]) as scribe:
        try:
            with pytest.raises(SummaryFailed, match=r"no answer within 0\.2 s") as caught:
                run(
                    make_summarize_node(slow, timeout_s=0.2, retries=0, on_failure="raise"),
                    {"messages": make_turns(4)},
                )
            update = run(make_summarize_node(scribe, timeout_s=None), {"messages": make_turns(4)})
        finally:
            let_go.set()

    assert isinstance(caught.value.__cause__, TimeoutError)
    assert update["summary"]["text"] == "in time"


def test_a_failure_in_a_graph_leaves_the_state(file_saver: SQLiteCheckpointer) -> None:
    """The thread is what it was before, and goes on when the summariser does."""
    with ScriptedServer([EMPTY, "the summary"]) as scribe, ScriptedServer(["answer"]) as server:
        graph = build_chat_graph(
            server,
            make_summarize_node(scribe, retries=0, on_failure="raise"),
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


def test_keep_shows_the_whole_conversation_over_a_list() -> None:
    """Nothing takes the place of what could not be summarised."""
    with ScriptedServer([EMPTY] * 3) as scribe:
        shown = make_summarize_node(scribe)(make_turns(4))

    assert comparison_keys(shown) == comparison_keys(make_turns(4))


# -- bad input


@pytest.mark.parametrize(
    ("options", "named"),
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
def test_bad_options_are_refused_at_once(options: Any, named: str) -> None:
    """The error names the option, its value and what was expected."""
    with pytest.raises(ConfigurationError) as caught:
        summarize(RunnableLambda(lambda messages: "text"), **options)

    assert named in str(caught.value)


def test_a_failure_is_tried_again_in_the_next_turn(
    file_saver: SQLiteCheckpointer, caplog: pytest.LogCaptureFixture
) -> None:
    """By default the turn goes on, everything is kept, and the next turn summarises it."""
    with (
        ScriptedServer([EMPTY, "the summary"]) as scribe,
        ScriptedServer(["one", "two"]) as server,
    ):
        graph = build_chat_graph(
            server, make_summarize_node(scribe, retries=0), checkpointer=file_saver
        )
        failed = graph.invoke({"messages": make_turns(4)}, THREAD)
        out = graph.invoke({"messages": [HumanMessage("q5", id="q5")]}, THREAD)

    assert "the next turn tries again" in caplog.text
    assert list_texts(failed["messages"]) == [*list_texts(make_turns(4)), "one"]
    assert failed.get("summary") is None
    summary = without_digests(out["summary"])
    assert summary == {"text": "the summary", "last": failed["messages"][-1].id, "count": 8}
    for text in ("q1", "a3", "q4", "one"):
        assert text in scribe.read_last_message()


def test_a_model_without_its_key_ends_no_turn(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A name is enough to build the node; the log says what is missing."""
    for name in ("OPENAI_API_KEY", "OPENAI_ADMIN_KEY"):
        monkeypatch.delenv(name, raising=False)
    summary = summarize("openai:gpt-5-mini", trigger=("fraction", 0.7), keep=("messages", 1))
    assert summary.invoke({"messages": make_turns(4)}) == {}

    summary = summarize("openai:gpt-5-mini", trigger=("messages", 5))
    assert summary.invoke({"messages": make_turns(4)}) == {}
    assert "OPENAI_API_KEY" in caplog.text


@pytest.mark.parametrize("run", [invoke_sync, invoke_async])
def test_an_interrupt_is_no_failure(run: Any) -> None:
    """langgraph's own signals pass through a call of a model."""

    def asks_first(request: Any) -> Any:
        raise GraphInterrupt(())

    summary = summarize(RunnableLambda(asks_first), trigger=("messages", 1), keep=("messages", 1))
    with pytest.raises(GraphInterrupt):
        run(summary, {"messages": make_turns(4)})


def test_messages_that_cannot_be_removed_are_refused_before_anything_is_asked() -> None:
    """A message without an id, no messages at all, and a summary that is none."""
    with ScriptedServer([]) as scribe:
        summary = make_summarize_node(scribe)
        nameless: list[BaseMessage] = [HumanMessage("q1"), AIMessage("a1"), *make_turns(4)]
        with pytest.raises(InvalidMessages, match="messages without ids"):
            summary.invoke({"messages": nameless})
        with pytest.raises(InvalidMessages, match="no channel 'messages'"):
            summary.invoke({})
        with pytest.raises(InvalidMessages, match="the message at index 0 is 'hello', a str"):
            summary.invoke({"messages": ["hello"]})
        with pytest.raises(ConfigurationError, match="channel of the summary is 7"):
            summary.invoke({"messages": make_turns(4), "summary": 7})

    assert scribe.requests == []


def test_a_graph_runs_on_langgraphs_own_saver() -> None:
    """Nothing of summarising needs perdure's checkpointer; only expanding does."""
    with ScriptedServer(["the summary", "answer"]) as server:
        graph = build_chat_graph(server, make_summarize_node(server), checkpointer=InMemorySaver())
        out = graph.invoke({"messages": make_turns(4)}, THREAD)

    assert list_texts(out["messages"]) == ["q4", "answer"]
