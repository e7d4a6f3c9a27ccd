"""What all pages share."""

from __future__ import annotations

import pytest

from perdure.server.pages import size, visible


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain <b>", "plain &lt;b&gt;"),
        ("a\u202eb", 'a<i class="ctl">U+202E</i>b'),
        ("\x1b[2J", '<i class="ctl">U+001B</i>[2J'),
        ("two\nlines\t", "two\nlines\t"),
    ],
)
def test_stored_text_is_shown_as_text(text: str, shown: str) -> None:
    assert visible(text) == shown


def test_sizes_have_units() -> None:
    assert [size(0), size(999), size(1500), size(2.5e9)] == [
        "0 bytes",
        "999 bytes",
        "1.5 kB",
        "2.5 GB",
    ]
