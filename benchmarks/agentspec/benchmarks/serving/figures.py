"""The figures of one cell, from what its steps and calls did."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentspec.benchmarks.serving.player import CallTimes, CellLog, Step

Figures = dict[str, Any]

# Bounds of the decode rows of a step, see the design of the metrics.
ROW_BUCKETS = (("1", 1), ("2-8", 8), ("9-32", 32), ("33-64", 64), ("65-128", 128), (">128", 1 << 30))
MIN_CALLS_FOR_P99 = 100


def cell_figures(log: CellLog, *, step_s: Callable[[Step], float], is_decode_only: bool) -> Figures:
    """Summarise a cell.

    Args:
        log: of the steps and calls that count.
        step_s: seconds that a step counts.
        is_decode_only: prompts were skipped, so that every step is one of decoding.

    Returns:
        `decode_goodput`: output tokens per second over the steps without prefill; `goodput`: over all steps;
        times in ms; rates whose denominator is 0 are None.
    """
    steps = log.steps
    decode = steps if is_decode_only else [step for step in steps if not step.num_prefill_tokens]
    busy_s = sum(map(step_s, steps))
    return {
        "num_steps": len(steps),
        "num_decode_steps": len(decode),
        "num_requests": len(log.calls),
        "decode_goodput": _ratio(_num_tokens(decode), sum(map(step_s, decode))),
        "decode_goodput_wall": _ratio(_num_tokens(decode), sum(step.wall_s for step in decode)),
        "goodput": _ratio(_num_tokens(steps), busy_s),
        "agent_steps_per_s": _ratio(len(log.calls), busy_s),
        "step_ms": _ratio(1000 * sum(map(step_s, decode)), len(decode)),
        **_verdicts(decode),
        "latency": latency_figures(log.calls),
        "run_s": _percentiles(log.run_s),
        "buckets": _buckets(decode, step_s),
        "step_times": _step_times(decode, step_s),
    }


def block_figures(blocks: Mapping[int, Sequence[int]], names: Sequence[str]) -> list[Figures]:
    """Verdicts by block, most drafts first."""
    found = []
    for block, (num_drafts, num_draft, num_accepted) in sorted(blocks.items(), key=lambda entry: -entry[1][0]):
        found.append(
            {
                "block": names[block],
                "num_drafts": num_drafts,
                "num_draft_tokens": num_draft,
                "num_accepted_tokens": num_accepted,
                "rejection_rate": _ratio(num_draft - num_accepted, num_draft),
            }
        )
    return found


def latency_figures(calls: Sequence[CallTimes]) -> Figures:
    """Percentiles over requests (ITL: over gaps) that were seen from their first token to their last.

    TTFT: from the request to its first tokens; TPOT: per further token; ITL: between two outputs, each of which may
    bring several tokens; E2EL: from the request to its last token. In ms on the engine's own clock.
    """
    whole = [call for call in calls if call.is_whole and call.token_at]
    longer = [call for call in whole if call.num_tokens > 1]
    spans = [1000 * (call.token_at[-1] - call.token_at[0]) / (call.num_tokens - 1) for call in longer]
    gaps = [np.diff(call.token_at) for call in whole]
    return {
        "num_requests": len(whole),
        "ttft_ms": _percentiles([1000 * (call.token_at[0] - call.submitted_at) for call in whole]),
        "tpot_ms": _percentiles(spans),
        "itl_ms": _percentiles((1000 * np.concatenate(gaps)).tolist() if gaps else []),
        "e2el_ms": _percentiles([1000 * (call.token_at[-1] - call.submitted_at) for call in whole]),
    }


def _verdicts(steps: Sequence[Step]) -> Figures:
    num_rows = sum(len(step.request_ids) for step in steps)
    num_drafts = sum(len(step.num_draft_tokens) for step in steps)
    num_draft = sum(sum(step.num_draft_tokens.values()) for step in steps)
    num_accepted = sum(sum(step.num_accepted_tokens.values()) for step in steps)
    return {
        "num_tokens": _num_tokens(steps),
        "num_draft_tokens": num_draft,
        "num_accepted_tokens": num_accepted,
        "rows_per_step": _ratio(num_rows, len(steps)),
        "tokens_per_step": _ratio(_num_tokens(steps), num_rows),
        "draft_tokens_per_step": _ratio(num_draft, len(steps)),
        "acceptance_rate": _ratio(num_accepted, num_draft),
        "acceptance_length": _ratio(num_drafts + num_accepted, num_drafts),
    }


def _buckets(steps: Sequence[Step], step_s: Callable[[Step], float]) -> list[Figures]:
    found = []
    lowest = 0
    for name, highest in ROW_BUCKETS:
        chosen = [step for step in steps if lowest < len(step.request_ids) <= highest]
        lowest = highest
        if chosen:
            total_s = sum(map(step_s, chosen))
            figures = {"num_steps": len(chosen), "step_ms": 1000 * total_s / len(chosen), **_verdicts(chosen)}
            found.append({"rows": name, **figures, "decode_goodput": _ratio(_num_tokens(chosen), total_s)})
    return found


def _step_times(steps: Sequence[Step], step_s: Callable[[Step], float]) -> list[Figures]:
    """Step times by rows and draft tokens, these rounded to powers of two: the measured T and its chosen points."""
    groups: dict[tuple[int, int], list[float]] = {}
    for step in steps:
        num_draft = sum(step.num_draft_tokens.values())
        key = len(step.request_ids), 1 << num_draft.bit_length() >> 1 if num_draft else 0
        groups.setdefault(key, []).append(1000 * step_s(step))
    return [
        {"num_rows": rows, "num_draft_tokens": drafts, "num_steps": len(ms), "median_ms": float(np.median(ms))}
        for (rows, drafts), ms in sorted(groups.items())
    ]


def _percentiles(values: Sequence[float] | NDArray[np.float64]) -> Figures | None:
    if not len(values):
        return None
    p50, p90, p99 = np.percentile(values, [50, 90, 99]).tolist()
    slowest = sorted(values)[-max(1, len(values) // 10) :]
    return {
        "num": len(values),
        "p50": p50,
        "p90": p90,
        "p99": p99 if len(values) >= MIN_CALLS_FOR_P99 else None,
        "slowest_decile": float(np.mean(slowest)) if len(values) >= 10 else None,
    }


def _num_tokens(steps: Sequence[Step]) -> int:
    return sum(len(tokens) for step in steps for tokens in step.token_ids.values())


def _ratio(numerator: float, denominator: float) -> float | None:
    return float(numerator) / float(denominator) if denominator else None
