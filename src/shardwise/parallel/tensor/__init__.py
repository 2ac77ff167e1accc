"""Tensor parallelism: linear layers and embeddings sharded over ranks."""
