"""What the engine process says of its steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

from agentspec.serving_patch.cost_model import StepTimer
from agentspec.sidecar.engine import StepTiming


@dataclass
class Request:
    num_tokens: int
    sampling_params: object = field(default_factory=lambda: SimpleNamespace(temperature=0.0))


def timer(*readings: float) -> StepTimer:
    return StepTimer(iter(readings).__next__)


def test_step_is_taken_apart_into_rows_drafts_and_prompts() -> None:
    steps = timer(10.0, 10.25)
    requests = {"a": Request(100), "b": Request(50), "c": Request(900)}
    steps.start()

    timing = steps.finish({"a": 4, "b": 1, "c": 512}, {"a": [1, 2, 3]}, requests)

    assert timing == StepTiming(
        duration_ms=250.0,
        num_decode_rows=2,
        num_draft_tokens=3,
        num_draft_rows=1,
        num_prefill_tokens=512,
        num_context_tokens=150,
    )


def test_rows_at_a_temperature_are_counted() -> None:
    steps = timer(0.0, 1.0)
    hot = Request(10, SimpleNamespace(temperature=0.7))
    steps.start()

    timing = steps.finish({"a": 1, "b": 1}, {}, {"a": hot, "b": Request(10)})

    assert timing is not None
    assert timing.num_sampled_rows == 1


def test_request_that_is_gone_still_counts_as_a_row() -> None:
    steps = timer(0.0, 1.0)
    steps.start()

    assert StepTiming(1000.0, num_decode_rows=1) == steps.finish({"a": 1}, {}, {})


def test_step_that_computes_nothing_is_not_measured() -> None:
    steps = timer(0.0, 1.0)
    steps.start()

    assert steps.finish({}, {}, {}) is None


def test_step_whose_start_was_missed_is_not_measured() -> None:
    steps = timer(0.0, 1.0)
    steps.start()
    steps.finish({"a": 1}, {}, {})

    assert steps.finish({"a": 1}, {}, {}) is None
