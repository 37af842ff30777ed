"""What a verification step costs, as the engine process sees it: measures its steps for the draft engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from agentspec.sidecar.engine import GREEDY_TEMPERATURE, StepTiming


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
