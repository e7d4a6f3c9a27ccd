"""Store few-shot examples, and select the examples that are most similar to a new case.

Searches compare the query with an example's input and context, but not with its outcome.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any, Final

from langchain_core.example_selectors import BaseExampleSelector
from langchain_core.runnables import RunnableConfig
from langgraph.store.base import BaseStore
from pydantic import BaseModel, Field, model_validator

from perdure.effects import build_async_function, build_blocking_function
from perdure.errors import InvalidValue
from perdure.memory.long_term.collection import Collection
from perdure.memory.long_term.gate import Gate
from perdure.memory.long_term.memory_changes import fill_provenance_defaults
from perdure.memory.long_term.records import EPISODE, Memory, Outcome, render_memory_line
from perdure.memory.options import check_instance, check_whole_number
from perdure.memory.quotation import render_section, select_fitting_indices_and_count_tokens
from perdure.memory.short_term.tokens import token_counter
from perdure.memory.thread_messages import build_hashed_key
from perdure.settings import TOOL_LIMIT
from perdure.stores.base import Provenance

# Number of memories to read per requested example. The number is greater than 1, because some of
# the memories may not be examples.
_READ_PER_EXAMPLE: Final = 2
# maps the keys of an example in LangChain's format to the fields of `ExampleFields`
_FIELD_NAMES: Final = {"input": "input", "output": "outcome", "context": "context", "why": "why"}
_Text = Annotated[str, Field(pattern=r"\S")]


class ExampleFields(BaseModel):
    """The fields of an example.

    Searches compare the query with the `text` field, which combines `input` and `context`.
    """

    text: str = ""
    input: _Text
    outcome: _Text
    context: str | None = None
    why: str | None = None
    score: float | None = None

    @model_validator(mode="after")
    def _set_searched_text(self) -> ExampleFields:
        self.text = "\n\n".join(filter(None, (self.input, self.context)))
        return self


class ExampleSelector(BaseExampleSelector):
    """Stores examples, and selects the ones that are most similar to a given situation.

    An `ExampleSelector` can be passed to LangChain's `FewShotPromptTemplate` and
    `FewShotChatMessagePromptTemplate` as the example selector. The selected examples are dicts with
    the keys `input`, `output`, `context` and `why`. Applications that do not use LangChain's prompt
    templates can call `add` and `select`. To update or forget examples, use the attribute
    `memories`, a `Collection` that contains the selector's examples.

    Args:
        store: The store of the examples, see `Collection`.
        namespace: The labels of the namespace, see `Collection`.
        gate: The checks of new examples, see `Collection`.
        limit: The maximum number of examples that are selected.
        max_tokens: The maximum number of tokens in the prompt section with the selected examples,
            or None for no limit.
        config: The config for calls without the argument `config`. If None, calls within a node use
            the config of the current run.
    """

    def __init__(
        self,
        store: BaseStore | None = None,
        namespace: tuple[str, ...] = ("examples", "{user_id}"),
        *,
        gate: Gate | None = None,
        limit: int = TOOL_LIMIT,
        max_tokens: int | None = 1_000,
        config: RunnableConfig | None = None,
    ) -> None:
        self.memories = Collection(store, namespace, schema=ExampleFields, gate=gate, kind=EPISODE)
        self.limit = check_whole_number("limit", limit, 1)
        self.max_tokens = (
            None if max_tokens is None else check_whole_number("max_tokens", max_tokens, 1)
        )
        self.config = config
        self._counter = token_counter(None)

    async def _store_example(
        self,
        input: str,
        outcome: str,
        *,
        context: str | None = None,
        why: str | None = None,
        score: float | None = None,
        provenance: Provenance | None = None,
        config: RunnableConfig | None = None,
    ) -> Outcome:
        """Store an example.

        If a stored example has the same input, context and outcome as the new example, the stored
        example is updated.

        Args:
            input: The situation.
            outcome: What was done, or the answer that was given.
            context: Further facts about the situation.
            why: The reason for the outcome.
            score: A rating of the outcome.
            provenance: The origin of the example. If None, the origin is the run of `config`.
            config: The config of the run.

        Returns:
            The outcome, which says whether the example was added, updated, quarantined or refused,
            or was stored already.
        """
        config = config or self.config
        parts = {
            "input": input, "outcome": outcome, "context": context, "why": why, "score": score
        }  # fmt: skip
        fields = {name: part for name, part in parts.items() if part is not None}
        writer = self.memories.build_writer(config)
        value = writer.build_memory_value(fields)
        return await writer.insert(
            fields,
            fill_provenance_defaults(config, provenance),
            build_hashed_key(
                "episode", *(value[name] or "" for name in ("input", "context", "outcome"))
            ),
            "updated",
        )

    async def _find_examples(
        self, query: str, *, as_of: datetime | None = None, config: RunnableConfig | None = None
    ) -> list[Memory]:
        """Return the examples that are most similar to a situation, best first.

        Args:
            query: The situation.
            as_of: The time as of which the examples are searched, or None for now.
            config: The config of the run.
        """
        if not check_instance("query", query, str, "text").strip():
            return []
        # Do not let neighbouring memories affect an example's score, because consecutive examples
        # are unrelated, unlike consecutive messages of a conversation.
        options = {"query": query, "as_of": as_of, "context": False}
        limit, config = self.limit * _READ_PER_EXAMPLE, config or self.config
        memories = await self.memories.search_namespace(options, limit, config=config)
        examples = [memory for memory in memories if _is_example_of_input_and_outcome(memory)][
            : self.limit
        ]
        positions, _ = select_fitting_indices_and_count_tokens(
            "examples",
            [render_memory_line(memory) for memory in examples],
            self.max_tokens,
            self._counter,
        )
        return [examples[position] for position in positions]

    async def _add_example(self, example: dict[str, str]) -> Outcome:
        """Store an example, given as a dict with the keys that LangChain's prompt templates use.

        `example` has the keys `input` and `output`, and optionally `context` and `why`.

        Raises:
            InvalidValue: The example has other keys.
        """
        names = set(example) if isinstance(example, Mapping) else set()
        if not {"input", "output"} <= names <= set(_FIELD_NAMES):
            raise InvalidValue(
                f"the example is {example!r:.80}; expected a dict with 'input' and 'output', and "
                "optionally 'context' and 'why'"
            )
        parts: dict[str, Any] = {_FIELD_NAMES[key]: part for key, part in example.items()}
        return await self._store_example(**parts)

    async def _select_examples(self, input_variables: dict[str, str]) -> list[dict[str, Any]]:
        """Return the examples that are most similar to the input variables of a LangChain prompt.

        The search query is built from the variables `input` and `context`. If there is no variable
        named `input`, the query is built from all variables.
        """
        preferred = [input_variables.get(key) for key in ("input", "context")]
        parts = preferred if preferred[0] else list(input_variables.values())
        memories = await self._find_examples("\n\n".join(str(part) for part in parts if part))
        return [
            {key: m.value.get(name) or "" for key, name in _FIELD_NAMES.items()} for m in memories
        ]

    @staticmethod
    def section(examples: Sequence[Memory]) -> str:
        """Return examples as a prompt section, quoted as data, or "" if there are no examples."""
        return (
            render_section("examples", [render_memory_line(case) for case in examples])
            if examples
            else ""
        )

    add, aadd = build_blocking_function(_store_example), build_async_function(_store_example)
    select, aselect = build_blocking_function(_find_examples), build_async_function(_find_examples)
    # mypy wrongly infers the base class as the type of `self` in the four following lines
    add_example = build_blocking_function(_add_example)  # type: ignore[arg-type]
    aadd_example = build_async_function(_add_example)  # type: ignore[arg-type]
    select_examples = build_blocking_function(_select_examples)  # type: ignore[arg-type]
    aselect_examples = build_async_function(_select_examples)  # type: ignore[arg-type]


def _is_example_of_input_and_outcome(memory: Memory) -> bool:
    """Return whether a memory is an example.

    A namespace with examples may also contain memories that are not examples.
    """
    parts = memory.value.get("input"), memory.value.get("outcome")
    return memory.kind == EPISODE and all(isinstance(part, str) for part in parts)
