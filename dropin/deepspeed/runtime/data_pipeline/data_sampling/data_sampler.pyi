from shardwise.data import CurriculumSampler as DeepSpeedDataSampler

__all__ = ["DeepSpeedDataSampler"]
