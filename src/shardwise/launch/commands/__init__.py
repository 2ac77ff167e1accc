"""The subcommands of `shardwise`, one file each.

Each file that defines `register(app)` is part of the command line, without any other list. Modules are
imported on every call of `shardwise`, so torch and the rest of the package are imported inside the functions.
"""
