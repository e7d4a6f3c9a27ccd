"""Replies: values as JSON, errors as their status and a sentence."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
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
from perdure.server.access import Refused

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
_ORJSON_OPTIONS: Final = orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY


def encode_json(value: Any) -> bytes:
    """A value as JSON: messages as their fields, what JSON has no form for as its text."""
    try:
        return orjson.dumps(value, _to_json_type, _ORJSON_OPTIONS)
    except TypeError:  # integers beyond 64 bits, lone surrogates, deep nesting
        return json.dumps(value, default=_to_json_type, skipkeys=True).encode()


def _to_json_type(value: Any) -> Any:
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
    """A text as it is, another value as JSON."""
    return value if isinstance(value, str) else encode_json(value).decode()


def truncate_text(text: str, max_length: int) -> tuple[str, int]:
    """The beginning of a text, and how many characters are left out."""
    return (text, 0) if len(text) <= max_length else (text[:max_length], len(text) - max_length)


def escape_unprintable(text: str) -> str:
    """Text in which what cannot be seen is escaped as in JSON, but for line feeds."""
    return "".join(c if c == "\n" or c.isprintable() else json.dumps(c)[1:-1] for c in text)


class JSONReply(Response):
    """A reply in JSON."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """The body."""
        return encode_json(content)


async def build_json_reply(content: Any) -> Response:
    """A reply with stored values: encoded in a thread, as those of a long conversation take long.

    What an endpoint returns otherwise passes through pydantic, which refuses some of them.
    """
    return await asyncio.to_thread(JSONReply, content)


def http_status(error: PerdureError) -> int:
    """The status of HTTP for an error."""
    if isinstance(error, Refused):
        return error.status
    return next((code for kinds, code in _STATUS_BY_ERROR.items() if isinstance(error, kinds)), 500)


def split_url(url: str) -> SplitResult:
    """The parts of an address of a client; of what is none, empty ones."""
    try:
        return urlsplit(url)
    except ValueError:  # brackets that are no address
        return urlsplit("")


def wants_json(request: Request) -> bool:
    """Whether a request for a page is for its JSON twin: at `.json`, or if JSON is accepted."""
    accepts = request.headers.get("accept", "")
    return request.url.path.endswith(".json") or accepts.startswith("application/json")
