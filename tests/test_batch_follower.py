"""What the V2 hook hands to the draft client, step by step, without vLLM."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from agentspec.serving_patch.batch_follower import AskedStep, BatchFollower, NewRequest, SampledStep
from agentspec.serving_patch.mailbox import Fallbacks
from agentspec.sidecar.engine import FinishReason, StepDrafts, StepRequest

DONE: Callable[[], None] = lambda: None  # noqa: E731  # the tokens are there


class Recorder:
    """A draft client that keeps what it is given, and answers the last step with drafts of `7`."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.steps: list[StepRequest] = []
        self.num_collected = 0
        self.skip_steps = 0
        self.lost: Sequence[int] = ()

    def open(self, handle: int, tokens: Any, tags: Any, sampling: Any, *, namespace: str) -> None:
        self.calls.append(("open", handle, tokens.tolist(), namespace))

    def submit(self, step: StepRequest) -> None:
        self.steps.append(step)

    def collect(self, *, deadline_ms: float) -> StepDrafts | None:
        self.num_collected += 1
        step = self.steps[-1]
        lengths = np.minimum(step.max_draft_tokens, 2)
        lost, self.lost = self.lost, ()
        return StepDrafts(
            step_id=step.step_id,
            draft_lengths=lengths,
            draft_token_ids=np.full(int(lengths.sum()), 7, np.int32),
            survival=np.ones(int(lengths.sum()), np.float32),
            redundancy=np.ones(len(lengths), np.float32),
            token_budget=step.token_budget,
            skip_steps=self.skip_steps,
            resync_handles=np.array(lost, np.int64),
        )

    def close(self, handle: int, reason: FinishReason, true_length: int, tail: Any) -> None:
        self.calls.append(("close", handle, reason, true_length, tail.tolist()))


def params(**changes: Any) -> Any:
    values = {
        "max_tokens": 10,
        "temperature": 0.0,
        "stop_token_ids": [99],
        "eos_token_id": 1,
        "min_p": 0.0,
        "logit_bias": None,
        "extra_args": None,
        "structured_outputs": None,
        "logprob_token_ids": None,
    }
    return SimpleNamespace(**{**values, **changes})


def new(name: str = "r", output: Sequence[int] = (), **changes: Any) -> NewRequest:
    salt = changes.pop("cache_salt", None)
    return NewRequest(name, [5, 6], None, output, params(**changes), salt, None, max_length=100)


def sampled(rows: dict[str, list[int]], drafted: dict[str, int] | None = None) -> SampledStep:
    width = max(map(len, rows.values()))
    tokens = np.array([[*tokens, *[0] * (width - len(tokens))] for tokens in rows.values()], np.int64)
    counts = np.array([*map(len, rows.values())], np.int32)
    return SampledStep([*rows], tokens, counts, drafted or {}, 0, lambda: None)


@pytest.fixture
def client() -> Recorder:
    return Recorder()


@pytest.fixture
def fallbacks() -> Fallbacks:
    return Fallbacks()


@pytest.fixture
def follower(client: Recorder, fallbacks: Fallbacks) -> Iterator[BatchFollower]:
    options = SimpleNamespace(namespace="team")
    drafting: Any = SimpleNamespace(
        options=options, max_draft_tokens=4, vocab_size=100, deadline_ms=50.0, fallbacks=fallbacks, client=client
    )
    follower = BatchFollower(drafting, max_num_scheduled_tokens=64)
    yield follower
    follower.shutdown()


def settled(asked: AskedStep) -> AskedStep:
    assert asked.is_submitted.wait(5)
    return asked


def step(follower: BatchFollower, rows: dict[str, list[int]], drafted: dict[str, int] | None = None) -> dict[str, Any]:
    return follower.collect(settled(follower.ask(sampled(rows, drafted), DONE)))


def test_tokens_are_handed_over_once_and_drafts_come_back_by_request(follower: Any, client: Recorder) -> None:
    follower.open(new("a"))
    follower.open(new("b", cache_salt="s"))

    assert step(follower, {"a": [3], "b": [4]}) == {"a": [7, 7], "b": [7, 7]}
    step(follower, {"a": [7, 7, 8], "b": [9]}, {"a": 2, "b": 2})

    last = client.steps[-1]
    assert (last.positions.tolist(), last.token_ids.tolist(), last.token_offsets.tolist()) == (
        [1, 1],
        [7, 7, 8, 9],
        [0, 3, 4],
    )
    assert (last.num_draft_tokens.tolist(), last.num_accepted_tokens.tolist()) == ([2, 2], [2, 0])
    opened = [call for call in client.calls if call[0] == "open"]
    assert [call[:3] for call in opened] == [("open", 0, [5, 6]), ("open", 1, [5, 6])]
    assert opened[0][3] == "team" != opened[1][3]


@pytest.mark.parametrize(
    ("tokens", "kept", "limit"), [([3, 99, 4], [3, 99], 10), ([3, 1, 4], [3, 1], 10), ([3, 4, 5], [3, 4], 2)]
)
def test_what_is_sampled_past_the_end_is_nobodys(
    tokens: list[int], kept: list[int], limit: int, follower: Any, client: Recorder
) -> None:
    follower.open(new(max_tokens=limit))

    assert step(follower, {"r": tokens}) == {}
    assert step(follower, {"r": [8]}) == {}
    follower.close("r", FinishReason.STOP, len(kept))
    follower.shutdown()

    assert client.steps == []
    assert client.calls[-1] == ("close", 0, FinishReason.STOP, len(kept), kept)


def test_end_that_only_the_scheduler_knows_cuts_the_tail(follower: Any, client: Recorder) -> None:
    follower.open(new())
    step(follower, {"r": [3]})
    follower.close("r", FinishReason.ABORT, 1)
    follower.close("unknown", FinishReason.ABORT, None)
    follower.shutdown()

    assert client.calls[-1] == ("close", 0, FinishReason.ABORT, 1, [])


def test_no_step_is_waited_for_while_the_client_says_that_it_does_not_pay(follower: Any, client: Recorder) -> None:
    follower.open(new())
    client.skip_steps = 2
    step(follower, {"r": [3]})

    assert [step(follower, {"r": [4]}), step(follower, {"r": [5]})] == [{}, {}]
    assert client.num_collected == 1
    assert step(follower, {"r": [6]}) == {"r": [7, 7]}
    assert client.steps[-1].positions.tolist() == [3], "the tokens of steps without drafts reached the history"


def test_request_goes_on_after_a_preemption_without_being_opened_again(follower: Any, client: Recorder) -> None:
    follower.open(new())
    step(follower, {"r": [3]})
    follower.open(new(output=[3]))
    step(follower, {"r": [4]})

    assert [call[0] for call in client.calls] == ["open"]
    assert client.steps[-1].positions.tolist() == [1]


def test_request_whose_tokens_in_flight_were_dropped_begins_anew(follower: Any, client: Recorder) -> None:
    follower.open(new())
    step(follower, {"r": [3]})
    step(follower, {"r": [4]})
    follower.open(new(output=[3]))
    step(follower, {"r": [5]})

    assert [call[0] for call in client.calls] == ["open", "close", "open"]
    assert (client.steps[-1].positions.tolist(), client.steps[-1].token_ids.tolist()) == ([0], [3, 5])


def test_lost_request_is_opened_again_with_its_whole_output(follower: Any, client: Recorder) -> None:
    follower.open(new())
    client.lost = [0]
    step(follower, {"r": [3]})
    step(follower, {"r": [4]})

    assert [call[0] for call in client.calls] == ["open", "open"]
    assert client.steps[-1].token_ids.tolist() == [3, 4]


def test_nobody_drafts_beside_a_request_that_keeps_its_batch_plain(follower: Any, client: Recorder) -> None:
    follower.open(new("a"))
    follower.open(new("b", logprob_token_ids=[1]))

    assert step(follower, {"a": [3], "b": [4]}) == {}
    follower.close("b", FinishReason.STOP, 1)
    assert step(follower, {"a": [5]}) == {"a": [7, 7]}


def test_failing_client_is_counted_and_costs_drafts_alone(
    follower: Any, client: Recorder, fallbacks: Fallbacks
) -> None:
    follower.open(new())
    client.steps = SimpleNamespace(append=lambda _: 1 / 0)  # type: ignore[assignment]  # fails in `submit` and `collect`

    assert step(follower, {"r": [3]}) == {}
    assert fallbacks.counts() == {"hook_error": 2}


def test_worker_spends_less_than_50_microseconds_on_a_step_of_four_rows(follower: Any, client: Recorder) -> None:
    rows = {name: [3] for name in "abcd"}
    for name in rows:
        follower.open(new(name, max_tokens=10_000))
    follower._drafting.max_draft_tokens = 0
    costs = []
    for _ in range(200):
        tokens = sampled(rows)
        begin = time.thread_time()
        asked = follower.ask(tokens, DONE)
        costs.append(time.thread_time() - begin)
        settled(asked)
        begin = time.thread_time()
        follower.collect(asked)
        costs[-1] += time.thread_time() - begin

    assert sorted(costs)[len(costs) // 2] < 50e-6
