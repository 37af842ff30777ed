"""The calibration that a new engine starts from, and how it is learned."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from tests.engine_player import LARGE_VOCABULARY, seeded
from tests.reference import Row, step_request, token_ids
from tests.reference_calibration import PRIOR_FILE, PRIOR_SHARES
from tests.trace_lab import trace_line, write_lines, write_tokenizer

from agentspec.benchmarks.__main__ import main
from agentspec.sidecar.engine import Engine, Parts, Sampling
from agentspec.sidecar.grammars import CHAT
from agentspec.sidecar.tags import Tags


def num_drafted_from_noise(parts: Parts) -> int:
    """Draft tokens of a cold engine in its first steps on text that nobody can predict."""
    random = seeded(1)
    engine = Engine(LARGE_VOCABULARY, CHAT, parts=parts)
    for handle in range(16):
        engine.open(handle, token_ids(*random.choices(range(10, 40), k=200)), Tags(), Sampling())
    num_drafted = 0
    for step in range(5):
        rows = [Row(handle, step, random.choices(range(10, 40), k=1)) for handle in range(16)]
        num_drafted += int(engine.step(step_request(rows, 1000)).draft_lengths.sum())
    return num_drafted


def test_a_cold_engine_drafts_less_from_noise_than_one_that_has_yet_to_learn_what_votes_are_worth() -> None:
    assert num_drafted_from_noise(Parts()) < num_drafted_from_noise(Parts(prior=False)) / 2


def test_shipped_prior_has_a_share_for_each_cell_and_knows_most_of_them() -> None:
    num_cells = len(Engine([b"x"], CHAT).calibration_counts())

    assert num_cells == len(PRIOR_SHARES)
    assert all(share == -1 or 0 < share < 1 for share in PRIOR_SHARES)
    assert num_cells / 2 < sum(share > 0 for share in PRIOR_SHARES)


@pytest.fixture
def traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AGENTSPEC_CACHE", str(tmp_path / "cache"))
    write_tokenizer(tmp_path / "tokenizer.json")
    lines = [trace_line(f"run {run}", 0, "Thought: look it up, then answer it. " * 4) for run in range(30)]
    write_lines(tmp_path / "traces.jsonl.gz", lines)
    return tmp_path


def learn(traces: Path, *options: str) -> str:
    output = traces / "prior.inc"
    paths = ["--tokenizer", str(traces / "tokenizer.json"), "--output", str(output)]
    result = CliRunner().invoke(main, ["prior", *paths, *options])
    assert result.exit_code == 0, result.output
    return output.read_text()


def test_a_learned_prior_has_the_form_of_the_shipped_one_and_trusts_what_proved_right(traces: Path) -> None:
    learned = learn(traces, "--eval", str(traces / "traces.jsonl.gz"))
    shares = np.array(
        [float(share.rstrip("f,\n")) for share in learned.replace("\n", " ").split(", ") if share.strip()]
    )

    assert len(shares) == len(PRIOR_SHARES)
    assert shares.max() > 0.95
    assert learned.count("\n") == PRIOR_FILE.read_text().count("\n")


def test_the_same_seed_learns_the_same_prior(traces: Path) -> None:
    options = ["--eval", str(traces / "traces.jsonl.gz"), "--batch-size", "4", "--seed", "2", "--max-tokens", "300"]

    assert learn(traces, *options) == learn(traces, *options)


def test_a_prior_needs_calls_to_learn_from(traces: Path) -> None:
    write_lines(traces / "empty.jsonl.gz", [])
    arguments = ["--tokenizer", str(traces / "tokenizer.json"), "--eval", str(traces / "empty.jsonl.gz")]
    result = CliRunner().invoke(main, ["prior", *arguments, "--output", str(traces / "prior.inc")])

    assert result.exit_code == 1
    assert "--eval: no calls to play" in result.output
    assert not (traces / "prior.inc").exists()
