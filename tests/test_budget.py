"""The split of a step's token budget by redundancy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests import reference

from agentspec.sidecar.engine import allocate_by_redundancy

SCORES = st.floats(0, 1, width=32)
ROWS = st.lists(st.tuples(SCORES, st.integers(0, 64)), max_size=40)
BUDGETS = st.integers(0, 400)
Rows = list[tuple[float, int]]


def allocate(rows: Rows, token_budget: int) -> list[int]:
    scores = np.array([score for score, _ in rows], np.float32)
    lengths = np.array([length for _, length in rows], np.int32)
    return [int(budget) for budget in allocate_by_redundancy(scores, lengths, token_budget)]


# Scores whose sums are exact in double, so that no share rounds across a whole token.
@given(st.lists(st.tuples(st.just(0.0) | st.floats(2**-10, 1, width=32), st.integers(0, 64)), max_size=40), BUDGETS)
@example([(0.5, 3), (0.5, 3), (0.5, 3)], 4)
def test_budgets_equal_those_of_the_reference(rows: Rows, token_budget: int) -> None:
    expected = reference.allocate_by_redundancy(*split(rows), token_budget)

    assert expected == allocate(rows, token_budget)


def split(rows: Rows) -> tuple[list[float], list[int]]:
    return [score for score, _ in rows], [length for _, length in rows]


@given(ROWS, BUDGETS)
def test_everything_is_spent_that_rows_with_a_score_can_use(rows: Rows, token_budget: int) -> None:
    usable = sum(length for score, length in rows if score > 0)

    assert min(token_budget, usable) == sum(allocate(rows, token_budget))


@given(ROWS, BUDGETS)
def test_no_row_gets_more_than_it_drafted(rows: Rows, token_budget: int) -> None:
    budgets = allocate(rows, token_budget)

    assert all(0 <= budget <= length for budget, (_, length) in zip(budgets, rows, strict=True))


@given(ROWS, BUDGETS)
def test_a_row_without_redundancy_gets_nothing(rows: Rows, token_budget: int) -> None:
    budgets = allocate([*rows, (0.0, 64)], token_budget)

    assert [0] == budgets[-1:]


@given(st.lists(SCORES, unique=True, max_size=40), st.integers(0, 64), BUDGETS)
def test_among_equal_lengths_a_higher_score_never_gets_less(
    scores: list[float], length: int, token_budget: int
) -> None:
    budgets = allocate([(score, length) for score in sorted(scores)], token_budget)

    assert sorted(budgets) == budgets


@given(st.lists(st.tuples(st.floats(0.015625, 1, width=32), st.integers(64, 64)), min_size=1), BUDGETS)
def test_shares_are_proportional_to_the_score_while_no_row_is_full(rows: Rows, token_budget: int) -> None:
    total = sum(score for score, _ in rows)
    shares = [token_budget * score / total for score, _ in rows]
    assume(max(shares) < 63)

    budgets = allocate(rows, token_budget)

    assert all(budget > share - 1.001 for budget, share in zip(budgets, shares, strict=True))


def test_a_batch_larger_than_the_budget_spends_all_of_it() -> None:
    """Rounding every share down gives nothing at all here."""
    budgets = allocate([(0.5, 16)] * 256, 78)

    assert [1] * 78 + [0] * 178 == budgets


def test_what_a_short_draft_leaves_goes_to_the_others() -> None:
    assert [2, 49, 49] == allocate([(1.0, 2), (0.5, 64), (0.5, 64)], 100)


def test_among_equal_scores_the_earlier_row_gets_the_last_token() -> None:
    assert [2, 1] == allocate([(0.5, 16), (0.5, 16)], 3)


def test_a_batch_without_rows_gets_no_budget() -> None:
    assert [] == allocate([], 100)


def test_the_smallest_scores_are_served() -> None:
    assert [5, 5] == allocate([(float(np.float32(1e-45)), 5), (float(np.float32(1e-45)), 5)], 1000)


@pytest.mark.parametrize("score", [-0.1, 1.1, np.nan, np.inf, -np.inf])
def test_a_score_outside_its_range_is_refused_and_named(score: float) -> None:
    with pytest.raises(ValueError, match=rf"row 1: .*\[0, 1\].*{str(score)[:3]}"):
        allocate([(0.5, 1), (score, 1)], 10)


def test_a_negative_length_is_refused_and_named() -> None:
    with pytest.raises(ValueError, match=r"row 1: .*length >= 0.*-1"):
        allocate([(0.5, 1), (0.5, -1)], 10)


def test_a_negative_budget_is_refused_and_named() -> None:
    with pytest.raises(ValueError, match=r"token_budget: .*-1"):
        allocate([(0.5, 1)], -1)


def test_arrays_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="lengths: expected 2 entries, got 3"):
        allocate_by_redundancy(np.zeros(2, np.float32), np.zeros(3, np.int32), 10)


@pytest.mark.parametrize(
    ("scores", "lengths"),
    [
        (np.zeros(2, np.float64), np.zeros(2, np.int32)),
        (np.zeros(2, np.float32), np.zeros(2, np.int64)),
        (np.zeros(4, np.float32)[::2], np.zeros(2, np.int32)),
        (np.zeros((1, 2), np.float32), np.zeros(2, np.int32)),
    ],
)
def test_arrays_of_another_type_or_layout_are_refused(scores: NDArray[np.float32], lengths: NDArray[np.int32]) -> None:
    with pytest.raises(TypeError):
        allocate_by_redundancy(scores, lengths, 10)
