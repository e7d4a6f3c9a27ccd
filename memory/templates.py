"""Templates of namespaces and keys, which the context or the config of a run fills in."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

from langchain_core.runnables import RunnableConfig

from perdure.errors import ConfigurationError, InvalidConfig
from perdure.memory.options import instance, whole
from perdure.memory.run_config import labels_of_run

_LABEL: Final = re.compile(r"([^{}]*)(?:\{([^\W\d]\w*)\}([^{}]*))?")


class Template:
    """Labels of a namespace, outermost first, like `("notes", "{user_id}")`.

    `{user_id}` stands for `user_id` in the run's `context`, which may be a dict, a dataclass or a
    pydantic model, else for `configurable["user_id"]` of its config. A label has one placeholder at
    most: with two, the values `"a-b", "c"` and `"a", "b-c"` would fill `"{x}-{y}"` alike.
    """

    def __init__(self, labels: Sequence[str]) -> None:
        expected = "labels, like ('notes', '{user_id}')"
        self.labels = tuple(instance("the template", labels, (list, tuple), expected))
        whole("the number of labels of the template", len(self.labels), 1)
        self._parsed = [_parsed(label) for label in self.labels]

    @property
    def names(self) -> tuple[str, ...]:
        """The names in a run's context or `configurable` that fill it in."""
        return tuple(dict.fromkeys(name for _, name, _ in self._parsed if name))

    def filled(self, config: RunnableConfig | None = None) -> tuple[str, ...]:
        """The labels for a run; None: for the run in which it is called.

        >>> Template(["notes", "{user_id}"]).filled({"configurable": {"user_id": "a.b"}})
        ('notes', 'a.b')
        """
        given = labels_of_run(self.names, config) if self.names else {}
        return tuple(
            before + self._value(name, given) + after if name else before
            for before, name, after in self._parsed
        )

    def _value(self, name: str, given: dict[str, Any]) -> str:
        if name not in given:
            raise InvalidConfig(
                f"the run has no {name!r}, which fills in {self.labels!r}; pass "
                f'context={{{name!r}: "…"}} or config={{"configurable": {{{name!r}: "…"}}}}'
            )
        value = given[name]
        if not isinstance(value, str) or not value.strip() or "\0" in value:
            raise InvalidConfig(
                f"{name!r} of the run is {value!r:.80}, with which {self.labels!r} cannot be "
                "filled; expected text that is not blank and has no NUL"
            )
        return str.__str__(value)  # an enum's own text, not its name


def _parsed(label: Any) -> tuple[str, str, str]:
    """The text before the placeholder, its name, the text after it; "" for what is not there."""
    match = _LABEL.fullmatch(label) if isinstance(label, str) and label else None
    if match is None:
        expected = "text that is not empty, with one placeholder at most, like '{user_id}'"
        raise ConfigurationError(f"the template has the label {label!r}; expected {expected}")
    return match[1], match[2] or "", match[3] or ""
