"""Adapters: small objects with DeepSpeed's interface."""
