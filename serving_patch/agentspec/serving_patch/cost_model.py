"""What a verification step costs, as the engine process sees it: measures its steps for the draft engine, knows where
accelerators turn from reading weights to computing, and keeps what was learned in a file."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from agentspec.sidecar.engine import GREEDY_TEMPERATURE, Engine, StepTiming

logger = logging.getLogger("vllm.agentspec")

# bf16 FLOP/s without sparsity over bytes/s of memory, both from the makers' data sheets: tokens that one forward pass
# computes in the time that reading bf16 weights takes.
ARITHMETIC_INTENSITY: Mapping[str, float] = {
    "A100": 312e12 / 2.04e12,
    "H100": 989e12 / 3.35e12,
    "H200": 989e12 / 4.8e12,
    "L4": 121e12 / 0.3e12,
    "L40S": 362e12 / 0.864e12,
    "MI300X": 1307e12 / 5.3e12,
}
_MATRIX = 1024
_STREAM_BYTES = 1 << 26
_ROUNDS = 3


def find_intensity(device_name: str) -> float | None:
    """Arithmetic intensity of an accelerator, bf16, by a name such as ``NVIDIA H200``; None: not in the table."""
    names = re.findall(r"[A-Z0-9]+", device_name.upper())
    return next((value for name, value in ARITHMETIC_INTENSITY.items() if name in names), None)


def measure_cpu_intensity(weight_bytes: int = 2) -> float:
    """Arithmetic intensity of this machine's CPU, measured in less than a second; at least 1.

    Args:
        weight_bytes: of one weight of the model.
    """
    matrix = np.ones((_MATRIX, _MATRIX), np.float32)
    memory = np.ones(_STREAM_BYTES // 4, np.float32)
    flops = 2 * _MATRIX**3 / _best_time(lambda: matrix @ matrix)
    bandwidth = _STREAM_BYTES / _best_time(memory.sum)
    return max(1.0, float(flops / bandwidth * weight_bytes / 2))


def _best_time(work: Callable[[], object]) -> float:
    times = []
    for _ in range(_ROUNDS):
        started_at = time.perf_counter()
        work()
        times.append(time.perf_counter() - started_at)
    return max(min(times), 1e-9)


class CostModelFile:
    """Keeps what an engine learned of its step times from one start to the next.

    Args:
        path: the file; None keeps nothing.
        machine: what the figures belong to (model, device, data type); a file of another machine is not used.
    """

    def __init__(self, path: Path | None, machine: str) -> None:
        self._path = path
        self._header = f"agentspec cost model 1\n{machine}\n\n".encode()

    def load(self, engine: Engine) -> bool:
        """Give the engine what was kept; a missing file is ignored, a bad one too, with a warning."""
        if self._path is None or not self._path.exists():
            return False
        try:
            kept = self._path.read_bytes()
        except OSError as error:
            logger.warning("agentspec: the saved cost model %s can't be read: %s", self._path, error)
            return False
        if kept.startswith(self._header) and engine.import_cost_model(kept[len(self._header) :]):
            return True
        logger.warning("agentspec: the saved cost model %s is damaged or of another machine; not used", self._path)
        return False

    def save(self, engine: Engine) -> None:
        """Keep what the engine has learned so far, all of it or nothing.

        Raises:
            OSError: the file can't be written.
        """
        learned = engine.export_cost_model()
        if self._path is None or not learned:
            return
        draft = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        draft.write_bytes(self._header + learned)
        draft.replace(self._path)


class RunningRequest(Protocol):
    """What is read of a request of vLLM."""

    sampling_params: object

    @property
    def num_tokens(self) -> int:
        """Prompt and output."""


class StepTimer:
    """Measures one step after the other, from the start of scheduling to the arrival of its tokens.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._started_at: float | None = None

    def start(self) -> None:
        """The scheduler begins to put a step together."""
        self._started_at = self._clock()

    def finish(
        self,
        num_scheduled_tokens: Mapping[str, int],
        drafts: Mapping[str, Sequence[int]],
        requests: Mapping[str, RunningRequest],
    ) -> StepTiming | None:
        """The tokens of the step are there; None when it was not started, or computed nothing.

        Args:
            num_scheduled_tokens: tokens of the step by request, drafts included.
            drafts: draft tokens by request; requests without one may be missing.
            requests: by their ids.
        """
        started_at, self._started_at = self._started_at, None
        if started_at is None or not num_scheduled_tokens:
            return None
        duration_ms = (self._clock() - started_at) * 1000
        num_prefill_tokens = 0
        rows = []
        for request_id, num_tokens in num_scheduled_tokens.items():
            if num_tokens - len(drafts.get(request_id, ())) == 1:
                rows.append(request_id)
            else:
                num_prefill_tokens += num_tokens
        lengths = [length for row in rows if (length := len(drafts.get(row, ())))]
        running = [request for row in rows if (request := requests.get(row)) is not None]
        return StepTiming(
            duration_ms=duration_ms,
            num_decode_rows=len(rows),
            num_draft_tokens=sum(lengths),
            num_draft_rows=len(lengths),
            num_prefill_tokens=num_prefill_tokens,
            num_sampled_rows=sum(map(is_sampled, running)),
            num_context_tokens=sum(request.num_tokens for request in running),
        )


def is_sampled(request: RunningRequest) -> bool:
    """Whether the target model samples the request at a temperature above 0."""
    temperature: float = getattr(request.sampling_params, "temperature", 0.0)
    return temperature >= GREEDY_TEMPERATURE
