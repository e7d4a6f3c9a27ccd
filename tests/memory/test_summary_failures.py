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

from perdure.checkpointers import SQLiteCheckpointer
from perdure.errors import ConfigurationError, InvalidMessages, SummaryFailed
from perdure.memory.summary import summarize
from tests.memory.conversations import keys
from tests.memory.scripted import (
    BLANK,
    CALLS,
    CUT_OFF,
    EMPTY,
    TOO_LONG,
    ScriptedServer,
)
from tests.memory.summaries import THREAD, awaited, chat, invoked, node, texts, turns
from tests.openai_server import Failure, Held

# -- failures


@pytest.mark.parametrize(
    ("script", "named", "asked"),
    [
        ([EMPTY] * 3, "the answer was empty", 3),
        ([BLANK] * 3, "the answer was empty", 3),
        ([CALLS] * 3, "the model called tools and said nothing", 3),
        ([CUT_OFF] * 3, "cut off at the model's limit", 3),
        (["They spoke of trains. " * 1_000] * 3, "tokens, and 400 words were asked for", 3),
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
    for run in (invoked, awaited):
        with ScriptedServer([*script]) as scribe, pytest.raises(SummaryFailed) as caught:
            run(node(scribe), {"messages": turns(4)})

        assert named in str(caught.value)
        assert "nothing was removed" in str(caught.value)
        assert len(scribe.requests) == asked
        failed = isinstance(script[0], Failure)
        assert isinstance(caught.value.__cause__, openai.OpenAIError) is failed

        caplog.clear()
        with ScriptedServer([*script]) as scribe, caplog.at_level(logging.WARNING, "perdure"):
            kept = run(node(scribe, on_failure="keep"), {"messages": turns(4)})

        assert kept == {}
        assert [named in record.message for record in caplog.records] == [True]


@pytest.mark.parametrize("fault", [EMPTY, BLANK, CALLS, Failure(500), Failure(429)])
@pytest.mark.parametrize("run", [invoked, awaited])
def test_a_summary_is_asked_for_again(fault: Any, run: Any) -> None:
    """What fails once may be had the second time."""
    with ScriptedServer([fault, "the summary"]) as scribe:
        update = run(node(scribe), {"messages": turns(4)})

    assert update["summary"]["text"] == "the summary"
    assert scribe.shown(0) == scribe.shown(1)


def test_a_summary_that_is_cut_off_is_asked_for_in_fewer_words() -> None:
    """The same request would be cut off again."""
    with ScriptedServer([CUT_OFF, "short"]) as scribe:
        update = node(scribe, max_words=100).invoke({"messages": turns(4)})

    assert update["summary"]["text"] == "short"
    assert "in 50 words at most" in scribe.asked_for()


@pytest.mark.parametrize("run", [invoked, awaited])
def test_a_summariser_that_hangs_is_left_behind(run: Any) -> None:
    """Blocking and awaited, the time limit is the node's."""
    let_go = threading.Event()
    with ScriptedServer([Held("late", let_go), "in time"]) as scribe:
        try:
            with pytest.raises(SummaryFailed, match=r"no answer within 0\.2 s") as caught:
                run(node(scribe, timeout_s=0.2, retries=0), {"messages": turns(4)})
            update = run(node(scribe, timeout_s=None), {"messages": turns(4)})
        finally:
            let_go.set()

    assert isinstance(caught.value.__cause__, TimeoutError)
    assert update["summary"]["text"] == "in time"


def test_a_failure_in_a_graph_leaves_the_state(file_saver: SQLiteCheckpointer) -> None:
    """The thread is what it was before, and goes on when the summariser does."""
    with ScriptedServer([EMPTY, "the summary"]) as scribe, ScriptedServer(["answer"]) as server:
        graph = chat(server, node(scribe, retries=0), checkpointer=file_saver)
        with pytest.raises(SummaryFailed):
            graph.invoke({"messages": turns(4)}, THREAD)
        before = graph.get_state(THREAD).values
        out = graph.invoke(None, THREAD)

    assert texts(before["messages"]) == texts(turns(4))
    assert before.get("summary") is None
    assert before["summarized"] == []
    assert texts(out["messages"]) == ["q4", "answer"]


def test_keep_shows_the_whole_conversation_over_a_list() -> None:
    """Nothing takes the place of what could not be summarised."""
    with ScriptedServer([EMPTY] * 3) as scribe:
        shown = node(scribe, on_failure="keep")(turns(4))

    assert keys(shown) == keys(turns(4))


# -- bad input


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"when": {}}, "when is {}"),
        ({"keep_turns": 0}, "keep_turns is 0"),
        ({"keep_turns": True}, "keep_turns is True"),
        ({"prompt": " "}, "prompt is ' '"),
        ({"prompt": 7}, "prompt is 7"),
        ({"max_words": 0}, "max_words is 0"),
        ({"form": "footnote"}, "form is 'footnote'"),
        ({"mode": "both"}, "mode is 'both'"),
        ({"on_failure": "ignore"}, "on_failure is 'ignore'"),
        ({"max_input_tokens": 0}, "max_input_tokens is 0"),
        ({"max_input_tokens": 50}, "max_input_tokens is 50; the prompt takes"),
        ({"timeout_s": 0}, "timeout_s is 0"),
        ({"timeout_s": "soon"}, "timeout_s is 'soon'"),
        ({"retries": -1}, "retries is -1"),
        ({"backoff_s": -1}, "backoff_s is -1"),
        ({"messages_key": ""}, "messages_key is ''"),
        ({"summary_key": None}, "summary_key is None"),
        ({"summary_key": "messages"}, "a channel each"),
    ],
)
def test_bad_options_are_refused_at_once(options: Any, named: str) -> None:
    """The error names the option, its value and what was expected."""
    with pytest.raises(ConfigurationError) as caught:
        summarize(RunnableLambda(lambda messages: "text"), **options)

    assert named in str(caught.value)


def test_what_is_no_model_is_refused() -> None:
    """A name is none."""
    with pytest.raises(ConfigurationError, match="model is 'gpt-4o'"):
        summarize("gpt-4o")  # type: ignore[arg-type]


def test_messages_that_cannot_be_removed_are_refused_before_anything_is_asked() -> None:
    """A message without an id, no messages at all, and a summary that is none."""
    with ScriptedServer([]) as scribe:
        summary = node(scribe)
        nameless: list[BaseMessage] = [HumanMessage("q1"), AIMessage("a1"), *turns(4)]
        with pytest.raises(InvalidMessages, match="without an id, 'q1'"):
            summary.invoke({"messages": nameless})
        with pytest.raises(InvalidMessages, match="no channel 'messages'"):
            summary.invoke({})
        with pytest.raises(InvalidMessages, match="number 0 is 'hello', a str"):
            summary.invoke({"messages": ["hello"]})
        with pytest.raises(ConfigurationError, match="channel of the summary holds 7"):
            summary.invoke({"messages": turns(4), "summary": 7})

    assert scribe.requests == []


def test_a_graph_runs_on_langgraphs_own_saver() -> None:
    """Nothing of summarising needs perdure's checkpointer; only expanding does."""
    with ScriptedServer(["the summary", "answer"]) as server:
        graph = chat(server, node(server), checkpointer=InMemorySaver())
        out = graph.invoke({"messages": turns(4)}, THREAD)

    assert texts(out["messages"]) == ["q4", "answer"]
