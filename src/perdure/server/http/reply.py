"""Build the server's HTTP replies.

A reply contains either JSON values or an error with its HTTP status and message.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from itertools import accumulate
from typing import Any, Final
from urllib.parse import SplitResult, urlsplit

import orjson
from langchain_core.messages import BaseMessage
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from perdure.errors import (
    AlreadyLocked,
    ConfigurationError,
    InvalidFilter,
    InvalidMessages,
    InvalidNamespace,
    InvalidPatch,
    InvalidUpdate,
    LimitExceeded,
    ModelFailed,
    PerdureError,
    SerializationError,
    StorageFull,
    StorageUnavailable,
    UnknownCheckpoint,
    UnknownMemory,
    UnknownPerson,
    UnknownThread,
    VersionConflict,
)
from perdure.server.http.access import Refused

_STATUS_BY_ERROR: Final[Mapping[type[PerdureError] | tuple[type[PerdureError], ...], int]] = {
    (UnknownThread, UnknownCheckpoint, UnknownMemory, UnknownPerson): 404,
    (VersionConflict, AlreadyLocked): 409,
    LimitExceeded: 413,
    StorageFull: 507,
    StorageUnavailable: 503,
    ModelFailed: 502,
    (ConfigurationError, InvalidFilter, InvalidMessages, InvalidNamespace): 422,
    (InvalidPatch, InvalidUpdate, SerializationError): 422,
}
JSONObject = dict[str, Any]
"""An object of JSON."""
MAX_JSON_LEVELS: Final = 500
"""The maximum nesting of lists and objects in a reply. The usual decoders accept this nesting."""
# A string, or a bracket that begins or ends a list or an object
_JSON_STRING_OR_BRACKET: Final = re.compile(r'"(?:[^"\\]|\\.)*+"|[\[\]{}]')
_ORJSON_OPTIONS: Final = orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY


def encode_json(value: Any) -> bytes:
    """Encode a value as JSON.

    A message is converted to a JSON object with the message's fields. Any other value that JSON
    cannot represent is converted to a JSON type such as a list or string.

    Raises:
        SerializationError: The value is nested deeper than `MAX_JSON_LEVELS` levels.
    """
    try:
        return orjson.dumps(value, _make_json_serializable, _ORJSON_OPTIONS)
    except TypeError:  # orjson rejects integers over 64 bits, lone surrogates and deep nesting.
        try:
            text = json.dumps(value, default=_make_json_serializable, skipkeys=True)
        except RecursionError:
            text = None
    # From Python 3.13 on, `json.dumps` encodes values that are nested so deeply that clients cannot
    # decode them.
    if text is None or _count_json_levels(text) > MAX_JSON_LEVELS:
        raise SerializationError(
            f"the value is nested deeper than {MAX_JSON_LEVELS} levels of lists and objects; store "
            "a flatter value"
        )
    if "NaN" in text or "Infinity" in text:  # These are not JSON. orjson replaces them with null.
        text = json.dumps(json.loads(text, parse_constant=lambda constant: None))
    return text.encode()


def _count_json_levels(text: str) -> int:
    """Return the maximum nesting of lists and objects in a text that is valid JSON."""
    brackets = (bracket for bracket in _JSON_STRING_OR_BRACKET.findall(text) if bracket in "[]{}")
    return max(accumulate(1 if bracket in "[{" else -1 for bracket in brackets), default=0)


def _make_json_serializable(value: Any) -> Any:
    """Convert a value that is not JSON-serializable to a serializable type."""
    if isinstance(value, BaseMessage | BaseModel):
        return value.model_dump()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, set | frozenset | tuple):
        return list(value)
    if isinstance(value, bytes | bytearray):
        return bytes(value).hex()
    return repr(value) if isinstance(value, BaseException) else str(value)


def format_as_text(value: Any) -> str:
    """Return a string unchanged, and any other value encoded as JSON."""
    return value if isinstance(value, str) else encode_json(value).decode()


def truncate_and_count_omitted(text: str, max_chars: int) -> tuple[str, int]:
    """Truncate a text, and return it with the number of omitted characters.

    Args:
        text: The text.
        max_chars: The maximum length of the returned text, in characters.
    """
    return (text, 0) if len(text) <= max_chars else (text[:max_chars], len(text) - max_chars)


def escape_unprintable(text: str) -> str:
    """Escape the unprintable characters in a text as JSON does. Line feeds are kept."""
    return "".join(
        character if character == "\n" or character.isprintable() else json.dumps(character)[1:-1]
        for character in text
    )


class JSONReply(Response):
    """A reply in JSON."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Return the body."""
        return encode_json(content)


async def build_json_reply(content: Any) -> Response:
    """Build a JSON reply from stored values, encoding them in a worker thread.

    A worker thread encodes the JSON, because encoding the values of a long conversation on the
    event loop would block other requests. Endpoints do not return stored values directly, because
    FastAPI would pass them to pydantic, which raises errors for some of them.
    """
    return await asyncio.to_thread(JSONReply, content)


def http_status(error: PerdureError) -> int:
    """Return the HTTP status for an error."""
    if isinstance(error, Refused):
        return error.status
    return next(
        (
            status
            for error_types, status in _STATUS_BY_ERROR.items()
            if isinstance(error, error_types)
        ),
        500,
    )


def split_url(url: str) -> SplitResult:
    """Split a client's URL into its parts, which are all empty if the URL is invalid."""
    try:
        return urlsplit(url)
    except ValueError:
        # `urlsplit` raises ValueError if a URL is invalid, for example if the text in the URL's
        # brackets is not an IPv6 address.
        return urlsplit("")


def wants_json(request: Request) -> bool:
    """Return whether a client asks for JSON, through the URL suffix or the Accept header."""
    accepts = request.headers.get("accept", "")
    return request.url.path.endswith(".json") or accepts.startswith("application/json")
