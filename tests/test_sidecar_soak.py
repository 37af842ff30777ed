"""64 engines on one draft server for ten minutes: nothing grows, neither memory nor open files nor latency."""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.sidecar_lab import TEXT, VOCABULARY, SidecarProcess, eventually, running_sidecar

from agentspec.serving_patch.mailbox import Fallbacks
from agentspec.serving_patch.sidecar_client import SidecarClient
from agentspec.serving_patch.sidecar_messages import Vocabulary
from agentspec.sidecar.engine import FinishReason, Sampling, StepRequest
from agentspec.sidecar.tags import Tags

NUM_ENGINES = 64
NUM_ROWS = 8
OUTPUT_TOKENS = 200
SOAK_S = 600.0
STEP_S = 0.5  # 64 engines of that step time keep two cores a third busy
PATIENCE_MS = 10_000.0  # a busy machine may stop a process for a second
MIB = 1 << 20

pytestmark = [pytest.mark.slow, pytest.mark.timeout(SOAK_S + 120)]


class Engine(threading.Thread):
    """Serves requests as an engine does: each row writes a text, ends and makes room for the next."""

    def __init__(self, number: int, client: SidecarClient, end: float) -> None:
        super().__init__()
        self._random = np.random.default_rng(number)
        self._client = client
        self._end = end
        self._tags = Tags(workflow_id=f"w{number % 4}", stage=f"s{number % 16}")
        self._positions: dict[int, int] = {}
        self._next_handle = 0
        self.round_trips_ms: list[tuple[float, float]] = []
        self.num_missed = 0

    def run(self) -> None:
        step_id = 0
        while time.monotonic() < self._end:
            self._admit()
            step_id += 1
            begin = time.monotonic()
            self._client.submit(self._step(step_id))
            drafts = self._client.collect(deadline_ms=PATIENCE_MS)
            self.round_trips_ms.append((begin, (time.monotonic() - begin) * 1000))
            self.num_missed += drafts is None
            assert drafts is None or not drafts.resync_handles.size
            time.sleep(max(0.0, begin + STEP_S * self._random.uniform(0.8, 1.2) - time.monotonic()))
        for handle in [*self._positions]:
            self._finish(handle)

    def _admit(self) -> None:
        for handle in [handle for handle, position in self._positions.items() if position >= OUTPUT_TOKENS]:
            self._finish(handle)
        while len(self._positions) < NUM_ROWS:
            prompt = np.array(TEXT * 8, np.int32)
            self._client.open(self._next_handle, prompt, self._tags, Sampling(), namespace="default")
            self._positions[self._next_handle] = 0
            self._next_handle += 1

    def _finish(self, handle: int) -> None:
        length = self._positions.pop(handle)
        self._client.close(handle, FinishReason.STOP, length, np.empty(0, np.int32))

    def _step(self, step_id: int) -> StepRequest:
        handles = [*self._positions]
        num_rows, new = len(handles), 4
        tokens = self._random.choice(np.array(TEXT, np.int32), num_rows * new)
        step = StepRequest(
            step_id=step_id,
            handles=np.array(handles, np.int64),
            positions=np.array([*self._positions.values()], np.int32),
            token_offsets=np.arange(num_rows + 1, dtype=np.int32) * np.int32(new),
            token_ids=tokens,
            num_draft_tokens=np.zeros(num_rows, np.int32),
            num_accepted_tokens=np.zeros(num_rows, np.int32),
            max_draft_tokens=np.full(num_rows, 8, np.int32),
            num_decode_rows=num_rows,
            num_prefill_tokens=0,
            token_budget=8 * num_rows,
        )
        for handle in handles:
            self._positions[handle] += new
        return step


@pytest.fixture
def server(tmp_path: Path) -> Iterator[SidecarProcess]:
    with running_sidecar(tmp_path / "s", "--history-bytes", "8MiB", "--policy", "uniform") as server:
        yield server


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def num_handles(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def test_ten_minutes_of_64_engines_leave_memory_handles_and_latency_as_they_were(server: SidecarProcess) -> None:
    vocabulary, fallbacks = Vocabulary.of("soak", VOCABULARY), Fallbacks()
    clients = [SidecarClient(server.socket, vocabulary, fallbacks=fallbacks) for _ in range(NUM_ENGINES)]
    assert all(client.wait_connected(30) for client in clients)
    begin = time.monotonic()
    engines = [Engine(number, client, begin + SOAK_S) for number, client in enumerate(clients)]
    for engine in engines:
        engine.start()
    pids = server.process.pid, os.getpid()
    time.sleep(SOAK_S * 0.3)  # by then the histories are full, at 4,096 tokens a second
    before = [(resident_bytes(pid), num_handles(pid)) for pid in pids]
    time.sleep(SOAK_S * 0.65)
    after = [(resident_bytes(pid), num_handles(pid)) for pid in pids]
    for engine in engines:
        engine.join(30)
    for client in clients:
        client.shutdown()

    trips = sorted(trip for engine in engines for trip in engine.round_trips_ms)
    sixth = len(trips) // 6
    early, late = (statistics.median(ms for _, ms in part) for part in (trips[sixth : 2 * sixth], trips[-sixth:]))
    assert 0 == sum(engine.num_missed for engine in engines)
    assert late < 2 * early + 1
    for (bytes_before, handles_before), (bytes_after, handles_after) in zip(before, after, strict=True):
        assert bytes_after - bytes_before < 16 * MIB
        assert handles_after <= handles_before + 4
    eventually(lambda: num_handles(server.process.pid) < NUM_ENGINES)
