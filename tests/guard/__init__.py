"""Stored hashes of losses, gradients and parameters of many settings: a change of code that is to change no bit."""
