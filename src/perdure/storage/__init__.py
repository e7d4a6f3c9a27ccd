"""The ground under checkpointers and stores: flows, databases, migrations, named queries."""
