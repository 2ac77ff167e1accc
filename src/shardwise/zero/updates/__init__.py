"""Updates: how optimizers step what is sharded."""
