"""Examples for langchain's few-shot prompts: `Examples` as an example selector."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from langchain_core.example_selectors import BaseExampleSelector
from langchain_core.runnables import RunnableConfig

from perdure.errors import ConfigurationError
from perdure.memory.collection.episodes import Example
from perdure.memory.collection.examples import Examples
from perdure.memory.options import whole
from perdure.memory.records import Outcome


class ExampleSelector(BaseExampleSelector):
    """Selects the examples most like what is asked, within a budget of tokens.

    For `FewShotPromptTemplate` and `FewShotChatMessagePromptTemplate`. An example is a dict with
    the input, the outcome and, if there are any, `context` and `why`.

    Args:
        examples: Where they are kept.
        input_key: The name of the input: in an example, and among the variables of the prompt.
        output_key: The name of the outcome.
        limit: How many at most.
        budget: Tokens that they may take; None: as many as they take.
        config: Of the run; None: within a node, the run it belongs to.

    Raises:
        ConfigurationError: An argument is wrong.
    """

    def __init__(
        self,
        examples: Examples,
        *,
        input_key: str = "input",
        output_key: str = "output",
        limit: int = 5,
        budget: int | None = 1_000,
        config: RunnableConfig | None = None,
    ) -> None:
        if not isinstance(examples, Examples):
            raise ConfigurationError(f"examples is {examples!r:.80}; expected Examples(store)")
        keys = {input_key, output_key, "context", "why"}
        if len(keys) < 4 or not all(isinstance(key, str) and key for key in keys):
            raise ConfigurationError(
                f"input_key is {input_key!r:.40} and output_key {output_key!r:.40}; expected two "
                "names that are not 'context' or 'why'"
            )
        self.examples, self.config = examples, config
        self.input_key, self.output_key = input_key, output_key
        self.limit = whole("limit", limit, 1)
        self.budget = None if budget is None else whole("budget", budget, 1)

    def add_example(self, example: dict[str, str]) -> Outcome:
        """Keep an example; see `Examples.add`.

        Raises:
            ConfigurationError: It lacks the input or the outcome, or has something else.
        """
        return self.examples.add(**self._parts(example), config=self.config)

    async def aadd_example(self, example: dict[str, str]) -> Outcome:
        """See `add_example`."""
        return await self.examples.aadd(**self._parts(example), config=self.config)

    def select_examples(self, input_variables: dict[str, str]) -> list[dict[str, Any]]:
        """The examples for the variables of a prompt, best first.

        Args:
            input_variables: With the input and, if there is one, `context`; where there is no
                input, all of them are searched for.
        """
        found = self.examples.select(
            self._query(input_variables), budget=self.budget, limit=self.limit, config=self.config
        )
        return [self._dict(example) for example in found]

    async def aselect_examples(self, input_variables: dict[str, str]) -> list[dict[str, Any]]:
        """See `select_examples`."""
        found = await self.examples.aselect(
            self._query(input_variables), budget=self.budget, limit=self.limit, config=self.config
        )
        return [self._dict(example) for example in found]

    def _parts(self, example: Any) -> dict[str, Any]:
        names = {
            self.input_key: "input",
            self.output_key: "outcome",
            "context": "context",
            "why": "why",
        }
        given = set(example) if isinstance(example, Mapping) else set()
        if not {self.input_key, self.output_key} <= given <= set(names):
            raise ConfigurationError(
                f"the example is {example!r:.80}; expected a dict with {self.input_key!r} and "
                f"{self.output_key!r}, at most 'context' and 'why' besides"
            )
        return {names[key]: part for key, part in example.items()}

    def _query(self, variables: Mapping[str, Any]) -> str:
        named = [variables.get(key) for key in (self.input_key, "context")]
        parts = named if named[0] else list(variables.values())
        return "\n\n".join(str(part) for part in parts if part)

    def _dict(self, example: Example) -> dict[str, Any]:
        parts = {"context": example.context, "why": example.why}
        found = {self.input_key: example.input, self.output_key: example.outcome}
        return found | {name: part or "" for name, part in parts.items()}
