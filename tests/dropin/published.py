"""Configurations as people publish them, what becomes of each, and the page that says so.

`configs/` has one file for each, in the form in which it is found; `configs/table.json` says where it comes from and
what is expected: it starts (with which stage, batch sizes on two ranks and precision), or it is refused because of
which keys. A feature that is built moves an expectation.

`python -m tests.dropin.published docs/reference/published-configs.md` writes the page's tables.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.config import Note, Resolution, accept, assume, resolve
from shardwise.config.checks import precision_of
from shardwise.errors import ConfigError
from tests.harness.pages import Page

DIRECTORY = Path(__file__).parent / "configs"
WORLD = 2


@dataclass(frozen=True)
class Published:
    """One file.

    Attributes:
        name: of the file.
        style: whose files look like this.
        starts: stage, batch sizes and precision that it runs with; None if it is refused.
        refused: paths of the keys because of which it is refused.
        thorough: other files, or tests of the sections, have its sections as well.
    """

    name: str
    style: str
    starts: dict[str, Any] | None
    refused: tuple[str, ...]
    thorough: bool

    @property
    def path(self) -> Path:
        return DIRECTORY / f"{self.name}.json"

    @property
    def through_trainer(self) -> bool:
        """Whether it leaves to a trainer what it cannot be judged without."""
        _, assumed = assume(accept(self.path))
        return any("is assumed here" in note.reason and not note.reason.startswith("absent") for note in assumed)


def published() -> list[Published]:
    """Every file, by name."""
    table = json.loads((DIRECTORY / "table.json").read_text())
    return [
        Published(name, row["style"], row.get("starts"), tuple(row.get("refused", ())), row.get("thorough", False))
        for name, row in table.items()
    ]


def facts_of(resolution: Resolution) -> dict[str, Any]:
    """What the table says of a configuration that starts."""
    config = resolution.config
    batch = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    return {
        "stage": config.zero_optimization.stage,
        **{name: getattr(config, name) for name in batch},
        "precision": precision_of(config),
    }


def page() -> str:
    """Return Markdown: what starts, and what is refused and why."""
    starting, refused = [], []
    for entry in published():
        facts, assumed = assume(accept(entry.path))
        try:
            found = resolve(accept(entry.path), world_size=WORLD, facts=facts)
        except ConfigError as error:
            refused.append(f"| `{entry.name}` | {_cell(entry.style)} | {_reasons(error)} |")
        else:
            starting.append(f"| `{entry.name}` | {_cell(entry.style)} | {_row(entry, found, assumed)} |")
    return "\n".join(
        [
            f"{len(starting)} start, {len(refused)} are refused.\n",
            "### These start\n",
            f"| File | As in | Stage | Precision | Batch on {WORLD} ranks | No effect | Warnings |",
            "|---|---|---:|---|---|---:|---|",
            *starting,
            "\n### These are refused\n",
            "| File | As in | Key: what is missing; what to do |\n|---|---|---|",
            *refused,
            "",
        ]
    )


def _row(entry: Published, found: Resolution, assumed: list[Note]) -> str:
    # The table's numbers, which the tests find at the start: a trainer may fill in another stage than the default.
    facts = entry.starts or {}
    batch = "{train_batch_size}={train_micro_batch_size_per_gpu}x{gradient_accumulation_steps}x" + str(WORLD)
    batch = batch.format(**facts)
    if any("batch" in note.path for note in assumed):
        batch = "the trainer's"
    warnings = ", ".join(_short(warning) for warning in found.warnings)
    return f"{facts['stage']} | {facts['precision']} | {batch} | {len(found.no_effect)} | {warnings}"


def _short(warning: str) -> str:
    """The key of a warning, marked if the key is deprecated."""
    path, _, text = warning.partition(": ")
    return f"`{_cell(path)}`{' (deprecated)' if 'deprecated' in text else ''}"


def _reasons(error: ConfigError) -> str:
    """The keys of a refused file by what is said of them."""
    found: dict[str, list[str]] = {}
    for problem in error.problems:
        text = problem.message.removeprefix("this version does not have ")
        what, _, instead = text.partition("; ")
        found.setdefault(instead or what, []).append(f"`{problem.path}`{f': {what}' if instead else ''}")
    return "<br>".join(f"{', '.join(keys)}; {_cell(text)}" for text, keys in found.items())


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


PAGE = Page("published-configs.md", "published", "tests.dropin.published", page)

if __name__ == "__main__":
    PAGE.write()
