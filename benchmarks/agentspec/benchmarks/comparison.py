"""Whether two ways of decoding gave the same outputs, call by call in each agent's order."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from agentspec.benchmarks.calls import Call

NUMERIC_TIE_GAP = 1e-4
"""Logits nearer than this are a numeric tie: float32 kernels differ by as much from one batch shape to another."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first call in which an agent's output differs.

    Attributes:
        agent: see `Call`.
        stage: see `Call`.
        iteration: see `Call`.
        position: output token where it differs, from 0.
        prefix_token_ids: prompt and the output that both have in common.
        expected_id: token of the reference; None where it made no such call or its output ended.
        actual_id: token of the other one; None likewise.
    """

    agent: str
    stage: str
    iteration: int
    position: int
    prefix_token_ids: tuple[int, ...]
    expected_id: int | None
    actual_id: int | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """What was compared and what differs.

    Attributes:
        num_compared_calls: pairs of calls, the diverging ones included.
        num_skipped_calls: calls of the reference that follow an agent's divergence: their prompts differ.
        divergences: the first of each agent that has one.
    """

    num_compared_calls: int
    num_skipped_calls: int
    divergences: tuple[Divergence, ...]


@dataclass(frozen=True, slots=True)
class Verdict:
    """A comparison whose divergences were judged.

    Attributes:
        num_compared_calls: see `Comparison`.
        num_skipped_calls: see `Comparison`.
        num_numeric_ties: divergences between two tokens that the reference itself holds for equal.
        differences: all other divergences.
    """

    num_compared_calls: int
    num_skipped_calls: int
    num_numeric_ties: int
    differences: tuple[Divergence, ...]

    @property
    def is_identical(self) -> bool:
        """No difference but numeric ties."""
        return not self.differences


def compare_calls(expected: Iterable[Call], actual: Iterable[Call]) -> Comparison:
    """Find the first divergence of each agent.

    Args:
        expected: calls of the reference; those of one agent in their order, agents in any order.
        actual: calls of what is compared with it.
    """
    expected_by_agent, actual_by_agent = _by_agent(expected), _by_agent(actual)
    num_compared = num_skipped = 0
    divergences = []
    for agent in sorted(expected_by_agent.keys() | actual_by_agent.keys()):
        ours, theirs = expected_by_agent[agent], actual_by_agent[agent]
        divergence, index = _first_divergence(ours, theirs)
        num_compared += min(index + (divergence is not None), len(ours), len(theirs))
        if divergence is not None:
            divergences.append(divergence)
            num_skipped += max(0, len(ours) - index - 1)
    return Comparison(num_compared, num_skipped, tuple(divergences))


def judge(comparison: Comparison, logit_gap: Callable[[Divergence], float | None]) -> Verdict:
    """Tell numeric ties from differences.

    Args:
        comparison: from `compare_calls`.
        logit_gap: how far the reference's logits of the two tokens lie apart, given the common prefix; None where
            one of them is not among its top tokens. Asked only where both have a token.
    """
    differences = []
    for divergence in comparison.divergences:
        has_two_tokens = divergence.expected_id is not None and divergence.actual_id is not None
        gap = logit_gap(divergence) if has_two_tokens else None
        if gap is None or gap >= NUMERIC_TIE_GAP:
            differences.append(divergence)
    return Verdict(
        num_compared_calls=comparison.num_compared_calls,
        num_skipped_calls=comparison.num_skipped_calls,
        num_numeric_ties=len(comparison.divergences) - len(differences),
        differences=tuple(differences),
    )


def _by_agent(calls: Iterable[Call]) -> defaultdict[str, list[Call]]:
    by_agent: defaultdict[str, list[Call]] = defaultdict(list)
    for call in calls:
        by_agent[call.agent].append(call)
    return by_agent


def _first_divergence(expected: Sequence[Call], actual: Sequence[Call]) -> tuple[Divergence | None, int]:
    """The divergence and the index of its call; None and the number of equal calls where there is none."""
    for index, (ours, theirs) in enumerate(zip(expected, actual, strict=False)):
        if (ours.stage, ours.prompt_token_ids) != (theirs.stage, theirs.prompt_token_ids):
            return _whole_call(ours), index
        if ours.output_token_ids != theirs.output_token_ids:
            return _within_call(ours, theirs), index
    index = min(len(expected), len(actual))
    longer = expected if len(expected) > len(actual) else actual
    return (_whole_call(longer[index]), index) if index < len(longer) else (None, index)


def _whole_call(call: Call) -> Divergence:
    """A call that only one side made, or made with another prompt: no token can be judged."""
    return Divergence(call.agent, call.stage, call.iteration, 0, call.prompt_token_ids, None, None)


def _within_call(expected: Call, actual: Call) -> Divergence:
    ours, theirs = expected.output_token_ids, actual.output_token_ids
    pairs = zip(ours, theirs, strict=False)
    position = next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))
    return Divergence(
        agent=expected.agent,
        stage=expected.stage,
        iteration=expected.iteration,
        position=position,
        prefix_token_ids=expected.prompt_token_ids + ours[:position],
        expected_id=ours[position] if position < len(ours) else None,
        actual_id=theirs[position] if position < len(theirs) else None,
    )
