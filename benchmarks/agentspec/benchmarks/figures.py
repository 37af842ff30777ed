"""What a replay's step log says: the figures of one cell, by node and by block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentspec.benchmarks.cost_curves import CostCurve
from agentspec.benchmarks.replay import StepLog

MIN_DECILE_TOKENS = 1000
WINDOW_STEPS = 25
TAKE_IN_SHARE = 0.4  # of `draft_us`, in a step that drafts nothing; measured, see benchmarks/LOG.md

Figures = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a step log, flat: one entry for each request and step, int64.

    Attributes:
        node_ids, block_ids: what the step began in.
        is_block_start: whether it began at the first token of a block; bool.
        num_draft_tokens, num_accepted_tokens, num_new_tokens: what it brought.
    """

    node_ids: NDArray[np.int64]
    block_ids: NDArray[np.int64]
    is_block_start: NDArray[np.bool_]
    num_draft_tokens: NDArray[np.int64]
    num_accepted_tokens: NDArray[np.int64]
    num_new_tokens: NDArray[np.int64]

    def figures(self, chosen: NDArray[np.bool_] | slice = slice(None)) -> Figures:
        """Rates over the chosen rows; a rate whose denominator is 0 is None."""
        drafted = self.num_draft_tokens[chosen]
        accepted = self.num_accepted_tokens[chosen]
        starts = accepted[self.is_block_start[chosen]]
        num_steps, num_drafts = len(drafted), int((drafted > 0).sum())
        return {
            "num_request_steps": num_steps,
            "num_tokens": int(self.num_new_tokens[chosen].sum()),
            "num_draft_tokens": int(drafted.sum()),
            "num_accepted_tokens": int(accepted.sum()),
            "num_block_starts": len(starts),
            "tokens_per_step": _ratio(self.num_new_tokens[chosen].sum(), num_steps),
            "rejection_rate": _ratio(drafted.sum() - accepted.sum(), drafted.sum()),
            "acceptance_length": _ratio(num_drafts + accepted.sum(), num_drafts),
            "accepted_per_step": _ratio(accepted.sum(), num_steps),
            "first_step_accepted": _ratio(starts.sum(), len(starts)),
        }


def _ratio(numerator: float, denominator: float) -> float | None:
    return float(numerator) / float(denominator) if denominator else None


def _flat(arrays: Sequence[NDArray[Any]]) -> NDArray[np.int64]:
    return np.concatenate(arrays).astype(np.int64) if arrays else np.empty(0, np.int64)


def flatten(log: StepLog, node_names: dict[str, int]) -> Rows:
    """Look up node and block of every row; new nodes enter `node_names`."""
    call_ids, positions = _flat(log.call_ids), _flat(log.positions)
    nodes = np.array([node_names.setdefault(call.node, len(node_names)) for call in log.calls], np.int64)
    offsets = np.append(0, np.cumsum([len(call.output) for call in log.calls])).astype(np.int64)
    flat = offsets[call_ids] + positions
    return Rows(
        node_ids=nodes[call_ids],
        block_ids=_flat([call.blocks for call in log.calls])[flat],
        is_block_start=_flat([call.is_block_start for call in log.calls])[flat] > 0,
        num_draft_tokens=_flat(log.num_draft_tokens),
        num_accepted_tokens=_flat(log.num_accepted_tokens),
        num_new_tokens=_flat(log.num_new_tokens),
    )


def summarise(log: StepLog, rows: Rows, curve: CostCurve, draft_us: float) -> Figures:
    """All figures of one cell.

    `budget_use` is D / M(b), summed over the steps. `modelled_speedup` compares tokens per time with plain decoding of
    the same rows; the step time is that of the curve, plus `draft_us` for each row of every step (where the method did
    not look for drafts, the share that taking in the tokens costs). `worst_window_speedup` is the same for the
    worst 25 steps in a row that begin at a multiple of 25. `calibration` holds
    for each tenth of predicted survival the number of draft tokens, the mean prediction and the accepted share; its
    mean error is weighted by tokens, its worst one is over tenths with at least 1,000 tokens.
    """
    row_counts, draft_counts = _flat([np.array(log.row_counts)]), _flat([np.array(log.draft_counts)])
    budgets = np.maximum(curve.knee() - row_counts, 0) if np.isfinite(curve.knee()) else np.zeros(len(row_counts))
    looked_counts = _flat([np.array(log.looked_counts)])
    charged = looked_counts + TAKE_IN_SHARE * (row_counts - looked_counts)
    plain_ms = curve.step_ms(row_counts)
    step_ms = curve.step_ms(row_counts + draft_counts) + draft_us / 1000 * charged
    tokens_per_step = _ratio(rows.num_new_tokens.sum(), row_counts.sum())
    return {
        **rows.figures(),
        "num_steps": len(row_counts),
        "rows_per_step": _ratio(row_counts.sum(), len(row_counts)),
        "draft_tokens_per_step": _ratio(draft_counts.sum(), row_counts.sum()),
        "budget_use": _ratio(draft_counts.sum(), budgets.sum()),
        "modelled_speedup": None
        if tokens_per_step is None
        else tokens_per_step * float(plain_ms.sum() / step_ms.sum()),
        "worst_window_speedup": _worst_window(log, plain_ms, step_ms),
        "looked_share": _ratio(looked_counts.sum(), row_counts.sum()),
        **_calibration(log, rows),
    }


def _worst_window(log: StepLog, plain_ms: NDArray[np.float64], step_ms: NDArray[np.float64]) -> float | None:
    num_new = np.array([tokens.sum() for tokens in log.num_new_tokens], np.float64)
    rows = np.array(log.row_counts, np.float64)
    num_windows = len(rows) // WINDOW_STEPS
    if not num_windows:
        return None
    new, row_sums, plain, took = (
        values[: num_windows * WINDOW_STEPS].reshape(num_windows, WINDOW_STEPS).sum(1)
        for values in (num_new, rows, plain_ms, step_ms)
    )
    return float((new / row_sums * plain / took).min())


def _calibration(log: StepLog, rows: Rows) -> Figures:
    if not log.survival or not sum(map(len, log.survival)):
        return {"calibration_error": None, "calibration_error_max": None, "calibration": []}
    survival = np.concatenate(log.survival).astype(np.float64)
    lengths = rows.num_draft_tokens
    place = np.arange(len(survival)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    is_accepted = place < np.repeat(rows.num_accepted_tokens, lengths)
    deciles = np.clip((survival * 10).astype(np.int64), 0, 9)
    counts = np.bincount(deciles, minlength=10)
    at_least_one = np.maximum(counts, 1)
    predicted = np.bincount(deciles, survival, 10) / at_least_one
    observed = np.bincount(deciles, is_accepted, 10) / at_least_one
    errors = np.abs(predicted - observed)
    is_large = counts >= MIN_DECILE_TOKENS
    return {
        "calibration_error": float(np.average(errors, weights=counts)),
        "calibration_error_max": float(errors[is_large].max()) if is_large.any() else None,
        "calibration": [
            {"num_tokens": int(counts[i]), "predicted": float(predicted[i]), "accepted": float(observed[i])}
            for i in range(10)
            if counts[i]
        ],
    }


def breakdown(rows: Rows, node_names: Sequence[str], block_names: Sequence[str]) -> list[Figures]:
    """Figures by node and by block, most steps first."""
    found = []
    for kind, names, ids in (("node", node_names, rows.node_ids), ("block", block_names, rows.block_ids)):
        counts = np.bincount(ids, minlength=len(names))
        for index in np.argsort(-counts, kind="stable"):
            if counts[index]:
                found.append({kind: names[index], **rows.figures(ids == index)})
    return found


def tokens_at_rejection(curve: Sequence[tuple[float, float]], rejection_rate: float) -> float | None:
    """Tokens per step of a threshold sweep at a given rejection rate, straight between its points.

    Args:
        curve: (rejection rate, tokens per step) of each threshold.
        rejection_rate: a peer's. Above the sweep's highest the end of the sweep counts: less rejected, so it flatters
            the peer, if anybody.

    Returns:
        None where the peer rejects less than the whole sweep.
    """
    rates, tokens = np.array(sorted(curve), np.float64).reshape(-1, 2).T
    if not len(rates) or rejection_rate < rates[0]:
        return None
    return float(np.interp(rejection_rate, rates, tokens))
