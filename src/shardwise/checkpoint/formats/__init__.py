"""Formats of weights and of training state: one reader (`WeightsReader`) and one writer (`WeightsWriter`) for each."""
