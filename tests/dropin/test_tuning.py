"""DeepSpeed's names of the autotuner."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from shardwise.errors import UsageError
from shardwise_deepspeed.launcher import job_of
from tests.harness.tuning import calls, candidate, describe
from tests.launch.test_tuning import place

__all__ = ["place"]

ARGS = argparse.Namespace(user_script="train.py", user_args=["--deepspeed_config", "ds.json"], autotuning="tune")


def test_the_option_of_the_command() -> None:
    assert job_of(["--autotuning", "run", "train.py"]).autotuning == "run"
    assert job_of(["--autotuning", "", "train.py"]).autotuning is None


@pytest.mark.usefixtures("installed")
def test_the_class(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from deepspeed.autotuning import Autotuner
    from deepspeed.launcher.runner import run_autotuning

    describe(place, candidate(2), candidate(16))
    tuner = Autotuner(ARGS, {"localhost": [0, 1]})
    tuner.tune()
    assert calls(place)[0][:2] == ["--nproc", "2"] and "--local-rank" in calls(place)[0]
    tuner.print_tuning_results()
    assert "z1_mbs16_gas1" in capsys.readouterr().out
    tuner.write_optimal_config()
    assert (place / "autotuning_results" / "ds_config_optimal.json").exists()
    run_autotuning(ARGS, {"localhost": [0]})
    assert "z1_mbs16_gas1" in capsys.readouterr().out
    tuner.run_after_tuning()  # the script is empty
    describe(place, candidate(2))
    with pytest.raises(UsageError, match="no candidate could be measured"):
        Autotuner(ARGS, {}).tune()
    with pytest.raises(UsageError, match="user_script is missing"):
        Autotuner(argparse.Namespace(), {})
