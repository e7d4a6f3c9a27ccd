"""What a client asks a run to do, checked. Nobody runs as somebody else."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from itertools import chain
from typing import Annotated, Any, Final, Literal, Self

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.serde.types import RESUME
from langgraph.types import Command, Send
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from perdure.checkpointers.labels import CALLER, DEED
from perdure.errors import ConfigurationError
from perdure.memory.run_config import parse_teams
from perdure.server.threads import validate_metadata

StreamMode = Literal[
    "values",
    "updates",
    "messages",
    "messages-tuple",
    "custom",
    "debug",
    "tasks",
    "checkpoints",
    "events",
]
_RESERVED_NAMES: Final = (
    "user_id", "owner", "thread_id", "run_id", "assistant_id", "graph_id", CALLER, DEED,
)  # fmt: skip
_INTERRUPT_ID: Final = re.compile("[0-9a-f]{32}")  # the id of one
_UNSUPPORTED_FIELDS: Final = ("strict_resume", "feedback_keys", "langsmith_tracer")
_MAX_DELAY_S: Final = 10 * 365 * 24 * 3600


class Goto(BaseModel):
    """A node to go to, with an input of its own."""

    node: str
    input: Any = None


def _as_list(value: Any) -> Any:
    return value if isinstance(value, list) else [value]


def _choose_modes(modes: list[StreamMode]) -> list[StreamMode]:
    """Return each mode once: `messages-tuple` in place of `messages`, and `values` for no mode.

    langgraph's server does the same. Otherwise each token would be sent twice.
    """
    chosen = [*dict.fromkeys(modes)] or ["values"]
    return [mode for mode in chosen if mode != "messages" or "messages-tuple" not in chosen]


def expand_arrays(values: Any) -> Any:
    """Return the values of a query parameter that may be repeated, or one array of JSON.

    The JavaScript SDK sends `stream_mode=values&stream_mode=updates`; earlier versions of it send
    `stream_mode=["values","updates"]`.
    """
    given = values if isinstance(values, list) else [values]
    return [*chain.from_iterable(map(_expand_array, given))]


def _expand_array(value: Any) -> list[Any]:
    if isinstance(value, str) and value.startswith("["):
        try:
            read = json.loads(value)
        except (ValueError, RecursionError):
            return [value]
        return read if isinstance(read, list) else [value]
    return [value]


def is_reserved_name(name: str) -> bool:
    """Whether the server alone sets what has this name in a config, or langgraph does."""
    return name in _RESERVED_NAMES or name.startswith(("__", "langgraph_"))


def _drop_reserved_names(metadata: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in metadata.items() if not is_reserved_name(name)}


Metadata = Annotated[dict[str, Any], AfterValidator(_drop_reserved_names)]
"""Metadata of a client, without what the server alone sets: a graph that calls this one sends it"""


class WithoutNulls(BaseModel):
    """A part of a request, in which null is as good as nothing."""

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, body: Any) -> Any:
        is_object = isinstance(body, Mapping)
        return {n: v for n, v in body.items() if v is not None} if is_object else body


class CommandFields(WithoutNulls):
    """langgraph's `Command`."""

    update: dict[str, Any] | list[tuple[str, Any]] | None = None
    resume: Any = None
    goto: Annotated[list[str | Goto], BeforeValidator(_as_list)] = []

    def to_command(self) -> Command[Any]:
        """As langgraph takes it."""
        goto = [
            each if isinstance(each, str) else Send(each.node, each.input) for each in self.goto
        ]
        return Command(update=self.update, resume=self.resume, goto=goto)

    @property
    def is_empty(self) -> bool:
        """Whether the command has no content."""
        return self.resume is None and not self.update and not self.goto

    @property
    def answers(self) -> list[Any]:
        """The answers to interrupts, which may be by their ids."""
        by_id = isinstance(self.resume, dict) and all(map(_INTERRUPT_ID.fullmatch, self.resume))
        return [] if self.resume is None else [*self.resume.values()] if by_id else [self.resume]

    @property
    def writes(self) -> list[tuple[str, Any]]:
        """What langgraph stores of it before it runs; of answers by ids nothing."""
        update = self.update or []
        given = [*update.items()] if isinstance(update, dict) else [*update]
        is_plain = self.answers == [self.resume]
        return [*given, *([(RESUME, self.resume)] if is_plain else [])]


class CheckpointRef(BaseModel):
    """Where to go on from."""

    thread_id: str | None = None
    checkpoint_id: str | None = None
    checkpoint_ns: str | None = None
    checkpoint_map: dict[str, str] | None = None


class Configurable(CheckpointRef):
    """The same, and what else a graph takes."""

    model_config = ConfigDict(extra="allow")


class ClientConfig(WithoutNulls):
    """Of langchain's config, what a client may set."""

    tags: list[str] = []
    recursion_limit: int = Field(default=25, ge=1, le=1000)
    configurable: Configurable = Configurable()
    metadata: Metadata = {}


class RunRequest(WithoutNulls):
    """The body of a request for a run, as `langgraph_sdk` sends it."""

    assistant_id: str
    input: Any = None
    command: CommandFields | None = None
    checkpoint: CheckpointRef | None = None
    checkpoint_id: str | None = None
    config: ClientConfig = ClientConfig()
    context: dict[str, Any] | None = None
    metadata: Metadata = {}
    interrupt_before: Literal["*"] | list[str] | None = None
    interrupt_after: Literal["*"] | list[str] | None = None
    stream_mode: Annotated[
        list[StreamMode], BeforeValidator(_as_list), AfterValidator(_choose_modes)
    ] = ["values"]
    stream_subgraphs: bool = False
    stream_resumable: bool = False
    on_disconnect: Literal["cancel", "continue"] = "continue"
    on_completion: Literal["delete", "keep"] = "delete"
    multitask_strategy: Literal["reject", "enqueue", "interrupt", "rollback"] = "enqueue"
    if_not_exists: Literal["reject", "create"] = "reject"
    durability: Literal["sync", "async", "exit"] | None = None
    checkpoint_during: bool | None = None
    after_seconds: float = Field(default=0, ge=0, le=_MAX_DELAY_S)
    webhook: str | None = None
    strict_resume: bool | None = None
    feedback_keys: list[str] | None = None
    langsmith_tracer: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name in _UNSUPPORTED_FIELDS:
            if value := getattr(self, name):
                raise ValueError(
                    f"{name} is {value!r}, which this server does not do: leave it out"
                )
        if self.durability is None and self.checkpoint_during is not None:  # its former name
            self.durability = "async" if self.checkpoint_during else "exit"
        if self.after_seconds and self.multitask_strategy == "reject":
            raise ValueError(
                "after_seconds with multitask_strategy 'reject': nobody could be told that it is "
                "rejected when its time has come; choose another strategy"
            )
        self._choose_input()
        self.check_metadata()
        return self

    def _choose_input(self) -> None:
        """Drop the command if it is empty, and otherwise drop the input beside it.

        Clients send the transcript, or an empty object, beside the answer to an interrupt.
        """
        if self.command is not None and self.command.is_empty:
            self.command = None
        if self.command is not None and self.input is not None:
            self.input = None

    def check_metadata(self) -> None:
        """Check what its checkpoints would have as their metadata."""
        labels = {
            n: v for n, v in self._merged_configurable.items() if isinstance(v, str | int | float)
        }
        validate_metadata({**labels, **self.config.metadata, **self.metadata})

    def graph_input(self) -> Any:
        """The graph's input."""
        return self.command.to_command() if self.command else self.input

    @property
    def call_options(self) -> dict[str, Any]:
        """How the graph is called, whoever reads what it tells."""
        names = {"context", "interrupt_before", "interrupt_after", "durability"}
        return self.model_dump(include=names)

    def to_stored(self) -> dict[str, Any]:
        """As it is stored; its metadata and assistant are told of the run."""
        return self.model_dump(exclude={"metadata", "assistant_id"}, exclude_unset=True)

    @property
    def has_message(self) -> bool:
        """Whether it says something new, beside an answer to a question."""
        if self.command is None:
            return self.input is not None
        sent = [each for each in self.command.goto if not isinstance(each, str)]
        return bool(self.command.update) or any(each.input is not None for each in sent)

    def with_assistant(self, assistant: Mapping[str, Any]) -> Self:
        """The request upon what its assistant is configured with, which is fixed by that.

        Of the config's `configurable` and metadata, of the context and the metadata it overrides
        what it names; tags are added.

        Raises:
            ConfigurationError: The metadata of both is too much.
        """
        base, own = assistant["config"], self.config.model_dump(exclude_unset=True)
        tags = dict.fromkeys((*base.get("tags", ()), *own.get("tags", ())))
        config = {**base, **own, "tags": [*tags]}
        for name in ("configurable", "metadata"):
            config[name] = {**base.get(name, {}), **own.get(name, {})}
        made = self.model_copy(
            update={
                "assistant_id": assistant["assistant_id"],
                "config": ClientConfig.model_validate(config),
                "metadata": {**_drop_reserved_names(assistant["metadata"]), **self.metadata},
                "context": {**assistant["context"], **(self.context or {})} or self.context,
            }
        )
        made.check_metadata()
        return made

    def check_reserved_names(self, thread_id: str, user: str) -> None:
        """Refuse what the server alone decides.

        Raises:
            ConfigurationError: The config or the context names another user or thread, or keys of
                langgraph's own.
        """
        own = {"thread_id": thread_id, "user_id": user, "owner": user}
        for name, value in chain(self._merged_configurable.items(), (self.context or {}).items()):
            if is_reserved_name(name) and value is not None and value != own.get(name):
                raise ConfigurationError(
                    f"{name!r} is {value!r}, and the server alone sets it: leave it out"
                )

    def team_names(self) -> set[str]:
        """Return the teams that the config or the context names.

        Raises:
            InvalidConfig: One of them is no name.
        """
        names = set[str]()
        for given in (self._merged_configurable, self.context or {}):
            for team, teams in ((given.get("team"), None), (None, given.get("teams"))):
                names |= {*(parse_teams(team, teams) or ())}
        return names

    @property
    def checkpoint_ids(self) -> dict[str, str]:
        """The checkpoints that it names, by their namespaces."""
        at = self._merged_configurable
        here = {at.get("checkpoint_ns", ""): at.get("checkpoint_id")}
        return {ns: id for ns, id in {**here, **at.get("checkpoint_map", {})}.items() if id}

    @property
    def _merged_configurable(self) -> dict[str, Any]:
        given = self.config.configurable.model_dump(exclude_unset=True)
        given |= (self.checkpoint or CheckpointRef()).model_dump(exclude_none=True)
        given |= {"checkpoint_id": self.checkpoint_id} if self.checkpoint_id else {}
        return {
            n: v for n, v in given.items() if v is not None or n not in CheckpointRef.model_fields
        }

    def build_config(
        self, server_values: Mapping[str, Any], *, is_continued: bool
    ) -> RunnableConfig:
        """The config of the run, with what the server alone sets; one that has begun goes on."""
        given = self._merged_configurable
        if is_continued:
            given = {n: v for n, v in given.items() if n not in CheckpointRef.model_fields}
        return {
            "configurable": {**given, **server_values},
            "metadata": {**self.config.metadata, **self.metadata},
            "tags": self.config.tags,
            "recursion_limit": self.config.recursion_limit,
        }
