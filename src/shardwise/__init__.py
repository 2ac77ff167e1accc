"""Train PyTorch models that do not fit one device."""
