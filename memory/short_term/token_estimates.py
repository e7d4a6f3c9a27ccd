"""Estimate token counts without a tokenizer, for text, images, files, audio and video.

The tokens-per-character values used for text were fitted to OpenAI's `o200k_base` encoding. For
text in Latin script (prose, code, JSON, CSV and identifiers) and for emoji, the estimated token
count is between 0.8 and 1.5 times the real token count. For text in scripts whose characters take
three bytes in UTF-8, such as Chinese, the estimated token count can be up to twice the real token
count.

The token counts for images, PDF pages, audio and video are based on the providers' documentation.
OpenAI charges 765 tokens for an image of 1024 by 1024 pixels, and 85 tokens for a low-detail image
(https://platform.openai.com/docs/guides/images-vision). Anthropic charges 1,500 to 3,000 tokens per
PDF page (https://docs.anthropic.com/en/docs/build-with-claude/pdf-support). Google charges 32
tokens per second of audio and about 300 tokens per second of video
(https://ai.google.dev/gemini-api/docs/tokens).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

# Estimated number of UTF-8 bytes per token of prose.
BYTES_PER_TOKEN: Final = 4
_DIGITS: Final = b"0123456789"
_SPACES: Final = b" \t\r\n\v\f"
_LETTERS: Final = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
_PROSE: Final = _LETTERS + _SPACES
_PROSE_PER_DIGIT: Final = 47
_PROSE_PER_PUNCTUATION: Final = 10
"""Minimum numbers of bytes per digit, and per punctuation mark, of text estimated as prose.

With at least this many bytes, the estimate for prose is not lower than the estimate that counts
characters, so that characters need not be counted. Prose is estimated at 0.25 tokens per byte,
while letters and spaces take at most 0.2 tokens each (see the constants below). The difference of
0.05 tokens per byte must cover the tokens that other characters take in addition: 0.5 for a
punctuation mark, and 1.05 for a digit with two letters next to it. 47 bytes per digit are more than
necessary.
"""
_ASCII: Final = bytes(range(0x80))
# Leading bytes of four-byte UTF-8 sequences, which encode emoji and rare characters.
_FOUR_BYTE_LEADS: Final = bytes(range(0xF0, 0xF5))
# Each `_TOKENS_PER_…` constant is the estimated number of tokens per character for one class of
# characters, such as digits.
_TOKENS_PER_DIGIT: Final = 0.55
_TOKENS_PER_PUNCTUATION: Final = 0.7
# Estimated tokens per letter that is adjacent to a digit, as in a UUID or a hash.
_TOKENS_PER_MIXED_LETTER: Final = 0.55
_TOKENS_PER_LETTER: Final = 0.15
_TOKENS_PER_SPACE: Final = 0.2
# Estimated tokens per character that takes four bytes in UTF-8, such as an emoji.
_TOKENS_PER_FOUR_BYTES: Final = 1.9
# For each digit in a text, the token estimate counts this many letters as adjacent to a digit. A
# letter that is adjacent to a digit, as in a UUID, takes more tokens than a letter in a word.
_MIXED_LETTERS_PER_DIGIT: Final = 2

IMAGE_TOKENS: Final = 765
LOW_DETAIL_IMAGE_TOKENS: Final = 85
# Estimated number of tokens per page of a document, such as a PDF.
_PAGE_TOKENS: Final = 2_000
# Assumed size of a document page, in bytes.
_PAGE_BYTES: Final = 50_000
_AUDIO_TOKENS_PER_S: Final = 32
# Assumed data rate of compressed audio, in bytes per second (128 kbit/s, as in an MP3 file).
_AUDIO_BYTES_PER_S: Final = 16_000
# Assumed data rate of uncompressed audio, in bytes per second (16-bit samples at 24 kHz).
_RAW_AUDIO_BYTES_PER_S: Final = 48_000
_VIDEO_TOKENS_PER_S: Final = 300
# Assumed data rate of video, in bytes per second (1 Mbit/s).
_VIDEO_BYTES_PER_S: Final = 125_000
# Estimated number of characters per token of encrypted reasoning. The value is high because
# providers drop encrypted reasoning from the requests of later turns.
_CHARACTERS_PER_HIDDEN_TOKEN: Final = 32
# Estimated number of audio tokens per token of the audio's transcript.
_TRANSCRIPT_FACTOR: Final = 3
# Estimated number of tokens of media whose size is unknown because the message contains only a URL
# or a file id.
_UNKNOWN_LENGTH_TOKENS: Final = {"file": _PAGE_TOKENS, "audio": 960, "video": 9_000}

_KINDS: Final = {
    "image": "image",
    "image_url": "image",
    "input_image": "image",
    "image_file": "image",
    "image_generation_call": "image",
    "computer_screenshot": "image",
    "audio": "audio",
    "input_audio": "audio",
    "video": "video",
    "video_url": "video",
    "file": "file",
    "input_file": "file",
    "document": "file",
    "media": "file",
    "text-plain": "file",
}
"""The kind of media, by the type of the content block."""
_UNTYPED_KINDS: Final = {
    "image": "image",
    "audio": "audio",
    "video": "video",
    "document": "file",
    "inline_data": "file",
    "file_data": "file",
}
"""The kind of media in a block without a type, by the key of the dict that contains the data.

Amazon Bedrock and Google use blocks without a type.
"""
# Keys of the text in a content block.
_TEXT_KEYS: Final = ("text", "reasoning", "thinking", "refusal")
# Keys under which a reasoning block stores encrypted data.
_HIDDEN_KEYS: Final = ("encrypted_content", "signature", "thought_signature", "data")
# Types of content blocks with reasoning.
_REASONING_TYPES: Final = frozenset({"reasoning", "thinking", "redacted_thinking"})
# Keys under which a media content block stores its data, its MIME type, and nested dicts.
_DATA_KEYS: Final = ("base64", "data", "file_data", "url", "image_url", "result", "bytes")
_MIME_KEYS: Final = ("mime_type", "media_type", "format", "filename")
_NESTED_KEYS: Final = (
    "image_url",
    "file",
    "input_audio",
    "source",
    "video_url",
    *_UNTYPED_KINDS,
)
_DATA_URL: Final = re.compile(r"data:([\w.+-]+/[\w.+-]+)?[^,]{0,200},")
# Minimum length, in characters, of base64 data. Shorter strings are treated as text.
_MIN_BASE64: Final = 512
_BASE64: Final = re.compile(r"[\w+/-]{60,}(?:[\r\n]+[\w+/-]+)*={0,2}\s*", re.ASCII)
# Approximate maximum number of dicts that are searched for the media data of one content block.
_MAX_NESTED: Final = 8
_RAW_AUDIO_TYPES: Final = ("wav", "pcm", "l16")
_JSON: Final = json.JSONEncoder(ensure_ascii=False, default=str)

CountText = Callable[[str], int]


def estimate_text_tokens(text: str, scale: float = 1.0) -> int:
    """Estimate the number of tokens of a text.

    Prose is estimated at four UTF-8 bytes per token. Digits, punctuation marks, letters next to
    digits, and emoji take more tokens per byte than prose. For a text with many digits or symbols,
    a second estimate counts each kind of character separately, and the larger estimate is returned.

    Args:
        text: The text. A lone surrogate is treated as one character.
        scale: The factor by which the estimate is multiplied.
    """
    try:
        data = text.encode()
    except UnicodeEncodeError:
        data = text.encode(errors="replace")
    size = len(data)
    others = data.translate(None, _PROSE)
    if _PROSE_PER_DIGIT * len(others) <= size:
        return math.ceil(size / BYTES_PER_TOKEN * scale)
    punctuation = len(others.translate(None, _DIGITS))
    digits = len(others) - punctuation
    # Most texts are prose.
    if _PROSE_PER_DIGIT * digits + _PROSE_PER_PUNCTUATION * punctuation <= size:
        return math.ceil(size / BYTES_PER_TOKEN * scale)
    spaces = size - len(data.translate(None, _SPACES))
    letters = size - len(others) - spaces
    by_character = 0.0
    if not text.isascii():
        beyond_ascii = others.translate(None, _ASCII)
        four_bytes = len(beyond_ascii) - len(beyond_ascii.translate(None, _FOUR_BYTE_LEADS))
        punctuation -= len(beyond_ascii)
        by_character = four_bytes * _TOKENS_PER_FOUR_BYTES
        by_character += (len(beyond_ascii) - 4 * four_bytes) / BYTES_PER_TOKEN
    mixed = min(letters, _MIXED_LETTERS_PER_DIGIT * digits)
    by_character += (
        digits * _TOKENS_PER_DIGIT
        + punctuation * _TOKENS_PER_PUNCTUATION
        + mixed * _TOKENS_PER_MIXED_LETTER
        + (letters - mixed) * _TOKENS_PER_LETTER
        + spaces * _TOKENS_PER_SPACE
    )
    return math.ceil(max(size / BYTES_PER_TOKEN, by_character) * scale)


def count_block_tokens(block: Mapping[str, Any], count_text: CountText) -> int:
    """Return the number of tokens of a content block in a message.

    Args:
        block: The content block, in the format of OpenAI, Anthropic, Google or langchain.
        count_text: The function that returns the number of tokens of a text.
    """
    kind = block.get("type")
    kind = kind if isinstance(kind, str) else ""
    texts = [block[key] for key in _TEXT_KEYS if isinstance(block.get(key), str)]
    if kind in _REASONING_TYPES:
        return sum(map(count_text, texts)) + _count_reasoning_tokens(block, count_text)
    if texts:
        return count_text(texts[0])
    media = _find_media_kind(block)
    return (
        _count_json_tokens(block, count_text)
        if media is None
        else _count_media_tokens(media, block, count_text)
    )


def _find_media_kind(block: Mapping[str, Any]) -> str | None:
    """Return the media kind of a content block, such as `image`, or None if it has no media."""
    kind = block.get("type")
    if kind is not None:
        return _KINDS.get(kind) if isinstance(kind, str) else None
    return next(
        (kind for key, kind in _UNTYPED_KINDS.items() if isinstance(block.get(key), Mapping)), None
    )


def count_voice_tokens(audio: Mapping[str, Any], count_text: CountText) -> int:
    """Return the number of tokens of an audio response from an OpenAI model.

    If the audio response contains neither a transcript nor audio data, 0 is returned.

    Args:
        audio: The value of `additional_kwargs["audio"]`.
        count_text: The function that returns the number of tokens of a text.
    """
    transcript = audio.get("transcript")
    if isinstance(transcript, str) and transcript:
        return _TRANSCRIPT_FACTOR * count_text(transcript)
    data = audio.get("data")
    return (
        _estimate_media_tokens("audio", "wav", len(data) * 3 // 4) if isinstance(data, str) else 0
    )


def _count_reasoning_tokens(block: Mapping[str, Any], count_text: CountText) -> int:
    """Count the tokens of the summary and the encrypted data in a reasoning block.

    This function does not count the reasoning text in the block, because the caller counts the
    reasoning text.
    """
    total = 0
    summary = block.get("summary")
    for part in summary if isinstance(summary, list) else ():
        if isinstance(part, Mapping) and isinstance(part.get("text"), str):
            total += count_text(part["text"])
    extras = block.get("extras")
    for holder in (block, extras if isinstance(extras, Mapping) else {}):
        for key in _HIDDEN_KEYS:
            hidden = holder.get(key)
            if isinstance(hidden, str | bytes):
                total += -(-len(hidden) // _CHARACTERS_PER_HIDDEN_TOKEN)
    return total


def _count_media_tokens(media_kind: str, block: Mapping[str, Any], count_text: CountText) -> int:
    """Return the number of tokens of an image, file, audio or video block."""
    parts: list[Mapping[str, Any]] = [block]
    # Append nested dicts to `parts` while iterating over it, so that the loop also visits the
    # nested dicts. This is needed because Amazon Bedrock stores media data in a dict within a dict.
    for part in parts:
        nested = (part.get(key) for key in _NESTED_KEYS) if len(parts) < _MAX_NESTED else ()
        parts += [value for value in nested if isinstance(value, Mapping)]
    mime, data = _find_mime_type_and_media_data(parts)
    prefix = mime.partition("/")[0]
    media_kind = prefix if prefix in ("image", "audio", "video") else media_kind
    if media_kind == "image":
        low = any(part.get("detail") == "low" for part in parts)
        return LOW_DETAIL_IMAGE_TOKENS if low else IMAGE_TOKENS
    source = block.get("source")
    if isinstance(source, Mapping) and source.get("type") == "content":
        return _count_json_tokens(source.get("content"), count_text)
    if data is None:
        return _UNKNOWN_LENGTH_TOKENS[media_kind]
    if isinstance(source, Mapping) and source.get("type") == "text" and isinstance(data, str):
        return count_text(data)
    size = len(data) if isinstance(data, bytes) else len(data) * 3 // 4
    if prefix == "text" or mime.endswith("json"):
        return -(-size // BYTES_PER_TOKEN)
    return _estimate_media_tokens(media_kind, mime, size)


def _find_mime_type_and_media_data(
    parts: Sequence[Mapping[str, Any]],
) -> tuple[str, str | bytes | None]:
    """Return the MIME type and the data of the media in a block.

    If the block has no MIME type, return its format, such as `wav`, or its file name instead. If
    the block contains only a URL or a file id, None is returned as the data.

    Args:
        parts: The block and the nested dicts that may contain the data.
    """
    names = [part.get(key) for part in parts for key in _MIME_KEYS]
    mime = next((name.lower() for name in names if isinstance(name, str) and name), "")
    values = [part.get(key) for part in parts for key in _DATA_KEYS]
    data = next((value for value in values if isinstance(value, str | bytes)), None)
    if isinstance(data, str) and (url := _DATA_URL.match(data)):
        return mime or str(url[1] or ""), data[url.end() :]
    if isinstance(data, str) and "://" in data[:16]:
        return mime, None
    return mime, data


def _estimate_media_tokens(media_kind: str, mime_type: str, byte_count: int) -> int:
    """Estimate the number of tokens of a file, audio or video from its size in bytes."""
    if media_kind == "audio":
        raw = any(name in mime_type for name in _RAW_AUDIO_TYPES)
        seconds = byte_count / (_RAW_AUDIO_BYTES_PER_S if raw else _AUDIO_BYTES_PER_S)
        return math.ceil(seconds * _AUDIO_TOKENS_PER_S)
    if media_kind == "video":
        return math.ceil(byte_count / _VIDEO_BYTES_PER_S * _VIDEO_TOKENS_PER_S)
    return math.ceil(byte_count / _PAGE_BYTES) * _PAGE_TOKENS


def _count_json_tokens(value: Any, count_text: CountText) -> int:
    """Return the number of tokens of a JSON value.

    If a media content block, such as an image, is nested in the JSON value, the block is counted in
    the same way as a media block at the top level of a message's content. The token count of base64
    data outside a media content block is estimated from the decoded size, in the same way as for a
    file.
    """
    if isinstance(value, list) and any(isinstance(part, Mapping) for part in value):
        return sum(
            count_block_tokens(part, count_text)
            if isinstance(part, Mapping)
            else _count_json_tokens(part, count_text)
            for part in value
        )
    media_tokens = 0

    def copy_without_media(part: Any) -> Any:
        """Return a copy of `part` without media, and add the media's tokens to `media_tokens`."""
        nonlocal media_tokens
        if isinstance(part, Mapping):
            if part is not value and _find_media_kind(part) is not None:
                media_tokens += count_block_tokens(part, count_text)
                return {}
            return {key: copy_without_media(inner) for key, inner in part.items()}
        if isinstance(part, list | tuple):
            return [copy_without_media(inner) for inner in part]
        if isinstance(part, bytes):
            media_tokens += _estimate_media_tokens("file", "", len(part))
            return ""
        url = _DATA_URL.match(part) if isinstance(part, str) else None
        if url is not None:
            media_tokens += _count_media_tokens("file", {"url": part}, count_text)
            return ""
        # A long base64 string may span several lines.
        if isinstance(part, str) and len(part) >= _MIN_BASE64 and _BASE64.fullmatch(part):
            media_tokens += _estimate_media_tokens("file", "", len(part) * 3 // 4)
            return ""
        return part

    text = _JSON.encode(copy_without_media(value))
    return media_tokens + count_text(text)
