"""What calibration.h says, slowly: one count per kind of evidence, one per predicted survival and depth."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

F32 = np.float32
Evidence = tuple[frozenset[bool], bool, int, int, int]

MATCH_EDGES = (1, 2, 3, 5, 8, 14, 24)
SUPPORT_EDGES = (1, 2, 4, 8)
CONSENSUS_EDGES = tuple(map(F32, (0.4, 0.6, 0.8, 0.97)))
SURVIVAL_EDGES = tuple(map(F32, (0.02, 0.04, 0.07, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98)))
DEPTH_EDGES = (0, 1, 2, 4, 7, 15)
TOKEN_PRIOR, SURVIVAL_PRIOR = F32(6), F32(20)
PRIOR_FILE = Path(__file__).parents[1] / "sidecar/core/calibration_prior.inc"
PRIOR_SHARES = [
    F32(share.rstrip("f")) for share in PRIOR_FILE.read_text().replace("\n", " ").split(", ") if share.strip()
]
NUM_TOKEN_CELLS = 3 * 2 * 8 * 5 * 5


def evidence_of(sources: frozenset[bool], depth: int, match_length: int, support: int, consensus: F32) -> Evidence:
    """The kind of evidence for one draft token; `sources` holds True for own text and False for that of others."""
    return (
        sources,
        depth > 0,
        bisect_left(MATCH_EDGES, match_length),
        bisect_left(SUPPORT_EDGES, support),
        bisect_left(CONSENSUS_EDGES, consensus),
    )


def _token_cell(evidence: Evidence) -> int:
    sources, is_deep, match, support, consensus = evidence
    source = (True in sources) + 2 * (False in sources) - 1
    return (((source * 2 + is_deep) * 8 + match) * 5 + support) * 5 + consensus


class ReferenceCalibration:
    """Observed shares, each pulled towards what the vote says while observations are few (fewer than 4,000 each)."""

    def __init__(self, *, has_prior: bool) -> None:
        self.has_prior = has_prior
        self.was_at_an_edge = False  # a prediction fell so near an edge that rounding chose its cell
        self.tokens: defaultdict[Evidence, list[int]] = defaultdict(lambda: [0, 0])
        self.survivals: defaultdict[tuple[int, int], list[int]] = defaultdict(lambda: [0, 0])

    def note_edge(self, value: F32, edges: Sequence[F32]) -> None:
        self.was_at_an_edge |= any(np.isclose(value, edge, rtol=1e-5, atol=0) for edge in edges)

    def probability(self, evidence: Evidence, raw: F32) -> F32:
        accepted, total = self.tokens[evidence]
        prior = self._prior(_token_cell(evidence), raw)
        return F32(F32(accepted) + TOKEN_PRIOR * prior) / (F32(total) + TOKEN_PRIOR)

    def survival(self, predicted: F32, depth: int) -> F32:
        self.note_edge(predicted, SURVIVAL_EDGES)
        accepted, total = self.survivals[self._cell(predicted, depth)]
        survival, deep = self._cell(predicted, depth)
        prior = self._prior(NUM_TOKEN_CELLS + survival * 7 + deep, predicted)
        return F32(F32(accepted) + SURVIVAL_PRIOR * prior) / (F32(total) + SURVIVAL_PRIOR)

    def _prior(self, cell: int, otherwise: F32) -> F32:
        share = PRIOR_SHARES[cell]
        return share if self.has_prior and share >= 0 else otherwise

    def record_token(self, evidence: Evidence, is_accepted: bool) -> None:
        self._add(self.tokens[evidence], is_accepted)

    def record_survival(self, predicted: F32, depth: int, is_accepted: bool) -> None:
        self._add(self.survivals[self._cell(predicted, depth)], is_accepted)

    @staticmethod
    def _cell(predicted: F32, depth: int) -> tuple[int, int]:
        return bisect_left(SURVIVAL_EDGES, predicted), bisect_left(DEPTH_EDGES, depth)

    @staticmethod
    def _add(count: list[int], is_accepted: bool) -> None:
        count[0] += is_accepted
        count[1] += 1
