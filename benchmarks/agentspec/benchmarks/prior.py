"""Learns the calibration that every new engine starts from: what drafts were worth on recorded runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from agentspec.benchmarks.corpus import TokenCall
from agentspec.benchmarks.methods.agentspec import AgentSpec
from agentspec.benchmarks.methods.interface import Setting
from agentspec.benchmarks.replay import NUM_SPECULATIVE_TOKENS, Piece, Queue, Replay
from agentspec.sidecar.engine import Parts

UNKNOWN = -1.0
MIN_OBSERVATIONS = 20
_BOUNDS = (0.005, 0.995)  # a cell that never was right may be so elsewhere
_LOWEST_THRESHOLD = 0.01
_PER_LINE = 14


def learn_prior(
    past: Iterable[TokenCall],
    pieces: Sequence[Piece],
    vocabulary: Sequence[bytes],
    *,
    batch_size: int,
    max_tokens: int | None,
    seed: int,
    on_progress: Callable[[int], None],
) -> NDArray[np.float64]:
    """Play recorded runs through an engine that starts from nothing.

    Returns:
        Share of right drafts of each calibration cell, in [0, 1]; `UNKNOWN` where fewer than `MIN_OBSERVATIONS` fell.
    """
    drafter = AgentSpec(Setting(vocabulary, NUM_SPECULATIVE_TOKENS, None), parts=Parts(prior=False))
    for call in past:
        drafter.warm(call)
    Replay(drafter, Queue(pieces, seed), batch_size, curve=None, threshold=_LOWEST_THRESHOLD).run(
        max_tokens, on_progress
    )
    counts = drafter.calibration_counts().astype(np.float64)
    shares = np.clip(counts[:, 0] / np.maximum(counts[:, 1], 1), *_BOUNDS)
    return np.where(counts[:, 1] >= MIN_OBSERVATIONS, shares, UNKNOWN)


def format_prior(shares: Sequence[float]) -> str:
    """The initialiser of `Calibration::kPriorShares`."""
    items = ["-1" if share < 0 else f"{share:.3f}f" for share in shares]
    lines = [", ".join(items[begin : begin + _PER_LINE]) for begin in range(0, len(items), _PER_LINE)]
    return ",\n".join(lines) + ",\n"
