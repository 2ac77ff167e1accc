"""Runs a function on several Gloo ranks in long-lived worker processes (see `tests.harness.pool`)."""

from tests.harness.pool import RankFailure, RankTimeout, close_pool, run_ranks, worker_pids

__all__ = ["RankFailure", "RankTimeout", "close_pool", "run_ranks", "worker_pids"]
