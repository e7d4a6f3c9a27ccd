"""Fill in namespace templates such as `("notes", "{user_id}")` with values of a run."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

from langchain_core.runnables import RunnableConfig, ensure_config

from perdure.checkpointers.address import WITHOUT_MEMORY_KEY
from perdure.errors import ConfigurationError, InvalidConfig
from perdure.memory.options import check_instance, check_whole_number
from perdure.memory.run_config import (
    get_allowed_teams,
    read_run_teams,
    read_values_of_run_context_or_config,
)
from perdure.settings import is_valid_user_or_team_name

TEAMS: Final = "teams"
"""The first label of namespaces that teams share. The second label is the name of the team."""

TEAM: Final = "{team}"
"""The label of a template that stands for each team of a run."""

USER_LABEL: Final = "{user_id}"
"""The label of a template that is replaced by the id of a user."""

PERSONAL_LABELS: Final = ("memories", "profiles", "instructions", "examples")
"""First labels of namespaces whose second label is the id of a user."""

_LABEL: Final = re.compile(r"([^{}]*)(?:\{([^\W\d]\w*)\}([^{}]*))?")


class Template:
    """A template for namespaces: labels with placeholders, such as `("notes", "{user_id}")`.

    `{user_id}` is replaced by `user_id` in the run's `context`, which may be a dict, a dataclass or
    a pydantic model. If the context has no `user_id`, `configurable["user_id"]` in the run's config
    is used. Each label can contain at most one placeholder, because with two placeholders,
    different values could produce the same label. For example, with the two placeholders in
    `"{x}-{y}"`, both `x="a-b", y="c"` and `x="a", y="b-c"` would produce the label `"a-b-c"`.

    The template `("teams", "{team}")` is filled in once for each of the run's teams; see
    `read_run_teams`.

    Args:
        labels: The labels, outermost first.
        shared: Whether the first label may be `"teams"`.
    """

    def __init__(self, labels: Sequence[str], *, shared: bool = False) -> None:
        expected = "labels, like ('notes', '{user_id}')"
        self.labels = tuple(check_instance("the template", labels, (list, tuple), expected))
        check_whole_number("the number of labels of the template", len(self.labels), 1)
        # The parts of each label: the text before the placeholder, the placeholder's name, and the
        # text after the placeholder. If a label has no placeholder, the placeholder's name is the
        # empty string.
        self._parsed: list[tuple[str, str, str]] = []
        # names of the placeholders, whose values come from the run's context or config
        self.placeholder_names: tuple[str, ...] = ()
        for label in self.labels:
            match = _LABEL.fullmatch(label) if isinstance(label, str) and label else None
            if match is None:
                raise ConfigurationError(
                    f"the namespace template has the label {label!r}; expected text that is not "
                    "empty, with at most one placeholder, such as '{user_id}'"
                )
            name = match[2] or ""
            self._parsed.append((match[1], name, match[3] or ""))
            if name and name not in self.placeholder_names:
                self.placeholder_names += (name,)
        self.is_team = self.labels[0] == TEAMS
        # True if memories stored under this template belong to a user or to a team
        self.is_personal = self.is_team or "user_id" in self.placeholder_names
        # True if perdure needs a stored record of this template to find a person's namespaces
        self.needs_record = must_record_template_to_find_its_namespaces(self.labels)
        if self.is_team:
            self._check_team_is_allowed_and_named(shared)

    def fill(self, config: RunnableConfig | None = None) -> tuple[str, ...]:
        """Return the labels for a run. `config=None` means the current run.

        A template that begins with `("teams", "{team}")` requires a run with exactly one team.

        >>> Template(["notes", "{user_id}"]).fill({"configurable": {"user_id": "a.b"}})
        ('notes', 'a.b')
        """
        if self.is_team:
            filled = self.fill_for_teams(config)
            if len(filled) != 1:
                names = ", ".join(map(repr, sorted(read_run_teams(config))))
                teams = f"the teams {names}" if names else "no team"
                team = self.labels[1]
                if team != TEAM:
                    raise InvalidConfig(
                        f"the template {self.labels!r} uses the team {team!r}, but the run has "
                        f"{teams}; use one of the user's teams"
                    )
                raise InvalidConfig(
                    f"the template {self.labels!r} needs exactly one team, but the run has {teams}"
                    '; pass context={"team": "…"} or config={"configurable": {"team": "…"}}'
                )
            return filled[0]
        return self._fill_label_placeholders(config)

    def fill_for_teams(self, config: RunnableConfig | None = None) -> list[tuple[str, ...]]:
        """Return one namespace for each team whose memories the run uses.

        Each namespace is the tuple of the template's labels, with values in place of the
        placeholders. If the run has no team, an empty list is returned.

        If the template's first label is not `"teams"`, the returned list contains a single
        namespace. If the template's first label is `"teams"` and its second label is the name of a
        team, the returned list contains only that team's namespace. If the template names a
        specific team, and the server does not let the run access that team's memories, the returned
        list is empty.
        """
        if not self.is_team:
            return [self._fill_label_placeholders(config)]
        name, allowed = self.labels[1], get_allowed_teams(config)
        if name != TEAM:
            teams: Sequence[str] = (name,) if allowed is None or name in allowed else ()
        else:
            teams = read_run_teams(config)
        return [self._fill_label_placeholders(config, team) for team in teams]

    def _fill_label_placeholders(
        self, config: RunnableConfig | None, team: str | None = None
    ) -> tuple[str, ...]:
        """Return the labels for a run.

        If `team` is not None, the placeholder `{team}` is replaced by `team`.
        """
        if self.is_memory_disabled_for_run(config):
            raise InvalidConfig(
                f"the template {self.labels!r} cannot be filled in, because memory is disabled for "
                "this run. The reason is that a user who may not act for the thread's user has "
                "sent the message or changed the thread"
            )
        names = [name for name in self.placeholder_names if team is None or name != "team"]
        values = read_values_of_run_context_or_config(names, config) if names else {}
        if team is not None:
            values["team"] = team
        return tuple(
            [
                prefix + self._get_placeholder_value(name, values) + suffix if name else prefix
                for prefix, name, suffix in self._parsed
            ]
        )

    def is_memory_disabled_for_run(self, config: RunnableConfig | None = None) -> bool:
        """Return whether the memories stored under this template are disabled for a run.

        Return True if memory is disabled for the run and the template belongs to a user or a team.

        If memory is disabled for a run, nodes neither recall nor remember anything. See
        `WITHOUT_MEMORY_KEY`.
        """
        return (
            self.is_personal
            and ensure_config(config)["configurable"].get(WITHOUT_MEMORY_KEY) is True
        )

    def _check_team_is_allowed_and_named(self, is_team_allowed: bool) -> None:
        """Raise ConfigurationError if a team template is not allowed or does not specify a team."""
        name = self.labels[1] if len(self.labels) > 1 else ""
        if not is_team_allowed:
            raise ConfigurationError(
                f"the template {self.labels!r} cannot begin with {TEAMS!r}; use another first "
                "label. Only use_memories, recall, Collection and the memory tools accept "
                f"{TEAMS!r}"
            )
        if name != TEAM and (not name or "{" in name):
            raise ConfigurationError(
                f"the namespace template {self.labels!r} begins with {TEAMS!r}, so its second "
                f"label must be {TEAM!r} or the name of a team"
            )

    def _get_placeholder_value(self, placeholder: str, run_values: dict[str, Any]) -> str:
        """Return the value of a placeholder.

        Raise InvalidConfig if the run specifies no value for the placeholder, or if the value
        cannot be used in the label of a namespace.
        """
        if placeholder not in run_values:
            raise InvalidConfig(
                f"the run has no {placeholder!r}, which the template {self.labels!r} needs; pass "
                f'context={{{placeholder!r}: "…"}} or '
                f'config={{"configurable": {{{placeholder!r}: "…"}}}}'
            )
        value = run_values[placeholder]
        is_valid = isinstance(value, str) and value.strip() and "\0" not in value
        if not is_valid or (placeholder == "user_id" and not is_valid_user_or_team_name(value)):
            raise InvalidConfig(
                f"the run's {placeholder!r} is {value!a:.80}, which cannot be used in the template "
                f"{self.labels!r}; expected a string that has a visible character, contains no NUL "
                "character, and is not '.' or '..'"
            )
        # For a member of a str enum, `str.__str__` returns the member's value rather than its name.
        return str.__str__(value)


def must_record_template_to_find_its_namespaces(template_labels: Sequence[str]) -> bool:
    """Return whether a namespace template must be recorded in the store.

    To export or delete a person's data, perdure finds the person's namespaces by means of the
    templates that are recorded in the store.

    A namespace template must be recorded in the store if it contains `{user_id}`, unless it has the
    form `(label, "{user_id}", ...)` with a label from `PERSONAL_LABELS`.
    """
    return USER_LABEL in template_labels and not (
        template_labels[0] in PERSONAL_LABELS and tuple(template_labels[1:2]) == (USER_LABEL,)
    )
