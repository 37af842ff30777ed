"""The choice of draft tokens that pay, against a plain search over all cuts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentspec.sidecar import _core

# Survival on the core's grid, so that the order of admission has no ties that fall differently.
SURVIVAL = st.integers(1, 1024).map(lambda level: level / 1024)
ROW = st.lists(SURVIVAL, max_size=16).map(lambda row: sorted(row, reverse=True))
ROWS = st.lists(ROW, min_size=1, max_size=12)
TIMES = st.lists(st.floats(0, 3, width=32), min_size=200, max_size=200).map(
    lambda rises: (1 + np.cumsum(rises)).tolist()
)
BOUNDS = st.integers(1, 200)


def allocate(
    rows: list[list[float]],
    times: list[float],
    *,
    trust: float = 1.0,
    min_gain: float = 0.0,
    token_ms: float = 0.0,
) -> list[int]:
    budgets, *_ = _core.allocate_by_goodput(rows, len(rows), times, 0.0, trust, min_gain, token_ms)
    return [int(budget) for budget in budgets]


def goodput(rows: list[list[float]], budgets: list[int], times: list[float]) -> float:
    accepted = sum(sum(row[:budget]) for row, budget in zip(rows, budgets, strict=True))
    return (len(rows) + accepted) / times[sum(budgets)]


def best_goodput(rows: list[list[float]], times: list[float]) -> float:
    """The best of all numbers of tokens, highest survival first."""
    survival = sorted((value for row in rows for value in row), reverse=True)[: len(times) - 1]
    tokens = len(rows) + np.concatenate([[0.0], np.cumsum(survival)])
    return float(np.max(tokens / np.array(times[: len(tokens)])))


@given(ROWS, TIMES, BOUNDS)
def test_no_other_cut_brings_more_tokens_per_time(rows: list[list[float]], times: list[float], bound: int) -> None:
    times = times[:bound]

    assert goodput(rows, allocate(rows, times), times) == pytest.approx(best_goodput(rows, times), rel=1e-5)


@given(ROWS, TIMES, BOUNDS)
def test_no_more_is_admitted_than_there_are_times_for(rows: list[list[float]], times: list[float], bound: int) -> None:
    assert sum(allocate(rows, times[:bound])) < bound


@given(ROWS)
def test_free_tokens_are_all_admitted(rows: list[list[float]]) -> None:
    assert [len(row) for row in rows] == allocate(rows, [1.0] * 200)


def test_nothing_is_admitted_where_every_token_costs_more_than_it_brings() -> None:
    assert [0, 0] == allocate([[0.9, 0.8], [0.5]], [1.0, 1.6, 2.2, 2.8])


def test_what_an_unlikely_row_frees_goes_to_the_likely_one() -> None:
    times = [1.0, 1.0, 1.0, 9.0, 9.0, 9.0]

    assert [2, 0] == allocate([[0.9, 0.8], [0.3, 0.2]], times)


def test_gain_below_the_least_one_counts_as_none() -> None:
    times = [1.0, 1.09]

    assert [[1], [0]] == [allocate([[0.1]], times, min_gain=gain) for gain in (0.0, 0.02)]


def test_survival_counts_less_where_it_is_not_trusted() -> None:
    times = [1.0, 1.4]

    assert [[1], [0]] == [allocate([[0.5]], times, trust=trust) for trust in (1.0, 0.5)]


def test_token_beside_a_long_prompt_is_worth_what_it_costs_without_one() -> None:
    """A prompt makes the step 100 times as long; by its own time any token would pay."""
    times = [100.0, 101.0]

    assert [[1], [0]] == [allocate([[0.5]], times, token_ms=token_ms) for token_ms in (0.0, 1.0)]
