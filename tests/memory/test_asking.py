"""What is wrong with an answer from which text is wanted."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.messages import AIMessage

from perdure.memory.model_call import fault_of


@pytest.mark.parametrize(
    ("metadata", "fault"),
    [
        ({"finish_reason": "stop"}, None),
        ({"stop_reason": "end_turn"}, None),
        ({"status": "completed", "incomplete_details": None}, None),
        ({"finish_reason": "length"}, "cut off"),
        ({"stop_reason": "max_tokens"}, "cut off"),
        ({"stopReason": "max_tokens"}, "cut off"),
        ({"done_reason": "length"}, "cut off"),
        ({"finish_reason": "MAX_TOKENS"}, "cut off"),
        (
            {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}},
            "cut off",
        ),
        ({"finish_reason": "content_filter"}, "withheld"),
        ({"finish_reason": "SAFETY"}, "withheld"),
        ({"stop_reason": "refusal"}, "withheld"),
    ],
)
def test_an_answer_that_did_not_end_by_itself_is_none(metadata: Any, fault: str | None) -> None:
    """Under the names that OpenAI, Anthropic, Bedrock, Google and Ollama give it."""
    found = fault_of(AIMessage("I cannot he", response_metadata=metadata))
    assert (found is None) if fault is None else fault in (found or "")
