"""Parts of the engine that a benchmark switches off, and the floor of survival."""

from __future__ import annotations

from itertools import product
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.engine_player import LARGE_VOCABULARY, NESTED, SMALL_VOCABULARY, Playground, fuzzing
from tests.reference import ReferenceEngine, Row, drafts_by_row, step_request, token_ids

from agentspec.sidecar.engine import Engine, FinishReason, Parts, Sampling
from agentspec.sidecar.grammars import CHAT
from agentspec.sidecar.tags import Tags

EVERY_CHOICE = [Parts(*switches) for switches in product([True, False], repeat=4)]


@fuzzing
@given(
    st.randoms(use_true_random=False), st.sampled_from(EVERY_CHOICE), st.booleans(), st.sampled_from([0.0, 0.01, 0.5])
)
def test_an_engine_without_some_parts_equals_the_reference_without_them(
    random: Random, parts: Parts, is_strict: bool, min_survival: float
) -> None:
    native = Engine(SMALL_VOCABULARY, NESTED, is_strict=is_strict, min_survival=min_survival, parts=parts)
    expected = ReferenceEngine(SMALL_VOCABULARY, NESTED, is_strict=is_strict, min_survival=min_survival, parts=parts)
    Playground(random, [native, expected]).play(40, native.check_integrity)


def first_draft(engine: Engine, prompt: list[int], output: list[int]) -> list[int]:
    engine.open(1, token_ids(*prompt), Tags(), Sampling())
    return drafts_by_row(engine.step(step_request([Row(1, 0, output)])))[0]


def remember(engine: Engine, *output: int) -> None:
    engine.open(0, token_ids(), Tags(), Sampling())
    engine.close(0, FinishReason.STOP, len(output), token_ids(*output))


@pytest.mark.parametrize("has_own", [True, False])
def test_without_own_evidence_a_prompt_is_not_repeated(has_own: bool) -> None:
    engine = Engine(LARGE_VOCABULARY, CHAT, parts=Parts(own=has_own))

    assert has_own == bool(first_draft(engine, [10, 11, 12, 13], [10, 11]))


@pytest.mark.parametrize("has_block_starts", [True, False])
def test_without_block_starts_the_first_token_is_not_drafted_but_later_ones_are(has_block_starts: bool) -> None:
    engine = Engine(LARGE_VOCABULARY, CHAT, parts=Parts(block_starts=has_block_starts, prior=False))
    remember(engine, 10, 11, 12, 13)

    assert has_block_starts == bool(first_draft(engine, [], []))
    assert [12, 13] == first_draft(engine, [], [10, 11])


@pytest.mark.parametrize("has_calibration", [True, False])
def test_without_calibration_an_engine_never_learns_that_its_drafts_are_wrong(has_calibration: bool) -> None:
    engine = Engine(LARGE_VOCABULARY, CHAT, parts=Parts(calibration=has_calibration))
    for _ in range(50):  # 20 always follows, but never what was drafted after it
        engine.open(1, token_ids(), Tags(history="read"), Sampling())
        remember(engine, 20, 21)
        engine.step(step_request([Row(1, 0, [20])]))
        engine.close(1, FinishReason.STOP, 2, token_ids(22))

    assert has_calibration != bool(first_draft(engine, [], [20]))


def test_a_lower_floor_hands_out_less_probable_tokens() -> None:
    lengths = []
    for min_survival in (0.0, 0.1, 0.9):
        engine = Engine(LARGE_VOCABULARY, CHAT, min_survival=min_survival)
        for token in range(30, 42):
            remember(engine, 20, token, *range(50, 60))
        lengths.append(len(first_draft(engine, [], [20])))

    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] > lengths[1] >= lengths[2] == 0


@pytest.mark.parametrize("min_survival", [-0.1, 1.1, float("nan")])
def test_a_floor_that_is_no_probability_is_refused(min_survival: float) -> None:
    with pytest.raises(ValueError, match="min_survival: expected 0 to 1"):
        Engine(LARGE_VOCABULARY, CHAT, min_survival=min_survival)


def test_evidence_that_was_wrong_for_long_is_believed_again_when_it_proves_right() -> None:
    engine = Engine(LARGE_VOCABULARY, CHAT)
    drafted = []
    for turn in range(900):
        answer = 22 if turn < 600 else 21
        engine.open(1, token_ids(), Tags(history="read"), Sampling())
        remember(engine, 20, 21)
        drafts = drafts_by_row(engine.step(step_request([Row(1, 0, [20])])))[0]
        engine.close(1, FinishReason.STOP, 2, token_ids(answer))
        drafted.append(bool(drafts))

    assert (False, True) == (any(drafted[500:600]), all(drafted[-100:]))
