"""Start jobs: the command line, hosts and devices, processes, their output and their end."""
