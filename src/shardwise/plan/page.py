"""Page on which settings are tried out: `shardwise plan --page`.

Memory is computed in the page, from the tables of `shardwise.plan.tables`. A Content-Security-Policy allows only the
page's own script and no requests.
"""

from __future__ import annotations

import base64
import gzip
import json
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from importlib import resources
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from shardwise._version import __version__
from shardwise.errors import ConfigError, UsageError
from shardwise.plan.architectures import SHAPES
from shardwise.plan.cluster import sheets
from shardwise.plan.models import micro_batch, named_model
from shardwise.plan.tables import Exporter
from shardwise.report.page import script_hash

PRECISIONS = ("bf16", "fp32")
DEFAULT: dict[str, Any] = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}
"""Configuration of all precisions, if none is given."""
_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def configurations(config: dict[str, Any] | None) -> dict[str, dict[str, Any]]:
    """Return the configurations of which the page has tables, by name: the given one, or AdamW in each precision."""
    if config is not None:
        return {"as configured": {key: value for key, value in config.items() if key not in _BATCH}}
    return {
        precision: {**DEFAULT, **({} if precision == "fp32" else {precision: {"enabled": True}})}
        for precision in PRECISIONS
    }


def tables_of(name: str, config: dict[str, Any], *, recompute: bool) -> tuple[int, dict[str, Any]]:
    """Return the number of parameters and the tables of a model of the command line, as JSON values.

    Raises UsageError for models that tables do not describe, and CommandLineError for unknown ones.
    """
    model = named_model(name, recompute)

    def batch(sequences: int, tokens: int) -> Any:
        return micro_batch(model, sequences, tokens, pipeline=False)

    try:
        return sum(parameter.numel() for parameter in model.parameters()), Exporter(model, config, batch).tables()
    except ConfigError as error:
        raise UsageError(
            f"{name}: tables cover data-parallel configurations for any number of ranks ({error}). Leave this key out "
            "of --config, or use `shardwise plan` without --page"
        ) from error
    except UsageError as error:
        raise UsageError(
            f"{name}: tables do not describe the dry runs of this model ({error}). Use `shardwise plan` without --page"
        ) from error


def page_models(names: Sequence[str], config: dict[str, Any] | None = None, workers: int = 1) -> dict[str, Any]:
    """Return what the page has to know of models: parameters, configurations and tables.

    Args:
        names: of the command line; models of `SHAPES` are planned with recomputation, too.
        config: None: AdamW in the precisions of `PRECISIONS`.
        workers: processes that run dry runs; 1: this one.

    Raises UsageError for models that tables do not describe.
    """
    configs = configurations(config)
    tasks = [
        (name, kind, again)
        for name in names
        for kind in configs
        for again in ((False, True) if name in SHAPES else (False,))
    ]
    found: dict[str, Any] = {name: {"parameters": 0, "configs": configs, "tables": {}} for name in names}
    with ProcessPoolExecutor(workers, get_context("spawn")) if workers > 1 else ThreadPoolExecutor(1) as pool:
        started = [pool.submit(tables_of, name, configs[kind], recompute=again) for name, kind, again in tasks]
        for (name, kind, again), one in zip(tasks, started, strict=True):
            found[name]["parameters"], tables = one.result()
            found[name]["tables"][kind + "/recompute" * again] = tables
    return found


def render(models: dict[str, dict[str, Any]]) -> str:
    """Return the page of models with their tables. Raises UsageError without jinja2."""
    try:
        from jinja2 import Environment
        from markupsafe import Markup
    except ImportError as error:
        raise UsageError(
            f'the page is made by the package "jinja2" ({error}); `pip install "shardwise[report]"`'
        ) from error
    own = resources.files(__package__)
    html, script, style = (own.joinpath(f"page.{suffix}").read_text("utf-8") for suffix in ("html", "js", "css"))
    style = resources.files("shardwise.report").joinpath("page.css").read_text("utf-8") + style
    known = sheets()
    card = "h100"
    content = {"models": models, "sheets": known.model_dump()}
    packed = gzip.compress(json.dumps(content, separators=(",", ":")).encode(), mtime=0)
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(html).render(
        policy=Markup(f"default-src 'none'; script-src {script_hash(script)}; style-src 'unsafe-inline'"),
        style=Markup(style),
        script=Markup(script),
        names=list(models),
        sheets=known,
        card=card,
        link="infiniband-ndr",
        device=f"{known.cards[card].memory / (1 << 30):.1f}",
        packed=base64.b64encode(packed).decode(),
        version=__version__,
    )


def write_page(models: dict[str, dict[str, Any]], out: Path) -> None:
    """Write the page. Raises UsageError if it cannot be written."""
    page = render(models)
    hidden = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        hidden.write_text(page, encoding="utf-8")
        os.replace(hidden, out)
    except OSError as error:
        hidden.unlink(missing_ok=True)
        raise UsageError(f"{out}: cannot be written: {error.strerror}. Name another file with --page") from error
