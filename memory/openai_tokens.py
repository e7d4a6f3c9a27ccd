"""Tokens as OpenAI's models count them, without ever asking the network for an encoding.

tiktoken is used if the file of the encoding is in its cache folder, whole: it is the reference, the
faster and the smaller in memory. Else bpe-openai is, which carries its encodings with it (extra
`[tokens]`). Both give the same tokens. Without either, tokens are estimated, and a warning says so
once: a counter that is a little off must not stop an agent.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import tempfile
import warnings
from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any, Final, Literal

from langchain_core.messages import BaseMessage

from perdure.memory.estimated_tokens import EstimatedCounter
from perdure.memory.image_tokens import Size, patch_tokens, tile_tokens
from perdure.memory.message_tokens import CountsByText, Memo

EncodingName = Literal["o200k_base", "cl100k_base"]

_LOG = logging.getLogger("perdure")

_PROVIDER = re.compile(r"(openai|azure_openai|azure)[:/]")
_O200K = re.compile(r"(gpt-(4o|4\.1|4\.5|5(\.\d+)?|oss)|chatgpt-4o|o[134]|codex-mini)(-.*)?")
_CL100K = re.compile(r"(gpt-4|gpt-3\.5|gpt-35)(-.*)?")
_PATCHED: Final = {
    r"gpt-4\.1-nano|gpt-5(\.\d+)?-nano": 2.46,
    r"gpt-4\.1-mini|gpt-5(\.\d+)?-(codex-)?mini": 1.62,
    r"o4-mini|codex-mini": 1.72,
    r"gpt-5\.[2-9]": 1.2,
}
"""Models that see images as patches, and the tokens a patch. Source: see `patch_tokens`."""

_FILES: Final = {
    "o200k_base": "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d",
    "cl100k_base": "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7",
}
"""SHA-256 of the files, as in tiktoken_ext/openai_public.py; tiktoken fetches one that differs."""
_URL = "https://openaipublic.blob.core.windows.net/encodings/{}.tiktoken"
_AT_ONCE = 50_000  # characters: bpe-openai refuses a text of a million, or 200,000 tokens


class OpenAICounter(CountsByText):
    """Counts as an OpenAI model does; exact for texts, roles and names, close for tool calls.

    What has been counted is remembered by content, and shared by all counters of an encoding.

    Args:
        encoding: `"o200k_base"` (since gpt-4o) or `"cl100k_base"`.
        memo: Counts a text in this encoding.
        patch: Tokens of an image's patch; None for models that count tiles.
    """

    def __init__(self, encoding: EncodingName, memo: Memo[str], patch: float | None = None) -> None:
        self.encoding = encoding
        self.function = 7 if encoding == "o200k_base" else 10
        self._memo = memo
        self._patch = patch

    def text(self, text: str) -> int:
        """Tokens of a text by itself; what looks like a special token counts as plain text."""
        return self._memo(text, text)

    def image(self, size: Size | None, low: bool) -> int:
        """Tokens of an image, by tiles or by patches."""
        return tile_tokens(size, low) if self._patch is None else patch_tokens(size, self._patch)

    def fitted(self, messages: Sequence[BaseMessage]) -> OpenAICounter:
        """Itself: it counts, it does not estimate."""
        return self


def openai_counter(model: str) -> OpenAICounter | EstimatedCounter | None:
    """The counter of an OpenAI model, an estimate if its encoding is not here; None for others.

    The first of an encoding takes up to a second, so that no turn of a conversation has to.
    """
    name = base_model(model)
    encoding = encoding_name(name)
    if encoding is None:
        return None
    memo = _memo(encoding)
    if memo is None:
        _warn(encoding)
        return EstimatedCounter()
    patch = next((factor for part, factor in _PATCHED.items() if re.match(part, name)), None)
    return OpenAICounter(encoding, memo, patch)


def base_model(model: str) -> str:
    """A model's name without its provider, and without what fine-tuning adds.

    >>> base_model("openai:ft:gpt-4o-mini-2024-07-18:acme::9x2")
    'gpt-4o-mini-2024-07-18'
    """
    name = _PROVIDER.sub("", model, count=1) if _PROVIDER.match(model) else model
    return name.split(":")[1] if name.startswith("ft:") else name


def encoding_name(model: str) -> EncodingName | None:
    """The encoding of a model, by its base name; None if it is not one of OpenAI's.

    Source: https://github.com/openai/tiktoken/blob/main/tiktoken/model.py

    >>> encoding_name("gpt-4o-2024-08-06"), encoding_name("gpt-4-0613"), encoding_name("mistral")
    ('o200k_base', 'cl100k_base', None)
    """
    if _O200K.fullmatch(model):
        return "o200k_base"
    return "cl100k_base" if _CL100K.fullmatch(model) else None


# -- loading encodings

_memos: dict[str, Memo[str]] = {}


def _memo(encoding: EncodingName) -> Memo[str] | None:
    """What counts in an encoding, loaded once; None if it is not on this machine."""
    if encoding not in _memos:
        encode = _from_tiktoken(encoding) or _from_bpe_openai(encoding)
        if encode is None:
            return None  # and not remembered: it may be installed later
        _memos.setdefault(encoding, Memo(partial(_count, encode)))
    return _memos[encoding]


def _count(encode: Callable[[str], Sequence[int]], text: str) -> int:
    pieces = range(0, len(text), _AT_ONCE)
    return sum(len(encode(text[start : start + _AT_ONCE])) for start in pieces)


def _from_tiktoken(encoding: EncodingName) -> Callable[[str], Sequence[int]] | None:
    file = _cached_file(encoding)
    if file is None or hashlib.sha256(file.read_bytes()).hexdigest() != _FILES[encoding]:
        return None
    return _imported("tiktoken", encoding)


def _from_bpe_openai(encoding: EncodingName) -> Callable[[str], Sequence[int]] | None:
    return _imported("bpe_openai", encoding)


def _imported(package: str, encoding: EncodingName) -> Callable[[str], Sequence[int]] | None:
    with warnings.catch_warnings():  # bpe-openai reads its files in a way Python 3.11 deprecates
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            module: Any = import_module(package)
        except ImportError:
            return None
        encode: Callable[[str], Sequence[int]] = module.get_encoding(encoding).encode_ordinary
    return encode


def _cached_file(encoding: EncodingName) -> Path | None:
    """The file of an encoding in tiktoken's cache, if it is there. Source: tiktoken/load.py."""
    folder = os.environ.get("TIKTOKEN_CACHE_DIR", os.environ.get("DATA_GYM_CACHE_DIR"))
    if folder is None:
        folder = os.path.join(tempfile.gettempdir(), "data-gym-cache")
    if not folder:  # set, and empty: tiktoken keeps no cache
        return None
    file = Path(folder, hashlib.sha1(_URL.format(encoding).encode()).hexdigest())
    return file if file.is_file() else None


@cache
def _warn(encoding: str) -> None:
    _LOG.warning(
        "tokens are estimated, not counted: the encoding %s is not on this machine. "
        "`pip install perdure[tokens]` brings it; token_counter('estimate') says it is wanted so",
        encoding,
    )
