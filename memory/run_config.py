"""Read a run's store, thread, user and teams from its config, and fill in namespace templates."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from datetime import datetime
from typing import Any, Final, Protocol, runtime_checkable

from langchain_core.runnables import RunnableConfig, ensure_config

from perdure.checkpointers.address import TEAMS_KEY, WITHOUT_MEMORY_KEY, find_run_context_values
from perdure.errors import ConfigurationError, InvalidConfig
from perdure.memory.options import check_instance, check_whole_number
from perdure.settings import is_valid_user_or_team_name

Clock = Callable[[RunnableConfig | None], datetime | None]
"""A function that returns the point in time for a run with this config, or None for now."""
TEAMS: Final = "teams"
"""The first label of namespaces that teams share. The second label is the name of the team."""
TEAM: Final = "{team}"
"""The label of a template that stands for each team of a run."""
CHOSEN_TEAM: Final = "__perdure_team"
"""The key in `configurable` for the team that a tool has chosen among the teams of the run."""


@runtime_checkable
class Versioned(Protocol):
    """Protocol of stores and checkpointers that keep a version history, such as perdure's."""

    history: Callable[..., Any]
    ahistory: Callable[..., Any]


def require_store_of_running_graph(requesting_components: str) -> Any:
    """Return the store that the running graph was compiled with.

    `requesting_components` names the components that need a store, for use in the error message.

    Raises:
        ConfigurationError: No graph is running, or it has no store.
    """
    # Import `langgraph.config` lazily, because the import takes half a second and most processes do
    # not need the module.
    from langgraph.config import get_store

    try:
        store: Any = get_store()
    # `get_store` raises an error outside a graph run.
    except (RuntimeError, KeyError):
        store = None
    if store is None:
        raise ConfigurationError(
            f"{requesting_components} need a store; pass store=, or compile the graph with a store"
        )
    return store


def read_values_of_run_context_or_config(
    names: Sequence[str], config: RunnableConfig | None
) -> dict[str, Any]:
    """Read named values from a run's context, falling back to `configurable` in the run's config.

    langgraph does not store a run's context. Therefore, if the run uses a perdure checkpointer, the
    values read from the context are stored with the thread.
    """
    config = ensure_config(config)
    configurable, values = config["configurable"], find_run_context_values(config, names)
    if values and configurable.get("thread_id") is not None:
        # Import the module lazily to reduce startup time. A run that uses a perdure checkpointer
        # has already imported it.
        from perdure.checkpointers.checkpointer import Checkpointer

        for saver in configurable.values():
            if isinstance(saver, Checkpointer):
                saver.copy_context_values_to_metadata(str(configurable["thread_id"]), values)
    return {**{name: configurable[name] for name in names if name in configurable}, **values}


def read_run_user(config: RunnableConfig | None) -> str | None:
    """Return the `user_id` of a run, or None if the run has none or an invalid one."""
    config = ensure_config(config)
    user_id = {**config["configurable"], **find_run_context_values(config, ("user_id",))}.get(
        "user_id"
    )
    return user_id if is_valid_user_or_team_name(user_id) else None


def read_run_teams(config: RunnableConfig | None) -> tuple[str, ...]:
    """Return the teams whose memory is used in a run, without duplicates.

    In the run's context or `configurable`, `teams` lists the teams and `team` selects one of them.
    On a server, a run can use only teams that its user belongs to. If a run on a server specifies
    no team, it uses all of its user's teams. If memory is disabled for the run, no teams are
    returned.

    Raises:
        InvalidConfig: `team` is not one of `teams`, or one of them is not valid.
    """
    config = ensure_config(config)
    configurable = config["configurable"]
    if configurable.get(WITHOUT_MEMORY_KEY) is True:
        return ()
    names = ("team", "teams")
    values = {
        **{name: configurable.get(name) for name in names},
        **find_run_context_values(config, names),
    }
    picked, allowed = configurable.get(CHOSEN_TEAM), get_allowed_teams(config)
    chosen = parse_run_teams(values["team"], values["teams"]) if picked is None else (picked,)
    if allowed is not None:
        chosen = tuple(team for team in (allowed if chosen is None else chosen) if team in allowed)
    return tuple(dict.fromkeys(chosen or ()))


def parse_run_teams(team: Any, teams: Any) -> tuple[str, ...] | None:
    """Return the teams specified by a run's `team` and `teams` options.

    Return None if neither option is set.

    Raises:
        InvalidConfig: `team` is not one of `teams`, or a name is blank or not text.
    """
    if teams is not None and (isinstance(teams, str) or not isinstance(teams, Collection)):
        raise InvalidConfig(f"the run's 'teams' is {teams!r:.80}; expected a list of team names")
    chosen = [*(teams or ())] if team is None else [team]
    for name in chosen:
        if not is_valid_user_or_team_name(name) or "\0" in name:
            raise InvalidConfig(
                f"the run has the team {name!a:.80}; expected a team name that is not blank, "
                "contains no NUL character, and is not '.' or '..'"
            )
    if team is not None and teams is not None and team not in teams:
        raise InvalidConfig(
            f"the run's 'team' is {team!r:.80}, which is not one of the run's 'teams'; expected "
            f"one of {[*teams]!r:.80}"
        )
    return None if team is None and teams is None else tuple(chosen)


def choose_team(config: RunnableConfig | None, team: str) -> RunnableConfig:
    """Return a copy of a run's config that restricts team memory to `team`."""
    config = ensure_config(config)
    return {**config, "configurable": {**config["configurable"], CHOSEN_TEAM: team}}


def get_allowed_teams(config: RunnableConfig | None) -> Collection[str] | None:
    """Return the teams that the server allows a run to use, or None if all teams are allowed."""
    allowed: Collection[str] | None = ensure_config(config)["configurable"].get(TEAMS_KEY)
    return allowed


def read_thread_and_checkpoint_id_of_run(
    config: RunnableConfig | None,
) -> tuple[str | None, str | None]:
    """Return a run's thread id and the id of the checkpoint from which the run resumes.

    The thread id and the checkpoint id are None if the run has no thread. Inside a node, the
    returned checkpoint id refers to the graph or subgraph that contains the node.
    """
    configurable = ensure_config(config)["configurable"]
    thread = configurable.get("thread_id")
    if thread is None:
        return None, None
    from langgraph.runtime import get_runtime

    try:
        runtime: Any = get_runtime()
    # `get_runtime` raises an error outside a graph run.
    except (RuntimeError, KeyError):
        runtime = None
    # `execution_info` is None if a langchain chain runs outside a graph.
    info = getattr(runtime, "execution_info", None)
    if info is not None and info.thread_id == thread:
        return str(thread), info.checkpoint_id
    return str(thread), configurable.get("checkpoint_id")


def parse_clock_option(option_name: str, value: Clock | str | None) -> Clock:
    """Convert an option value to a clock, a function that maps a run's config to a point in time.

    Args:
        option_name: The name of the option, for error messages.
        value: A clock, the key under which `configurable` contains the point in time, or None for
            the present time.
    """
    if value is None:
        return lambda config: None
    if not isinstance(value, str):
        expected = "a function of a run's config, or a key of its configurable"
        return check_instance(option_name, value, Callable, expected)  # type: ignore[arg-type, no-any-return]

    def read_time(config: RunnableConfig | None) -> datetime | None:
        """Return `configurable[value]` as a datetime, or None if the key is missing."""
        time = ensure_config(config)["configurable"].get(value)
        try:
            return datetime.fromisoformat(time) if isinstance(time, str) else time
        except ValueError as exc:
            raise InvalidConfig(
                f"configurable[{value!r}] is {time!r:.80}; expected a time in ISO 8601, such as "
                "'2026-05-01T12:00:00+00:00'"
            ) from exc

    return read_time


_LABEL: Final = re.compile(r"([^{}]*)(?:\{([^\W\d]\w*)\}([^{}]*))?")


class Template:
    """A template for namespaces: labels with placeholders, such as `("notes", "{user_id}")`.

    `{user_id}` is replaced by `user_id` in the run's `context`, which may be a dict, a dataclass or
    a pydantic model. If the context has no `user_id`, `configurable["user_id"]` in the run's config
    is used. Each label can contain at most one placeholder. With two placeholders, different values
    could produce the same label. For example, a label `"{x}-{y}"` would be filled in as `"a-b-c"`
    for both `x="a-b", y="c"` and `x="a", y="b-c"`.

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
        self._parsed = [
            _split_label_into_prefix_placeholder_and_suffix(label) for label in self.labels
        ]
        self.is_team = self.labels[0] == TEAMS
        if self.is_team:
            self._check_team_is_allowed_and_named(shared)

    @property
    def placeholder_names(self) -> tuple[str, ...]:
        """The names of the template's placeholders.

        The values of the placeholders come from the run's context or config.
        """
        return tuple(dict.fromkeys(name for _, name, _ in self._parsed if name))

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
                        f"the template {self.labels!r} names the team {team!r}, but the run has "
                        f"{teams}; use a team of the run's user"
                    )
                raise InvalidConfig(
                    f"the run has {teams}, but the template {self.labels!r} needs exactly one "
                    'team; pass context={"team": "…"} or config={"configurable": {"team": "…"}}'
                )
            return filled[0]
        return self._fill_label_placeholders(config)

    def fill_for_teams(self, config: RunnableConfig | None = None) -> list[tuple[str, ...]]:
        """Return a list with one namespace for each team of a run.

        Each namespace is the tuple of the template's labels, with values in place of the
        placeholders. The list is empty if the run has no team.

        If the template's first label is not `"teams"`, the list contains a single namespace. If the
        template's first label is `"teams"` and its second label is the name of a team, the list
        contains only that team's namespace. In this case, the list is empty if the server does not
        allow the run to use the team.
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
                "this run. Memory is disabled if the sender of the message is not the thread's "
                "user and is not allowed to act for that user"
            )
        names = [name for name in self.placeholder_names if team is None or name != "team"]
        values = read_values_of_run_context_or_config(names, config) if names else {}
        if team is not None:
            values["team"] = team
        return tuple(
            prefix + self._get_placeholder_value(name, values) + suffix if name else prefix
            for prefix, name, suffix in self._parsed
        )

    @property
    def is_personal(self) -> bool:
        """Whether memories stored under this template belong to a user or a team."""
        return self.is_team or "user_id" in self.placeholder_names

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
                f"the template {self.labels!r} begins with {TEAMS!r}, which only use_memories, "
                "recall, Collection and the memory tools accept; expected another first label"
            )
        if name != TEAM and (not name or "{" in name):
            raise ConfigurationError(
                f"the namespace template {self.labels!r} begins with {TEAMS!r}, but its second "
                f"label is neither {TEAM!r} nor the name of a team"
            )

    def _get_placeholder_value(self, placeholder: str, run_values: dict[str, Any]) -> str:
        """Return the value of a placeholder.

        Raise InvalidConfig if the value is missing or cannot be used as a label.
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
                f"{self.labels!r}; expected text that has a visible character, contains no NUL "
                "character, and is not '.' or '..'"
            )
        # For a member of a str enum, `str.__str__` returns the member's value rather than its name.
        return str.__str__(value)


def _split_label_into_prefix_placeholder_and_suffix(label: Any) -> tuple[str, str, str]:
    """Split a label into (text before the placeholder, placeholder name, text after it).

    If a label has no placeholder, the placeholder name and the text after it are empty strings.
    """
    match = _LABEL.fullmatch(label) if isinstance(label, str) and label else None
    if match is None:
        expected = "text that is not empty, with at most one placeholder, such as '{user_id}'"
        raise ConfigurationError(
            f"the namespace template has the label {label!r}; expected {expected}"
        )
    return match[1], match[2] or "", match[3] or ""
