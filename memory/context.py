"""Add the instructions, profile, summary, memories and examples to a model request."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from itertools import chain, islice, tee
from typing import Any, Final, Literal, Self, cast

from langchain_core.messages import SystemMessage
from langchain_core.runnables import RunnableConfig
from langgraph.store.base import BaseStore
from pydantic import BaseModel

from perdure.effects import build_async_function, build_blocking_function, call_method
from perdure.errors import BudgetExceeded, EmbeddingFailed, PerdureError, StorageError
from perdure.memory.conversation import Turn, get_role
from perdure.memory.long_term.recall import NAMESPACE, Labels, MemorySearch
from perdure.memory.long_term.records import Memory, StoreAdapter, render_memory_line
from perdure.memory.nodes import MessagesNode, ModelInput, append_text_to_content, read_channel
from perdure.memory.options import check_choice, check_instance, check_whole_number
from perdure.memory.quotation import render_section, select_fitting_indices_and_count_tokens
from perdure.memory.run_config import (
    Clock,
    parse_clock_option,
    read_thread_and_checkpoint_id_of_run,
)
from perdure.memory.short_term.summary_state import SUMMARY, SummarizedMessages, read_summary
from perdure.memory.short_term.system_messages import read_system_text
from perdure.memory.short_term.tokens import Countable, TokenCounter
from perdure.memory.short_term.tokens import token_counter as counter_of
from perdure.memory.short_term.trim import (
    BudgetNode,
    build_budget_error,
    iter_system_message_names_with_token_counts,
    select_turns,
)
from perdure.settings import SHOWN_LIMIT
from perdure.stores.search.text import STOP_WORDS, tokenize_query
from perdure.stores.values import to_prompt_json

BUDGET_SHARES: Final[Mapping[str, float]] = {
    "profile": 0.15,
    "summary": 0.25,
    "memories": 0.25,
    "examples": 0.2,
}
"""The maximum share of the budget for each part. The conversation can use all remaining tokens."""

MemoryPlace = Literal["system", "question"]
PartFunction = Callable[[Any, RunnableConfig | None], Any]
"""Returns a part of the request; called with the state (None for plain messages) and the config."""
# Maximum length, in words, of a follow-up question with one significant word, such as "and
# Bruges?". A question that consists only of stop words is always treated as a follow-up.
_MAX_ELLIPTIC_WORDS: Final = 3
# maximum length of a query, in characters; a longer query is shortened by cutting out its middle
_MAX_QUERY_CHARS: Final = 2_000
# Filler text that most tokenizers encode as a single token. It is repeated to reserve tokens in a
# request.
_ONE_TOKEN: Final = " the"
_LOG = logging.getLogger("perdure")


class Assemble(BudgetNode):
    """A node that assembles a model request from several parts, within a token budget.

    Example: `assemble(4_000, memories=…)(messages)`

    Each part of the request, such as `profile` or `memories`, is either a value or a function that
    is called with the state and the run's config. All parts except the instructions are quoted as
    data, one JSON value per entry. The node also drops older messages that do not fit in
    the token budget, so it must be the last node in a view.

    Args:
        max_tokens: The maximum number of tokens in the request.
        instructions: The text of the system message. None means the text of the existing system
            message.
        profile: The user's profile.
        summary: A summary of earlier messages. None means the summary that `summarize` has stored
            in the state.
        memories: Recalled memories, best first: items of a store, texts or JSON objects.
        examples: Examples of earlier cases, best first. Like memories, examples may be items of a
            store, texts or JSON objects.
        token_counter: See `perdure.memory.token_counter`.
        messages_key: The channel of the messages.
    """

    def __init__(
        self,
        max_tokens: int,
        *,
        instructions: str | PartFunction | None = None,
        profile: Mapping[str, Any] | str | PartFunction | None = None,
        summary: Mapping[str, Any] | str | PartFunction | None = None,
        memories: Sequence[Any] | PartFunction = (),
        examples: Sequence[Any] | PartFunction = (),
        token_counter: Countable | None = None,
        messages_key: str = "messages",
    ) -> None:
        super().__init__(messages_key)
        self.parts = {
            "instructions": instructions,
            "profile": profile,
            "summary": summary,
            "memories": memories,
            "examples": examples,
        }
        self.counter, self.tools = counter_of(token_counter), cast("Sequence[Any]", ())
        # system prompt sent with the messages, or None
        self.system_prompt: SystemMessage | str | None = None
        self.max_tokens = check_whole_number("max_tokens", max_tokens, 1)

    def with_tools(
        self, tools: Sequence[Any], system_prompt: SystemMessage | str | None = None
    ) -> Self:
        """Return a copy of the node that also counts the tokens of the tools and system prompt."""
        copied = copy(self)
        copied.tools, copied.system_prompt = tools, system_prompt
        return copied

    def transform_input(
        self, model_input: ModelInput, state: Any, config: RunnableConfig | None
    ) -> ModelInput:
        """Return the system message with its sections, and the latest turns that fit in the budget.

        An additive token counter's estimates are scaled up if the token usage reported by the
        provider shows that they are too low.
        """
        contents = {
            name: part(state, config) if callable(part) else part
            for name, part in self.parts.items()
        }
        if contents["summary"] is None and state is not None:
            contents["summary"] = read_channel(state, SUMMARY)
            model_input = SummarizedMessages.from_state(state).remove_from(model_input)
        if self.counter.is_additive:
            return self._fit_request_by_scaled_token_estimates(
                model_input, partial(self._select_fitting_context, contents)
            )
        all_turns = list(model_input.turns)
        return self._fit_request_by_counting_whole_requests(
            lambda unused_tokens: self._select_fitting_context(
                contents, replace(model_input, turns=iter(all_turns)), self.counter, unused_tokens
            ),
            self.max_tokens,
            self.counter.count_tools(self.tools),
            self.counter.count_system_prompt(self.system_prompt),
        )

    def _select_fitting_context(
        self,
        contents: Mapping[str, Any],
        model_input: ModelInput,
        counter: TokenCounter,
        unused_tokens: float = 0,
    ) -> ModelInput:
        """Return the system message, and as many of the newest turns as fit in the token budget.

        The system message contains the instructions and, for each section, the entries that fit in
        the budget.

        Args:
            contents: The parts by name.
            model_input: The system message and the turns.
            counter: Counts the tokens.
            unused_tokens: The number of tokens of the budget that are left unused. It may be
                negative; see `find_largest_message_selection_within_budget`.

        Raises:
            BudgetExceeded: The instructions, tools and newest messages alone exceed the budget.
        """
        text = contents["instructions"]
        if text is None:
            text = "" if model_input.system is None else read_system_text(model_input.system)
        tools, system = counter.count_tools(self.tools), _count_system_tokens(text, counter)
        prompt = counter.count_system_prompt(self.system_prompt)
        newest = list(islice(model_input.turns, 1))
        fixed = counter.count_request_tokens_excluding_messages(tools) + prompt + unused_tokens
        tokens_left = self.max_tokens - fixed
        window = select_turns(
            ModelInput(None, iter(newest)), tokens_left - system, counter.message_counter
        )
        needed_tokens = sum(
            counter.message_counter(message) for unit in window.required_units for message in unit
        )
        if window.excess > 0:
            costs: list[tuple[str, float]] = [("instructions", system)]
            if contents["instructions"] is None and model_input.system_parts:
                costs = list(
                    iter_system_message_names_with_token_counts(
                        model_input, counter.message_counter
                    )
                )
            costs += [("tools", tools), ("the newest messages", needed_tokens)]
            costs.append(("the request itself", fixed - tools))
            raise build_budget_error(self.max_tokens, costs, "shorten the instructions")
        for name, entries in _iter_section_names_and_entries(contents):
            text = self._append_section_within_budget(
                text, name, entries, tokens_left - needed_tokens, counter
            )
        tokens_left -= _count_system_tokens(text, counter)
        turns = select_turns(
            ModelInput(None, chain(newest, model_input.turns)), tokens_left, counter.message_counter
        ).turns
        return ModelInput(SystemMessage(text) if text else None, iter(turns))

    def _append_section_within_budget(
        self,
        system_text: str,
        section_name: str,
        entries: list[str],
        tokens_left: float,
        counter: TokenCounter,
    ) -> str:
        """Return the text of a system message with a section appended.

        A section is a named list of entries, such as recalled memories. An entry is appended only
        if the section then stays within its token budget, and the system message stays within
        `tokens_left` tokens. If no entry fits in the budget, return `system_text` unchanged.
        `tokens_left` is the maximum length of the complete system message, in tokens.
        """
        share = min(
            int(self.max_tokens * BUDGET_SHARES[section_name]),
            tokens_left - _count_system_tokens(system_text, counter),
        )
        section_entries = [
            entries[number]
            for number in select_fitting_indices_and_count_tokens(
                section_name, entries, share, counter
            )[0]
        ]
        while section_entries:
            added = render_section(section_name, section_entries)
            longer_text = f"{system_text}\n\n{added}" if system_text else added
            if _count_system_tokens(longer_text, counter) <= tokens_left:
                return longer_text
            # The token count of the joined text can exceed the sum of its parts' counts, so the
            # joined text may not fit. Drop the section's last entry and try again.
            section_entries.pop()
        return system_text


assemble = Assemble


def _iter_section_names_and_entries(contents: Mapping[str, Any]) -> Iterator[tuple[str, list[str]]]:
    """Yield each non-empty section of `contents` as a pair of its name and its list of entries."""
    summary = read_summary(contents["summary"])
    profile: Any = contents["profile"]
    if isinstance(profile, BaseModel):
        profile = profile.model_dump(mode="json")
    check_instance(
        "profile",
        profile or {},
        (Mapping, str),
        "a pydantic model, a dict or text: for a Profile, lambda state, config: p.get(config)",
    )
    texts = {
        "profile": [to_prompt_json(profile)] if profile else [],
        "summary": [to_prompt_json(summary["text"])] if summary and summary["text"] else [],
        "memories": [render_memory_line(memory) for memory in contents["memories"] or ()],
        "examples": [render_memory_line(example) for example in contents["examples"] or ()],
    }
    return ((name, entries) for name, entries in texts.items() if entries)


def _count_system_tokens(text: str, counter: TokenCounter) -> int:
    """Return the token count of a system message with the given text, or 0 if the text is empty."""
    return counter.count_message_tokens(SystemMessage(text)) if text else 0


class UseMemories(MessagesNode):
    """A graph node that adds recalled memories to a model request; also usable in a `view`.

    The memories are placed in a `<memories>` section of the request. In a view, place
    `use_memories` after `use_instructions`, because `use_instructions` replaces the system message.
    Place `use_memories` before `trim`, so that the token budget of `trim` includes the memories.
    For example, `view(use_memories(), trim(max_tokens=4_000))` adds memories to a request and then
    trims the request.

    The query is the newest human message. If the newest human message is too short to search for on
    its own, such as "and then?", the query also includes the previous human message. A memory is
    left out if all of its source messages are still in the request after all parts of the view have
    been applied. If the store or its embedder fails, a warning is logged, and the turn continues
    without memories.

    Args:
        store: See `recall`.
        namespace: See `recall`.
        kinds: See `recall`.
        limit: See `recall`.
        max_tokens: The maximum number of tokens of the memories.
        min_score: See `recall`.
        all_below: With a number such as 12, all memories are shown as long as the namespaces have
            fewer than 12 memories. The memories are shown best first, whatever their scores.
            `max_tokens` still limits the memories.
        as_of: The point in time as of which memories are recalled. Pass the name of a value in the
            run's config that holds the time, or a function that returns the time for a config.
        place: Where the section is put. With `"system"`, the section is at the end of the system
            message. With `"question"`, the section follows the newest question. Providers cache the
            prefix that a request shares with the previous request. Memories in the system message
            change with each question, and so make the shared prefix short.
        messages_key: The channel of the messages.
        namespaces: Several namespaces. `[("memories", "{user_id}"), ("teams", "{team}")]` shows the
            memories of the user and of the user's teams.
    """

    def __init__(
        self,
        store: BaseStore | None = None,
        *,
        namespace: Labels = NAMESPACE,
        kinds: Sequence[str] | None = None,
        limit: int = SHOWN_LIMIT,
        max_tokens: int = 1_000,
        min_score: float | None = None,
        all_below: int | None = None,
        as_of: Clock | str | None = None,
        place: MemoryPlace = "system",
        messages_key: str = "messages",
        namespaces: Sequence[Sequence[str]] | None = None,
    ) -> None:
        super().__init__(messages_key)
        self._add = (
            _append_to_newest_question
            if check_choice("place", place, ("system", "question")) == "question"
            else _append_text_to_system_message
        )
        self._search = MemorySearch(
            namespace, kinds, limit, max_tokens, min_score, all_below, namespaces=namespaces
        )
        self._store = None if store is None else StoreAdapter(store).store
        self._as_of = parse_clock_option("as_of", as_of)
        self._following: list[MessagesNode] = []

    def adapt_to_following_view_parts(self, following_parts: Sequence[MessagesNode]) -> Self:
        """Return a copy of this node with references to the nodes that follow this node in a view.

        A view applies several nodes in sequence to the messages for a model.

        For each model request, the returned copy of the node also runs the nodes in
        `following_parts`. The result shows which messages the model will receive. Other
        `UseMemories` nodes in `following_parts` are left out, because they never remove messages
        and would only search the store again.
        """
        copied = copy(self)
        copied._following = [part for part in following_parts if not isinstance(part, UseMemories)]
        return copied

    async def _transform_input(
        self, model_input: ModelInput, state: Any, config: RunnableConfig | None
    ) -> ModelInput:
        """Add memories that are relevant to the latest question to a copy of `model_input`."""
        newest, turns = tee(model_input.turns)
        query, max_tokens = (
            build_search_query_from_newest_turns(list(islice(newest, 2))),
            self._search.max_tokens or 0,
        )
        lines: tuple[str, ...] = ()
        while query and max_tokens:
            turns_to_try, turns = tee(turns)
            filled_input = self._add(
                replace(model_input, turns=turns_to_try), _ONE_TOKEN * max_tokens
            )
            try:
                shown_ids = await self._find_ids_of_messages_kept_by_later_parts(
                    filled_input, state, config
                )
            except BudgetExceeded:
                # The tokens reserved for the memories exceed the token budget of a later node.
                # Halve the number of reserved tokens and try again.
                max_tokens //= 2
                continue
            lines = await self._recall_memory_lines(query, max_tokens, shown_ids, config)
            break
        while lines:
            turns_to_try, turns = tee(turns)
            filled_input = self._add(
                replace(model_input, turns=turns_to_try), render_section("memories", lines)
            )
            try:
                await self._find_ids_of_messages_kept_by_later_parts(filled_input, state, config)
                break
            # The memories need more tokens than estimated and exceed a later node's token budget.
            # Drop the last memory and try again.
            except BudgetExceeded:
                lines = lines[:-1]
        model_input = replace(model_input, turns=turns)
        return self._add(model_input, render_section("memories", lines)) if lines else model_input

    transform_input = build_blocking_function(_transform_input)  # type: ignore[arg-type]
    atransform_input = build_async_function(_transform_input)  # type: ignore[arg-type]

    async def _find_ids_of_messages_kept_by_later_parts(
        self, model_input: ModelInput, state: Any, config: RunnableConfig | None
    ) -> frozenset[str | None]:
        """Run the view's later nodes, and return the ids of the messages that these nodes keep.

        Pass `model_input` to the first node, and pass each node's result to the next node.
        """
        for part in self._following:
            model_input = await call_method(part, "transform_input", model_input, state, config)
        return frozenset(message.id for message in model_input.to_messages())

    async def _recall_memory_lines(
        self,
        query: str,
        max_tokens: int,
        shown_ids: frozenset[str | None],
        config: RunnableConfig | None,
    ) -> tuple[str, ...]:
        """Recall memories as lines of text.

        A memory is skipped if all of its source messages are already in the request. If the store
        or its embedder fails, a warning is logged and an empty tuple is returned.
        """
        thread_id, _ = read_thread_and_checkpoint_id_of_run(config)

        def is_not_shown(memory: Memory) -> bool:
            """Return False if the request contains all source messages of a memory, else True."""
            origin = memory.provenance
            if origin is None or not origin.message_ids:
                return True
            elsewhere = thread_id is not None and origin.thread_id not in (None, thread_id)
            return elsewhere or not shown_ids.issuperset(origin.message_ids)

        try:
            memories = await self._search.find_memories(
                query,
                self._store,
                config,
                as_of=self._as_of(config),
                max_tokens=max_tokens,
                accepts=is_not_shown,
                expected_rejections=len(shown_ids),
            )
            return memories.lines
        # A third-party store can raise exceptions from its database driver.
        except Exception as exc:
            if isinstance(exc, PerdureError) and not isinstance(
                exc, StorageError | EmbeddingFailed
            ):
                # A `PerdureError` that is not temporary indicates a mistake in the application's
                # code and would recur in every turn. Raise the error, so that the developer notices
                # the mistake.
                raise
            _LOG.warning("no memory is recalled in this turn: %s", exc, exc_info=exc)
            return ()


use_memories = UseMemories


def build_search_query_from_newest_turns(turns: Sequence[Turn]) -> str:
    """Build a search query from the latest turns, or return "" if the latest question has no text.

    `turns` are sorted newest first. The query is the latest question. If the latest question is too
    short to search for on its own, such as "and then?", the query also contains the previous
    question.
    """
    questions = (turn.messages[0] for turn in turns[:2])
    texts = [message.text.strip() for message in questions if get_role(message) == "human"]
    if not texts or not texts[0]:
        return ""
    significant_words = [word for word in tokenize_query(texts[0]) if word not in STOP_WORDS]
    # for example "and then?" or "Bruges?"
    is_elliptic = not significant_words or (
        len(significant_words) == 1 and len(texts[0].split()) <= _MAX_ELLIPTIC_WORDS
    )
    text = "\n".join(reversed(texts)) if is_elliptic else texts[0]
    half = _MAX_QUERY_CHARS // 2
    return text if len(text) <= _MAX_QUERY_CHARS else f"{text[:half]}\n{text[-half:]}"


def _append_to_newest_question(model_input: ModelInput, text: str) -> ModelInput:
    """Return a copy of `model_input` with `text` appended to the latest question.

    If the latest turn does not begin with a human message, `text` is appended to the system message
    instead.
    """
    newest = next(model_input.turns, None)
    if newest is None or get_role(newest.units[0][0]) != "human":
        turns = model_input.turns if newest is None else chain([newest], model_input.turns)
        return _append_text_to_system_message(replace(model_input, turns=turns), text)
    (question, *others), *units = newest.units
    changed = question.model_copy(
        update={"content": append_text_to_content(question.content, text)}
    )
    turn = newest._replace(units=[(changed, *others), *units])
    return replace(model_input, turns=chain([turn], model_input.turns))


def _append_text_to_system_message(model_input: ModelInput, text: str) -> ModelInput:
    """Return a copy of `model_input` with `text` appended to the system message."""
    if model_input.system is None:
        return replace(model_input, system=SystemMessage(text))
    content = append_text_to_content(model_input.system.content, text)
    return replace(model_input, system=model_input.system.model_copy(update={"content": content}))
