"""Profiles: a document under a schema, changed by patches."""
