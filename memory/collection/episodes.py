"""What an episode is: its parts, as they are given, kept and shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Final

from langchain_core.messages import AIMessage, BaseMessage, HumanMessage

from perdure.errors import ConfigurationError, InvalidValue
from perdure.memory.options import is_number
from perdure.memory.quotation import memory_line, section
from perdure.memory.records import EPISODE, Memory

_TEXTS: Final = ("input", "outcome", "context", "why")


@dataclass(frozen=True, slots=True)
class Example:
    """An episode, as an example. As text it is one line that quotes it.

    Attributes:
        key: Its id.
        input: What was asked.
        outcome: What was done, or answered.
        context: The situation.
        why: Why it went well, or badly.
        score: How well.
        memory: The memory that it is.
    """

    key: str
    input: str
    outcome: str
    context: str | None
    why: str | None
    score: float | None
    memory: Memory

    def as_messages(self) -> list[BaseMessage]:
        """The input, in its context, as a human message, and the outcome as the answer."""
        asked = f"{self.context}\n\n{self.input}" if self.context else self.input
        return [HumanMessage(asked), AIMessage(self.outcome)]

    def __str__(self) -> str:
        return memory_line(self.memory)


def as_section(examples: Sequence[Example]) -> str:
    """Examples as a section of a prompt, quoted; "" for none."""
    return section("examples", [str(example) for example in examples]) if examples else ""


def example_of(memory: Memory) -> Example:
    """The example that an episode is."""
    value = memory.value
    return Example(
        memory.key,
        value["input"],
        value["outcome"],
        value.get("context"),
        value.get("why"),
        value.get("score"),
        memory,
    )


def is_episode(memory: Memory) -> bool:
    """Whether a memory is one that `Examples` keeps."""
    parts = (memory.value.get("input"), memory.value.get("outcome"))
    return memory.kind == EPISODE and all(isinstance(part, str) for part in parts)


def value_of(parts: dict[str, Any]) -> dict[str, Any]:
    """What is kept of an episode; its text is what is searched."""
    kept = {name: parts.get(name) for name in (*_TEXTS, "score")}
    searched = [part for part in (kept["input"], kept["context"]) if part]
    return {"text": "\n\n".join(searched), **kept}


def key_of(parts: dict[str, Any]) -> str:
    """The key of an episode: the same for the same."""
    said = "\0".join(parts[name] or "" for name in ("input", "context", "outcome"))
    digest = blake2b(said.encode("utf-8", "surrogatepass"), digest_size=10)
    return f"episode-{digest.hexdigest()}"


def checked_parts(**parts: Any) -> dict[str, Any]:
    """Parts of an episode, if they are.

    Raises:
        ConfigurationError: There is no such part.
        InvalidValue: One is something else than it should be.
    """
    for name, part in parts.items():
        if name == "score":
            if part is not None and not is_number(part):
                raise InvalidValue(f"score is {part!r:.80}; expected a number, or None")
        elif name not in _TEXTS:
            raise ConfigurationError(
                f"an episode has no {name!r}; expected some of {[*_TEXTS, 'score']}"
            )
        elif name in ("input", "outcome"):
            if not isinstance(part, str) or not part.strip():
                raise InvalidValue(f"{name} is {part!r:.80}; expected text that is not empty")
        elif part is not None and not isinstance(part, str):
            raise InvalidValue(f"{name} is {part!r:.80}; expected text, or None")
    return parts
