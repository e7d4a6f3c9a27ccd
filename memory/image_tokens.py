"""What images, files and recordings cost: by the providers' formulas, or by a bound.

Only headers are read, never whole images, and nothing is fetched: an image behind a URL counts as
the largest one.
"""

from __future__ import annotations

import binascii
import math
from base64 import b64decode
from collections.abc import Mapping
from typing import Any, Final

Size = tuple[int, int]
"""Width and height in pixels."""

IMAGES: Final = frozenset({"image", "image_url", "input_image"})
FILES: Final = frozenset(
    {"file", "input_file", "document", "media", "audio", "input_audio", "video", "video_url"}
)

_LOW, _TILE, _SIDE = 85, 170, 512
_LONGEST, _SHORTEST = 2048, 768
_MOST_TILES = _LOW + _TILE * (_LONGEST // _SIDE) * math.ceil(_SHORTEST / _SIDE)
_PATCH, _MOST_PATCHES = 32, 1536
_PIXELS_A_TOKEN, _MOST_BY_AREA = 750, 1600
_UNSEEN = 4_000  # a file of which only the address or the id is known: a page or two
_HEAD = 1 << 17  # characters of base64 in which the size of a JPEG must be found
_DATA: Final = frozenset({"base64", "data", "file_data"})


def tile_tokens(size: Size | None, low: bool) -> int:
    """Tokens of an image for gpt-4o, gpt-4.1, gpt-5, o1 and o3; the most, if its size is unknown.

    gpt-5 and the o-series take a little less a tile (140 and 150 for 170): they are counted high.
    gpt-4o-mini is billed more a tile, but holds as much in its window.

    Source: https://platform.openai.com/docs/guides/images-vision (calculating costs)

    >>> tile_tokens((1024, 1024), low=False), tile_tokens((2048, 4096), low=False)
    (765, 1105)
    """
    if low:
        return _LOW
    if size is None:
        return _MOST_TILES
    scale = min(1.0, _LONGEST / max(size))
    scale = min(scale, _SHORTEST / min(size))
    across, down = (math.ceil(max(1, round(side * scale)) / _SIDE) for side in size)
    return _LOW + _TILE * across * down


def patch_tokens(size: Size | None, factor: float) -> int:
    """Tokens of an image for models that count patches of 32 by 32 pixels (gpt-4.1-mini, o4-mini).

    Source: https://platform.openai.com/docs/guides/images-vision (calculating costs)

    >>> patch_tokens((1024, 1024), factor=1.0)
    1024
    """
    patches = _MOST_PATCHES
    if size is not None:
        patches = min(patches, math.ceil(size[0] / _PATCH) * math.ceil(size[1] / _PATCH))
    return math.ceil(patches * factor)


def any_image_tokens(size: Size | None, low: bool) -> int:
    """Tokens of an image for a model that nobody named: the more of OpenAI's and Anthropic's.

    Source: https://docs.anthropic.com/en/docs/build-with-claude/vision (width times height / 750)
    """
    by_area = _MOST_BY_AREA
    if size is not None:
        by_area = min(by_area, math.ceil(size[0] * size[1] / _PIXELS_A_TOKEN))
    return max(tile_tokens(size, low), 0 if low else by_area)


def file_tokens(block: Mapping[str, Any]) -> int:
    """A bound for a file, a recording or a film, from the size of its data.

    A token for 32 bytes of sound (Gemini counts 32 tokens a second; speech takes 1 kB a second or
    more), for 8 of a PDF (its text is compressed), for 3 of anything else; 4,000 for a file that
    is elsewhere.

    Source: https://ai.google.dev/gemini-api/docs/tokens
    """
    data = payload(block)
    if data is None:
        return _UNSEEN
    size = len(data.partition(",")[2] or data) * 3 // 4
    if "audio" in block["type"] or "video" in block["type"]:
        return math.ceil(size / 32)
    return math.ceil(size / (8 if "pdf" in _labels(block) else 3))


def payload(block: Mapping[str, Any]) -> str | None:
    """The base64 data in a block of any provider's form, perhaps as a data URL; None without."""
    for key, value in block.items():
        if isinstance(value, Mapping):
            found = payload(value)
            if found is not None:
                return found
        elif isinstance(value, str) and (key in _DATA or value.startswith("data:")):
            return value
    return None


def is_low(block: Mapping[str, Any]) -> bool:
    """Whether an image is to be seen at low detail."""
    url = block.get("image_url")
    detail = url.get("detail") if isinstance(url, Mapping) else None
    return (block.get("detail") or detail) == "low"


def pixels(block: Mapping[str, Any]) -> Size | None:
    """The size of an image whose data is in the block, if it is a PNG, a GIF or a JPEG."""
    data = payload(block)
    if data is None:
        return None
    start = data.find(",", 0, 200) + 1  # base64 has no comma, the head of a data URL one
    try:
        head = b64decode(data[start : start + 64])
        if head.startswith(b"\xff\xd8"):
            head = b64decode(data[start : start + _HEAD])
        size = _size_of(head)
    except (binascii.Error, ValueError):
        return None
    return size if size is not None and min(size) > 0 else None


def _size_of(head: bytes) -> Size | None:
    if head.startswith(b"\x89PNG\r\n\x1a\n") and len(head) >= 24:
        return int.from_bytes(head[16:20], "big"), int.from_bytes(head[20:24], "big")
    if head.startswith((b"GIF87a", b"GIF89a")) and len(head) >= 10:
        return int.from_bytes(head[6:8], "little"), int.from_bytes(head[8:10], "little")
    return _jpeg_size(head) if head.startswith(b"\xff\xd8") else None


def _jpeg_size(head: bytes) -> Size | None:
    """The size in a start-of-frame segment, to which the lengths of those before it lead."""
    at = 2
    while at + 9 <= len(head) and head[at] == 0xFF:
        marker = head[at + 1]
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            return int.from_bytes(head[at + 7 : at + 9]), int.from_bytes(head[at + 5 : at + 7])
        at += 2 + int.from_bytes(head[at + 2 : at + 4])
    return None


def _labels(block: Mapping[str, Any]) -> str:
    """The names and types that a block gives its file, and the head of a data URL."""
    texts = []
    for value in block.values():
        if isinstance(value, Mapping):
            texts.append(_labels(value))
        elif isinstance(value, str):
            texts.append(value[:100])
    return " ".join(texts).lower()
