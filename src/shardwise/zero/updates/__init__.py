"""Updates: optimizer steps of sharded parameters."""
