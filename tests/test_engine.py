"""The draft engine: drafts, their lengths, isolation by block, counts, bad input, threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.engine_player import (
    END,
    LARGE_VOCABULARY,
    NESTED,
    SMALL_VOCABULARY,
    START,
    Client,
    Playground,
    fuzzing,
    seeded,
)
from tests.reference import ReferenceEngine, Row, drafts_by_row, step_request, token_ids

from agentspec.sidecar.engine import Engine, FinishReason, Sampling, StepRequest
from agentspec.sidecar.grammars import CHAT
from agentspec.sidecar.tags import Tags


@fuzzing
@given(st.randoms(use_true_random=False), st.integers(10, 60), st.booleans(), st.sampled_from([1, 4, 16, 64]))
def test_drafts_survival_redundancy_budgets_and_counts_equal_those_of_the_reference(
    random: Random, num_calls: int, is_strict: bool, num_speculative_tokens: int
) -> None:
    play_beside_reference(random, num_calls, is_strict=is_strict, num_speculative_tokens=num_speculative_tokens)


@pytest.mark.parametrize("seed", range(12))
def test_long_plays_with_bursting_buckets_equal_the_reference(seed: int) -> None:
    play_beside_reference(seeded(seed), 150, is_strict=seed % 2 == 0, num_speculative_tokens=16)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1100))
def test_longer_plays_equal_the_reference(seed: int) -> None:
    play_beside_reference(seeded(seed), 500, is_strict=seed % 2 == 0, num_speculative_tokens=64)


def play_beside_reference(random: Random, num_calls: int, *, is_strict: bool, num_speculative_tokens: int) -> None:
    native = Engine(SMALL_VOCABULARY, NESTED, is_strict=is_strict, num_speculative_tokens=num_speculative_tokens)
    expected = ReferenceEngine(
        SMALL_VOCABULARY, NESTED, is_strict=is_strict, num_speculative_tokens=num_speculative_tokens
    )
    Playground(random, [native, expected]).play(num_calls, native.check_integrity)


def test_a_context_that_reaches_back_to_the_start_is_one_context_at_every_length() -> None:
    """Positions 32 tokens into an output were refiled under another hash than they are looked up with."""
    beginning = list(range(10, 41))
    for length in (15, 16, 31):
        engines = [kind(LARGE_VOCABULARY, CHAT) for kind in (Engine, ReferenceEngine)]
        for engine, handle in product(engines, range(17)):
            text = [*beginning[:length], 50 if handle < 16 else 51, 52]
            engine.open(handle, token_ids(), Tags(), Sampling())
            engine.close(handle, FinishReason.STOP, len(text), token_ids(*text))
        answers = []
        for engine in engines:
            engine.open(99, token_ids(), Tags(), Sampling())
            drafts = engine.step(step_request([Row(99, 0, beginning[:length])]))
            answers.append((drafts_by_row(drafts), drafts.redundancy.round(5).tolist()))

        assert [[50, 52]] == answers[0][0]
        assert answers[1] == answers[0], f"after {length} tokens"


def test_a_cold_engine_drafts_nothing() -> None:
    assert [] == Client().draft_after(2, 3, 4)


def test_a_repetition_of_the_prompt_is_drafted_from_the_prompt() -> None:
    client = Client()
    client.open(prompt=[5, 6, 7, 8, 9], history="off")

    assert [7, 8, 9] == client.step(5, 6)[:3]


def test_only_the_last_8192_tokens_of_a_prompt_are_evidence() -> None:
    drafts = []
    for token in (4, 5):
        client = Client()
        client.open(prompt=[3, 4, 5, 6, *[2] * 8190], history="off")
        drafts.append(client.step(token)[:1])

    assert [[], [6]] == drafts


def test_the_first_token_of_an_output_is_drafted_from_other_outputs() -> None:
    client = Client()
    client.write(5, 6, 7)

    assert [5, 6, 7] == client.draft_after()


def test_the_first_token_of_an_output_is_drafted_from_outputs_after_a_like_end_of_a_prompt() -> None:
    client = Client()
    client.write(5, 6, prompt=[30, 31, 40])
    client.write(7, 8, prompt=[30, 31, 41])

    assert [[5, 6], [7, 8]] == [client.draft_after(prompt=[29, 31, end]) for end in (40, 41)]


@pytest.mark.parametrize("length", [1, 14, 15, 16, 40])
def test_a_prompt_of_another_request_is_never_drafted(length: int) -> None:
    client = Client()
    prompt = list(range(100, 100 + length))
    client.write(5, 6, prompt=prompt)

    assert [] == [draft for token in prompt if (draft := client.draft_after(token))]
    assert 2 == client.engine.num_history_tokens()
    client.engine.check_integrity()


@pytest.mark.parametrize("reason", FinishReason)
def test_a_request_without_output_leaves_nothing(reason: FinishReason) -> None:
    client = Client()
    client.open(prompt=[30, 31, 32])
    client.close(reason=reason)

    assert (0, []) == (client.engine.num_history_tokens(), client.draft_after())


def test_the_first_tokens_of_a_block_are_drafted_from_other_blocks_of_its_path() -> None:
    client = Client(is_strict=True)
    client.write(5, START, 6, 7, END, 8)

    assert [6, 7, END] == client.draft_after(9, START)


def test_another_workflow_of_the_stage_is_evidence_of_less_weight() -> None:
    client = Client()
    client.write(5, 6, workflow_id="w", stage="s")
    client.write(5, 7, workflow_id="v", stage="s")
    client.write(5, 7, workflow_id="v", stage="s")

    assert [6, 7] == [client.draft_after(5, workflow_id=name, stage="s")[0] for name in "wv"]


def test_tokens_of_an_open_request_are_drafted_for_others_after_its_next_step() -> None:
    client = Client()
    client.open()
    client.step(5, 6, 7)
    before = client.draft_after(5)
    client.step()

    assert ([], [6, 7]) == (before, client.draft_after(5))


def test_a_strict_draft_ends_where_its_block_ends() -> None:
    client = Client(is_strict=True)
    client.write(START, 5, 6, END, 7, 8)

    assert [6, END] == client.draft_after(START, 5)


def test_a_soft_draft_crosses_the_end_of_its_block() -> None:
    client = Client()
    client.write(START, 5, 6, END, 7, 8)

    assert [6, END, 7, 8] == client.draft_after(START, 5)


def test_a_strict_draft_from_its_own_output_ends_where_its_block_ends() -> None:
    client = Client(is_strict=True)
    client.open(history="off")

    assert [6, END] == client.step(START, 5, 6, END, 7, 8, START, 5)


def test_strict_mode_never_drafts_from_another_block_path() -> None:
    client = Client(is_strict=True)
    client.write(5, 6, 7, block="reasoning")

    assert [[], [6, 7]] == [client.draft_after(5), client.draft_after(5, block="reasoning")]


def test_a_strict_draft_ends_in_a_token_that_ends_a_block_and_starts_one_of_the_same_path() -> None:
    vocabulary = [b"<think>", b"</think><think>", b"x", b"y"]
    drafts = []
    for tags, prefix in ((Tags(history="off"), [0, 2, 1, 3, 2]), (Tags(), [0, 2])):
        engine = Engine(vocabulary, CHAT, is_strict=True)
        engine.open(1, token_ids(), Tags(), Sampling())
        engine.close(1, FinishReason.STOP, 5, token_ids(0, 2, 1, 3, 3))
        engine.open(2, token_ids(), tags, Sampling())
        drafts += drafts_by_row(engine.step(step_request([Row(2, 0, prefix)])))

    assert [[1], [1]] == drafts


def test_a_request_with_history_off_drafts_from_itself_alone() -> None:
    client = Client()
    client.write(5, 6, 7)

    assert [] == client.draft_after(5, history="off")


@pytest.mark.parametrize(
    ("tags", "room", "token_budget", "num_drafted"),
    [
        ({}, 64, 64, 16),
        ({"max_draft_tokens": 3}, 64, 64, 3),
        ({"max_draft_tokens": 0}, 64, 64, 0),
        ({"speculate": False}, 64, 64, 0),
        ({}, 5, 64, 5),
        ({}, 0, 64, 0),
        ({}, 64, 2, 2),
        ({}, 64, 0, 0),
    ],
)
def test_a_draft_is_no_longer_than_engine_tags_room_and_budget_allow(
    tags: dict[str, Any], room: int, token_budget: int, num_drafted: int
) -> None:
    client = Client(num_speculative_tokens=16)
    client.write(*range(10, 60))
    client.open(**tags)

    assert list(range(11, 11 + num_drafted)) == client.step(10, room=room, token_budget=token_budget)


def test_the_longest_draft_has_64_tokens() -> None:
    client = Client(num_speculative_tokens=64)
    client.write(*range(10, 200))

    assert list(range(11, 75)) == client.draft_after(10)


def test_rows_after_the_deadline_get_no_draft() -> None:
    client, request = many_rows_of_one_text(64)

    drafts = client.engine.step(request, deadline_us=1)

    assert 0 == drafts.draft_lengths[16:].sum()
    assert 0 < drafts.draft_lengths[:1].sum()


def test_a_deadline_far_away_is_none() -> None:
    client, request = many_rows_of_one_text(64)

    assert np.all(client.engine.step(request, deadline_us=2**62).draft_lengths > 0)


def test_the_deadline_counts_from_the_call() -> None:
    client, request = many_rows_of_one_text(64, num_tokens=20_000)

    assert 0 == client.engine.step(request, deadline_us=500).draft_lengths[16:].sum()


def many_rows_of_one_text(num_rows: int, num_tokens: int = 1) -> tuple[Client, Any]:
    client = Client()
    client.write(5, *range(5, 100))
    for handle in range(num_rows):
        client.open(handle)
    tokens = [5] * num_tokens
    return client, step_request([Row(handle, 0, tokens if handle == 0 else [5]) for handle in range(num_rows)])


def test_unknown_handles_and_wrong_positions_are_reported_and_the_other_rows_served() -> None:
    client = Client()
    client.write(5, 6, 7)
    for handle in (1, 2, 3):
        client.open(handle)
    rows = [Row(1, 0, [5]), Row(99, 0, [5]), Row(2, 3, [5]), Row(3, 0, [5, 6])]

    drafts = client.engine.step(step_request(rows))

    assert [99, 2] == drafts.resync_handles.tolist()
    assert [[6, 7], [], [], [7]] == drafts_by_row(drafts)


def test_a_position_that_goes_backwards_is_reported_and_takes_nothing_in() -> None:
    client = Client()
    client.open(1)
    client.step(5, 6, handle=1)

    drafts = client.engine.step(step_request([Row(1, 1, [7])]))

    assert [1] == drafts.resync_handles.tolist()
    assert [] == client.step(7, handle=1)


def test_counts_are_kept_by_the_block_in_which_a_step_began() -> None:
    client = Client()
    client.open(tenant="n", workflow_id="w", stage="s")
    client.engine.step(step_request([Row(0, 0, [5, START, 6], 64, 4, 1)]))
    client.engine.step(step_request([Row(0, 3, [7, END], 64, 0, 0)]))
    client.engine.step(step_request([Row(0, 5, [8], 64, 3, 0)]))

    rows = {row.block: row for row in client.engine.stats()}
    assert {("n", "w", "s")} == {(row.namespace, row.workflow_id, row.stage) for row in rows.values()}
    assert {"text": (2, 2, 7, 1, 4), "reasoning": (1, 0, 0, 0, 2)} == {
        block: (row.num_steps, row.num_drafts, row.num_draft_tokens, row.num_accepted_tokens, row.num_tokens)
        for block, row in rows.items()
    }


def test_the_last_draft_is_judged_by_the_tail() -> None:
    client = Client()
    client.write(5, 6, 7, 8)
    client.open(workflow_id="w")
    client.step(5)
    client.close(6, 7, 9)

    row = next(row for row in client.engine.stats() if row.workflow_id == "w")
    assert (2, 1, 3, 2, 4) == (
        row.num_steps,
        row.num_drafts,
        row.num_draft_tokens,
        row.num_accepted_tokens,
        row.num_tokens,
    )


def test_at_most_1024_rows_are_counted_apart() -> None:
    client = Client()
    for stage in range(5000):
        client.open(stage, stage=f"{stage}", history="off")

    rows = client.engine.stats()
    assert 1024 == len(rows)
    assert 1 == sum(row.block == "other" for row in rows)


def test_a_step_without_rows_is_answered() -> None:
    drafts = Client().engine.step(step_request([]))

    assert [0, 0, 0] == [len(drafts.draft_lengths), len(drafts.draft_token_ids), len(drafts.resync_handles)]


BAD_STEPS: list[tuple[str, dict[str, Any], str]] = [
    ("one position too few", {"positions": token_ids(2)}, "positions: expected 2 entries, got 1"),
    ("one position too many", {"positions": token_ids(2, 2, 2)}, "positions: expected 2 entries, got 3"),
    ("no counts of drafts", {"num_draft_tokens": token_ids()}, "num_draft_tokens: expected 2 entries, got 0"),
    ("no accepted counts", {"num_accepted_tokens": token_ids()}, "num_accepted_tokens: expected 2 entries, got 0"),
    ("no room", {"max_draft_tokens": token_ids()}, "max_draft_tokens: expected 2 entries, got 0"),
    ("no offsets", {"token_offsets": token_ids()}, "token_offsets: expected 3 entries, got 0"),
    ("an offset too few", {"token_offsets": token_ids(0, 2)}, "token_offsets: expected 3 entries, got 2"),
    ("a negative position", {"positions": token_ids(2, -1)}, r"positions\[1\]: expected >= 0, got -1"),
    ("negative room", {"max_draft_tokens": token_ids(-5, 1)}, r"max_draft_tokens\[0\]: expected >= 0, got -5"),
    ("negative drafts", {"num_draft_tokens": token_ids(0, -2)}, r"num_draft_tokens\[1\]: expected >= 0, got -2"),
    ("negative verdict", {"num_accepted_tokens": token_ids(-9, 0)}, r"num_accepted_tokens\[0\]: .* got -9"),
    ("offsets that go backwards", {"token_offsets": token_ids(0, 3, 2)}, r"token_offsets\[2\]"),
    ("offsets that start late", {"token_offsets": token_ids(1, 1, 2)}, "token_offsets: .* 2"),
    ("offsets below 0", {"token_offsets": token_ids(-1, 1, 2)}, "token_offsets"),
    ("offsets past the end", {"token_offsets": token_ids(0, 1, 3)}, "token_offsets: .* 2"),
    ("offsets before the end", {"token_offsets": token_ids(0, 1, 1)}, "token_offsets: .* 2"),
    ("a negative token", {"token_ids": token_ids(7, -1)}, r"token_ids\[1\]: token id -1 .* vocabulary of 1000"),
    ("a token past the end", {"token_ids": token_ids(1000, 7)}, r"token_ids\[0\]: token id 1000 .* of 1000"),
    ("the largest token", {"token_ids": token_ids(7, 2**31 - 1)}, r"token_ids\[1\]: token id 2147483647"),
    ("a negative budget", {"token_budget": -1}, "token_budget: expected >= 0, got -1"),
    ("a handle twice", {"handles": np.array([1, 1])}, r"handles\[1\]: .*1"),
]


@pytest.mark.parametrize(("fields", "message"), [pytest.param(*row[1:], id=row[0]) for row in BAD_STEPS])
def test_a_bad_step_is_refused_by_field_and_value_and_changes_nothing(fields: dict[str, Any], message: str) -> None:
    engine, request = two_rows_at_position_two()

    refuse_and_go_on(engine, request, fields, ValueError, message)


def test_a_negative_deadline_is_refused() -> None:
    engine, request = two_rows_at_position_two()

    with pytest.raises(ValueError, match="deadline_us: expected >= 0, got -1"):
        engine.step(request, deadline_us=-1)


ARRAYS = (
    *("handles", "positions", "token_offsets", "token_ids"),
    *("num_draft_tokens", "num_accepted_tokens", "max_draft_tokens"),
)


@pytest.mark.parametrize("field", ARRAYS)
@pytest.mark.parametrize(
    "change",
    [
        lambda array: array.astype(np.float32),
        lambda array: array.astype(np.int32 if array.dtype == np.int64 else np.int64),
        lambda array: array.astype(np.uint32),
        lambda array: array.astype(array.dtype.newbyteorder(">")),
        lambda array: np.repeat(array, 2)[::2],
        lambda array: array[::-1],
        lambda array: array.reshape(1, -1),
        lambda array: array.tolist(),
        lambda array: None,
    ],
    ids=["float32", "other width", "unsigned", "big endian", "strided", "reversed", "2-d", "list", "none"],
)
def test_an_array_of_another_type_or_layout_is_refused(field: str, change: Callable[[Any], Any]) -> None:
    engine, request = two_rows_at_position_two()

    refuse_and_go_on(engine, request, {field: change(getattr(request, field))}, TypeError, field)


def two_rows_at_position_two() -> tuple[Engine, StepRequest]:
    client = Client()
    client.write(5, 6, 7, 8)
    for handle in (1, 2):
        client.open(handle)
        client.step(4, 5, handle=handle)
    return client.engine, step_request([Row(1, 2, [6]), Row(2, 2, [6])])


def refuse_and_go_on(
    engine: Engine, request: StepRequest, fields: dict[str, Any], error: type[Exception], message: str
) -> None:
    before = engine.stats(), engine.num_history_tokens(), engine.memory_bytes(), engine.num_open_requests()

    with pytest.raises(error, match=message):
        engine.step(replace(request, **fields))

    assert before == (engine.stats(), engine.num_history_tokens(), engine.memory_bytes(), engine.num_open_requests())
    assert [[7, 8], [7, 8]] == drafts_by_row(engine.step(request))


@pytest.mark.parametrize("token", [-1, -(2**31), 1000, 2**31 - 1])
def test_a_prompt_with_a_token_outside_the_vocabulary_is_refused_with_its_handle(token: int) -> None:
    engine = Engine(LARGE_VOCABULARY, CHAT)

    with pytest.raises(ValueError, match=rf"tokens\[1\]: token id {token} .* vocabulary of 1000 \(handle 7\)"):
        engine.open(7, token_ids(5, token), Tags(), Sampling())

    assert (0, 0) == (engine.num_open_requests(), engine.memory_bytes())


def test_a_tail_with_a_token_outside_the_vocabulary_is_refused_and_the_request_stays_open() -> None:
    client = Client()
    client.open(7)
    client.step(5, 6, handle=7)

    with pytest.raises(ValueError, match=r"tail\[1\]: token id 1000 .* vocabulary of 1000 \(handle 7\)"):
        client.engine.close(7, FinishReason.STOP, 4, token_ids(5, 1000))

    assert [6] == client.step(5, handle=7)[:1]


def test_a_negative_true_length_is_refused() -> None:
    client = Client()
    client.open(7)

    with pytest.raises(ValueError, match="true_length: expected >= 0, got -1"):
        client.engine.close(7, FinishReason.STOP, -1, token_ids())

    assert 1 == client.engine.num_open_requests()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_speculative_tokens": 0}, "num_speculative_tokens: expected 1 to 64, got 0"),
        ({"num_speculative_tokens": 65}, "num_speculative_tokens: expected 1 to 64, got 65"),
        ({"history_bytes": 0}, "history_bytes: expected > 0, got 0"),
        ({"history_bytes": -1}, "history_bytes: expected > 0, got -1"),
        ({"max_histories": 0}, "max_histories: expected > 0, got 0"),
        ({"namespace_bytes": 0}, "namespace_bytes: expected 1 to history_bytes, 1073741824, got 0"),
        ({"history_bytes": 5, "namespace_bytes": 6}, "namespace_bytes: expected 1 to history_bytes, 5, got 6"),
        ({"stored_tokens_per_s": 0.0}, "stored_tokens_per_s: expected > 0, got 0.0"),
        ({"stored_tokens_per_s": float("nan")}, "stored_tokens_per_s: expected > 0, got nan"),
        ({"ttl_s": 0.0}, "ttl_s: expected > 0, got 0.0"),
        ({"ttl_s": float("nan")}, "ttl_s: expected > 0, got nan"),
    ],
)
def test_an_option_out_of_range_is_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Client(**options)


def test_names_that_are_no_unicode_text_are_refused_as_values() -> None:
    """JSON can bring half a surrogate pair into a tag."""
    with pytest.raises(ValueError, match="stage"):
        Client().open(stage="\ud800")


def test_an_engine_without_a_vocabulary_refuses_every_token() -> None:
    engine = Engine([], CHAT)

    with pytest.raises(ValueError, match="vocabulary of 0"):
        engine.open(1, token_ids(0), Tags(), Sampling())


def test_other_python_threads_run_during_a_step() -> None:
    client = Client()
    client.open()
    request = step_request([Row(0, 0, [5, 6, 7, 8] * 200_000)])
    turns: list[float] = []
    is_done = threading.Event()

    def take_turns() -> None:
        while not is_done.wait(0.001):
            turns.append(time.perf_counter())

    thread = threading.Thread(target=take_turns)
    thread.start()
    start = time.perf_counter()
    client.engine.step(request)
    end = time.perf_counter()
    is_done.set()
    thread.join()

    third = (end - start) / 3
    assert third > 0.01, "too short to tell"
    assert any(start + third < turn < end - third for turn in turns)


def test_calls_from_many_threads_leave_the_engine_whole() -> None:
    engine = Engine(SMALL_VOCABULARY, NESTED, history_bytes=200_000)
    failures: list[BaseException] = []

    def play(seed: int) -> None:
        try:
            player = Playground(seeded(seed), [engine], first_handle=seed * 1000)
            player.play(300, check)
            while player.live:
                player.close()
        except BaseException as error:  # noqa: BLE001  # a thread's failure is the test's
            failures.append(error)

    def check() -> None:
        engine.check_integrity()
        engine.stats()
        assert engine.memory_bytes() <= 200_000

    threads = [threading.Thread(target=play, args=(seed,)) for seed in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert [] == failures
    assert 0 == engine.num_open_requests()
