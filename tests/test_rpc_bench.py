"""The benchmark of a draft server: real processes, figures that add up, and no process left behind."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from agentspec.benchmarks import rpc_bench
from agentspec.benchmarks.__main__ import main
from agentspec.benchmarks.rpc_bench import RpcBench, RpcBenchError


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("rpc") / "rpc.json"
    done = CliRunner().invoke(
        main, ["rpc", "--steps", "80", "--batch-size", "1", "--batch-size", "16", "--json", str(path)]
    )
    assert 0 == done.exit_code, done.output
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_there_is_a_cell_for_each_batch_size(result: dict[str, Any]) -> None:
    assert [1, 16] == [cell["batch_size"] for cell in result["cells"]]
    assert ("rpc", 40) == (result["meta"]["command"], result["meta"]["num_steps"])


def test_the_blocked_time_is_the_hooks_less_the_engines(result: dict[str, Any]) -> None:
    for cell in result["cells"]:
        assert 0 < cell["submit_us"] < cell["hook_us"]
        assert 0 < cell["engine_us"] < cell["hook_us"]
        assert cell["blocked_us"] <= cell["blocked_p99_us"]
        assert cell["blocked_us"] / cell["framed_us"] == pytest.approx(cell["ratio"], rel=0.02)


def test_messages_grow_with_the_batch(result: dict[str, Any]) -> None:
    small, large = result["cells"]

    assert 16 * 32 < large["request_bytes"] < 16 * 64
    assert small["request_bytes"] < large["request_bytes"]
    assert small["answer_bytes"] < large["answer_bytes"]


def test_a_server_that_does_not_start_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    silent = tmp_path / "python"
    silent.write_text("#!/bin/sh\nexit 3\n")
    silent.chmod(0o755)
    monkeypatch.setattr(rpc_bench, "START_S", 0.5)
    monkeypatch.setattr(sys, "executable", str(silent))

    with pytest.raises(RpcBenchError, match="agentspec-sidecar did not answer"):
        RpcBench(80).run([1])
