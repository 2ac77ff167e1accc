"""Lower bound of a rank's memory, from the formulas of the ZeRO stages.

By Rajbhandari et al., "ZeRO: Memory optimizations toward training trillion parameter models" (2020, section 3): the
parameters' elements without padding, sharded by the stage. Added are the largest pair of consecutive units unsharded,
and a gradient, send and receive buffer of one unit.
"""

from __future__ import annotations

from collections.abc import Iterable

from shardwise.memory import Category
from shardwise.zero.model import ShardedModel
from shardwise.zero.units.flat_param import FlatParamStorage
from shardwise.zero.units.peaks import gathered_together
from shardwise.zero.units.unit import Unit


def floor(
    model: ShardedModel, accumulation: int, planned: dict[Category, int], kept: dict[Category, int]
) -> dict[Category, int]:
    """Return the least bytes of each category; of activations, `planned`. `kept`: bytes that stay between steps."""
    sections = [section for unit in model.units for section in unit.sections]
    trained = [section for section in sections if section.layout.trainable and model.update is not None]
    stepped = sum(_numel(s) / s.domain.parts(s.levels.optimizer) for s in trained)
    padded = sum(s.master_stop - s.master_start for s in trained)
    adds_up = model.domain.world > 1 and accumulation > 1 and not model.plan.shard_gradients
    found = {
        Category.PARAMETERS: sum(_bytes(s, s.levels.parameters, s.layout.dtype.itemsize) for s in sections)
        + sum(_whole(unit.sections) // unit.second.world for unit in model.units if unit.second is not None),
        Category.GRADIENTS: sum(
            _bytes(s, 0 if adds_up else s.levels.optimizer, s.accumulate_dtype.itemsize) for s in trained
        ),
        Category.MASTER: sum(
            _bytes(s, s.levels.optimizer, s.master_dtype.itemsize) for s in trained if not s.master_is_parameter
        ),
        Category.OPTIMIZER: int(kept[Category.OPTIMIZER] * (stepped / padded if padded else 0)),
        Category.OTHER: kept[Category.OTHER],
        Category.GATHERED: _pair(model),
        Category.BUFFERS: max((_reduced(unit) for unit in model.units), default=0) if trained else 0,
    }
    return {category: min(size, found.get(category, size)) for category, size in planned.items()}


def _numel(section: FlatParamStorage) -> int:
    return sum(slot.numel for slot in section.layout.slots)


def _bytes(section: FlatParamStorage, level: int, itemsize: int) -> int:
    return -(-_numel(section) // section.domain.parts(level)) * itemsize


def _whole(sections: Iterable[FlatParamStorage]) -> int:
    return sum(_bytes(section, 0, section.layout.dtype.itemsize) for section in sections)


def _pair(model: ShardedModel) -> int:
    whole = {unit.index: _whole(unit.sections) for unit in model.units if unit.sharded}
    numels = {unit.index: unit.numel for unit in model.units}
    sets = gathered_together(model.order, whole, numels, model.plan.ahead)
    return max((sum(whole[index] for index in (*around, *coming)) for around, coming in sets), default=0)


def _reduced(unit: Unit) -> int:
    inner = unit.domain.dimensions[0]
    sent = 0 if inner.world == 1 else _whole(unit.trainable)
    return sent + inner.received(sent)
