"""Extension of griffe: methods that the engine has from its parts are documented as its own."""

from __future__ import annotations

import copy
import re
from typing import Any

import griffe

_OF_PART = re.compile(r"of_part\(['\"]\w+['\"], (\w+)\.(\w+)\)")


class PartMethods(griffe.Extension):
    """Replaces each attribute `name = of_part("part", Class.method)` of the engine by the method."""

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        """Replace them, once all modules have been read."""
        engine = pkg["engine.engine.Engine"]
        for name, member in list(engine.members.items()):
            found = _OF_PART.fullmatch(str(member.value)) if member.is_attribute else None
            if found:
                method = copy.copy(pkg.modules_collection[engine.module.resolve(found[1])][found[2]])
                method.name, method.parent = name, engine
                engine.members[name] = method
