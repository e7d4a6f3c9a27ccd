"""Create and read labels, the metadata values that a checkpoint inherits from its parent.

There are three kinds of labels. The labels `user_id` and `owner` identify the user of the thread. A
checkpoint inherits its parent's `user_id` and `owner` unless its run identifies a different user.
The label `STATE_FROM_OTHERS` means that other users have written to the state. All other labels are
values that `CheckpointSaver.copy_context_values_to_metadata` copied from a run's context into the
metadata. The metadata key `LABELS` lists the names of these values.

Labels inherited by a new checkpoint are stored in its own metadata. Each checkpoint has its own
copy of the inherited values, because listing threads reads only the head's metadata, and because a
checkpoint's ancestors may have been pruned.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from langchain_core.runnables import RunnableConfig

from perdure.checkpointers.address import (
    WITHOUT_MEMORY_KEY,
    find_run_context,
    find_run_context_values,
)

LABELS: Final = "perdure_labels"
"""The metadata key that lists the names of the labels that were copied from a run's context."""
MERGED: Final = "perdure_merged"
"""The metadata key that lists the channels copied into a checkpoint by a merge.

Channels whose copied values the run has read since are omitted; see `merge_planner`.
"""
UPDATED: Final = "perdure_updated"
"""The metadata key for the id of the checkpoint to which the first in a series of state updates was
applied. The key is added to the last update of the series when the updates before it are pruned."""
CALLER: Final = "perdure_caller"
"""The metadata key that identifies the server's caller whose run stored the checkpoint. It is set
only if the caller is not the person to whom the thread belongs. The value is not inherited."""
CALLER_ACTION: Final = "perdure_deed"
"""The metadata key for the action that the caller under `CALLER` performed, such as `answered`."""
STATE_FROM_OTHERS: Final = "perdure_state_from_others"
"""The metadata key that is True if other users have written to the thread's state.

Users who may act for the person to whom the thread belongs do not count. The value is inherited, so
it also marks all later checkpoints, forks and copies.
"""
TURN_WITHOUT_MEMORY: Final = "perdure_turn_without_memory"
"""The metadata key that is True if a turn that uses nobody's memories stored the checkpoint.

The turn is a run that used nobody's memories, or an update of the state by a user who may not act
for the person to whom the thread belongs. A run that continues from such a checkpoint uses nobody's
memories either. The value is not inherited.
"""
USER_LABELS: Final = ("user_id", "owner")
"""The metadata keys that identify the user of a thread."""
# Maximum length of a label in characters. Longer values are not used as labels. Namespaces in the
# store have a similar limit.
_LONGEST_LABEL: Final = 4096
# Stands for a missing value, because None is a possible value.
_MISSING: Final = object()


def select_labels_for_child_checkpoint(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata values of a checkpoint that are needed when its child is stored.

    The child checkpoint inherits the labels of its parent. The list of channel names under `MERGED`
    is also returned, because it is needed to plan a merge.
    """
    context_labels = metadata.get(LABELS)
    names = [
        *(*USER_LABELS, MERGED, STATE_FROM_OTHERS),
        *(context_labels if isinstance(context_labels, list) else ()),
    ]
    return {name: metadata[name] for name in names if name in metadata}


def describe_actions_of_callers_other_than_person(
    metadata: Iterable[Mapping[str, Any]],
) -> list[str]:
    """Return a description of each distinct action that another user took on a person's thread.

    Args:
        metadata: The metadata of checkpoints of the thread.

    >>> answer = {"perdure_caller": "boss", "perdure_deed": "answered"}
    >>> describe_actions_of_callers_other_than_person([answer, {}])
    ['answered by boss']
    """
    descriptions = (
        f"{values.get(CALLER_ACTION)} by {values[CALLER]}"
        for values in metadata
        if CALLER in values
    )
    return [*dict.fromkeys(descriptions)]


def find_id_of_checkpoint_changed_by_state_update(
    parent_id: str | None, metadata: Mapping[str, Any]
) -> str | None:
    """Return the id of the checkpoint to which a state update was applied.

    Args:
        parent_id: The id of the parent of the checkpoint that the update created.
        metadata: The metadata of the checkpoint that the update created.

    Returns:
        The id, which can be that of another update's checkpoint. None if the metadata is not that
        of a state update.
    """
    if metadata.get("source") != "update":
        return None
    updated_id = metadata.get(UPDATED)
    return updated_id if isinstance(updated_id, str) else parent_id


def find_labels_in_run_context(
    config: RunnableConfig, label_names: Iterable[str]
) -> dict[str, str]:
    """Return the named values from a run's context that are valid labels.

    If the run does not use long-term memory, `user_id` and `owner` are omitted, because the run's
    own metadata already identifies the person to whom the thread belongs.
    """
    if (config.get("configurable") or {}).get(WITHOUT_MEMORY_KEY) is True:
        label_names = [name for name in label_names if name not in USER_LABELS]
    values = find_run_context_values(config, label_names)
    return {name: value for name, value in values.items() if _is_valid_label(value)}


def build_labels_of_new_checkpoint(
    metadata: Mapping[str, Any], parent_labels: Mapping[str, Any], config: RunnableConfig
) -> dict[str, Any]:
    """Return the labels of a new checkpoint.

    Values in the new checkpoint's own metadata override labels inherited from the parent
    checkpoint. If the new metadata, the run's context or the config identifies a different user
    than the parent's labels, the new checkpoint inherits neither `user_id` nor `owner`, and the
    labels identify the new user instead. Neither label is inherited, because a new `user_id` and an
    inherited `owner` (or a new `owner` and an inherited `user_id`) could identify different users.
    The values `""` and None mean nobody. If the parent's labels identify no user, the new
    checkpoint's user can come only from its own metadata.

    Args:
        metadata: The metadata of the new checkpoint.
        parent_labels: The labels of its parent.
        config: The config of the put.
    """
    own = {name: metadata[name] for name in parent_labels if name in metadata}
    labels = {**parent_labels, **own, **select_labels_for_child_checkpoint(metadata)}
    if MERGED not in metadata:
        labels.pop(MERGED, None)
    if parent_labels.get(STATE_FROM_OTHERS):
        labels[STATE_FROM_OTHERS] = True
    parent_user = {name: parent_labels[name] for name in USER_LABELS if name in parent_labels}
    if parent_user.keys() <= metadata.keys():
        return labels
    named_users = _find_user_id_and_owner(config)
    named_users |= {name: metadata[name] for name in USER_LABELS if name in metadata}
    user = parent_user.get("owner", parent_user.get("user_id"))
    if not all(
        _is_same_user(value, parent_user.get(name, user)) for name, value in named_users.items()
    ):
        for name in parent_user.keys() - metadata.keys():
            del labels[name]
    labels |= {name: value for name, value in named_users.items() if _is_valid_label(value)}
    return labels


def _find_user_id_and_owner(config: RunnableConfig) -> dict[str, Any]:
    """Return `user_id` and `owner` from the run's context.

    A value that is not in the context is taken from `config["configurable"]`, or else from
    `config["metadata"]`. A value that is missing everywhere is omitted. A value that is explicitly
    None is returned like any other value. If the context is a pydantic model, only fields that the
    caller has set are included.
    """
    context, named_users = find_run_context(config), dict[str, Any]()
    configurable, metadata = config.get("configurable") or {}, config.get("metadata") or {}
    for name in USER_LABELS:
        value = _MISSING
        if isinstance(context, Mapping):
            value = context.get(name, _MISSING)
        elif name in getattr(context, "model_fields_set", (name,)):
            value = getattr(context, name, _MISSING)
        for source in (configurable, metadata):
            if value is _MISSING:
                value = source.get(name, _MISSING)
        if value is not _MISSING:
            named_users[name] = value
    return named_users


def _is_same_user(value: object, inherited: object) -> bool:
    """Return whether a value and an inherited value identify the same user.

    The result is False if `value` is not text or a number.
    """
    return isinstance(value, str | int | float) and value == inherited


def _is_valid_label(value: object) -> bool:
    """Return whether a value from a run's context can be stored as a checkpoint label."""
    return isinstance(value, str) and "\0" not in value and len(value) <= _LONGEST_LABEL
