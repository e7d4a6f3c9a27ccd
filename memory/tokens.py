"""What tokens cost: the contract of counters, and how to name one.

A counter counts message by message, so that a turn need only count what is new.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from langchain_core.messages import BaseMessage


@runtime_checkable
class TokenCounter(Protocol):
    """Counts tokens; the same input always gives the same number.

    Attributes:
        request: Tokens that a request takes besides its messages and tools.
    """

    request: int

    def text(self, text: str) -> int:
        """Tokens of a text by itself."""

    def message(self, message: BaseMessage) -> int:
        """Tokens of a message, with what the provider puts around it."""

    def tools(self, tools: Sequence[Any]) -> int:
        """Tokens of the schemas of tools, in any form that `bind_tools` takes."""

    def fitted(self, messages: Sequence[BaseMessage]) -> TokenCounter:
        """The counter for a conversation: itself, unless what the provider reported says more."""
