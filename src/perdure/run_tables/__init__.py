"""Store the server's runs, events, assistants, crons and webhooks in a checkpointer's database.

The server's tables have a schema version of their own, separate from the other tables. A server
creates its tables when it first opens a database. The package can be imported without the server's
dependencies. Programs other than the server can therefore erase, delete, copy and export the data
that the server stores for a thread.
"""
