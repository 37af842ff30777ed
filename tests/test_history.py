"""What enters a history, who may draft from it, and what is forgotten."""

from __future__ import annotations

import time
from itertools import product
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.engine_player import END, NESTED, SMALL_VOCABULARY, START, Client, Playground, fuzzing, seeded
from tests.reference import token_ids

from agentspec.sidecar.engine import Engine, FinishReason

QUOTAS = (1, 183, 400, 6_000, 25_000, 100_000)


def test_nothing_crosses_a_namespace_or_a_stage_whatever_they_are_called() -> None:
    client = Client()
    names = ["", "a", "b", "/", "a/", "/b", "a/b", "1:a", "a%2Fb"]
    keys = list(product(names, repeat=3))
    secrets = dict(zip(keys, range(10, 10 + len(keys)), strict=True))
    for tenant, narrower, stage in keys:
        client.write(5, secrets[tenant, narrower, stage], tenant=tenant, namespace=narrower, stage=stage)

    leaks = {
        key: draft
        for key in keys
        if (draft := client.draft_after(5, tenant=key[0], namespace=key[1], stage=key[2])) != [secrets[key]]
    }
    assert {} == leaks


@pytest.mark.parametrize("name", ["ü", "\0", "a\0b", "\N{SNOWMAN}" * 80])
def test_names_of_any_characters_are_taken(name: str) -> None:
    client = Client()
    client.write(5, 6, stage=name, workflow_id=name, block=name)

    assert [6] == client.draft_after(5, stage=name, workflow_id=name, block=name)


@pytest.mark.parametrize("is_strict", [False, True])
@pytest.mark.parametrize("history", ["read", "off"])
def test_text_of_a_request_that_may_not_write_never_comes_back(history: str, is_strict: bool) -> None:
    client = Client(is_strict=is_strict)
    client.open(history=history)
    client.step(5, 6, 7)
    client.step(8)
    client.close(9)

    assert ([], 0) == (client.draft_after(5), client.engine.num_history_tokens())


def test_what_was_handed_over_past_the_true_length_never_enters_the_history() -> None:
    client = Client()
    client.open()
    client.step(5, 6)
    client.step(7, 8, 9)
    client.close(true_length=3)

    assert [[6, 7], []] == [client.draft_after(5), client.draft_after(8)]


def test_a_tail_takes_nothing_past_the_true_length_into_the_history() -> None:
    client = Client()
    client.open()
    client.step(5, 6, 7)
    client.close(8, true_length=2)

    assert [[6], []] == [client.draft_after(5), client.draft_after(6)]


def test_a_tail_longer_than_the_true_length_is_cut() -> None:
    client = Client()
    client.open()
    client.step(5, 6)
    client.close(7, 8, 9, true_length=4)

    assert [6, 7, 8] == client.draft_after(5)


def test_a_tail_that_does_not_follow_what_the_engine_knows_is_not_stored() -> None:
    """After a resync that no step followed, the tokens between are missing."""
    client = Client()
    client.open()
    client.step(5, 6)
    client.step(7)
    client.open()
    client.close(8, 9, 10, 11, true_length=7)

    assert [6] == client.draft_after(5)
    assert [] == client.draft_after(9)


@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT])
def test_the_text_of_a_request_that_ended_in_any_way_but_an_error_is_stored(reason: FinishReason) -> None:
    client = Client()
    client.open()
    client.step(5, 6)
    client.close(7, reason=reason)

    assert [6, 7] == client.draft_after(5)


@pytest.mark.parametrize("tail", [[], [9]])
def test_after_an_error_only_what_was_already_shared_stays(tail: list[int]) -> None:
    client = Client()
    client.open()
    client.step(5, 6)
    client.step(7, 8)
    client.close(*tail, reason=FinishReason.ERROR)

    assert [6] == client.draft_after(5)


def test_closing_again_changes_nothing() -> None:
    client = Client()
    client.write(5, 6)
    before = (client.engine.num_history_tokens(), client.engine.memory_bytes(), client.engine.stats())

    client.engine.close(-1, FinishReason.STOP, 2, token_ids(5, 6))

    assert before == (client.engine.num_history_tokens(), client.engine.memory_bytes(), client.engine.stats())


def test_a_request_opened_again_stores_its_text_once() -> None:
    client = Client()
    client.open()
    client.step(5, 6)
    client.step(7)
    client.open()
    client.open()
    client.step(5, 6, 7)
    client.step(8)
    client.close()
    once = Client()
    once.write(5, 6, 7, 8)

    assert once.engine.num_history_tokens() == client.engine.num_history_tokens()
    assert [6, 7, 8] == client.draft_after(5)


def test_a_request_opened_again_does_not_draft_from_its_own_text_as_shared() -> None:
    """Own text counts once: as own evidence."""
    scores = []
    for num_opens in (1, 2):
        client = Client()
        client.open()
        client.step(5, 6, 5)
        client.step(6, 5)
        if num_opens == 2:
            client.open()
            client.step(5, 6, 5, 6, 5)
        scores.append(client.step(6, 5))

    assert scores[0] == scores[1]


def test_a_handle_opened_again_under_another_key_is_another_request() -> None:
    """The end of its text in the old history was taken for a place in the new one: memory was corrupted."""
    client = Client()
    client.write(*range(5, 45), stage="s")
    client.open(stage="t")
    client.step(*range(50, 150))
    client.step()
    client.open(stage="s")
    client.step(60, 61, 62)
    client.step()

    client.engine.check_integrity()
    assert [[6, 7], [61, 62]] == [client.draft_after(5, stage="s")[:2], client.draft_after(60, stage="s")[:2]]


def test_a_deleted_namespace_stays_deleted_when_its_requests_are_opened_again() -> None:
    client = Client()
    client.open(tenant="n", stage="s")
    client.step(5, 6, 7)
    client.step(8)
    client.engine.delete_namespace("n")
    client.open(tenant="n", stage="s")
    client.step(5, 6, 7, START, 8)
    client.step(9)
    client.close()

    assert (0, []) == (client.engine.num_history_tokens(), client.engine.stats())


def test_a_history_is_in_use_as_long_as_a_request_writes_to_it() -> None:
    client = Client()
    client.open()
    client.step(5, 6)
    time.sleep(0.05)
    client.close()

    assert 0 == client.engine.forget_unused(0.04)


@pytest.mark.parametrize("max_age_s", [-1.0, float("nan")])
def test_an_age_that_is_none_is_refused(max_age_s: float) -> None:
    client = Client()
    client.write(5, 6)

    with pytest.raises(ValueError, match="max_age_s"):
        client.engine.forget_unused(max_age_s)

    assert [6] == client.draft_after(5)


def test_a_history_that_outlived_its_ttl_is_dropped_by_a_later_call() -> None:
    client = Client(ttl_s=0.02)
    client.write(5, 6, stage="old")
    time.sleep(0.03)
    client.open(stage="new")

    assert 0 == client.engine.num_history_tokens()


def test_a_history_in_use_outlives_its_ttl() -> None:
    client = Client(ttl_s=0.02)
    client.open()
    client.step(5, 6)
    client.step(7)
    time.sleep(0.03)
    client.step(8)
    client.step(9)
    client.close()

    assert 5 == client.engine.num_history_tokens()


def test_all_histories_that_outlived_their_ttl_are_dropped_in_the_end() -> None:
    client = Client(ttl_s=0.02)
    for stage in range(100):
        client.write(5, 6, stage=f"{stage}")
    time.sleep(0.03)
    client.open(stage="open")
    for _ in range(100):
        client.step(5)

    client.engine.check_integrity()
    assert 99 == client.engine.num_history_tokens()


def test_of_too_many_histories_those_used_least_lately_are_dropped() -> None:
    client = Client(max_histories=3)
    for stage in range(10):
        client.write(5, 10 + stage, stage=f"{stage}")
        client.draft_after(5, stage="0")

    client.engine.check_integrity()
    drafts = [client.draft_after(5, stage=f"{stage}") for stage in (0, 9, 8, 7)]
    assert [[10], [19], [18], []] == drafts


def test_a_request_goes_without_a_history_when_open_ones_hold_all() -> None:
    client = Client(max_histories=2)
    for handle in range(3):
        client.open(handle, stage=f"{handle}")
        client.step(5, 6, handle=handle)
    for handle in range(3):
        client.close(handle=handle)

    client.engine.check_integrity()
    assert [[6], [6], []] == [client.draft_after(5, stage=f"{stage}") for stage in range(3)]


def test_10000_small_histories_forget_without_a_look_at_all_of_them() -> None:
    client = Client(history_bytes=1 << 40, max_histories=10_000)
    for stage in range(10_000):
        client.write(5, 6, stage=f"{stage}")

    def seconds_to_write(first_stage: int, tag: str) -> float:
        start = time.thread_time()
        for stage in range(first_stage, first_stage + 500):
            client.write(5, 6, stage=f"{tag}{stage}")
        return time.thread_time() - start

    without = min(seconds_to_write(stage, "") for stage in (0, 500, 1000))
    forgetting = min(seconds_to_write(stage, "new") for stage in (0, 500, 1000))
    assert 23_000 == client.engine.num_history_tokens()
    assert forgetting < 10 * without


def test_history_tokens_are_the_output_tokens_that_were_stored() -> None:
    client = Client()
    client.write(5, START, 6, END, 7)

    assert 5 == client.engine.num_history_tokens()


@fuzzing
@given(st.randoms(use_true_random=False), st.integers(10, 60), st.booleans(), st.sampled_from(QUOTAS))
def test_memory_never_exceeds_its_quota_after_any_call(
    random: Random, num_calls: int, is_strict: bool, history_bytes: int
) -> None:
    play_within_quota(random, num_calls, history_bytes, is_strict=is_strict)


@pytest.mark.parametrize(("seed", "history_bytes"), list(enumerate(QUOTAS * 2)))
def test_long_plays_never_exceed_the_quota(seed: int, history_bytes: int) -> None:
    play_within_quota(seeded(seed), 400, history_bytes, is_strict=seed % 2 == 0)


def play_within_quota(random: Random, num_calls: int, history_bytes: int, *, is_strict: bool) -> None:
    engine = Engine(SMALL_VOCABULARY, NESTED, is_strict=is_strict, history_bytes=history_bytes)

    def check() -> None:
        engine.check_integrity()
        assert engine.memory_bytes() <= history_bytes

    Playground(random, [engine]).play(num_calls, check)


def test_forgetting_keeps_the_newest_text() -> None:
    client = Client(history_bytes=1 << 17)
    texts = [seeded(seed).choices(range(2, 1000), k=50) for seed in range(1000)]
    for text in texts:
        client.write(*text)

    assert 0 < client.engine.num_history_tokens() < 40_000
    assert [text[3:10] for text in texts[-20:]] == [client.draft_after(*text[:3])[:7] for text in texts[-20:]]


def test_forgetting_takes_the_history_that_was_used_least_lately() -> None:
    client = Client(history_bytes=1 << 16)
    for stage in range(100):
        client.write(*range(5, 30), stage=f"{stage}")
        assert client.draft_after(5, 6, stage="0")

    assert [[], [7]] == [client.draft_after(5, 6, stage=stage)[:1] for stage in ("1", "99")]


def test_of_a_text_larger_than_the_quota_the_end_is_kept() -> None:
    client = Client(history_bytes=1 << 17)
    text = seeded(0).choices(range(2, 1000), k=20_000)
    client.write(*text)

    assert text[-5:] == client.draft_after(*text[-8:-5])


def test_an_open_request_goes_on_when_its_history_was_forgotten() -> None:
    client = Client(history_bytes=1 << 15)
    client.open(stage="s")
    client.step(5, 6, 7)
    client.step(8)
    for stage in range(20):
        client.write(*seeded(stage).choices(range(2, 1000), k=100), stage=f"other{stage}")
    client.step(9, 10)
    client.step(11)
    client.close()

    client.engine.check_integrity()
    assert [10, 11] == client.draft_after(8, 9, stage="s")
