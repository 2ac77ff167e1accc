from shardwise.schedules import CurriculumScheduler as CurriculumScheduler

__all__ = ["CurriculumScheduler"]
