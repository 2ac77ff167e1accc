"""Units: which parameters are gathered and reduced together, where they lie, and over which ranks."""
