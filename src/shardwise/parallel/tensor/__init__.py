"""Tensor parallelism: matrices that ranks have in parts."""
