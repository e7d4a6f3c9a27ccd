"""Few-shot examples: earlier cases, selected by how like the present one they are.

The input and its context are searched, so that the outcome of a case does not matter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from hashlib import blake2b
from typing import Annotated, Any, Final

from langchain_core.example_selectors import BaseExampleSelector
from langchain_core.runnables import RunnableConfig
from langgraph.store.base import BaseStore
from pydantic import BaseModel, Field, model_validator

from perdure.effects import awaiting, blocking
from perdure.errors import InvalidValue
from perdure.memory.changes import complete_provenance
from perdure.memory.collection import Collection
from perdure.memory.gate import Gate
from perdure.memory.options import check_instance, check_whole_number
from perdure.memory.quotation import fit_section, render_section
from perdure.memory.records import EPISODE, Memory, Outcome, render_memory_line
from perdure.memory.tokens import token_counter
from perdure.settings import TOOL_LIMIT
from perdure.stores.base import Provenance

_OTHERS: Final = 2  # memories read for one example: some of the namespace may be none
_NAMES: Final = {"input": "input", "output": "outcome", "context": "context", "why": "why"}
_Text = Annotated[str, Field(pattern=r"\S")]


class ExampleFields(BaseModel):
    """The value of an example; `text`, which is searched, is made of two other fields."""

    text: str = ""
    input: _Text
    outcome: _Text
    context: str | None = None
    why: str | None = None
    score: float | None = None

    @model_validator(mode="after")
    def _searched(self) -> ExampleFields:
        self.text = "\n\n".join(filter(None, (self.input, self.context)))
        return self


class ExampleSelector(BaseExampleSelector):
    """Keeps examples and selects those most like a situation, within a budget of tokens.

    It is a selector for langchain's `FewShotPromptTemplate` and `FewShotChatMessagePromptTemplate`,
    whose examples are dicts of `input`, `output`, `context` and `why`; `add` and `select` are for
    your own prompts. `memories` is the same as a `Collection`, with `update` and `forget`.

    Args:
        store, namespace, gate: See `Collection`.
        limit: How many examples are selected at most.
        max_tokens: Tokens that they may take as a section; None: any number.
        config: Of the run, for calls without one; None: within a node, the config of its run.
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

    async def _add(
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
        """Keep an example; added again, with another reason or score, it is updated."""
        config = config or self.config
        parts = {
            "input": input, "outcome": outcome, "context": context, "why": why, "score": score
        }  # fmt: skip
        fields = {name: part for name, part in parts.items() if part is not None}
        writer = self.memories.build_writer(config)
        value = writer.build_value(fields)
        same = "\0".join(value[name] or "" for name in ("input", "context", "outcome"))
        digest = blake2b(same.encode("utf-8", "surrogatepass"), digest_size=10)
        source = complete_provenance(config, provenance)
        return await writer.insert(fields, source, f"episode-{digest.hexdigest()}", "updated")

    async def _select(
        self, query: str, *, as_of: datetime | None = None, config: RunnableConfig | None = None
    ) -> list[Memory]:
        """The examples most like a situation, best first; now, or at a moment of the past."""
        if not check_instance("query", query, str, "text").strip():
            return []
        # not in context: two examples of one thread are no neighbours in a conversation
        options = {"query": query, "as_of": as_of, "context": False}
        limit, config = self.limit * _OTHERS, config or self.config
        memories = await self.memories.search_namespace(options, limit, config=config)
        examples = [memory for memory in memories if _is_example(memory)][: self.limit]
        lines = [render_memory_line(memory) for memory in examples]
        taken, _ = fit_section("examples", lines, self.max_tokens, self._counter)
        return [examples[n] for n in taken]

    async def _add_example(self, example: dict[str, str]) -> Outcome:
        """Keep the example of a prompt: `input` and `output`, at most `context` and `why`."""
        names = set(example) if isinstance(example, Mapping) else set()
        if not {"input", "output"} <= names <= set(_NAMES):
            raise InvalidValue(
                f"the example is {example!r:.80}; expected a dict with 'input' and 'output', at "
                "most 'context' and 'why' besides"
            )
        parts: dict[str, Any] = {_NAMES[key]: part for key, part in example.items()}
        return await self._add(**parts)

    async def _select_examples(self, input_variables: dict[str, str]) -> list[dict[str, Any]]:
        """The examples for `input` and `context` of a prompt, or without them for all variables."""
        named = [input_variables.get(key) for key in ("input", "context")]
        parts = named if named[0] else list(input_variables.values())
        memories = await self._select("\n\n".join(str(part) for part in parts if part))
        return [{key: m.value.get(name) or "" for key, name in _NAMES.items()} for m in memories]

    @staticmethod
    def section(examples: Sequence[Memory]) -> str:
        """Examples as a section of a prompt, quoted; "" for none."""
        return (
            render_section("examples", [render_memory_line(each) for each in examples])
            if examples
            else ""
        )

    add, aadd = blocking(_add), awaiting(_add)
    select, aselect = blocking(_select), awaiting(_select)
    # mypy takes `self` to be the base class
    add_example, aadd_example = blocking(_add_example), awaiting(_add_example)  # type: ignore[arg-type]
    select_examples, aselect_examples = blocking(_select_examples), awaiting(_select_examples)  # type: ignore[arg-type]


def _is_example(memory: Memory) -> bool:
    """Whether it is an example; the namespace may have other memories, also other episodes."""
    parts = memory.value.get("input"), memory.value.get("outcome")
    return memory.kind == EPISODE and all(isinstance(part, str) for part in parts)
