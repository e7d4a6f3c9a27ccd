"""Storage for checkpointers and stores: flows, databases, schemas, named queries."""
