"""Modules that are made of the table: identity, laziness, absent names, assignments."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import pickle
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

import shardwise
from shardwise.errors import UsageError
from shardwise.launch.detect import installed


def run(code: str, *path: Path) -> subprocess.CompletedProcess[str]:
    """Run a program with directories in front of its path."""
    lines = "".join(f"sys.path.insert(0, {str(entry)!r})\n" for entry in path)
    return subprocess.run([sys.executable, "-c", f"import sys\n{lines}{code}"], capture_output=True, text=True)


def package(directory: Path, version: str, source: str = "") -> Path:
    """Make a package `deepspeed` with metadata."""
    (directory / "deepspeed").mkdir(parents=True)
    (directory / "deepspeed" / "__init__.py").write_text(source or f"__version__ = {version!r}\n")
    info = directory / f"deepspeed-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: deepspeed\nVersion: {version}\n")
    return directory


@pytest.mark.usefixtures("installed")
class TestInstalled:
    def test_classes_are_pickled_by_their_own_names(self) -> None:
        from deepspeed.ops.adam import FusedAdam
        from deepspeed.runtime.engine import DeepSpeedEngine

        for cls in (DeepSpeedEngine, FusedAdam):
            data = pickle.dumps(cls)
            assert pickle.loads(data) is cls and b"shardwise" in data

    def test_star_imports_bring_what_can_be_imported(self) -> None:
        names: dict[str, object] = {}
        exec("from deepspeed.comm import *", names)
        assert names["all_reduce"] is shardwise.comm.all_reduce
        assert "TorchBackend" in names and "cdb" not in names

    def test_unknown_names_are_ordinary_errors(self) -> None:
        import deepspeed

        with pytest.raises(ImportError, match="cannot import name 'nonsense'"):
            from deepspeed import nonsense  # noqa: F401
        with pytest.raises(ModuleNotFoundError, match=r"No module named 'deepspeed\.nonsense'"):
            importlib.import_module("deepspeed.nonsense")
        with pytest.raises(AttributeError, match=r"module 'deepspeed' .* has no attribute 'nonsense'"):
            _ = deepspeed.nonsense

    def test_find_spec_answers_truthfully(self) -> None:
        assert importlib.util.find_spec("deepspeed") is not None
        assert importlib.util.find_spec("deepspeed.moe.layer") is not None
        assert importlib.util.find_spec("deepspeed.ops.deepspeed4science") is None
        assert importlib.util.find_spec("deepspeed.nonsense") is None
        with pytest.raises(ModuleNotFoundError):  # as of any module whose parent is missing
            importlib.util.find_spec("deepspeed.ops.deepspeed4science.evoformer_attn")

    def test_assignments_reach_the_library(self) -> None:
        from deepspeed.runtime.zero import partition_parameters
        from deepspeed.utils import groups

        from shardwise_deepspeed import building

        original = building.zero_wrapper_for_fp_tensor_constructor
        partition_parameters.zero_wrapper_for_fp_tensor_constructor = len
        assert building.zero_wrapper_for_fp_tensor_constructor is len
        del partition_parameters.zero_wrapper_for_fp_tensor_constructor
        assert partition_parameters.zero_wrapper_for_fp_tensor_constructor is original

        class Unit:
            def get_model_parallel_world_size(self) -> int:
                return 4

        groups.mpu = Unit()
        assert groups.get_model_parallel_world_size() == groups.get_tensor_parallel_world_size() == 4
        groups.mpu = None
        assert groups.get_model_parallel_world_size() == 1
        with mock.patch("deepspeed.utils.groups.mpu", Unit()):
            assert groups.get_model_parallel_world_size() == 4
        assert groups.mpu is None

    def test_the_log_of_collectives_can_be_replaced(self) -> None:
        import deepspeed.comm as dist

        held = shardwise.comm.comms_logger.comms_dict
        dist.comms_logger.comms_dict = {}
        assert shardwise.comm.comms_logger.comms_dict is not held
        shardwise.comm.comms_logger.comms_dict = held

    def test_metadata_answers(self) -> None:
        import deepspeed

        assert importlib.metadata.version("deepspeed") == deepspeed.__version__ == "0.19.8+shardwise"
        assert importlib.metadata.metadata("deepspeed")["Name"] == "deepspeed"
        assert importlib.metadata.packages_distributions()["deepspeed"] == ["deepspeed"]
        assert importlib.metadata.version("torch") == torch.__version__
        with pytest.raises(importlib.metadata.PackageNotFoundError):
            importlib.metadata.version("deepspeed-nonsense")

    def test_installing_twice_is_installing_once(self) -> None:
        path = list(sys.meta_path)
        shardwise.install_as_deepspeed()
        import deepspeed  # noqa: F401

        shardwise.install_as_deepspeed()
        assert sys.meta_path == path


@pytest.mark.usefixtures("plain")
@pytest.mark.skipif(bool(installed()), reason="a package deepspeed is installed")
def test_without_it_there_is_none() -> None:
    assert importlib.util.find_spec("deepspeed") is None


@pytest.mark.usefixtures("plain")
def test_after_deepspeed_itself_it_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(package(tmp_path, "0.16.0")))
    importlib.import_module("deepspeed")
    with pytest.raises(UsageError, match=r"DeepSpeed 0\.16\.0 has been imported already, from .*__init__\.py"):
        shardwise.install_as_deepspeed()


def test_what_it_hides_is_said(tmp_path: Path) -> None:
    directory = package(tmp_path, "0.16.0")
    done = run(
        "import shardwise; shardwise.install_as_deepspeed()\n"
        "import deepspeed, importlib.metadata as m; print(deepspeed.__version__, m.version('deepspeed'))",
        directory,
    )
    assert done.stdout == "0.19.8+shardwise 0.19.8+shardwise\n", done.stderr
    assert f"DeepSpeed 0.16.0 at {directory / 'deepspeed'} is hidden" in done.stderr


def test_the_distribution_turns_itself_into_the_root() -> None:
    directory = Path(__file__).parents[2] / "dropin"
    done = run(
        "import deepspeed, shardwise\n"
        "from deepspeed.runtime.engine import DeepSpeedEngine\n"
        "shardwise.install_as_deepspeed()\n"
        "assert DeepSpeedEngine is deepspeed.DeepSpeedEngine\n"
        "import importlib; importlib.reload(deepspeed)\n"
        "print(deepspeed.__file__, [n for n in vars(deepspeed) if not n.startswith('__')])",
        directory,
    )
    assert done.stdout.startswith(f"{directory / 'deepspeed' / '__init__.py'} "), done.stderr


def test_it_is_listed_once(tmp_path: Path) -> None:
    count = (
        "import shardwise; shardwise.install_as_deepspeed(); import importlib.metadata as m\n"
        "print([d.version for d in m.distributions() if d.metadata['Name'] == 'deepspeed'])"
    )
    assert run(count).stdout == "['0.19.8+shardwise']\n"
    source = (Path(__file__).parents[2] / "dropin" / "deepspeed" / "__init__.py").read_text()
    ours = package(tmp_path, "0.19.8+shardwise", source)
    assert run(count, ours).stdout == "['0.19.8+shardwise']\n"


def test_importing_costs_no_torch() -> None:
    code = "import shardwise; shardwise.install_as_deepspeed(); import deepspeed; print('torch' in sys.modules)"
    assert run(code).stdout == "False\n"


@pytest.mark.usefixtures("installed")
def test_parameters_get_their_attributes_with_the_first_engine() -> None:
    import deepspeed

    assert "ds_numel" not in vars(torch.nn.Parameter)
    model = torch.nn.Linear(2, 1)
    config = {"train_batch_size": 2, "zero_optimization": {"stage": 3}}
    engine = deepspeed.initialize(model=model, model_parameters=[], config=config)[0]
    assert (model.weight.ds_numel, model.weight.partition_numel()) == (2, 2)
    assert not hasattr(torch.nn.Parameter(), "ds_numel")
    engine.destroy()
