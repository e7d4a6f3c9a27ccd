"""Storage for checkpointers and stores: flows, databases, migrations, named queries."""
