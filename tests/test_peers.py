"""The peers of a replay against cases made by hand, and against the code that they stand for where that is here."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.trace_lab import ids, require_arctic, step_of, token_call

from agentspec.benchmarks.cost_curves import CostCurve
from agentspec.benchmarks.methods.arctic import Arctic
from agentspec.benchmarks.methods.gpu_suffix import (
    HALF_LIFE_STEPS,
    AcceptanceStats,
    GpuSuffix,
    SharedText,
    length_bucket,
)
from agentspec.benchmarks.methods.interface import Method
from agentspec.benchmarks.methods.ngram import Ngram, draft_ngram
from agentspec.benchmarks.methods.own_text import OwnText, longest_match

texts = st.lists(st.integers(0, 3), max_size=40)


def draft(text: Sequence[int], min_ngram: int = 2, max_ngram: int = 5, length: int = 5) -> list[int]:
    drafted: list[int] = draft_ngram(ids(*text), min_ngram, max_ngram, length).tolist()
    return drafted


# --- ngram ---


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ([1, 2, 3, 9, 1, 2], [3, 9, 1, 2]),  # the last two tokens occur before
        ([1, 2, 3, 9, 2], []),  # one token is below the least length
        ([1, 2, 7, 6, 1, 2, 8, 5, 1, 2], [7, 6, 1, 2, 8]),  # of two occurrences the earlier
        ([1, 2, 7, 5, 0, 1, 2, 8, 5, 0, 1, 2], [8, 5, 0, 1, 2]),  # a longer one wins over an earlier one
        ([4, 4, 4, 4], [4]),  # occurrences may overlap the end
        ([], []),
        ([1], []),
    ],
)
def test_ngram_copies_what_followed_the_longest_occurrence(text: list[int], expected: list[int]) -> None:
    assert expected == draft(text)


def test_ngram_does_not_match_further_than_its_longest_gram() -> None:
    text = [9, 1, 2, 7, 0, 3, 1, 2, 8, 0, 3, 1, 2]  # three tokens match at 8, two at 7

    assert ([8], [7]) == (draft(text, max_ngram=3, length=1), draft(text, max_ngram=2, length=1))


@given(texts, st.integers(1, 3), st.integers(0, 3), st.integers(1, 6))
def test_ngram_follows_its_definition(text: list[int], min_ngram: int, more: int, length: int) -> None:
    expected: list[int] = []
    for size in range(min_ngram, min_ngram + more + 1):
        starts = [i for i in range(len(text) - size) if text[i : i + size] == text[len(text) - size :]]
        if starts:
            expected = text[starts[0] + size :][:length]

    assert expected == draft(text, min_ngram, min_ngram + more, length)


@pytest.mark.usefixtures("numba")
@pytest.mark.vllm
def test_ngram_drafts_what_vllm_drafts() -> None:
    from vllm.v1.spec_decode import ngram_proposer  # noqa: PLC0415  # imports torch

    rng = np.random.default_rng(0)
    for _ in range(300):
        text = rng.integers(0, 4, rng.integers(0, 60)).astype(np.int32)
        expected = ngram_proposer._find_longest_matched_ngram_and_propose_tokens(text, 2, 5, 1000, 5)

        assert expected.tolist() == draft(text.tolist())


def test_ngram_sees_prompt_and_output_of_its_request_alone() -> None:
    method = Ngram()
    method.open(0, token_call([0]), ids(1, 2, 3, 4), is_recorded=True)
    method.open(1, token_call([0]), ids(1, 2, 5, 6), is_recorded=True)

    assert [3, 4, 1, 2] == method.step(step_of(0, [1, 2])).token_ids.tolist()


@given(texts, st.integers(1, 5))
def test_longest_match_is_the_longest_and_complete(text: list[int], limit: int) -> None:
    length, following = longest_match(ids(*text), limit)

    def ends(size: int) -> list[int]:
        return [i for i in range(size, len(text)) if text[i - size : i] == text[len(text) - size :]]

    longest = max((size for size in range(1, min(limit, len(text)) + 1) if ends(size)), default=0)
    assert longest == length
    assert (ends(longest) if longest else []) == following.tolist()


@given(st.lists(texts, max_size=8))
def test_own_text_grows_by_what_is_appended(parts: list[list[int]]) -> None:
    text = OwnText(ids())
    for part in parts * 20:
        text.append(ids(*part))

    assert [token for part in parts * 20 for token in part] == text.tokens.tolist()


# --- gpu-suffix ---


def shared_draft(documents: Sequence[Sequence[int]], tail: Sequence[int], length: int = 4) -> tuple[int, list[int]]:
    shared = SharedText()
    for document in documents:
        shared.append(ids(*document))
    return shared.draft(ids(*tail), length)


def test_most_frequent_continuation_wins() -> None:
    assert (2, [3, 4]) == shared_draft([[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 3, 4], [1, 2, 9]], [1, 2])


def test_newest_continuation_wins_a_tie() -> None:
    assert (2, [4, 7]) == shared_draft([[1, 2, 3, 8], [1, 2, 4, 7]], [1, 2])


def test_chain_with_the_highest_sum_of_shares_wins_over_the_longest_match() -> None:
    documents = [[9, 1, 2, 3], *[[5, 1, 2, 4, 4, 4, 4]] * 4]

    assert (2, [4, 4, 4, 4]) == shared_draft(documents, [9, 1, 2])


def test_longer_match_wins_between_equal_sums() -> None:
    assert (4, [6, 6, 6, 6]) == shared_draft([[9, 8, 1, 2, 6, 6, 6, 6, 6], [5, 1, 2, 7]], [9, 8, 1, 2])


def test_draft_ends_with_its_document() -> None:
    assert (2, [3]) == shared_draft([[1, 2, 3], [7, 8, 9]], [1, 2])


def test_one_matching_token_is_no_match() -> None:
    assert (0, []) == shared_draft([[1, 2, 3]], [7, 2])


def test_key_remembers_one_position_of_each_of_the_last_eight_documents() -> None:
    documents = [[1, 2, number] for number in range(10, 26)]

    assert (2, [25]) == shared_draft(documents, [1, 2], 1)
    assert (2, [4]) == shared_draft([[1, 2, 3, 1, 2, 4]], [1, 2], 1)


@pytest.mark.parametrize(("length", "bucket"), [(1, 0), (6, 5), (7, 6), (10, 6), (11, 7), (20, 7), (21, 8), (24, 8)])
def test_match_lengths_share_buckets(length: int, bucket: int) -> None:
    assert bucket == length_bucket(length)


def test_survival_is_the_product_of_observed_rates() -> None:
    stats = AcceptanceStats(4)
    stats.observe((0, 1), 2, 4)  # two accepted, the third rejected, the fourth not reached
    stats.observe((0, 1), 1, 1)  # one verified and accepted

    assert [3 / 4, 3 / 4 * 2 / 3, 3 / 4 * 2 / 3 * 1 / 3] == pytest.approx(stats.survival((0, 1), 3))
    assert [1 / 2] == stats.survival((1, 1), 1).tolist()


def test_statistics_are_halved_every_1024_steps() -> None:
    stats = AcceptanceStats(1)
    for _ in range(4):
        stats.observe((0, 0), 1, 1)
    for _ in range(HALF_LIFE_STEPS):
        stats.count_step()

    assert [(2 + 1) / (2 + 2)] == stats.survival((0, 0), 1).tolist()


def opened(method: Method, prompt: Sequence[int], handle: int = 0) -> Method:
    method.open(handle, token_call([0]), ids(*prompt), is_recorded=True)
    return method


def test_own_text_wins_a_tie_and_its_latest_occurrence_is_copied() -> None:
    method = GpuSuffix(16, None)
    method.warm(token_call([1, 2, 9, 9]))

    drafts = opened(method, [1, 2, 3, 1, 2, 4]).step(step_of(0, [1, 2]))

    assert [4, 1, 2] == drafts.token_ids.tolist()


def test_answer_is_shared_when_it_has_ended_with_the_end_of_its_prompt() -> None:
    method = opened(GpuSuffix(16, None), [5, 6, 7])
    method.step(step_of(0))
    method.step(step_of(0, [1]))
    assert [] == opened(method, [5, 6, 7], 1).step(step_of(1)).token_ids.tolist()

    method.close(0, ids(2, 3), 0, 0)

    assert [1, 2, 3] == method.step(step_of(1)).token_ids.tolist()


def test_answer_that_is_not_recorded_is_never_shared() -> None:
    method = GpuSuffix(16, None)
    method.open(0, token_call([0]), ids(5, 6, 7), is_recorded=False)
    method.close(0, ids(1, 2, 3), 0, 0)

    assert [] == opened(method, [5, 6, 7], 1).step(step_of(1)).token_ids.tolist()


def taught(method: GpuSuffix, num_rejected: int) -> GpuSuffix:
    """A request whose drafts were rejected at the third token so often."""
    opened(method, [1, 2, 3, 4, 5, 6, 7, 8, 0, 1])
    for _ in range(num_rejected):
        method.step(step_of(0))
        method._take_in(method._requests[0], ids(), 2, 4)
    return method


def test_tokens_are_admitted_by_survival_while_they_pay() -> None:
    free = CostCurve("free", ((1, 1.0),))
    steep = CostCurve("steep", ((1, 1.0), (2, 1.5)))  # a further token costs half a step

    assert 8 == len(taught(GpuSuffix(8, free), 0).step(step_of(0)).token_ids)
    assert [2, 0] == [
        len(taught(GpuSuffix(8, curve), 20).step(step_of(0)).token_ids)
        for curve in (steep, CostCurve("worse", ((1, 1.0), (2, 3.0))))
    ]


@pytest.mark.parametrize(("has_shadow", "survival"), [(False, 1 / 2), (True, 2 / 3)])
def test_unverified_tokens_teach_the_shadow_alone(has_shadow: bool, survival: float) -> None:
    method = opened(GpuSuffix(4, None, has_shadow=has_shadow), [1, 2, 3, 4, 5, 1])
    method.step(step_of(0))  # drafts 2 3 4 5; nothing of it is verified
    method.step(step_of(0, [2, 3]))
    method.step(step_of(0, [4, 5]))

    drafts = opened(method, [9, 8, 9], 1).step(step_of(1))  # a match of one token, as the first one was

    assert drafts.survival is not None
    assert survival == pytest.approx(drafts.survival[0])


@pytest.mark.parametrize("has_shadow", [False, True])
def test_verified_tokens_teach_both(has_shadow: bool) -> None:
    method = opened(GpuSuffix(4, None, has_shadow=has_shadow), [1, 2, 3, 4, 5, 1])
    method.step(step_of(0))  # drafts 2 3 4 5
    method.step(step_of(0, [2, 3, 7], num_draft=4, num_accepted=2))

    drafts = opened(method, [9, 8, 8, 8, 9], 1).step(step_of(1))

    assert drafts.survival is not None
    assert [2 / 3, 2 / 3 * 2 / 3, 2 / 3 * 2 / 3 / 3] == pytest.approx(drafts.survival[:3].tolist())


# --- Arctic ---


@pytest.mark.parametrize("depth", [24, 64])
def test_arctic_drafts_from_answers_of_the_past(depth: int) -> None:
    require_arctic()
    method = Arctic(depth, 4)
    method.warm(token_call([1, 2, 3, 4, 5, 6]))

    drafts = opened(method, [7, 1, 2, 3]).step(step_of(0))

    assert [4, 5, 6] == drafts.token_ids.tolist()
    assert drafts.survival is not None
    assert [1.0, 1.0, 1.0] == drafts.survival.tolist()


def test_arctic_shares_an_answer_while_it_is_written() -> None:
    require_arctic()
    method = opened(Arctic(24, 4), [])
    method.step(step_of(0, [1, 2, 3, 4]))

    assert [3, 4] == opened(method, [9, 1, 2], 1).step(step_of(1)).token_ids.tolist()


def test_arctic_never_shares_an_answer_that_is_not_recorded() -> None:
    require_arctic()
    method = Arctic(24, 4)
    method.open(0, token_call([0]), ids(), is_recorded=False)
    method.step(step_of(0, [1, 2, 3, 4]))
    method.close(0, ids(5), 0, 0)

    assert [] == opened(method, [1, 2], 1).step(step_of(1)).token_ids.tolist()
