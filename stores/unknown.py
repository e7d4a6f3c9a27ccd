"""A name that is not known: which one may have been meant, and which there are."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Final

_ALIKE: Final = 0.75  # of 1; below it, `$regex` is taken for `$gte`


def meant(name: object, known: Iterable[str]) -> str:
    """The end of a message about an unknown name.

    >>> meant("actr", ("actor", "at")), meant("$y", ("$eq", "$ne"))
    ("did you mean 'actor'? There are actor, at", 'there are $eq, $ne')
    """
    names = tuple(known)
    listed = f"here are {', '.join(names)}"
    close = get_close_matches(str(name), names, 1, _ALIKE)
    return f"did you mean {close[0]!r}? T{listed}" if close else f"t{listed}"
