"""Every error perdure raises, in one hierarchy.

    PerdureError
    ├─ ConfigurationError (ValueError)     an argument or setting is wrong; nothing was touched
    │  ├─ InvalidConfig                    a RunnableConfig without a usable thread_id
    │  ├─ WrongKey                         the encryption key does not open this database
    │  ├─ EmbedderMismatch                 the store's vectors come from another model
    │  ├─ MissingDependency (ImportError)  an extra is needed and not installed
    │  └─ UnknownModel (LookupError)       a model whose tokens, or whose window, nobody named
    ├─ StorageError                        the database refused; see __cause__
    │  ├─ StorageUnavailable               locked, busy or closed: may be retried
    │  ├─ StorageFull                      no disk space left; nothing was half written
    │  ├─ NotADatabase                     the path is a directory, or a file that is not perdure's
    │  ├─ SchemaMismatch                   written by a newer perdure, or before its first release
    │  └─ CorruptRecord                    a stored row cannot be read back, or was tampered with
    ├─ SerializationError (TypeError)      a value cannot be stored or read back
    │  ├─ Unstorable                       the serializer refuses the value; the path to it is named
    │  ├─ InvalidValue (ValueError)        a store's value is not JSON; the path is named
    │  └─ ForbiddenType                    its type is not on the allowlist
    ├─ UnknownThread (LookupError)         no thread by that id
    ├─ UnknownCheckpoint (LookupError)     no checkpoint by that id in the thread
    ├─ ThreadDeleted                       the thread of a run was deleted during the run
    ├─ RunEnded                            a write of a run that has ended
    ├─ UnknownPerson (LookupError)         nothing belongs to a person of that name
    ├─ UnknownMemory (LookupError)         no memory by that id in the namespace
    ├─ AlreadyLocked (RuntimeError)        a run takes a lock that it has already
    ├─ InvalidNamespace (ValueError)       a namespace or key that no store can hold
    ├─ InvalidFilter (ValueError)          an unknown operator, or one with a value of a wrong type
    ├─ VersionConflict                     an item is not at the version that `if_version` names
    ├─ LimitExceeded                       a scoped store would hold more than it may
    ├─ EmbeddingFailed                     the embedder raised, timed out or returned no vectors
    ├─ InvalidUpdate (ValueError)          a reducer was given an update it cannot apply
    ├─ InvalidPatch (ValueError)           a change that a profile, or its schema, does not take
    ├─ InvalidMessages (TypeError)         what should be messages holds something else
    ├─ BudgetExceeded                      what must be shown takes more than is allowed
    ├─ ModelFailed                         the chat model did not answer
    │  ├─ SummaryFailed                    the summariser gave no summary; nothing was removed
    │  └─ InstructionsRefused              a rewrite of instructions that is no usable one
    └─ ImportFailed (ValueError)           a file to import is malformed; says where

A message says what happened, to which object, what was expected and what to do.
"""

from __future__ import annotations


class PerdureError(Exception):
    """The root of every error perdure raises."""


class ConfigurationError(PerdureError, ValueError):
    """An argument or a setting is wrong; nothing was read or written."""


class InvalidConfig(ConfigurationError):
    """A `RunnableConfig` lacks what a checkpointer needs, or holds it in a wrong form."""


class WrongKey(ConfigurationError):
    """The encryption key, or its absence, does not fit the database."""


class MissingDependency(ConfigurationError, ImportError):
    """A feature needs a package that an extra of perdure installs."""


class UnknownModel(ConfigurationError, LookupError):
    """A model's tokens, or the size of its window, are not known; they can be given by hand."""


class EmbedderMismatch(ConfigurationError):
    """The vectors in the store come from another model, or have other dimensions."""


class StorageError(PerdureError):
    """The database refused an operation; `__cause__` is the driver's error."""


class StorageUnavailable(StorageError):
    """The database is locked, busy or closed. The operation may be retried."""


class StorageFull(StorageError):
    """No disk space is left. The state is as it was before the operation."""


class NotADatabase(StorageError):
    """The path is not a file that perdure could have written."""


class SchemaMismatch(StorageError):
    """The database was written by a newer perdure, or by a build from before the first release."""


class CorruptRecord(StorageError):
    """A stored row cannot be read back: damaged, truncated or tampered with."""


class SerializationError(PerdureError, TypeError):
    """A value cannot be written, or cannot be read back."""


class Unstorable(SerializationError):
    """The serializer refuses a value. The message names the path to it."""


class InvalidValue(SerializationError, ValueError):
    """A store's value is not a JSON object. The message names the path to the offending part."""


class ForbiddenType(SerializationError):
    """A type is not on the deserialisation allowlist. `allow=[...]` adds one."""


class UnknownThread(PerdureError, LookupError):
    """No thread has that id."""


class UnknownCheckpoint(PerdureError, LookupError):
    """The thread has no checkpoint with that id."""


class ThreadDeleted(PerdureError):
    """A run tried to write to a thread that was deleted after the run had loaded its state.

    Nothing was stored. A new run with the same thread id begins a new conversation.
    """


class RunEnded(PerdureError):
    """A run that has ended, or was cancelled, tried to write. Nothing was stored."""


class UnknownPerson(PerdureError, LookupError):
    """Nothing in the database belongs to a person of this name."""


class UnknownMemory(PerdureError, LookupError):
    """The namespace has no memory with that id, or has it no more."""


class AlreadyLocked(PerdureError, RuntimeError):
    """A run takes a lock that it already holds."""


class InvalidNamespace(PerdureError, ValueError):
    """A namespace or key that no store can hold."""


class InvalidFilter(PerdureError, ValueError):
    """A filter has an unknown operator, or an operator a value of a type it cannot compare."""


class VersionConflict(PerdureError):
    """An item is not at the version that `if_version` names; nothing was written."""


class LimitExceeded(PerdureError):
    """A scoped store would hold more items or bytes than it may; nothing was written."""


class EmbeddingFailed(PerdureError):
    """The embedder raised, took too long, or returned something that is no list of vectors."""


class InvalidUpdate(PerdureError, ValueError):
    """A reducer was given an update that cannot be applied."""


class ModelFailed(PerdureError):
    """The chat model could not be reached, or refused. The messages are stored."""


class SummaryFailed(ModelFailed):
    """The summariser raised, took too long, or returned no text. Nothing was removed."""


class InstructionsRefused(ModelFailed):
    """A rewrite of instructions was empty, cut off or out of bounds. The previous text stays."""


class InvalidPatch(PerdureError, ValueError):
    """A change of a profile cannot be applied, or its schema refuses what is left of it.

    Nothing was written.
    """


class InvalidMessages(PerdureError, TypeError):
    """What should be a list of messages holds something else."""


class BudgetExceeded(PerdureError):
    """What may not be left out takes more tokens, or messages, than are allowed."""


class ImportFailed(PerdureError, ValueError):
    """A file to import is malformed."""
