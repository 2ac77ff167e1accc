"""`python -m shardwise.launch` is the command `shardwise`."""

from shardwise.launch.cli import main

main()
