"""How the draft tokens of a step are chosen: policies, their configuration, and what they brought."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Literal, get_args

Policy = Literal["goodput", "redundancy", "uniform", "fixed", "off", "shadow"]
"""Which draft tokens of a batch are verified.

`goodput`: those that make the tokens of the step per time highest, by survival and the cost model; maybe none.
`redundancy`: the paper's rule, the token budget split by redundancy score. `uniform`: the token budget split evenly.
`fixed`: all that was drafted. `off`: none. `shadow`: decides as `goodput` does, verifies none, and counts what it would
have.
"""

POLICIES: tuple[Policy, ...] = get_args(Policy)
# Bounds of the decode rows by which steps are counted; the last bucket has none.
ROW_BUCKETS = ("1", "2-8", "9-32", "33-64", "65-128", ">128")
DEFAULT_INTENSITY = 206.0  # H200, bf16
MAX_INTENSITY = float(1 << 20)


@dataclass(frozen=True, slots=True)
class BudgetOptions:
    """Configuration of the budget of one engine.

    Attributes:
        policy: see `Policy`.
        arithmetic_intensity: tokens that one forward pass computes in the time that reading the weights takes. It
            limits the token budget of `redundancy` and `uniform` to M(b) = this - rows - prefill tokens, and is where
            the cost model expects a step to become dearer until it has seen for itself. None: only the step's own
            `token_budget` limits, and the cost model expects 206.
        slope: how much longer a step of that many tokens takes than one of one token, as a share; the cost model's
            first guess, >= 0.
        capture_sizes: tokens per step for which the engine has CUDA graphs, rising: a step is padded to the next one.
        min_gain: `goodput` verifies nothing that is expected to gain less than this share of plain decoding, in [0, 1].
        draft_us: time to draft one row, charged to every step; None: measured.

    Raises:
        ValueError: a value is out of its range; the message names the field.
    """

    policy: Policy = "redundancy"
    arithmetic_intensity: float | None = None
    slope: float = 0.1
    capture_sizes: tuple[int, ...] = ()
    min_gain: float = 0.006
    draft_us: float | None = None

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ValueError(f"policy: expected one of {', '.join(POLICIES)}, got {self.policy!r}")
        intensity = self.arithmetic_intensity
        if intensity is not None and not 1 <= intensity <= MAX_INTENSITY:
            raise ValueError(f"arithmetic_intensity: expected 1 to {MAX_INTENSITY:.0f}, got {intensity}")
        if not 0 <= self.slope <= 100:  # more is no slope but a wrong unit
            raise ValueError(f"slope: expected 0 to 100, got {self.slope}")
        if not 0 <= self.min_gain <= 1:
            raise ValueError(f"min_gain: expected 0 to 1, got {self.min_gain}")
        if self.draft_us is not None and not (self.draft_us >= 0 and math.isfinite(self.draft_us)):
            raise ValueError(f"draft_us: expected >= 0, got {self.draft_us}")
        sizes = self.capture_sizes
        if any(size < 1 for size in sizes) or any(a >= b for a, b in itertools.pairwise(sizes)):
            raise ValueError(f"capture_sizes: expected rising numbers >= 1, got {sizes}")

    def fields(self) -> tuple[int, float, float, float, list[int], float, float]:
        """The values as the core takes them."""
        return (
            POLICIES.index(self.policy),
            self.arithmetic_intensity or 0.0,
            self.arithmetic_intensity or DEFAULT_INTENSITY,
            self.slope,
            list(self.capture_sizes),
            self.min_gain,
            -1.0 if self.draft_us is None else self.draft_us,
        )


PLAIN_BUDGET = BudgetOptions()


@dataclass(frozen=True, slots=True)
class BucketStats:
    """What the budget did in steps of so many decode rows (see `ROW_BUCKETS`), since the engine started.

    Attributes:
        num_draft_steps: steps that verified a draft.
        num_skipped_steps: steps for which nothing was drafted, because it had not paid.
        num_draft_tokens: draft tokens that were admitted; under `shadow` they are not verified.
        num_expected_tokens: of these, accepted ones, as survival promises.
        num_accepted_tokens: of these, accepted ones.
        step_ms: time of the target model, where it was measured.
        predicted_ms: the same as the cost model predicted it.
        draft_ms: time charged for drafting.
        predicted_saved_ms: time saved against plain decoding, D[(1 - r)s - v] as the policy saw it: D draft tokens,
            r rejected, s saved by an accepted token, v the cost of verifying one.
        saved_ms: the same as it turned out, drafting charged.
    """

    num_steps: int
    num_draft_steps: int
    num_skipped_steps: int
    num_draft_tokens: int
    num_expected_tokens: float
    num_accepted_tokens: int
    step_ms: float
    predicted_ms: float
    draft_ms: float
    predicted_saved_ms: float
    saved_ms: float


@dataclass(frozen=True, slots=True)
class BudgetStats:
    """The budget of one client of a draft engine.

    Attributes:
        client_id: see `StepRequest`.
        num_timings: steps that the cost model learned from.
        num_bad_timings: measurements that it refused: no tokens, or a duration that can't be.
        num_gate_closings: how often drafting was stopped because it had made decoding slower.
        level_ms: time of the shortest step now; 0: nothing was measured yet.
        noise: typical error of one predicted step, as a share.
        trust: accepted tokens per token that survival promised, where that was proven to be below 1.
        is_gate_open: False while drafting is stopped.
        buckets: one for each of `ROW_BUCKETS`.
    """

    client_id: int
    num_timings: int
    num_bad_timings: int
    num_gate_closings: int
    level_ms: float
    noise: float
    trust: float
    is_gate_open: bool
    buckets: tuple[BucketStats, ...]
