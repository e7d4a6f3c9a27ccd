"""Summarising: what was said before the last turns becomes a text that grows with the conversation.

Nothing is removed before there is a summary of it, and the ids of what it stands for are kept, so
that `expand` gives the originals back.
"""

from __future__ import annotations

import operator
from typing import Annotated, Any, Final

from langchain_core.language_models import BaseChatModel
from langchain_core.runnables import Runnable

from perdure.errors import ConfigurationError
from perdure.memory.model_call import ModelCall
from perdure.memory.nodes import MODES, Mode
from perdure.memory.options import choice as check_choice
from perdure.memory.presenting import FORMS, Form, Summary
from perdure.memory.reducers import ChatState
from perdure.memory.summarizing import PROMPT, Summarizer
from perdure.memory.summary_node import ON_FAILURE, Channels, Due, OnFailure, Summarize
from perdure.memory.tokens import Countable, TokenCounter, context_window, token_counter
from perdure.memory.triggers import When, trigger

_INPUT_TOKENS: Final = 16_000  # of a model whose window is not known
_SHARE: Final = 0.75  # of the window: the rest is for the answer, and for counting otherwise


class SummaryState(ChatState, total=False):
    """A chat with a running summary.

    Attributes:
        summary: The summary.
        summarized: The ids of the messages it stands for, in the order in which they were said.
    """

    summary: Summary
    summarized: Annotated[list[str], operator.add]


def summarize(
    model: Runnable[Any, Any],
    *,
    when: When | None = None,
    keep_turns: int = 3,
    prompt: str | None = None,
    max_words: int = 400,
    form: Form = "system",
    mode: Mode = "state",
    counter: Countable | None = None,
    window: BaseChatModel | str | int | None = None,
    max_input_tokens: int | None = None,
    timeout_s: float | None = 60,
    retries: int = 2,
    backoff_s: float = 0.5,
    on_failure: OnFailure = "raise",
    messages_key: str = "messages",
    summary_key: str = "summary",
    summarized_key: str = "summarized",
) -> Summarize:
    """A node that keeps a running summary: `summarize(model, when={"tokens": 4_000})`.

    As a node it writes the summary to the state (`SummaryState` has the channels) and, in the mode
    `"state"`, removes what it stands for, by id. `shown` gives what the model is to be shown. Over
    a plain list it gives what is to be shown, with the summary in it; fed with that and what was
    said since, it extends the summary.

    Args:
        model: Writes the summaries: a chat model, or what answers like one.
        when: When to summarise, counted over what is not summarised yet, without system messages:
            `{"messages": 40}`, `{"tokens": 4000}`, `{"fraction": 0.7}` of the window; a dict with
            several asks for all of them, a list of dicts for any. None: 40 messages.
        keep_turns: How many of the newest turns are never summarised, from 1 on.
        prompt: Instructions to the summariser instead of perdure's; `{max_words}` in it stands for
            the number. The conversation follows in a message of its own.
        max_words: How long the summary may become.
        form: `"system"`: the summary is shown as part of the system message; `"human"`: as a human
            message before the others.
        mode: `"state"`: what is summarised is removed from the state; a perdure checkpointer's
            history still has it. `"view"`: the state keeps all (`llm_input_messages` is shown).
            That is part of the node's update, so `stream_mode="messages"` passes the message with
            the summary on, with this node's name as `langgraph_node`. An edit of a summarised
            message under its id is not summarised again.
        counter: What counts tokens, if not what fits the model; see `token_counter`.
        window: Whose window `fraction` is a part of, or its size in tokens; None: the model's.
        max_input_tokens: What one request to the summariser may take; what is longer is summarised
            in parts. None: three quarters of the model's window, 16,000 if it is not known.
        timeout_s: Seconds a call may take; None: as long as it takes.
        retries: How often a call is made again that raised, took too long, said nothing, called
            tools or was cut off.
        backoff_s: Seconds before the first of these; they double.
        on_failure: `"raise"` raises `SummaryFailed`; in a graph that summarises after its answer,
            as `chat_graph` does, the answer is in the thread by then, and only the run fails.
            `"keep"` logs a warning and goes on with everything as it was.
        messages_key: The channel of the messages.
        summary_key: The channel of the summary.
        summarized_key: The channel of the ids of what it stands for. Where the model is shown a
            view, the state has to have it too: without it everything counts as not summarised.

    Raises:
        ConfigurationError: An option is wrong, or the options contradict each other.
        UnknownModel: `when` has a fraction, and the window is not known.
    """
    if not isinstance(model, Runnable):
        raise ConfigurationError(
            f"model is {model!r:.80}; expected a chat model, such as ChatOpenAI(model=...)"
        )
    _check_options(prompt, timeout_s, backoff_s)
    _check_wholes(keep_turns, max_words, retries, max_input_tokens)
    for name, value, choices in (
        ("form", form, FORMS),
        ("mode", mode, MODES),
        ("on_failure", on_failure, ON_FAILURE),
    ):
        check_choice(name, value, choices)
    chosen = _counter(model, counter)
    return Summarize(
        Summarizer(
            ModelCall(model, timeout_s),
            prompt or PROMPT,
            max_words,
            chosen.text,
            max_input_tokens or _input_tokens(model),
            retries,
            backoff_s,
        ),
        Due(
            trigger(
                {"messages": 40} if when is None else when,
                lambda: context_window(model if window is None else window),
            ),
            chosen,
            keep_turns,
        ),
        Channels(messages_key, summary_key, summarized_key),
        form=form,
        mode=mode,
        on_failure=on_failure,
    )


# -- options


def _counter(model: Runnable[Any, Any], counter: Countable | None) -> TokenCounter:
    if counter is None and isinstance(model, BaseChatModel):
        return token_counter(model)
    return token_counter(counter)


def _input_tokens(model: Runnable[Any, Any]) -> int:
    try:
        return int(_SHARE * context_window(model))
    except ConfigurationError:
        return _INPUT_TOKENS


def _check_wholes(
    keep_turns: int, max_words: int, retries: int, max_input_tokens: int | None
) -> None:
    for name, value, least in (
        ("keep_turns", keep_turns, 1),
        ("max_words", max_words, 1),
        ("retries", retries, 0),
        ("max_input_tokens", 1 if max_input_tokens is None else max_input_tokens, 1),
    ):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ConfigurationError(
                f"{name} is {value!r}; expected a whole number from {least} on"
            )


def _check_options(prompt: str | None, timeout_s: float | None, backoff_s: float) -> None:
    if prompt is not None and (not isinstance(prompt, str) or not prompt.strip()):
        raise ConfigurationError(f"prompt is {prompt!r}; expected instructions to the summariser")
    if timeout_s is not None and not _is_number(timeout_s, above=0):
        raise ConfigurationError(f"timeout_s is {timeout_s!r}; expected seconds above 0, or None")
    if not _is_number(backoff_s) or backoff_s < 0:
        raise ConfigurationError(f"backoff_s is {backoff_s!r}; expected seconds, 0 or more")


def _is_number(value: Any, above: float = float("-inf")) -> bool:
    return not isinstance(value, bool) and isinstance(value, int | float) and value > above
