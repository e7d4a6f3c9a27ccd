"""The exception hierarchy of perdure.

    PerdureError
    ├─ ConfigurationError (ValueError)     an argument or a setting is wrong
    │  ├─ InvalidConfig                    a RunnableConfig without a usable thread_id
    │  ├─ WrongKey                         the encryption key is not the key of the database
    │  ├─ EmbedderMismatch                 the store's vectors come from another model
    │  ├─ MissingDependency (ImportError)  a package of an optional extra is not installed
    │  └─ UnknownModel (LookupError)       the token count or context window of a model is unknown
    ├─ StorageError                        the database refused an operation; see __cause__
    │  ├─ StorageUnavailable               the database is locked, busy or closed; retry
    │  ├─ StorageFull                      the disk is full; nothing was written
    │  ├─ NotADatabase                     perdure did not write the file at the path
    │  ├─ SchemaMismatch                   another version of perdure wrote the database
    │  └─ CorruptRecord                    a stored row is damaged, truncated or was tampered with
    ├─ SerializationError (TypeError)      a value cannot be stored or read back
    │  ├─ Unstorable                       the serializer refuses a value
    │  ├─ InvalidValue (ValueError)        a value of a store item is not JSON
    │  └─ ForbiddenType                    the type of the value is not in the allowlist
    ├─ UnknownThread (LookupError)         no thread has this id
    ├─ UnknownCheckpoint (LookupError)     the thread has no checkpoint with this id
    ├─ ThreadDeleted                       a run wrote to a thread that was deleted during the run
    ├─ RunEnded                            a run tried to write after it had ended
    ├─ UnknownPerson (LookupError)         nothing belongs to a person with this name
    ├─ UnknownMemory (LookupError)         the namespace has no memory with this id
    ├─ AlreadyLocked (RuntimeError)        a run tried to take a lock that it already holds
    ├─ InvalidNamespace (ValueError)       a namespace or key that a store cannot contain
    ├─ InvalidFilter (ValueError)          a filter has an unknown operator or a wrong value
    ├─ VersionConflict                     the version of an item differs from `if_version`
    ├─ LimitExceeded                       a write would exceed the limit of a scoped store
    ├─ EmbeddingFailed                     the embedder raised, timed out or returned no vectors
    ├─ InvalidUpdate (ValueError)          a reducer cannot apply an update
    ├─ InvalidPatch (ValueError)           a change to a profile is invalid
    ├─ InvalidMessages (TypeError)         a list of messages contains another kind of value
    ├─ BudgetExceeded                      the required messages exceed the budget
    ├─ ModelFailed                         the chat model gave no usable answer
    │  ├─ SummaryFailed                    the model returned no summary; nothing was removed
    │  └─ InstructionsRefused              the model's rewrite of instructions is not usable
    └─ ImportFailed (ValueError)           an import failed; the message says where and why

Each error message says which value or object is wrong, what was expected, and what to do.
"""

from __future__ import annotations


class PerdureError(Exception):
    """The base class of all errors that perdure raises."""


class ConfigurationError(PerdureError, ValueError):
    """An argument or a setting is wrong. Nothing was read or written."""


class InvalidConfig(ConfigurationError):
    """Raised if the `thread_id` or another field of a `RunnableConfig` is missing or invalid."""


class WrongKey(ConfigurationError):
    """Raised if the database cannot be opened with the given encryption key.

    `WrongKey` is also raised if the database is encrypted but no key was passed, or if a key was
    passed but the database is not encrypted.
    """


class MissingDependency(ConfigurationError, ImportError):
    """Raised if a feature needs a package that is not installed.

    The missing package can be installed with one of perdure's optional extras.
    """


class UnknownModel(ConfigurationError, LookupError):
    """Raised if the token count or the context window of a model is unknown.

    To avoid the error, pass the model's token count or context window as an argument.
    """


class EmbedderMismatch(ConfigurationError):
    """Raised if the store's vectors do not match the embedder or the vector encoding.

    The stored vectors have a different embedding model, number of dimensions or encoding than the
    opened store.
    """


class StorageError(PerdureError):
    """The database refused an operation.

    If the database driver raised an exception, the driver's exception is the `__cause__` of the
    `StorageError`.
    """


class StorageUnavailable(StorageError):
    """The database is locked, busy or closed. The operation may be retried."""


class StorageFull(StorageError):
    """The disk is full. The failed operation did not change the database."""


class NotADatabase(StorageError):
    """Raised if the path is a directory or a file that perdure did not create."""


class SchemaMismatch(StorageError):
    """Raised if a newer version of perdure or a pre-release build wrote the database.

    Raised before threads are erased, deleted, copied or merged if the database has tables unknown
    to this version.
    """


class CorruptRecord(StorageError):
    """Raised if a stored row cannot be read because it is damaged, truncated or forged."""


class SerializationError(PerdureError, TypeError):
    """Raised if a value cannot be serialized, or if a stored value cannot be deserialized."""


class Unstorable(SerializationError):
    """Raised if the serializer refuses a value.

    The value that the serializer refuses may be nested in another value. The error message gives
    the path to the refused value.
    """


class InvalidValue(SerializationError, ValueError):
    """Raised if a store item's value is not a JSON object.

    The error message says which part of the item's value is invalid.
    """


class ForbiddenType(SerializationError):
    """Raised if a stored value has a type that is not in the allowlist.

    Add the type to the allowlist with `allow=[...]`.
    """


class UnknownThread(PerdureError, LookupError):
    """No thread has this id."""


class UnknownCheckpoint(PerdureError, LookupError):
    """Raised if the thread has no checkpoint with the requested id."""


class ThreadDeleted(PerdureError):
    """Raised if a run cannot write to its thread because the thread was deleted during the run.

    Nothing was stored. A new run with the same thread id begins a new conversation.
    """


class RunEnded(PerdureError):
    """Raised if a run tries to write after it has ended or been cancelled. Nothing was stored."""


class UnknownPerson(PerdureError, LookupError):
    """Raised if the database contains no data that belongs to a person with the requested name."""


class UnknownMemory(PerdureError, LookupError):
    """Raised if the namespace contains no memory with the requested id.

    The memory may have been deleted.
    """


class AlreadyLocked(PerdureError, RuntimeError):
    """Raised if a run tries to acquire a lock that it already holds.

    The server also raises `AlreadyLocked` if a thread cannot be changed because one of the thread's
    runs has not ended.
    """


class InvalidNamespace(PerdureError, ValueError):
    """Raised if the namespace or the key of a store item is invalid."""


class InvalidFilter(PerdureError, ValueError):
    """Raised if a filter has an unknown operator, or a value that its operator cannot compare."""


class VersionConflict(PerdureError):
    """Raised if the item's current version is not the expected `if_version`.

    Nothing was written.
    """


class LimitExceeded(PerdureError):
    """Raised if a write would exceed a scoped store's limit on items or bytes.

    The rejected write did not change the store.
    """


class EmbeddingFailed(PerdureError):
    """Raised if the embedder fails, times out, or does not return a list of vectors."""


class InvalidUpdate(PerdureError, ValueError):
    """Raised if a reducer cannot apply an update to the state of a graph."""


class ModelFailed(PerdureError):
    """Raised if the chat model gives no usable answer, for example because it cannot be reached.

    The messages of the thread stay stored.
    """


class SummaryFailed(ModelFailed):
    """Raised if the model that writes summaries fails, times out or returns no usable summary.

    No message was removed.
    """


class InstructionsRefused(ModelFailed):
    """Raised if the instructions rewritten by a model are empty, truncated, too long or too short.

    The previous instructions stay in use.
    """


class InvalidPatch(PerdureError, ValueError):
    """Raised if a patch cannot be applied to a profile, or if the result does not match its schema.

    Nothing was written.
    """


class InvalidMessages(PerdureError, TypeError):
    """Raised if a list of messages is missing, or contains anything other than valid messages."""


class BudgetExceeded(PerdureError):
    """Raised if the messages that trimming must keep exceed the token or message limit."""


class ImportFailed(PerdureError, ValueError):
    """Raised if an import fails, for example because a file to import is malformed.

    An import of a database also fails if a thread cannot be merged, or if the import is cancelled.
    Data that was imported before the import failed may remain in the database.
    """
