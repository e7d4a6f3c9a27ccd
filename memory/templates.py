"""Templates of namespaces and keys, which the config of a run fills in.

A value is one label, or a part of one, whatever characters it has: no user id names a namespace of
another user.
"""

from __future__ import annotations

from collections.abc import Sequence
from string import Formatter
from typing import Any, NamedTuple

from langchain_core.runnables import RunnableConfig, ensure_config

from perdure.errors import ConfigurationError, InvalidConfig


class _Label(NamedTuple):
    before: str
    name: str | None
    after: str


class Template:
    """Labels of a namespace, like `("notes", "{user_id}")`.

    `{user_id}` stands for `configurable["user_id"]` of the run; `{{` and `}}` are braces.

    Args:
        labels: Outermost first. One placeholder a label at most: with two, the values `"a-b", "c"`
            and `"a", "b-c"` would fill `"{x}-{y}"` alike.

    Raises:
        ConfigurationError: There is no label, one is empty, or its braces are no placeholder.
    """

    def __init__(self, labels: Sequence[str]) -> None:
        if isinstance(labels, str) or not isinstance(labels, Sequence) or not labels:
            raise ConfigurationError(
                f"the template is {labels!r}; expected labels, like ('notes', '{{user_id}}')"
            )
        self.labels = tuple(labels)
        self._parsed = [_parsed(label) for label in labels]

    def __repr__(self) -> str:
        return f"Template({self.labels!r})"

    @property
    def names(self) -> tuple[str, ...]:
        """The names in a run's `configurable` that fill it in.

        >>> Template(["notes", "{user_id}"]).names
        ('user_id',)
        """
        return tuple(dict.fromkeys(label.name for label in self._parsed if label.name is not None))

    def filled(self, config: RunnableConfig | None = None) -> tuple[str, ...]:
        """The labels for a run.

        >>> Template(["notes", "{user_id}"]).filled({"configurable": {"user_id": "a.b"}})
        ('notes', 'a.b')

        Args:
            config: The run's; None: within a node, that of the run it belongs to.

        Raises:
            InvalidConfig: It does not say what a placeholder stands for, or not in text, or in
                blanks only, or with a NUL.
        """
        if all(label.name is None for label in self._parsed):
            return tuple(label.before for label in self._parsed)
        given = ensure_config(config)["configurable"]
        return tuple(self._filled(label, given) for label in self._parsed)

    def _filled(self, label: _Label, given: dict[str, Any]) -> str:
        if label.name is None:
            return label.before
        if label.name not in given:
            raise InvalidConfig(
                f"the run's config has no {label.name!r}, which fills in {self.labels!r}; pass "
                f'config={{"configurable": {{{label.name!r}: "…"}}}}'
            )
        value = given[label.name]
        if not isinstance(value, str) or not value.strip() or "\0" in value:
            raise InvalidConfig(
                f"configurable[{label.name!r}] is {value!r:.80}, with which {self!r} cannot be "
                "filled; expected text that is not blank and has no NUL"
            )
        return label.before + str.__str__(value) + label.after  # an enum's own text, not its name


def _parsed(label: Any) -> _Label:
    if not isinstance(label, str) or not label:
        raise ConfigurationError(
            f"the template has the label {label!r}; expected text that is not empty"
        )
    try:
        parts = list(Formatter().parse(label))
    except ValueError as exc:
        raise _malformed(label) from exc
    texts, name = [""], None
    for text, field, spec, conversion in parts:
        texts[-1] += text
        if field is None:
            continue
        if name is not None or spec or conversion or not field.isidentifier():
            raise _malformed(label)
        name = field
        texts.append("")
    return _Label(texts[0], name, texts[-1] if name else "")


def _malformed(label: str) -> ConfigurationError:
    return ConfigurationError(
        f"the label {label!r} is no template; expected text with one placeholder at most, like "
        "'{user_id}' ('{{' and '}}' are braces)"
    )
