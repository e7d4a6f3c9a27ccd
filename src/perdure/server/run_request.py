"""Define and validate the body of a request that starts a run.

Some keys of a run's config, context and metadata are reserved for the server. Reserved keys in the
metadata are dropped. Reserved keys in the config and the context are rejected by
`RunRequest.refuse_reserved_config_values`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import chain
from typing import Annotated, Any, Final, Literal, Self

from langchain_core.runnables import RunnableConfig
from langgraph.types import Command, Send
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from perdure.checkpointers.labels import (
    CALLER,
    CALLER_ACTION,
    STATE_FROM_OTHERS,
    TURN_WITHOUT_MEMORY,
)
from perdure.errors import ConfigurationError
from perdure.memory.run_config import parse_run_teams
from perdure.server.message_authors import HUMAN_ROLES, MESSAGE_ROLES
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
# Keys of a config, a context or metadata that only the server may set
_RESERVED_NAMES: Final = (
    "user_id", "owner", "thread_id", "run_id", "assistant_id", "graph_id", CALLER, CALLER_ACTION,
    STATE_FROM_OTHERS, TURN_WITHOUT_MEMORY,
)  # fmt: skip
_UNSUPPORTED_FIELDS: Final = ("strict_resume", "feedback_keys", "langsmith_tracer")
# Maximum delay of a run (`after_seconds`), in seconds: ten years
_MAX_DELAY_S: Final = 10 * 365 * 24 * 3600


class Goto(BaseModel):
    """A target of a `Command`'s `goto`: a node and its input."""

    node: str
    input: Any = None


def _as_list(value: Any) -> Any:
    """Return `value` if it is a list, otherwise a list that contains only `value`."""
    return value if isinstance(value, list) else [value]


def _deduplicate_stream_modes(modes: list[StreamMode]) -> list[StreamMode]:
    """Return the stream modes without duplicates. If there are none, return `["values"]`.

    If a client requests both `messages` and `messages-tuple`, the mode `messages` is left out, as
    in langgraph's server, because the two modes together would send each token twice.
    """
    chosen = [*dict.fromkeys(modes)] or ["values"]
    return [mode for mode in chosen if mode != "messages" or "messages-tuple" not in chosen]


def parse_repeated_or_json_array_parameter(values: Any) -> list[Any]:
    """Return all values of a query parameter that can be given more than once.

    The parameter is either repeated in the URL or given once as a JSON array.

    The JavaScript SDK sends `stream_mode=values&stream_mode=updates`; earlier versions of it send
    `stream_mode=["values","updates"]`.
    """
    items = values if isinstance(values, list) else [values]
    return [*chain.from_iterable(map(_parse_json_array_or_wrap, items))]


def _parse_json_array_or_wrap(value: Any) -> list[Any]:
    """Return the elements of a JSON array that is passed as a string.

    If `value` is not a string that contains a JSON array, return `[value]`.
    """
    if isinstance(value, str) and value.startswith("["):
        try:
            array = json.loads(value)
        except (ValueError, RecursionError):
            return [value]
        return array if isinstance(array, list) else [value]
    return [value]


def is_reserved_name(name: str) -> bool:
    """Return whether a config or metadata key is reserved for the server or langgraph."""
    return name in _RESERVED_NAMES or name.startswith(("__", "langgraph_"))


def _drop_reserved_names(metadata: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of metadata without the keys that are reserved for the server or langgraph."""
    return {key: value for key, value in metadata.items() if not is_reserved_name(key)}


Metadata = Annotated[dict[str, Any], AfterValidator(_drop_reserved_names)]
"""The metadata that a client sends, without reserved names. Reserved names do not cause an error,
because LangGraph's `RemoteGraph` sends some of them."""


class WithoutNulls(BaseModel):
    """Base class of request-body models that treat null fields as missing."""

    @model_validator(mode="before")
    @classmethod
    def _drop_null_fields(cls, body: Any) -> Any:
        """Remove fields whose value is null."""
        is_object = isinstance(body, Mapping)
        return (
            {name: value for name, value in body.items() if value is not None}
            if is_object
            else body
        )


class CommandFields(WithoutNulls):
    """The fields of LangGraph's `Command`, as sent by a client."""

    update: dict[str, Any] | list[tuple[str, Any]] | None = None
    resume: Any = None
    goto: Annotated[list[str | Goto], BeforeValidator(_as_list)] = []

    def to_langgraph_command(self) -> Command[Any]:
        """Convert the fields to a LangGraph `Command` object."""
        goto = [
            target if isinstance(target, str) else Send(target.node, target.input)
            for target in self.goto
        ]
        return Command(update=self.update, resume=self.resume, goto=goto)

    @property
    def is_empty(self) -> bool:
        """Return True if the command sets none of `resume`, `update` and `goto`."""
        return self.resume is None and not self.update and not self.goto


class CheckpointRef(BaseModel):
    """A reference to a checkpoint, such as the one from which a run continues."""

    thread_id: str | None = None
    checkpoint_id: str | None = None
    checkpoint_ns: str | None = None
    checkpoint_map: dict[str, str] | None = None


class Configurable(CheckpointRef):
    """A config's `configurable` dict: a checkpoint reference and other fields for the graph."""

    model_config = ConfigDict(extra="allow")


class ClientConfig(WithoutNulls):
    """The fields of a LangChain config that clients are allowed to set."""

    tags: list[str] = []
    recursion_limit: int = Field(default=25, ge=1, le=1000)
    configurable: Configurable = Configurable()
    metadata: Metadata = {}


class RunRequest(WithoutNulls):
    """The request body that `langgraph_sdk` sends to start a run."""

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
        list[StreamMode], BeforeValidator(_as_list), AfterValidator(_deduplicate_stream_modes)
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
    def _refuse_unsupported_and_fill_related_fields(self) -> Self:
        """Reject unsupported fields and combinations, and set fields that depend on others."""
        for field in _UNSUPPORTED_FIELDS:
            if value := getattr(self, field):
                raise ValueError(
                    f"the field {field!r} is {value!r}, but this server does not support this "
                    "field; remove the field"
                )
        # In langgraph, `checkpoint_during` is the former name of `durability`.
        if self.durability is None and self.checkpoint_during is not None:
            self.durability = "async" if self.checkpoint_during else "exit"
        if self.after_seconds and self.multitask_strategy == "reject":
            raise ValueError(
                "after_seconds cannot be combined with multitask_strategy 'reject', because the "
                "server cannot reject a delayed run after it has accepted the request; choose "
                "another strategy"
            )
        self._drop_command_if_empty_else_drop_input()
        self.validate_metadata_of_run_checkpoints()
        return self

    def _drop_command_if_empty_else_drop_input(self) -> None:
        """Drop `command` if it is empty. If it is not empty, drop `input`.

        Some clients send an `input` together with a `command` that answers an interrupt. Such an
        `input` is ignored, because it only repeats the thread's messages or is an empty object.
        """
        if self.command is not None and self.command.is_empty:
            self.command = None
        if self.command is not None and self.input is not None:
            self.input = None

    def validate_metadata_of_run_checkpoints(self) -> None:
        """Validate the metadata that will be stored with the run's checkpoints.

        Raises:
            ConfigurationError: See `validate_metadata`.
        """
        # LangGraph copies strings and numbers from `configurable` into the checkpoint metadata.
        labels = {
            name: value
            for name, value in self._configurable_with_checkpoint.items()
            if isinstance(value, str | int | float)
        }
        validate_metadata({**labels, **self.config.metadata, **self.metadata})

    def graph_input(self) -> Any:
        """Return the graph's input: a `Command` if the request has one, otherwise `input`."""
        return self.command.to_langgraph_command() if self.command else self.input

    @property
    def client_input_values(self) -> list[Any]:
        """Return the client's values that the graph receives as input or in a command."""
        if self.command is None:
            return [self.input]
        targets = [target.input for target in self.command.goto if not isinstance(target, str)]
        return [self.command.update, self.command.resume, *targets]

    @property
    def call_options(self) -> dict[str, Any]:
        """Return the request fields that are passed to the graph as keyword arguments."""
        names = {"context", "interrupt_before", "interrupt_after", "durability"}
        return self.model_dump(include=names)

    def to_stored(self) -> dict[str, Any]:
        """Return the fields that the client has set, for storage in the run's row.

        The metadata and the assistant id are omitted, because `RunRow.details` already contains
        them.
        """
        return self.model_dump(exclude={"metadata", "assistant_id"}, exclude_unset=True)

    @property
    def has_new_graph_input(self) -> bool:
        """Return whether the request has new graph input, not just answers to interrupts."""
        if self.command is None:
            return self.input is not None
        sends = [target for target in self.command.goto if not isinstance(target, str)]
        return bool(self.command.update) or any(target.input is not None for target in sends)

    @property
    def continues_turn(self) -> bool:
        """Return whether the run continues an earlier turn instead of starting a new one.

        A run with a command continues the turn's pending tasks, even if the command adds a message.
        A run whose input has no human message lets the graph respond to the messages of earlier
        runs.
        """
        return self.command is not None or not _brings_new_text(self.input)

    @property
    def answers_interrupt_with_edited_tool_call(self) -> bool:
        """Return whether the request answers an interrupt by editing a tool call.

        The answer may be sent as `command.resume`, or as the input of a thread stream.
        """
        answer = self.input if self.command is None else self.command.resume
        return _contains_edit_decision(answer)

    def merge_with_assistant(self, assistant: Mapping[str, Any]) -> Self:
        """Return the request, merged with its assistant's configuration.

        The context, the metadata, and the config's `configurable` and `metadata` are merged key by
        key, and the request's values take precedence. The request's tags are added to the
        assistant's tags.

        Raises:
            ConfigurationError: The combined metadata is too large.
        """
        base_config, own_config = assistant["config"], self.config.model_dump(exclude_unset=True)
        tags = dict.fromkeys((*base_config.get("tags", ()), *own_config.get("tags", ())))
        config = {**base_config, **own_config, "tags": [*tags]}
        for name in ("configurable", "metadata"):
            config[name] = {**base_config.get(name, {}), **own_config.get(name, {})}
        combined = self.model_copy(
            update={
                "assistant_id": assistant["assistant_id"],
                "config": ClientConfig.model_validate(config),
                "metadata": {**_drop_reserved_names(assistant["metadata"]), **self.metadata},
                "context": {**assistant["context"], **(self.context or {})} or self.context,
            }
        )
        combined.validate_metadata_of_run_checkpoints()
        return combined

    def refuse_reserved_config_values(self, thread_id: str, user: str) -> None:
        """Reject a config or context that sets a value reserved for the server.

        Args:
            thread_id: The thread of the run.
            user: The person whose memories the run uses.

        Raises:
            ConfigurationError: The config or the context contains a reserved name. `thread_id`,
                `user_id` and `owner` are allowed if they have the run's own values.
        """
        allowed = {"thread_id": thread_id, "user_id": user, "owner": user}
        for name, value in chain(
            self._configurable_with_checkpoint.items(), (self.context or {}).items()
        ):
            if is_reserved_name(name) and value is not None and value != allowed.get(name):
                raise ConfigurationError(
                    f"the field {name!r} is {value!r}, but only the server may set this field; "
                    "remove it from the request"
                )

    def team_names(self) -> set[str]:
        """Return the team names that are given in the config and the context.

        Raises:
            InvalidConfig: A name of a team is invalid.
        """
        names = set[str]()
        for values in (self._configurable_with_checkpoint, self.context or {}):
            for team, teams in ((values.get("team"), None), (None, values.get("teams"))):
                names |= {*(parse_run_teams(team, teams) or ())}
        return names

    @property
    def checkpoint_ids_by_namespace(self) -> dict[str, str]:
        """Return a dict of the checkpoint ids in the request, keyed by checkpoint namespace."""
        configurable = self._configurable_with_checkpoint
        named_ids = {configurable.get("checkpoint_ns", ""): configurable.get("checkpoint_id")}
        return {
            namespace: checkpoint_id
            for namespace, checkpoint_id in {
                **named_ids,
                **configurable.get("checkpoint_map", {}),
            }.items()
            if checkpoint_id
        }

    @property
    def start_checkpoint_id(self) -> str | None:
        """Return the id of the root graph's checkpoint from which the run starts.

        The result is None if the run starts from the head of the thread. If the request specifies a
        subgraph's checkpoint, the id of the root graph's checkpoint is taken from `checkpoint_map`.
        """
        return self.checkpoint_ids_by_namespace.get("")

    @property
    def _configurable_with_checkpoint(self) -> dict[str, Any]:
        """Return the request's `configurable`, with the requested checkpoint added to it."""
        configurable = self.config.configurable.model_dump(exclude_unset=True)
        configurable |= (self.checkpoint or CheckpointRef()).model_dump(exclude_none=True)
        configurable |= {"checkpoint_id": self.checkpoint_id} if self.checkpoint_id else {}
        return {
            name: value
            for name, value in configurable.items()
            if value is not None or name not in CheckpointRef.model_fields
        }

    def build_config(
        self, server_values: Mapping[str, Any], *, is_continued: bool
    ) -> RunnableConfig:
        """Return the config of the run.

        Args:
            server_values: Values that only the server sets.
            is_continued: Whether an earlier execution of the run is continued. The config then
                contains no checkpoint id, so that the run continues from the thread's head.
        """
        configurable = {
            name: value
            for name, value in self._configurable_with_checkpoint.items()
            if name not in CheckpointRef.model_fields
        }
        if not is_continued:
            # Pass the checkpoint to langgraph in the same way for every request. Otherwise, the
            # checkpoint that langgraph loads would depend on which of the fields `checkpoint`,
            # `checkpoint_id` and `config.configurable` the client has set.
            configurable["checkpoint_ns"] = ""
            if self.start_checkpoint_id is not None:
                configurable["checkpoint_id"] = self.start_checkpoint_id
            if checkpoint_map := self._configurable_with_checkpoint.get("checkpoint_map"):
                configurable["checkpoint_map"] = checkpoint_map
        return {
            "configurable": {**configurable, **server_values},
            "metadata": {**self.config.metadata, **self.metadata},
            "tags": self.config.tags,
            "recursion_limit": self.config.recursion_limit,
        }


def _brings_new_text(value: Any) -> bool:
    """Return whether an input contains a human message or another non-empty channel value.

    Messages with other roles, such as `assistant`, do not count, because a graph responds to the
    last human message.
    """
    if isinstance(value, list):
        return any(map(_brings_new_text, value))
    if not isinstance(value, dict):
        return value not in (None, "")
    role = value.get("role", value.get("type"))
    if role in MESSAGE_ROLES:
        return role in HUMAN_ROLES
    return any(map(_brings_new_text, value.values()))


def _contains_edit_decision(answer: Any) -> bool:
    """Return whether an answer to interrupts contains a decision of the type `edit`.

    LangChain's human-in-the-loop middleware expects such decisions. An answer to several interrupts
    is a dict with one answer for each interrupt id.
    """
    if isinstance(answer, dict):
        if answer.get("type") == "edit":
            return True
        return any(_contains_edit_decision(value) for value in answer.values())
    return isinstance(answer, list) and any(map(_contains_edit_decision, answer))
