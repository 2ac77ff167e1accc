"""Units: parameters that are unsharded and reduced together, their layout, and their ranks."""
