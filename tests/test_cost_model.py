"""What the engine process says of its steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.reference import step_request

from agentspec.serving_patch.cost_model import CostModelFile, StepTimer, find_intensity, measure_cpu_intensity
from agentspec.sidecar.budget import BudgetOptions
from agentspec.sidecar.engine import Engine, StepTiming
from agentspec.sidecar.grammars import CHAT


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


@pytest.mark.parametrize(
    ("name", "intensity"),
    [
        ("NVIDIA A100-SXM4-80GB", 153),
        ("NVIDIA H100 80GB HBM3", 295),
        ("NVIDIA H200", 206),
        ("NVIDIA L4", 403),
        ("NVIDIA L40S", 419),
        ("AMD Instinct MI300X OAM", 247),
    ],
)
def test_intensity_of_an_accelerator_is_that_of_its_data_sheet(name: str, intensity: int) -> None:
    found = find_intensity(name)

    assert found is not None
    assert intensity == round(found)


def test_unknown_accelerator_has_none() -> None:
    assert find_intensity("NVIDIA H2000 Super") is None


def test_intensity_of_this_machine_is_measured() -> None:
    assert 1 <= measure_cpu_intensity() < 10_000


def new_engine() -> Engine:
    return Engine([b"a"], CHAT, budget=BudgetOptions("goodput"))


def taught() -> Engine:
    engine = new_engine()
    engine.step(replace(step_request([]), timing=StepTiming(40.0, 4)))
    return engine


def test_cost_model_is_kept_from_one_start_to_the_next(tmp_path: Path) -> None:
    file = CostModelFile(tmp_path / "cost", "h200 | model")
    file.save(taught())
    engine = new_engine()

    assert file.load(engine)
    assert engine.predict_step_ms(StepTiming(0.0, 4)) == pytest.approx(40.0, rel=0.01)
    assert ["cost"] == [path.name for path in tmp_path.iterdir()]


@pytest.mark.parametrize(
    "damage", [lambda kept: kept[:-3], lambda kept: b"junk", lambda kept: kept[:-9] + b"123456789"]
)
def test_damaged_cost_model_is_ignored_with_one_warning(
    damage: Callable[[bytes], bytes], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "cost"
    file = CostModelFile(path, "h200")
    file.save(taught())
    path.write_bytes(damage(path.read_bytes()))

    assert not file.load(new_engine())
    assert ["WARNING"] == [record.levelname for record in caplog.records]


def test_cost_model_of_another_machine_is_ignored_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    CostModelFile(tmp_path / "cost", "h100").save(taught())

    assert not CostModelFile(tmp_path / "cost", "h200").load(new_engine())
    assert ["WARNING"] == [record.levelname for record in caplog.records]


def test_missing_file_is_no_matter(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert not CostModelFile(tmp_path / "cost", "h200").load(new_engine())
    assert [] == caplog.records


def test_engine_that_has_measured_nothing_keeps_nothing(tmp_path: Path) -> None:
    CostModelFile(tmp_path / "cost", "h200").save(new_engine())

    assert [] == list(tmp_path.iterdir())
