"""Passes: the order in which units are unsharded, resharded and reduced."""
