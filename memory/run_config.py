"""What the config of a run says: its store, thread, checkpoint, labels, teams, moments in it."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from datetime import datetime
from typing import Any, Final, Protocol, runtime_checkable

from langchain_core.runnables import RunnableConfig, ensure_config

from perdure.checkpointers.address import TEAMS_KEY, WITHOUT_MEMORY_KEY, context_values
from perdure.errors import ConfigurationError, InvalidConfig
from perdure.memory.options import check_instance, check_whole_number

Clock = Callable[[RunnableConfig | None], datetime | None]
"""A function of a run's config that gives a moment, or None."""
TEAMS: Final = "teams"
"""The first label of namespaces that teams share, whose second label is the name of a team."""
TEAM: Final = "{team}"
"""The label of a template that stands for each team of a run."""
CHOSEN_TEAM: Final = "__perdure_team"
"""The key in `configurable` for the one of a run's teams that a tool has chosen."""


@runtime_checkable
class Versioned(Protocol):
    """A store that keeps versions and swaps by comparing them, as perdure's do."""

    history: Callable[..., Any]
    ahistory: Callable[..., Any]


def get_graph_store(what: str) -> Any:
    """The store that the graph in which this runs was compiled with; `what` needs one."""
    from langgraph.config import get_store  # half a second, and a store is mostly given

    try:
        store: Any = get_store()
    except (RuntimeError, KeyError):  # not within a graph
        store = None
    if store is None:
        raise ConfigurationError(
            f"{what} have no store: pass store=, or compile the graph with one"
        )
    return store


def read_run_values(names: Sequence[str], config: RunnableConfig | None) -> dict[str, Any]:
    """The values of a run for some names: its context's, else those of its `configurable`.

    Its checkpointer is told which are the context's, of which langgraph stores nothing.
    """
    config = ensure_config(config)
    configurable, values = config["configurable"], context_values(config, names)
    if values and configurable.get("thread_id") is not None:
        from perdure.checkpointers.checkpointer import Checkpointer  # a run has it imported

        for saver in configurable.values():
            if isinstance(saver, Checkpointer):
                saver.label(str(configurable["thread_id"]), values)
    return {**{name: configurable[name] for name in names if name in configurable}, **values}


def read_run_user(config: RunnableConfig | None) -> str | None:
    """Return the `user_id` of a run, or None if the run has none."""
    config = ensure_config(config)
    named = {**config["configurable"], **context_values(config, ("user_id",))}.get("user_id")
    return named if isinstance(named, str) and named.strip() else None


def read_run_teams(config: RunnableConfig | None) -> tuple[str, ...]:
    """Return the teams whose memory a run uses, each once.

    `teams` in the run's context or `configurable` lists them, and `team` chooses one. On a server,
    the teams of the person limit both, and are used if the run names none.

    Raises:
        InvalidConfig: `team` is not one of `teams`, or one of them is not valid.
    """
    config = ensure_config(config)
    configurable = config["configurable"]
    if configurable.get(WITHOUT_MEMORY_KEY) is True:
        return ()
    names = ("team", "teams")
    named = {**{name: configurable.get(name) for name in names}, **context_values(config, names)}
    picked, allowed = configurable.get(CHOSEN_TEAM), allowed_teams(config)
    chosen = parse_teams(named["team"], named["teams"]) if picked is None else (picked,)
    if allowed is not None:
        chosen = tuple(team for team in (allowed if chosen is None else chosen) if team in allowed)
    return tuple(dict.fromkeys(chosen or ()))


def parse_teams(team: Any, teams: Any) -> tuple[str, ...] | None:
    """Return the teams that the values `team` and `teams` name, or None if both are None.

    Raises:
        InvalidConfig: `team` is not one of `teams`, or one of them is no name.
    """
    if teams is not None and (isinstance(teams, str) or not isinstance(teams, Collection)):
        raise InvalidConfig(f"'teams' of the run is {teams!r:.80}; expected a list of names")
    named = [*(teams or ())] if team is None else [team]
    for name in named:
        if not isinstance(name, str) or not name.strip() or "\0" in name:
            raise InvalidConfig(
                f"the run names the team {name!r:.80}; expected text that is not blank and has no "
                "NUL"
            )
    if team is not None and teams is not None and team not in teams:
        raise InvalidConfig(f"'team' of the run is {team!r:.80}, which is not one of its 'teams'")
    return None if team is None and teams is None else tuple(named)


def with_team(config: RunnableConfig | None, team: str) -> RunnableConfig:
    """Return the config of a run for the memory of one team, which is one of its teams."""
    config = ensure_config(config)
    return {**config, "configurable": {**config["configurable"], CHOSEN_TEAM: team}}


def allowed_teams(config: RunnableConfig | None) -> Collection[str] | None:
    """Return the teams to which a server limits a run, or None if there is no such limit."""
    allowed: Collection[str] | None = ensure_config(config)["configurable"].get(TEAMS_KEY)
    return allowed


def read_run_source(config: RunnableConfig | None) -> tuple[str | None, str | None]:
    """The thread of a run and, within a node, the checkpoint from which the (sub)graph goes on."""
    given = ensure_config(config)["configurable"]
    thread = given.get("thread_id")
    if thread is None:
        return None, None
    from langgraph.runtime import get_runtime

    try:
        runtime: Any = get_runtime()
    except (RuntimeError, KeyError):  # not within a run
        runtime = None
    running = getattr(runtime, "execution_info", None)  # None: a chain's run, not a graph's
    if running is not None and running.thread_id == thread:
        return str(thread), running.checkpoint_id
    return str(thread), given.get("checkpoint_id")


def make_clock(name: str, given: Clock | str | None) -> Clock:
    """The clock for the option `name`: a function, or the name of a moment in `configurable`."""
    if given is None:
        return lambda config: None
    if not isinstance(given, str):
        expected = "a function of a run's config, or the name of a moment in it"
        return check_instance(name, given, Callable, expected)  # type: ignore[arg-type, no-any-return]

    def clock(config: RunnableConfig | None) -> datetime | None:
        value = ensure_config(config)["configurable"].get(given)
        try:
            return datetime.fromisoformat(value) if isinstance(value, str) else value
        except ValueError as exc:
            raise InvalidConfig(
                f"configurable[{given!r}] is {value!r:.80}; expected a moment in ISO 8601, like "
                "'2026-05-01T12:00:00+00:00'"
            ) from exc

    return clock


_LABEL: Final = re.compile(r"([^{}]*)(?:\{([^\W\d]\w*)\}([^{}]*))?")


class Template:
    """Labels of a namespace, outermost first, like `("notes", "{user_id}")`.

    `{user_id}` stands for `user_id` in the run's `context`, which may be a dict, a dataclass or a
    pydantic model, else for `configurable["user_id"]` of its config. A label has one placeholder at
    most: with two, the values `"a-b", "c"` and `"a", "b-c"` would fill `"{x}-{y}"` alike.

    In `("teams", "{team}")`, `{team}` stands for each team of the run; see `teams_of_run`.

    Args:
        labels: The labels.
        shared: Whether the first label may be `"teams"`.
    """

    def __init__(self, labels: Sequence[str], *, shared: bool = False) -> None:
        expected = "labels, like ('notes', '{user_id}')"
        self.labels = tuple(check_instance("the template", labels, (list, tuple), expected))
        check_whole_number("the number of labels of the template", len(self.labels), 1)
        self._parsed = [_parse_label(label) for label in self.labels]
        self.is_team = self.labels[0] == TEAMS
        if self.is_team:
            self._check_team(shared)

    @property
    def names(self) -> tuple[str, ...]:
        """The names in a run's context or `configurable` that fill it in."""
        return tuple(dict.fromkeys(name for _, name, _ in self._parsed if name))

    def fill(self, config: RunnableConfig | None = None) -> tuple[str, ...]:
        """The labels for a run; None: for the run in which it is called.

        Of a team's template, the run must have exactly one team.

        >>> Template(["notes", "{user_id}"]).filled({"configurable": {"user_id": "a.b"}})
        ('notes', 'a.b')
        """
        if self.is_team:
            filled = self.fill_for_teams(config)
            if len(filled) != 1:
                known = ", ".join(map(repr, sorted(read_run_teams(config)))) or "no team"
                raise InvalidConfig(
                    f"the run has {known}, and {self.labels!r} needs exactly one: pass "
                    'context={"team": "…"} or config={"configurable": {"team": "…"}}'
                )
            return filled[0]
        return self._fill_labels(config)

    def fill_for_teams(self, config: RunnableConfig | None = None) -> list[tuple[str, ...]]:
        """Return the labels for each team of a run, none if it has no team.

        A template without a team is filled once.
        """
        if not self.is_team:
            return [self._fill_labels(config)]
        name, allowed = self.labels[1], allowed_teams(config)
        if name != TEAM:
            teams: Sequence[str] = (name,) if allowed is None or name in allowed else ()
        else:
            teams = read_run_teams(config)
        return [self._fill_labels(config, team) for team in teams]

    def _fill_labels(
        self, config: RunnableConfig | None, team: str | None = None
    ) -> tuple[str, ...]:
        if self.lacks_memory(config):
            raise InvalidConfig(
                f"the run has no memory, so {self.labels!r} cannot be filled in: its message is "
                "not from the person of the thread, and its sender may not act for that person"
            )
        names = [name for name in self.names if team is None or name != "team"]
        given = read_run_values(names, config) if names else {}
        if team is not None:
            given["team"] = team
        return tuple(
            before + self._get_value(name, given) + after if name else before
            for before, name, after in self._parsed
        )

    def lacks_memory(self, config: RunnableConfig | None = None) -> bool:
        """Return whether the labels name the user of a run that has no memory of any user.

        See `WITHOUT_MEMORY_KEY`. Nodes recall and remember nothing in this case.
        """
        is_personal = self.is_team or "user_id" in self.names
        return is_personal and ensure_config(config)["configurable"].get(WITHOUT_MEMORY_KEY) is True

    def _check_team(self, shared: bool) -> None:
        name = self.labels[1] if len(self.labels) > 1 else ""
        if not shared:
            raise ConfigurationError(
                f"the template {self.labels!r} begins with {TEAMS!r}, which use_memories, recall, "
                "Collection and the tools for memories may use; expected another first label"
            )
        if name != TEAM and (not name or "{" in name):
            raise ConfigurationError(
                f"the template {self.labels!r} begins with {TEAMS!r}; expected {TEAM!r} or the "
                "name of a team as second label"
            )

    def _get_value(self, name: str, given: dict[str, Any]) -> str:
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


def _parse_label(label: Any) -> tuple[str, str, str]:
    """The text before the placeholder, its name, the text after it; "" for what is not there."""
    match = _LABEL.fullmatch(label) if isinstance(label, str) and label else None
    if match is None:
        expected = "text that is not empty, with one placeholder at most, like '{user_id}'"
        raise ConfigurationError(f"the template has the label {label!r}; expected {expected}")
    return match[1], match[2] or "", match[3] or ""
