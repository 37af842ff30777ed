"""The engine benchmark: which cells there are, what they compare, and the figure that a replay takes from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from tests.trace_lab import byte_tokenizer, require_arctic, write_tokenizer

from agentspec.benchmarks import engine_bench
from agentspec.benchmarks.__main__ import main
from agentspec.benchmarks.contestants import ArcticTree, Batch, Contestant, Drafter, NgramScan, Ours
from agentspec.benchmarks.engine_bench import EngineBenchError, allocated_bytes, read_documents, stored_draft_us
from agentspec.benchmarks.methods.arctic import MissingPeerError
from agentspec.sidecar.engine import StepDrafts

VOCABULARY = [b"%d " % token for token in range(100)]


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A short run without `ngram`, which needs vLLM."""
    require_arctic()
    folder = tmp_path_factory.mktemp("bench")
    tokenizer, path = write_tokenizer(folder / "tokenizer.json"), folder / "engine.json"
    arguments = ["engine", "--history-tokens", "20000", "--batch-size", "1", "--batch-size", "4"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_bench, "_scans", dict)
        done = CliRunner().invoke(main, [*arguments, "--tokenizer", str(tokenizer), "--json", str(path)])
    assert 0 == done.exit_code, done.output
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_there_is_a_cell_for_each_metric_batch_size_and_peer(result: dict[str, Any]) -> None:
    cells = [
        (cell["metric"], cell["batch_size"], cell["peer"])
        for cell in result["cells"]
        if not cell["metric"].startswith(("keys_", "step_beside_"))
    ]

    assert sorted(
        (metric, batch_size, peer)
        for metric, batch_sizes in {
            "insert_us_per_token": [-1],
            "bytes_per_token": [-1],
            "start_8k_ms": [-1],
            "start_128k_ms": [-1],
            "forget_us_per_token": [-1],
            "step_us_per_request": [1, 4],
            "query_us": [1, 4],
        }.items()
        for batch_size in batch_sizes
        for peer in ("arctic-d24", "arctic-d64")
    ) == sorted((metric, batch_size or -1, peer) for metric, batch_size, peer in cells)


def test_many_small_histories_are_compared_with_a_tree_for_each(result: dict[str, Any]) -> None:
    cells = [cell for cell in result["cells"] if cell["metric"].startswith("keys_")]

    assert [("keys_insert_us_per_token", "arctic-d24"), ("keys_bytes_per_token", "arctic-d24")] == [
        (cell["metric"], cell["peer"]) for cell in cells
    ]
    assert cells[1]["agentspec"] < 40


def test_steps_beside_another_thread_are_compared_with_steps_alone(result: dict[str, Any]) -> None:
    cells = [cell for cell in result["cells"] if cell["metric"].startswith("step_beside_")]

    assert {"alone"} == {cell["peer"] for cell in cells}
    assert [f"step_beside_{work}_p{share}_us" for work in ("insert", "export") for share in (50, 99)] == [
        cell["metric"] for cell in cells
    ]


def test_ratio_above_one_says_that_ours_is_smaller(result: dict[str, Any]) -> None:
    for cell in result["cells"]:
        assert 20000 == cell["history_tokens"]
        assert cell["peer_value"] / cell["agentspec"] == pytest.approx(cell["ratio"])
        assert cell["agentspec"] > 0


def test_history_takes_less_memory_than_the_peers(result: dict[str, Any]) -> None:
    assert all(cell["ratio"] > 2 for cell in result["cells"] if cell["metric"] == "bytes_per_token")


def test_drafting_is_charged_by_the_nearest_batch_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "engine.json"
    cells = [
        {"metric": "step_us_per_request", "batch_size": size, "agentspec": us} for size, us in ((1, 9.0), (64, 3.0))
    ]
    path.write_text(json.dumps({"cells": [{"metric": "query_us", "batch_size": 32, "agentspec": 1.0}, *cells]}))
    monkeypatch.setattr(engine_bench, "STORED_RESULT", path)

    assert [9.0, 9.0, 3.0, 3.0] == [stored_draft_us(size) for size in (1, 4, 32, 1000)]


def test_repository_keeps_a_result() -> None:
    assert 0 < stored_draft_us(64) < 100


def test_texts_are_the_same_in_every_run(tmp_path: Path) -> None:
    first, second = (read_documents(byte_tokenizer(tmp_path), 10_000) for _ in range(2))

    assert [document.tolist() for document in first] == [document.tolist() for document in second]


def test_too_little_text_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_bench, "source_files", lambda: iter([]))

    with pytest.raises(EngineBenchError, match="10000 tokens asked for, 0 are on this machine"):
        read_documents(byte_tokenizer(tmp_path), 10_000)


def test_allocated_bytes_follow_what_is_held() -> None:
    before = allocated_bytes()
    held = np.ones(1 << 20)
    with_array = allocated_bytes()
    del held

    assert 8 << 20 == pytest.approx(with_array - before, rel=0.01)
    assert 8 << 20 == pytest.approx(with_array - allocated_bytes(), rel=0.01)


def make_batch() -> Batch:
    rows = np.arange(40, dtype=np.int32).reshape(2, 20)
    return Batch([np.ascontiguousarray(row[:10]) for row in rows], np.ascontiguousarray(rows[:, 10:]))


def started(contestant: Contestant, batch: Batch) -> Contestant:
    contestant.insert(np.arange(100, dtype=np.int32))
    for handle, prompt in enumerate(batch.prompts):
        contestant.start(handle, prompt)
    return contestant


def test_our_step_hands_over_the_stream_and_drafts_what_follows_it() -> None:
    batch = make_batch()
    ours = started(Ours(VOCABULARY), batch)

    for step in range(3):
        drafts, again = ours.prepare(batch, step, 1)(), ours.prepare(batch, step + 1, 0)()

        assert isinstance(drafts, StepDrafts)
        assert isinstance(again, StepDrafts)
        assert 0 == drafts.resync_handles.size + again.resync_handles.size
        assert [11 + step, 31 + step] == drafts.draft_token_ids[[0, drafts.draft_lengths[0]]].tolist()
        assert drafts.draft_token_ids.tolist() == again.draft_token_ids.tolist()


def test_stopped_requests_leave_nothing_behind() -> None:
    require_arctic()
    batch = make_batch()
    for contestant in (Ours(VOCABULARY), ArcticTree(24)):
        started(contestant, batch)
        for handle in range(2):
            contestant.stop(handle)

        started(contestant, batch).prepare(batch, 0, 1)()


def test_missing_vllm_leaves_the_ngram_cells_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> NgramScan:
        raise MissingPeerError("no vLLM")

    monkeypatch.setattr(engine_bench, "NgramScan", fail)

    assert {} == engine_bench._scans()


@pytest.mark.usefixtures("numba")
@pytest.mark.vllm
def test_ngram_is_vllms_own_code_on_the_same_batch() -> None:
    batch = Batch([np.array([1, 2, 3, 4, 5, 6, 7, 1, 2], np.int32)], np.array([[3, 9, 9]], np.int32))
    scan: Drafter = NgramScan()

    assert [5, 5] == [scan.prepare(batch, step, num_new)() for step, num_new in ((0, 0), (0, 1))]
