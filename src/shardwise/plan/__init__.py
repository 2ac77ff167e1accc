"""Plans of time: the operators and collectives of a dry run, and how long they take on a machine."""
