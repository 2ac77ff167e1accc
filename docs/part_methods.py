"""Extension of griffe: documents methods of the engine's parts as its own, and fences examples in docstrings."""

from __future__ import annotations

import copy
import re
from typing import Any

import griffe

_OF_PART = re.compile(r"of_part\(['\"]\w+['\"], (\w+)\.(\w+)\)")
_EXAMPLE = re.compile(r"^( *)>>> .*(?:\n\1(?!\s*$).+)*", re.MULTILINE)


class PartMethods(griffe.Extension):
    """Replaces each attribute `name = of_part("part", Class.method)` of the engine by the method."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Put each example of a docstring into a code block, because Markdown reads `>>>` as quotations."""
        if obj.docstring:
            obj.docstring.value = _EXAMPLE.sub(r"\1```pycon\n\g<0>\n\1```", obj.docstring.value)

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        """Replace them, once all modules have been read."""
        engine = pkg["engine.engine.Engine"]
        for name, member in list(engine.members.items()):
            found = _OF_PART.fullmatch(str(member.value)) if member.is_attribute else None
            if found:
                method = copy.copy(pkg.modules_collection[engine.module.resolve(found[1])][found[2]])
                method.name, method.parent = name, engine
                engine.members[name] = method
