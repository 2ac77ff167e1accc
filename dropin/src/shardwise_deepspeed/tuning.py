"""DeepSpeed's class of the autotuner, over the search of `shardwise run --autotuning`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence

from shardwise.errors import UsageError
from shardwise.launch.job import check
from shardwise.launch.start import run_job
from shardwise.launch.tuning import Tuning
from shardwise_deepspeed.launcher import defaults, job_from


class Autotuner:
    """A search for the configuration of a command line.

    Args:
        args: options of the command `deepspeed`; absent ones have their defaults.
        active_resources: slots of each machine.

    Raises CommandLineError for wrong options, ConfigError for a wrong section `autotuning`.
    """

    def __init__(self, args: argparse.Namespace, active_resources: Mapping[str, Sequence[int]]) -> None:
        given = {**defaults(), **vars(args), "autotuning": ""}
        if given["user_script"] is None:
            raise UsageError("Autotuner(args): args.user_script is missing; it is the script that is run")
        if given["num_gpus"] == -1 and len(active_resources) == 1:
            given["num_gpus"] = len(next(iter(active_resources.values())))
        job = job_from(argparse.Namespace(**given))
        check(job)
        self._search = Tuning(job)

    def tune(self) -> None:
        """Run the candidates, and write their results. Raises UsageError if none could be measured."""
        if self._search.tune():
            raise UsageError("Autotuner.tune(): no candidate could be measured; the reasons are above")

    def print_tuning_results(self) -> None:
        """Print the table of results."""
        self._search.print_results()

    def write_optimal_config(self) -> None:
        """Write `ds_config_optimal.json` and `cmd_optimal.txt`. Raises LaunchError before a successful `tune`."""
        self._search.write_optimal()

    def run_after_tuning(self) -> None:
        """Run the job with the best configuration. Raises UsageError if the job fails."""
        code = run_job(self._search.best_job())
        if code:
            raise UsageError(f"Autotuner.run_after_tuning(): the job ended with exit code {code}")


def run_autotuning(args: argparse.Namespace, active_resources: Mapping[str, Sequence[int]]) -> None:
    """Search, and with `args.autotuning` "run" run the job with the best configuration."""
    tuner = Autotuner(args, active_resources)
    tuner.tune()
    tuner.print_tuning_results()
    if args.autotuning == "run":
        tuner.run_after_tuning()
