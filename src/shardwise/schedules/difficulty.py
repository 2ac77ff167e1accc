"""Difficulty of a curriculum as a function of the step: linear, root, discrete, or a function of the script.

Paper: Li et al., "The Stability-Efficiency Dilemma: Investigating Sequence Length Warmup" (2021).
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping
from typing import Any

from shardwise.config.argument_models import checked
from shardwise.config.schema.data import Curriculum, DifficultySchedule
from shardwise.errors import ConfigError, UsageError

Difficulty = int | float


def difficulty_at(step: int, settings: Curriculum, schedule: DifficultySchedule) -> Difficulty:
    """Return the difficulty in a step, from 1, of a checked schedule that is not "custom"."""
    if settings.schedule_type == "fixed_discrete":
        assert schedule.difficulty is not None and schedule.max_step is not None
        found = schedule.difficulty[bisect.bisect_left(schedule.max_step, step)]
        return int(found) if found == int(found) else found
    least, most, total = settings.min_difficulty, settings.max_difficulty, schedule.total_curriculum_step
    assert least is not None and most is not None and total is not None and schedule.difficulty_step is not None
    if step >= total:
        return most
    if settings.schedule_type == "fixed_linear":
        grown = least + (most - least) * step // total
    else:
        assert schedule.root_degree is not None
        grown = int(least + (most - least) * (step / total) ** (1 / schedule.root_degree))
    return min(most, max(least, grown - grown % schedule.difficulty_step))


class CurriculumScheduler:
    """Schedule of a difficulty.

    Args:
        config: `min_difficulty`, `max_difficulty`, `schedule_type` and `schedule_config`, as in the section
            `curriculum_learning`; other keys of the section are not read.

    Raises:
        ConfigError: a key is missing or wrong.

    >>> schedule = {"total_curriculum_step": 4, "difficulty_step": 8}
    >>> config = {"min_difficulty": 8, "max_difficulty": 64, "schedule_type": "fixed_linear"}
    >>> scheduler = CurriculumScheduler({**config, "schedule_config": schedule})
    >>> [scheduler.get_difficulty(step) for step in range(1, 6)]
    [16, 32, 48, 64, 64]
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        at = "CurriculumScheduler: {}"
        given = {name: config[name] for name in Curriculum.model_fields if name in config}
        self._settings = checked(Curriculum, given, at, "the curriculum")
        steps = config.get("schedule_config", {})
        self._schedule = checked(DifficultySchedule, steps, at.format("schedule_config.{}"), "the schedule")
        for name, text, kind in self._settings.incomplete(self._schedule, lambda name: f"`{name}`"):
            raise kind(f"{at.format(name)}: {text}")
        self.custom: Callable[[int], Difficulty] | None = None
        self._current: Difficulty = self._settings.min_difficulty or 0

    def set_custom_get_difficulty(self, schedule_function: Callable[[int], Difficulty]) -> None:
        """Set the function of the step (from 1) that returns the difficulty, for schedule_type "custom"."""
        if self._settings.schedule_type != "custom":
            raise ConfigError(
                f'a function of the difficulty needs schedule_type "custom", which is "{self._settings.schedule_type}"'
            )
        self.custom = schedule_function

    def get_difficulty(self, global_steps: int) -> Difficulty:
        """Return the difficulty in a step, from 1. Raises UsageError if the function of "custom" is not set."""
        if self._settings.schedule_type != "custom":
            return difficulty_at(global_steps, self._settings, self._schedule)
        if self.custom is None:
            raise UsageError(
                'the curriculum has schedule_type "custom" and no function yet; call '
                "engine.set_custom_curriculum_learning_schedule() before the first batch"
            )
        return self.custom(global_steps)

    def update_difficulty(self, global_steps: int) -> Difficulty:
        """Set and return the current difficulty: that of a step."""
        self._current = self.get_difficulty(global_steps)
        return self._current

    def get_current_difficulty(self) -> Difficulty:
        """Return the current difficulty."""
        return self._current

    def set_current_difficulty(self, difficulty: Difficulty) -> None:
        """Set the current difficulty until the next update."""
        self._current = difficulty

    def get_state(self) -> dict[str, Any]:
        """Return the current difficulty as JSON types."""
        return {"current_difficulty": self._current}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restore a state."""
        self._current = state["current_difficulty"]
