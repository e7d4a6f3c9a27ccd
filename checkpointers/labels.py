"""Create and read labels, the metadata values that a checkpoint inherits from its parent.

There are three kinds of labels. The labels `user_id` and `owner` identify the user of the thread. A
checkpoint inherits its parent's `user_id` and `owner` unless its run identifies a different user.
The label `STATE_FROM_OTHERS` means that users other than the person to whom the thread belongs have
written to the state. Context labels can have any name.
`CheckpointSaver.copy_context_values_to_metadata` copies context labels from a run's context into
the metadata. The metadata entry `LABELS` lists the names of the values that were copied from the
context.

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
"""The metadata key for the ids of the checkpoints to which a series of state updates was applied.

The ids are sorted from the last update of the series to the first. The key is added to the last
update when the updates before it are pruned. A run can have started from each of these checkpoints.
"""
MAX_UPDATED_IDS: Final = 64
"""The maximum number of ids under `UPDATED`. If a series is longer, the ids of the newest updates
and the id of the checkpoint before the series are stored."""
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
"""The metadata key that is True if a run that uses nobody's memories stored the checkpoint.

It is also True if a user who may not act for the person to whom the thread belongs updated the
state. The value is not inherited.
"""
USER_LABELS: Final = ("user_id", "owner")
"""The metadata keys that identify the user of a thread."""
# Maximum length of a label in characters. Longer values are not used as labels. Namespaces in the
# store have a similar limit.
_LONGEST_LABEL: Final = 4096
# Sentinel for a missing value, because None is a valid value.
_MISSING: Final = object()


def select_labels_for_child_checkpoint(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata values of a checkpoint that are needed when its child is stored.

    The child checkpoint inherits the labels of its parent. The returned dict also contains the list
    of channel names under `MERGED`, which is needed to plan a merge.
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
    """Describe each distinct action that another user took on a person's thread.

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


def list_ids_of_checkpoints_changed_by_state_updates(
    parent_id: str | None, metadata: Mapping[str, Any]
) -> list[str]:
    """Return the ids of the checkpoints to which a series of state updates was applied.

    Args:
        parent_id: The id of the parent of the checkpoint that the last update created.
        metadata: The metadata of the checkpoint that the last update created.

    Returns:
        The ids under the metadata key `UPDATED`. Without this key, the list contains the id of the
        parent, which can be the checkpoint of another update. The list is empty if the metadata is
        not that of a state update.
    """
    if metadata.get("source") != "update":
        return []
    updated_ids = metadata.get(UPDATED)
    if isinstance(updated_ids, list) and updated_ids:
        return [str(updated_id) for updated_id in updated_ids]
    return [] if parent_id is None else [parent_id]


def find_labels_in_run_context(
    config: RunnableConfig, label_names: Iterable[str]
) -> dict[str, str]:
    """Return the values in a run's context that can be stored as checkpoint labels, by name.

    Only the names in `label_names` are looked up in the context.

    The labels `user_id` and `owner` are omitted for a run without long-term memory, because the
    run's metadata already identifies the thread's user.
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
    checkpoint. A user named in the checkpoint's metadata, the run's context or the config takes
    precedence over the parent checkpoint's user. A checkpoint does not inherit `user_id` and
    `owner` from a parent with a different user. If only one of `user_id` and `owner` is new, the
    other one is not inherited from the parent, because the two labels could then identify different
    users. The values `""` and None mean nobody. If the parent checkpoint has neither of the labels
    `user_id` and `owner`, the user is taken only from the new checkpoint's metadata. The run's
    context and the config are ignored in this case.

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
    `config["metadata"]`. A value that is missing from the context, `configurable` and `metadata` is
    omitted from the returned dict. If `user_id` or `owner` is present and is None, the returned
    dict contains None for it. If the context is a pydantic model, only fields that the caller has
    set are included.
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
    """Return whether a label identifies the same user as the value inherited from the parent.

    The result is False if `value` is not text or a number.
    """
    return isinstance(value, str | int | float) and value == inherited


def _is_valid_label(value: object) -> bool:
    """Return whether a value from a run's context can be stored as a checkpoint label."""
    return isinstance(value, str) and "\0" not in value and len(value) <= _LONGEST_LABEL
