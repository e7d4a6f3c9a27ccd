"""Read a run's store, thread, user and teams from its config."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from datetime import datetime
from typing import Any, Final, Protocol, runtime_checkable

from langchain_core.runnables import RunnableConfig, ensure_config

from perdure.checkpointers.address import TEAMS_KEY, WITHOUT_MEMORY_KEY, find_run_context_values
from perdure.errors import ConfigurationError, InvalidConfig
from perdure.memory.options import check_instance
from perdure.settings import is_valid_user_or_team_name

Clock = Callable[[RunnableConfig | None], datetime | None]
"""A function that returns the point in time for a run with this config, or None for now."""
CHOSEN_TEAM: Final = "__perdure_team"
"""The key in `configurable` for the team that a tool has chosen among the teams of the run."""


@runtime_checkable
class Versioned(Protocol):
    """Protocol of stores and checkpointers that keep a version history, such as perdure's."""

    history: Callable[..., Any]
    ahistory: Callable[..., Any]


def get_runtime_of_running_graph() -> Any:
    """Return LangGraph's `Runtime` of the running graph, or None if no graph is running."""
    # Import `langgraph.runtime` lazily, because the import takes half a second and most processes
    # do not need the module.
    from langgraph.runtime import get_runtime

    try:
        return get_runtime()
    # `get_runtime` raises an error outside a graph run.
    except (RuntimeError, KeyError):
        return None


def require_store_of_running_graph(requesting_components: str) -> Any:
    """Return the store that the running graph was compiled with.

    `requesting_components` names the components that need a store, for use in the error message.

    Raises:
        ConfigurationError: No graph is running, or it has no store.
    """
    store = getattr(get_runtime_of_running_graph(), "store", None)
    if store is None:
        raise ConfigurationError(
            f"{requesting_components} need a store; pass store=, or compile the graph with a store"
        )
    return store


def read_values_of_run_context_or_config(
    names: Sequence[str], config: RunnableConfig | None
) -> dict[str, Any]:
    """Read named values from a run's context, falling back to `configurable` in the run's config.

    langgraph does not store a run's context, so values read from the context are also stored with
    the thread if the run uses a perdure checkpointer.
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
    no team, it uses all of its user's teams. If memory is disabled for the run, an empty tuple is
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

    If the run has no thread, return None for the thread id and the checkpoint id. Inside a node,
    the checkpoint id belongs to the graph or subgraph that contains the node.
    """
    configurable = ensure_config(config)["configurable"]
    thread = configurable.get("thread_id")
    if thread is None:
        return None, None
    # `execution_info` is None if a langchain chain runs outside a graph.
    info = getattr(get_runtime_of_running_graph(), "execution_info", None)
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
