from typing import Any, NoReturn

from typing_extensions import deprecated

from shardwise.data import DataAnalyzer as DataAnalyzer
from shardwise.data import DistributedDataAnalyzer as DistributedDataAnalyzer

__all__ = ["DataAnalyzer", "Dist", "DistributedDataAnalyzer"]

@deprecated('it is an inner part of DeepSpeed: here `shardwise.data` has samplers, analyzers and indexed datasets, and an engine reads the section data_efficiency')
class Dist:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
