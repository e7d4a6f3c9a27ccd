"""A rule for names of users that does not depend on the product's rule."""

from __future__ import annotations

import unicodedata


def has_letter_or_digit(text: str) -> bool:
    """Return whether a text has a cased letter or a decimal digit, which are always visible."""
    return any(unicodedata.category(char) in {"Lu", "Ll", "Nd"} for char in text)
