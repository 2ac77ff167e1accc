"""The subcommands of `shardwise`, one file each.

A file here that defines `register(app)` becomes part of the command line; nothing else lists it. Modules are
imported on every call of `shardwise`, so torch and the rest of the package are imported inside the functions.
"""
