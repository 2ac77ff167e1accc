"""Subcommands of `shardwise`: each file that defines `register(app)` is part of the command line. Modules are imported
on every call of `shardwise`; torch and the rest of the package are imported inside the functions.
"""
