"""`agentspec-bench serve` on real engines: a tiny model with random weights, outputs forced."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
from click.testing import CliRunner, Result
from tests.serve_lab import cells_of, serve, write_runs, write_tiny_model
from tests.trace_lab import require_arctic

from agentspec.benchmarks.__main__ import main
from agentspec.benchmarks.serving import matrix
from agentspec.benchmarks.serving.engine_process import EngineProcess

pytestmark = pytest.mark.vllm

BATCH_SIZE = 4
NUM_STEPS = 20
AGENTSPEC = "agentspec:fixed"  # else the steps of a slow machine decide how many drafts are verified


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, require_vllm: None) -> Path:
    folder = tmp_path_factory.mktemp("serve")
    write_tiny_model(folder / "model")
    write_runs(folder / "runs.jsonl")
    return folder


def run(folder: Path, output: str, *options: str) -> Result:
    arguments = ("--batch-size", str(BATCH_SIZE), "--json", str(folder / output), *options)
    return serve(folder / "model", folder / "runs.jsonl", *arguments)


@pytest.fixture(scope="module")
def served(folder: Path) -> Path:
    """Three engines in lockstep."""
    require_arctic()
    methods = ("--method", "suffix", "--method", AGENTSPEC)
    done = run(folder, "served.json", "--steps", str(NUM_STEPS), *methods)
    assert done.exit_code == 0, done.output
    return folder / "served.json"


@pytest.fixture(scope="module")
def cells(served: Path) -> dict[str, dict[str, Any]]:
    return {cell["method"]: cell for cell in cells_of(served)}


def test_every_method_follows_the_traces_and_is_compared_with_plain(cells: dict[str, dict[str, Any]]) -> None:
    assert [AGENTSPEC, "plain", "suffix"] == sorted(cells)
    for cell in cells.values():
        assert cell["status"] == "ok"
        assert cell["speedup_vs_plain"] == cell["decode_goodput"] / cells["plain"]["decode_goodput"]


def test_plain_decoding_brings_one_token_a_row_and_step(cells: dict[str, dict[str, Any]]) -> None:
    assert cells["plain"]["tokens_per_step"] == 1.0
    assert cells["plain"]["num_draft_tokens"] == 0
    assert cells["plain"]["num_tokens"] == cells["plain"]["num_steps"] * BATCH_SIZE


@pytest.mark.parametrize("method", [AGENTSPEC, "suffix"])
def test_history_of_other_runs_lets_drafts_be_accepted(cells: dict[str, dict[str, Any]], method: str) -> None:
    assert cells[method]["tokens_per_step"] > 2
    assert cells[method]["num_accepted_tokens"] > cells[method]["num_steps"]


def test_cell_has_the_steps_that_were_asked_for(cells: dict[str, dict[str, Any]]) -> None:
    assert all(cell["num_steps"] == NUM_STEPS for cell in cells.values())


def test_blocks_are_those_of_the_trace(cells: dict[str, dict[str, Any]]) -> None:
    blocks = {row["block"]: row for row in cells[AGENTSPEC]["blocks"]}

    assert "code" in blocks
    assert sum(row["num_draft_tokens"] for row in blocks.values()) == cells[AGENTSPEC]["num_draft_tokens"]


def test_no_step_of_ours_fell_back(cells: dict[str, dict[str, Any]]) -> None:
    assert cells[AGENTSPEC]["fallbacks"] == {}


def test_report_draws_what_was_served(served: Path, folder: Path) -> None:
    done = CliRunner().invoke(main, ["report", str(served), "-o", str(folder / "report.html")])
    html = (folder / "report.html").read_text()

    assert done.exit_code == 0, done.output
    assert "Speed-up by batch size" in html
    assert "Measured figures" in html
    assert 'class="modelled"' not in html


def test_finished_run_starts_no_engine_again(served: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> EngineProcess:
        raise AssertionError("an engine was started")

    monkeypatch.setattr(matrix, "EngineProcess", refuse)
    before = cells_of(served)
    done = run(folder, "served.json", "--steps", str(NUM_STEPS), "--method", "suffix", "--method", AGENTSPEC)

    assert done.exit_code == 0, done.output
    assert before == cells_of(served)


def test_file_of_other_conditions_is_refused(served: Path, folder: Path) -> None:
    done = run(folder, "served.json", "--steps", str(NUM_STEPS), "--seed", "7")

    assert done.exit_code == 2
    assert "seed was 0, is 7" in done.output


class _Watched(EngineProcess):
    """Engine processes that a test can reach by their kind."""

    found: ClassVar[dict[str, EngineProcess]] = {}

    def __init__(self, settings: Any, log_path: Path) -> None:
        super().__init__(settings, log_path)
        self.found[settings.kind] = self


def strike(monkeypatch: pytest.MonkeyPatch, number: signal.Signals) -> None:
    """Send a signal to AgentSpec's engine while it plays its first cell."""
    monkeypatch.setattr(matrix, "EngineProcess", _Watched)
    stock: Callable[..., None] = matrix.Matrix._step

    def step(self: matrix.Matrix, fleet: Any, key: Any, engines: dict[str, EngineProcess]) -> None:
        if key.batch_size == 1:
            os.kill(_Watched.found["agentspec"].process_id, number)
        stock(self, fleet, key, engines)

    monkeypatch.setattr(matrix.Matrix, "_step", step)


@pytest.fixture(scope="module")
def died(folder: Path) -> Result:
    """A run in which AgentSpec's engine dies in its first cell."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        strike(monkeypatch, signal.SIGKILL)
        return run(folder, "died.json", "--steps", "3", "--batch-size", "1", "--method", "agentspec")


def test_engine_that_dies_fails_its_cell_and_the_rest_is_measured(died: Result, folder: Path) -> None:
    cells = {(cell["batch_size"], cell["method"]): cell for cell in cells_of(folder / "died.json")}

    assert died.exit_code == 1
    assert "the engine died (exit code -9)" in died.output
    assert cells[1, "agentspec"]["status"] == "failed"
    assert cells[1, "agentspec"]["log_tail"]
    others = [cells[1, "plain"], cells[BATCH_SIZE, "plain"], cells[BATCH_SIZE, "agentspec"]]
    assert all(cell["status"] == "ok" for cell in others)


def test_failed_cells_alone_are_measured_when_the_run_goes_on(died: Result, folder: Path) -> None:
    before = cells_of(folder / "died.json")
    kept = [cell for cell in before if cell["status"] == "ok"]
    assert len(kept) == len(before) - 1
    done = run(folder, "died.json", "--steps", "3", "--batch-size", "1", "--method", "agentspec")
    cells = cells_of(folder / "died.json")

    assert done.exit_code == 0, done.output
    assert all(cell in cells for cell in kept)
    assert len(cells) == len(before)


def test_engine_that_hangs_fails_its_cell(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    strike(monkeypatch, signal.SIGSTOP)
    options = ("--steps", "3", "--step-deadline", "3", "--method", "agentspec")
    done = serve(
        folder / "model", folder / "runs.jsonl", "--batch-size", "1", "--json", str(folder / "hung.json"), *options
    )
    cells = {cell["method"]: cell for cell in cells_of(folder / "hung.json")}

    assert done.exit_code == 1
    assert "gave no answer in 3 s" in cells["agentspec"]["reason"]
    assert cells["plain"]["status"] == "ok"


def test_engine_that_does_not_start_fails_its_cells_with_the_reason(folder: Path) -> None:
    model = write_tiny_model(folder / "broken", num_attention_heads=3)
    options = ("--steps", "3", "--batch-size", "1", "--json", str(folder / "broken.json"))
    done = serve(model, folder / "runs.jsonl", *options)
    cells = cells_of(folder / "broken.json")

    assert done.exit_code == 1
    assert ["failed", "failed"] == [cell["status"] for cell in cells]
    assert all(cell["reason"].startswith("did not start: ") and cell["log_tail"] for cell in cells)
