"""DeepSpeed's monitors without an engine, and one class for each service."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

from typing_extensions import override

from shardwise import monitor
from shardwise.comm.api import get_rank
from shardwise.config.schema.base import ConfigSection, section
from shardwise.config.schema.observe import Comet, CSVMonitor, JSONLMonitor, MLflow, TensorBoard, WandB


class DeepSpeedMonitorConfig(ConfigSection):
    """The sections of monitors."""

    tensorboard: TensorBoard = section(TensorBoard, "TensorBoard.")
    wandb: WandB = section(WandB, "Weights & Biases.")
    csv_monitor: CSVMonitor = section(CSVMonitor, "CSV files.")
    comet: Comet = section(Comet, "Comet.")
    mlflow: MLflow = section(MLflow, "MLflow.")
    jsonl_monitor: JSONLMonitor = section(JSONLMonitor, "JSON lines.")


def get_monitor_config(param_dict: Mapping[str, Any]) -> DeepSpeedMonitorConfig:
    """Return the monitors' sections of a configuration."""
    found = {name: param_dict[name] for name in DeepSpeedMonitorConfig.model_fields if name in param_dict}
    return DeepSpeedMonitorConfig.model_validate(found)


class Monitor(ABC):
    """Base class of scripts' own monitors."""

    @abstractmethod
    def __init__(self, monitor_config: Any) -> None:
        self.monitor_config = monitor_config

    @abstractmethod
    def write_events(self, event_list: Iterable[Any]) -> None:
        """Write (name, value, step) triples."""


class _OfService(Monitor):
    """A monitor of one service; rank 0 writes."""

    _section = ""

    def __init_subclass__(cls, section: str | None = None) -> None:
        cls._section = section or cls._section

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        sections = SimpleNamespace(**{self._section: config})
        monitor.check_packages(sections)
        self._writer = monitor.Monitor(sections, get_rank())
        self.enabled = self._writer.enabled

    @override
    def write_events(self, event_list: Iterable[Any]) -> None:
        self._writer.write_events(event_list)


class TensorBoardMonitor(_OfService, section="tensorboard"):
    """TensorBoard."""


class WandbMonitor(_OfService, section="wandb"):
    """Weights & Biases."""


class csvMonitor(_OfService, section="csv_monitor"):
    """CSV files."""


class CometMonitor(_OfService, section="comet"):
    """Comet."""


class _MLflowMonitor(_OfService, section="mlflow"):
    """MLflow."""


class _JSONLMonitor(_OfService, section="jsonl_monitor"):
    """JSON lines."""


class MonitorMaster(Monitor):
    """All enabled services (`tb_monitor`, `wandb_monitor`, `csv_monitor`, `comet_monitor`) of `get_monitor_config`, or
    of an object with such sections. `enabled` is True if one service is.
    """

    def __init__(self, monitor_config: Any) -> None:
        super().__init__(monitor_config)
        self.tb_monitor = TensorBoardMonitor(monitor_config.tensorboard)
        self.wandb_monitor = WandbMonitor(monitor_config.wandb)
        self.csv_monitor = csvMonitor(monitor_config.csv_monitor)
        self.comet_monitor = CometMonitor(monitor_config.comet)
        others = [make(getattr(monitor_config, make._section, None)) for make in (_MLflowMonitor, _JSONLMonitor)]
        self._all = [self.tb_monitor, self.wandb_monitor, self.csv_monitor, self.comet_monitor, *others]
        self.enabled = any(member.enabled for member in self._all)

    def write_events(self, event_list: Iterable[Any]) -> None:
        """Write events to each service."""
        events = list(event_list)
        for member in self._all:
            member.write_events(events)
