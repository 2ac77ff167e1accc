"""Pictures show simulated and measured times."""

from __future__ import annotations

import json
import re
from xml.etree import ElementTree

import pytest

from shardwise.errors import UsageError
from shardwise.pipeline import (
    Action,
    Op,
    Span,
    make_schedule,
    simulate,
    svg,
    text_chart,
    trace_events,
    with_communication,
    with_sharding,
)
from shardwise.pipeline.actions import COMPUTATIONS

SVG = "{http://www.w3.org/2000/svg}"
MEASURED = [
    Span(1, Action(Op.FORWARD, 1, 0), 0.0031, 0.0042),
    Span(0, Action(Op.FORWARD, 0, 0), 0.0020, 0.0030),
    Span(0, Action(Op.SEND_FORWARD, 0, 0), 0.0030, 0.0031),
    Span(1, Action(Op.BACKWARD, 1, 0), 0.0042, 0.0060),
    Span(0, Action(Op.STEP), 0.0070, 0.0071),
]


def spans(name: str, ranks: int, micro_batches: int) -> list[Span]:
    schedule = with_sharding(with_communication(make_schedule(name, ranks, micro_batches)), "run")
    return [span for spans in simulate(schedule).spans for span in spans]


def test_text_of_one_stage_on_a_rank_and_of_two() -> None:
    first, second = "F0 F1 ......B0--- F2 B1--- ...B2---", "...F0 B0--- F1 B1--- F2 B2---"
    assert text_chart(spans("1f1b", 2, 3)) == f"rank 0 {first}\nrank 1 {second}\n"
    first, second = "F0 ......f0 i0 w0 ...B0---", "...F0 f0 ......i0 I0 w0 W0"
    assert text_chart(spans("zbv", 2, 1)) == f"rank 0 {first}\nrank 1 {second}\n"


def test_text_of_measured_times_has_the_given_width() -> None:
    assert text_chart(MEASURED, columns=40) == (
        "rank 0 F0-------\n"  #
        "rank 1 ...........F0-------- B0---------------\n"
    )


@pytest.mark.parametrize("name", ["1f1b", "zbv"])
def test_svg_has_a_box_for_each_computation(name: str) -> None:
    root = ElementTree.fromstring(svg(spans(name, 4, 12), "4 ranks & 12 micro-batches", "ms"))
    boxes = root.findall(f"{SVG}g")
    shown = [span for span in spans(name, 4, 12) if span.action.op in COMPUTATIONS]
    titles = [box.findtext(f"{SVG}title") for box in boxes]
    assert sorted(titles) == sorted(f"{s.action}: {s.start:g} to {s.end:g} ms" for s in shown)
    labels = [box.findtext(f"{SVG}text") for box in boxes]
    assert labels == [str(re.search(r"micro-batch (\d+)", title or "").group(1)) for title in titles]
    texts = [text.text for text in root.findall(f"{SVG}text")]
    assert "4 ranks & 12 micro-batches" in texts and "rank 3" in texts and "forward" in texts
    for box in boxes:
        rect = box.find(f"{SVG}rect")
        assert rect is not None and float(rect.get("x")) + float(rect.get("width")) <= float(root.get("width"))


def test_trace_events_have_all_actions_in_microseconds() -> None:
    events = json.loads(json.dumps(trace_events(MEASURED)))
    assert [event["args"]["name"] for event in events if event["ph"] == "M"] == ["rank 0", "rank 1"]
    complete = [event for event in events if event["ph"] == "X"]
    assert complete[0] == {
        "name": "forward 0",
        "cat": "compute",
        "ph": "X",
        "ts": 3100.0,
        "dur": 1100.0,
        "pid": 1,
        "tid": 0,
        "args": {"stage": 1, "micro_batch": 0},
    }
    assert [(event["name"], event["cat"]) for event in complete[2:]] == [
        ("send forward 0", "pipeline"),
        ("backward 0", "compute"),
        ("step", "pipeline"),
    ]


def test_spans_without_a_computation_are_refused() -> None:
    with pytest.raises(UsageError, match="no forward or backward in the spans takes time"):
        svg(MEASURED[-1:])
