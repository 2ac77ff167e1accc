"""Plans before a run: models, time of a step, the best setting, candidates of the autotuner, and a page of plans."""
