"""The launcher: command line, hosts and devices, worker processes, output and shutdown."""
