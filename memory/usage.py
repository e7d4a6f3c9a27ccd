"""Read the token usage and the model names from model responses."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final

from langchain_core.messages import BaseMessage

from perdure.memory.conversation import get_role

# Maximum plausible token count. Larger reported values are ignored.
_MAX_TOKENS: Final = 20_000_000
# Keys in `response_metadata` where providers report the model name.
_MODEL_KEYS: Final = ("model_name", "model", "model_id")
_NO_USAGE: Final[Mapping[str, Any]] = {}
_PROVIDERS: Final = (
    "openai|azure_openai|azure|anthropic|google_genai|google_vertexai|google|bedrock|"
    "bedrock_converse|ollama|groq|mistralai|deepseek|xai|together|fireworks|cohere|openrouter"
)
# Matches the provider or path prefix of a model name, such as "openai:" or "models/".
_PREFIX: Final = re.compile(rf"^(?:.*/|(?:{_PROVIDERS}):)+")
# Matches the version at the end of a model name, such as "-2024-08-06", "@20240806", "-002" or
# ":latest".
_VERSION: Final = re.compile(r"(?:-\d{4}-\d\d-\d\d|[-@]\d{8}|-\d{3,4}|[-:@](?:latest|default))+$")
# Matches a repeated name, such as "gpt-4ogpt-4o". langchain repeats the model name when it merges
# the chunks of a streamed response.
_REPEATED: Final = re.compile(r"^(.{4,}?)\1+$")


def read_reported_total_tokens(message: BaseMessage) -> int:
    """Return the total number of tokens in a request and its response.

    Return 0 if the response does not report a number of input tokens, or if the total is
    implausible because it exceeds `_MAX_TOKENS`. Cached input tokens are included in the total.
    """
    usage = _read_usage(message)
    if not usage:
        return 0
    sent = _read_count(usage.get("input_tokens"))
    details = usage.get("input_token_details")
    if isinstance(details, Mapping):
        cached = _read_count(details.get("cache_read")) + _read_count(details.get("cache_creation"))
        # Some provider integrations do not count cached tokens in `input_tokens`.
        sent += cached if cached > sent else 0
    total = sent + _read_count(usage.get("output_tokens"))
    return total if sent and total <= _MAX_TOKENS else 0


def read_reported_output_tokens(message: BaseMessage) -> int:
    """Return the number of output tokens that a response reports, excluding reasoning tokens.

    Return 0 if the response does not report its output tokens.
    """
    usage = _read_usage(message)
    if not usage:
        return 0
    details = usage.get("output_token_details")
    reasoning = _read_count(details.get("reasoning")) if isinstance(details, Mapping) else 0
    return max(0, _read_count(usage.get("output_tokens")) - reasoning)


def read_model_name(message: BaseMessage) -> str | None:
    """Return the name of the model that generated a response, or None if it is not reported."""
    metadata = message.response_metadata
    names = (metadata.get(key) for key in _MODEL_KEYS) if metadata else ()
    return next((name for name in names if isinstance(name, str) and name), None)


def is_same_model(first: str | None, second: str | None) -> bool:
    """Return whether two model names could refer to the same model.

    None stands for an unknown model name, which matches every model. Provider prefixes and version
    suffixes in the names are ignored.

    >>> is_same_model("openai:gpt-4o", "gpt-4o-2024-08-06"), is_same_model("gpt-4", "gpt-4o")
    (True, False)
    """
    return (
        first is None
        or second is None
        or _remove_provider_and_version(first) == _remove_provider_and_version(second)
    )


@lru_cache(maxsize=256)
def _remove_provider_and_version(model: str) -> str:
    """Strip the provider prefix and the version suffix from a model name."""
    name = _REPEATED.sub(r"\1", model.strip().lower())
    name = _PREFIX.sub("", name)
    return _VERSION.sub("", name) or name


def _read_usage(message: BaseMessage) -> Mapping[str, Any]:
    """Return the `usage_metadata` of an AI message, or an empty mapping."""
    usage = getattr(message, "usage_metadata", None) if get_role(message) == "ai" else None
    return usage if type(usage) is dict or isinstance(usage, Mapping) else _NO_USAGE


def _read_count(value: Any) -> int:
    """Return a reported token count, or 0 if the value is not a positive int."""
    is_count = isinstance(value, int) and not isinstance(value, bool) and value > 0
    return value if is_count else 0
