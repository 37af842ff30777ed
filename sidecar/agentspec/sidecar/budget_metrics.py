"""Metrics of the budget: what it chose by decode rows in the step, what that brought, and how well it predicts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from opentelemetry.metrics import CallbackOptions, Meter, Observation

from agentspec.sidecar.budget import POLICIES, ROW_BUCKETS, BudgetStats, Policy

_SECONDS = 1e-3  # the core counts milliseconds

BUCKET_COUNTERS = {
    "agentspec_budget_steps": ("num_steps", 1, "Verification steps of the batch."),
    "agentspec_budget_draft_steps": ("num_draft_steps", 1, "Steps that verified a draft."),
    "agentspec_budget_skipped_steps": ("num_skipped_steps", 1, "Steps without drafting, because it did not pay."),
    "agentspec_budget_draft_tokens": ("num_draft_tokens", 1, "Draft tokens admitted; under shadow, not verified."),
    "agentspec_budget_expected_tokens": ("num_expected_tokens", 1, "Of these, accepted, as survival promised."),
    "agentspec_budget_accepted_tokens": ("num_accepted_tokens", 1, "Of these, accepted."),
    "agentspec_step_seconds": ("step_ms", _SECONDS, "Time of the target model, measured."),
    "agentspec_predicted_step_seconds": ("predicted_ms", _SECONDS, "The same as the cost model predicted it."),
    "agentspec_drafting_seconds": ("draft_ms", _SECONDS, "Time charged for drafting."),
}
"""Field of `BucketStats`, its factor and its description by metric, with the label `rows`."""

BUCKET_SUMS = {
    "agentspec_saved_seconds": ("saved_ms", _SECONDS, "Time saved against plain decoding, drafting charged."),
    "agentspec_predicted_saved_seconds": ("predicted_saved_ms", _SECONDS, "The same as the policy expected it."),
}
"""The same for sums that may fall."""


class BudgetedEngine(Protocol):
    """What these metrics read of a draft engine."""

    def budget_stats(self) -> Sequence[BudgetStats]:
        """What the budget of each client did."""
        ...

    @property
    def policy(self) -> Policy:
        """Which draft tokens are verified."""
        ...


def register_budget(meter: Meter, engine: BudgetedEngine) -> None:
    """Make the metrics; several clients of one engine are summed, their gauges show the mean or the worst of them."""
    for metric, (field, factor, description) in BUCKET_COUNTERS.items():
        meter.create_observable_counter(metric, [_observe_buckets(engine, field, factor)], description=description)
    for metric, (field, factor, description) in BUCKET_SUMS.items():
        observe = _observe_buckets(engine, field, factor)
        meter.create_observable_up_down_counter(metric, [observe], description=description)

    def observe_timings(_: CallbackOptions) -> Iterable[Observation]:
        budgets = engine.budget_stats()
        yield Observation(sum(budget.num_timings for budget in budgets), {"result": "used"})
        yield Observation(sum(budget.num_bad_timings for budget in budgets), {"result": "refused"})

    meter.create_observable_counter(
        "agentspec_step_timings", [observe_timings], description="Measured steps that the cost model was given."
    )

    def observe_policy(_: CallbackOptions) -> Iterable[Observation]:
        current = engine.policy
        return [Observation(int(policy == current), {"policy": policy}) for policy in POLICIES]

    meter.create_observable_gauge("agentspec_policy", [observe_policy], description="1: the policy in use.")
    meter.create_observable_counter(
        "agentspec_gate_closings",
        [_observe(engine, lambda budgets: sum(budget.num_gate_closings for budget in budgets))],
        description="Times that drafting was stopped, because it had made decoding slower.",
    )
    for metric, (read, description) in _GAUGES.items():
        meter.create_observable_gauge(metric, [_observe(engine, read)], description=description)


def _mean_level(budgets: Sequence[BudgetStats]) -> float:
    levels = [budget.level_ms for budget in budgets if budget.level_ms > 0]
    return _SECONDS * sum(levels) / max(1, len(levels))


_Read = Callable[[Sequence[BudgetStats]], float]

_GAUGES: dict[str, tuple[_Read, str]] = {
    "agentspec_closed_gates": (
        lambda budgets: sum(not budget.is_gate_open for budget in budgets),
        "Clients for which drafting is stopped now.",
    ),
    "agentspec_cost_model_level_seconds": (_mean_level, "Time of the shortest step now, mean over the clients."),
    "agentspec_cost_model_error_ratio": (
        lambda budgets: max((budget.noise for budget in budgets), default=0.0),
        "Typical error of one predicted step, of the worst client.",
    ),
    "agentspec_survival_trust_ratio": (
        lambda budgets: min((budget.trust for budget in budgets), default=1.0),
        "Accepted tokens per promised one, where proven to be below 1, of the worst client.",
    ),
}


def _observe(engine: BudgetedEngine, read: _Read) -> Callable[[CallbackOptions], Iterable[Observation]]:
    def observe(_: CallbackOptions) -> Iterable[Observation]:
        yield Observation(read(engine.budget_stats()))

    return observe


def _observe_buckets(
    engine: BudgetedEngine, field: str, factor: float
) -> Callable[[CallbackOptions], Iterable[Observation]]:
    def observe(_: CallbackOptions) -> Iterable[Observation]:
        budgets = engine.budget_stats()
        for index, rows in enumerate(ROW_BUCKETS):
            buckets = [budget.buckets[index] for budget in budgets]
            if any(bucket.num_steps or bucket.step_ms for bucket in buckets):
                yield Observation(factor * sum(getattr(bucket, field) for bucket in buckets), {"rows": rows})

    return observe
