"""The benchmark of shared histories: a real Redis, figures of the right kind, and no process left behind."""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner
from tests.redis_lab import require_redis

from agentspec.benchmarks import redis_bench
from agentspec.benchmarks.__main__ import main
from agentspec.sidecar.store import keeper


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    require_redis()
    path = tmp_path_factory.mktemp("redis") / "redis.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(redis_bench, "DELAY_S", 0.5)
        patch.setattr(redis_bench, "IDLE_S", 1.0)
        patch.setattr(keeper, "HOUSEKEEPING_S", 0.2)
        patch.setattr(redis_bench, "IDLE_NAMESPACES", 50)
        done = CliRunner().invoke(main, ["redis", "--warm-tokens", "100000", "--json", str(path)])
    assert 0 == done.exit_code, done.output
    return {cell["measurement"]: cell for cell in json.loads(path.read_text())["cells"]}


def test_a_block_arrives_within_a_tenth_of_a_second(cells: dict[str, dict[str, Any]]) -> None:
    assert 0 < cells["delay"]["delay_p50_ms"] < 100


def test_a_token_takes_a_few_bytes(cells: dict[str, dict[str, Any]]) -> None:
    assert 0 < cells["memory"]["snapshot_bytes_per_token"] < cells["memory"]["log_bytes_per_token"] < 4


def test_a_new_engine_holds_all_that_was_written(cells: dict[str, dict[str, Any]]) -> None:
    assert 1 == cells["warm"]["held_share"]
    assert 0 < cells["warm"]["tenth_s"] < cells["warm"]["complete_s"]


def test_engines_that_wait_do_not_work(cells: dict[str, dict[str, Any]]) -> None:
    assert cells["idle"]["cores_per_engine"] < 0.3


def test_a_missing_redis_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    done = CliRunner().invoke(main, ["redis"])

    assert 1 == done.exit_code
    assert "redis-server is missing: install Redis 7 or newer" in done.output
