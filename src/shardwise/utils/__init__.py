"""Helpers for training scripts."""
