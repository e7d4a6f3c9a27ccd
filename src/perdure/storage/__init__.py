"""Storage layer of checkpointers and stores: databases, schemas, locks and SQL requests."""
