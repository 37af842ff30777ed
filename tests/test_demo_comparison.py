"""Whether two ways of decoding agree: first divergences, numeric ties, missing calls."""

from __future__ import annotations

import pytest

from agentspec.benchmarks.calls import Call
from agentspec.benchmarks.comparison import NUMERIC_TIE_GAP, Comparison, Divergence, compare_calls, judge

PROMPT = (1, 2, 3)
TIE = NUMERIC_TIE_GAP / 2


def make_call(agent: str = "a", stage: str = "plan", prompt: tuple[int, ...] = PROMPT, *output: int) -> Call:
    return Call(agent, stage, 0, prompt, output or (7, 8, 9))


def with_output(*output: int, agent: str = "a") -> Call:
    return make_call(agent, "plan", PROMPT, *output)


def divergence_at(position: int, expected: int | None, actual: int | None, agent: str = "a") -> Divergence:
    return Divergence(agent, "plan", 0, position, PROMPT, expected, actual)


def test_equal_calls_are_identical() -> None:
    calls = [make_call("a"), make_call("b"), make_call("a", "write")]

    comparison = compare_calls(calls, calls)

    assert comparison == Comparison(num_compared_calls=3, num_skipped_calls=0, divergences=())


def test_order_of_agents_does_not_matter_and_order_within_an_agent_does() -> None:
    expected = [make_call("a"), make_call("b"), make_call("a", "write")]

    by_agent = compare_calls(expected, [expected[1], expected[0], expected[2]])
    swapped = compare_calls(expected, [expected[1], expected[2], expected[0]])

    assert by_agent.divergences == ()
    assert [divergence.agent for divergence in swapped.divergences] == ["a"]


def test_divergence_names_the_first_token_that_differs_and_the_prefix_before_it() -> None:
    comparison = compare_calls([with_output(7, 8, 9)], [with_output(7, 5, 9)])

    assert comparison.divergences == (Divergence("a", "plan", 0, 1, (*PROMPT, 7), 8, 5),)


def test_output_that_ended_early_has_no_token_to_judge() -> None:
    comparison = compare_calls([with_output(7, 8, 9)], [with_output(7, 8)])

    assert comparison.divergences == (Divergence("a", "plan", 0, 2, (*PROMPT, 7, 8), 9, None),)


def test_calls_after_an_agents_divergence_are_skipped_and_counted() -> None:
    later = make_call("a", "write", (4, 5, 6))
    changed = make_call("a", "write", (4, 9, 6))

    comparison = compare_calls(
        [with_output(7, 8), later, later, make_call("b")],
        [with_output(7, 5), changed, changed, make_call("b")],
    )

    assert (comparison.num_compared_calls, comparison.num_skipped_calls) == (2, 2)
    assert len(comparison.divergences) == 1


@pytest.mark.parametrize("is_ours_missing", [True, False])
def test_call_that_only_one_side_made_is_a_difference(is_ours_missing: bool) -> None:
    both, one = [make_call(), make_call("a", "write")], [make_call()]
    expected, actual = (one, both) if is_ours_missing else (both, one)

    verdict = judge(compare_calls(expected, actual), lambda _divergence: 0.0)

    assert verdict.num_compared_calls == 1
    assert [difference.stage for difference in verdict.differences] == ["write"]


def test_agent_that_made_no_call_at_all_is_a_difference() -> None:
    verdict = judge(compare_calls([make_call("a"), make_call("b")], [make_call("a")]), lambda _divergence: 0.0)

    assert [difference.agent for difference in verdict.differences] == ["b"]


def test_other_prompt_without_an_earlier_divergence_is_a_difference() -> None:
    verdict = judge(
        compare_calls([make_call(prompt=(1, 2, 3))], [make_call(prompt=(1, 2, 4))]), lambda _divergence: 0.0
    )

    assert not verdict.is_identical


@pytest.mark.parametrize(
    ("gap", "is_identical"),
    [(0.0, True), (TIE, True), (NUMERIC_TIE_GAP, False), (1.0, False), (None, False)],
)
def test_only_a_gap_below_the_threshold_is_a_numeric_tie(gap: float | None, is_identical: bool) -> None:
    comparison = Comparison(1, 0, (divergence_at(0, 7, 5),))

    verdict = judge(comparison, lambda _divergence: gap)

    assert (verdict.is_identical, verdict.num_numeric_ties) == (is_identical, int(is_identical))


def test_missing_token_is_never_a_tie_and_nobody_is_asked() -> None:
    comparison = Comparison(2, 0, (divergence_at(2, 9, None), divergence_at(2, None, 9, agent="b")))

    def fail(_divergence: Divergence) -> float:
        raise AssertionError("asked for the logits of a token that is not there")

    verdict = judge(comparison, fail)

    assert (len(verdict.differences), verdict.num_numeric_ties) == (2, 0)
