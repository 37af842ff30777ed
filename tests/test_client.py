"""Draft clients: the embedded one, and the guard that keeps a bad one from hurting vLLM."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import pytest

from agentspec.serving_patch import client as client_module
from agentspec.serving_patch import command_queue
from agentspec.serving_patch.client import EmbeddedClient, GuardedClient
from agentspec.serving_patch.mailbox import Fallbacks, check_drafts
from agentspec.sidecar.engine import Engine, FinishReason, Sampling, StepDrafts, StepRequest, TokenIds
from agentspec.sidecar.grammar_store import GrammarStore, parse_grammar
from agentspec.sidecar.grammars import CHAT
from agentspec.sidecar.tags import UNTAGGED, Tags

VOCAB_SIZE = 16
LONG_MS = 20_000.0  # a wait that only a bug makes long
SHORT_MS = 20.0
GREEDY = Sampling()


def tokens_of(*values: int) -> TokenIds:
    return np.array(values, np.int32)


def step_of(step_id: int, *, num_rows: int = 2, room: int = 4, budget: int = 8) -> StepRequest:
    return StepRequest(
        step_id=step_id,
        handles=np.arange(num_rows, dtype=np.int64),
        positions=np.zeros(num_rows, np.int32),
        token_offsets=np.arange(num_rows + 1, dtype=np.int32),
        token_ids=np.ones(num_rows, np.int32),
        num_draft_tokens=np.zeros(num_rows, np.int32),
        num_accepted_tokens=np.zeros(num_rows, np.int32),
        max_draft_tokens=np.full(num_rows, room, np.int32),
        num_decode_rows=num_rows,
        num_prefill_tokens=0,
        token_budget=budget,
    )


def drafts_of(step: StepRequest, *, length: int = 2, resync: tuple[int, ...] = ()) -> StepDrafts:
    num_rows = len(step.handles)
    return StepDrafts(
        step_id=step.step_id,
        draft_lengths=np.full(num_rows, length, np.int32),
        draft_token_ids=np.full(num_rows * length, 3, np.int32),
        survival=np.ones(num_rows * length, np.float32),
        redundancy=np.ones(num_rows, np.float32),
        token_budget=step.token_budget,
        resync_handles=np.array(resync, np.int64),
    )


@dataclass
class ScriptedClient:
    """Answers each step by a function, and records every call that reached it."""

    answer: Callable[[StepRequest], StepDrafts | None] = drafts_of
    calls: list[tuple[str, int]] = field(default_factory=list)
    threads: set[int] = field(default_factory=set)
    step: StepRequest | None = None

    def open(self, handle: int, tokens: TokenIds, tags: Tags, sampling: Sampling, *, namespace: str) -> None:
        self.record("open", handle)

    def submit(self, step: StepRequest) -> None:
        self.record("submit", step.step_id)
        self.step = step

    def collect(self, *, deadline_ms: float) -> StepDrafts | None:
        assert self.step is not None
        return self.answer(self.step)

    def close(self, handle: int, reason: FinishReason, true_length: int, tail: TokenIds) -> None:
        self.record("close", handle)

    def shutdown(self) -> None:
        self.record("shutdown", 0)

    def record(self, name: str, value: int) -> None:
        self.calls.append((name, value))
        self.threads.add(threading.get_ident())


@dataclass
class HangingClient(ScriptedClient):
    """Hangs in `collect` of the steps in `hanging_steps` until it is let go."""

    hanging_steps: tuple[int, ...] = (1,)
    let_go: threading.Event = field(default_factory=threading.Event)
    is_hanging: threading.Event = field(default_factory=threading.Event)

    def collect(self, *, deadline_ms: float) -> StepDrafts | None:
        assert self.step is not None
        if self.step.step_id in self.hanging_steps:
            self.is_hanging.set()
            self.let_go.wait(30)
        return self.answer(self.step)


@pytest.fixture
def fallbacks() -> Fallbacks:
    return Fallbacks()


@pytest.fixture
def guard_of(fallbacks: Fallbacks) -> Iterator[Callable[[Any], GuardedClient]]:
    """Make guards that are shut down after the test."""
    guards: list[GuardedClient] = []

    def make(client: Any) -> GuardedClient:
        guards.append(GuardedClient(client, vocab_size=VOCAB_SIZE, fallbacks=fallbacks, deadline_ms=SHORT_MS))
        return guards[-1]

    yield make
    for guard in guards:
        guard.shutdown()


def open_handle(client: Any, handle: int, prompt: TokenIds | None = None) -> None:
    client.open(handle, tokens_of(1, 2) if prompt is None else prompt, UNTAGGED, GREEDY, namespace="default")


def close_handle(client: Any, handle: int) -> None:
    client.close(handle, FinishReason.STOP, 0, tokens_of())


def seconds(call: Callable[[], Any]) -> float:
    begin = time.monotonic()
    call()
    return time.monotonic() - begin


def test_guard_passes_drafts_of_the_submitted_step_on(guard_of: Any) -> None:
    guard = guard_of(ScriptedClient())
    guard.submit(step_of(1))

    drafts = guard.collect(deadline_ms=LONG_MS)

    assert drafts is not None
    assert drafts.step_id == 1
    assert drafts.draft_token_ids.tolist() == [3, 3, 3, 3]


def test_one_thread_that_is_not_ours_makes_all_calls_in_order(guard_of: Any) -> None:
    client = ScriptedClient()
    guard = guard_of(client)
    open_handle(guard, 7)
    guard.submit(step_of(1))
    close_handle(guard, 7)
    guard.shutdown()

    assert client.calls == [("open", 7), ("submit", 1), ("close", 7), ("shutdown", 0)]
    assert len(client.threads) == 1
    assert threading.get_ident() not in client.threads


def test_client_that_raises_costs_no_wait_and_is_counted(guard_of: Any, fallbacks: Fallbacks) -> None:
    def lose_peer(step: StepRequest) -> StepDrafts:
        raise ConnectionResetError(f"step {step.step_id}")

    guard = guard_of(ScriptedClient(lose_peer))
    guard.submit(step_of(1))
    waited_s = seconds(lambda: guard.collect(deadline_ms=LONG_MS))
    guard.submit(step_of(2))

    assert guard.collect(deadline_ms=LONG_MS) is None
    assert waited_s < LONG_MS / 2000
    assert fallbacks.counts() == {"client_error": 2}


def test_client_that_hangs_costs_one_deadline_and_then_nothing(guard_of: Any, fallbacks: Fallbacks) -> None:
    client = HangingClient()
    guard = guard_of(client)
    guard.submit(step_of(1))
    first_s = seconds(lambda: guard.collect(deadline_ms=SHORT_MS))
    guard.submit(step_of(2))
    second_s = seconds(lambda: guard.collect(deadline_ms=LONG_MS))
    client.let_go.set()

    assert SHORT_MS / 1000 <= first_s < LONG_MS / 2000
    assert second_s < LONG_MS / 2000
    assert fallbacks.counts() == {"deadline": 1, "behind": 1}


def test_client_that_comes_back_serves_again(guard_of: Any) -> None:
    client = HangingClient()
    guard = guard_of(client)
    guard.submit(step_of(1))
    guard.collect(deadline_ms=SHORT_MS)
    client.let_go.set()
    guard.submit(step_of(2))
    settle(guard)

    drafts = guard.collect(deadline_ms=0)

    assert drafts is not None
    assert drafts.step_id == 2


def test_late_answer_is_not_taken_for_the_next_step(guard_of: Any) -> None:
    client = HangingClient(hanging_steps=(1, 2))
    guard = guard_of(client)
    guard.submit(step_of(1))
    guard.collect(deadline_ms=SHORT_MS)
    guard.submit(step_of(2))
    client.is_hanging.wait(30)

    assert guard.collect(deadline_ms=0) is None
    client.let_go.set()


def test_client_that_is_late_again_and_again_is_waited_for_less_and_less(guard_of: Any, fallbacks: Fallbacks) -> None:
    num_steps = 20
    client = HangingClient(hanging_steps=tuple(range(1, num_steps + 1)))
    guard = guard_of(client)
    for step_id in range(1, num_steps + 1):
        client.let_go.clear()
        guard.submit(step_of(step_id))
        guard.collect(deadline_ms=1.0)
        client.let_go.set()
        settle(guard)

    # Waits at steps 1, 2, 4, 8, 16; it would be 20 waits without the back-off.
    assert fallbacks.counts() == {"deadline": 5, "skipped": num_steps - 5}


def settle(guard: GuardedClient) -> None:
    """Wait until the guard's thread has nothing to do: its queue is in order, so an open is done after all before."""
    is_idle = threading.Event()
    original = guard._client.open
    guard._client.open = lambda *args, **kwargs: is_idle.set()  # type: ignore[method-assign]
    open_handle(guard, 1 << 40)
    assert is_idle.wait(30)
    guard._client.open = original  # type: ignore[method-assign]


GARBAGE: dict[str, Callable[[StepDrafts], Any]] = {
    "another step": lambda drafts: replace(drafts, step_id=77),
    "a token past the vocabulary": lambda drafts: replace(drafts, draft_token_ids=np.full(4, VOCAB_SIZE, np.int32)),
    "a negative token": lambda drafts: replace(drafts, draft_token_ids=np.full(4, -1, np.int32)),
    "a row over its room": lambda drafts: replace(
        drafts, draft_lengths=tokens_of(5, 0), draft_token_ids=np.full(5, 3, np.int32)
    ),
    "a negative length": lambda drafts: replace(drafts, draft_lengths=tokens_of(5, -1)),
    "fewer rows": lambda drafts: replace(drafts, draft_lengths=tokens_of(4)),
    "lengths that do not add up": lambda drafts: replace(drafts, draft_lengths=tokens_of(2, 1)),
    "a batch over its budget": lambda drafts: replace(
        drafts, draft_lengths=tokens_of(4, 4), draft_token_ids=np.full(8, 3, np.int32)
    ),
    "tokens of another shape": lambda drafts: replace(drafts, draft_token_ids=np.full((2, 2), 3, np.int32)),
    "fractions": lambda drafts: replace(drafts, draft_token_ids=np.full(4, 0.5, np.float32)),
    "lengths of None": lambda drafts: replace(drafts, draft_lengths=cast(Any, None)),
    "a string": lambda drafts: "drafts",
}


@pytest.mark.parametrize("kind", GARBAGE)
def test_garbage_is_refused_and_counted(kind: str, guard_of: Any, fallbacks: Fallbacks) -> None:
    guard = guard_of(ScriptedClient(lambda step: GARBAGE[kind](drafts_of(step))))
    guard.submit(step_of(1, budget=7))

    assert guard.collect(deadline_ms=LONG_MS) is None
    assert fallbacks.counts() == {"bad_drafts": 1}


def test_drafts_at_every_bound_are_taken() -> None:
    step = step_of(1, room=4, budget=8)
    drafts = replace(drafts_of(step, length=4), draft_token_ids=np.full(8, VOCAB_SIZE - 1, np.int32))

    check_drafts(step, drafts, VOCAB_SIZE)


def test_close_reaches_a_client_whose_engine_is_idle(guard_of: Any) -> None:
    is_closed = threading.Event()
    client = ScriptedClient()
    client.close = lambda *_: is_closed.set()  # type: ignore[method-assign]
    guard = guard_of(client)
    open_handle(guard, 1)
    close_handle(guard, 1)

    assert is_closed.wait(30)


def test_close_of_a_handle_that_was_never_opened_is_not_passed_on(guard_of: Any) -> None:
    client = ScriptedClient()
    guard = guard_of(client)
    close_handle(guard, 5)
    guard.shutdown()

    assert client.calls == [("shutdown", 0)]


def test_full_queue_drops_steps_and_prompts_but_no_close(
    guard_of: Any, fallbacks: Fallbacks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command_queue, "MAX_QUEUED_TOKENS", 1000)
    client = HangingClient()
    guard = guard_of(client)
    open_handle(guard, 1)
    guard.submit(step_of(1))
    client.is_hanging.wait(30)
    for step_id in range(2, 100):
        guard.submit(step_of(step_id))
    open_handle(guard, 2, np.zeros(1000, np.int32))
    close_handle(guard, 1)
    close_handle(guard, 2)
    num_queued = len(guard._commands)
    client.let_go.set()
    guard.shutdown()

    assert num_queued < 1000 / command_queue.COMMAND_TOKENS
    assert ("open", 2) not in client.calls
    assert [call for call in client.calls if call[0] == "close"] == [("close", 1)]
    assert fallbacks.counts()["queue_full"] > 80


def test_step_that_was_dropped_gets_no_answer(guard_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    guard = guard_of(ScriptedClient())
    guard.submit(step_of(1))
    settle(guard)
    monkeypatch.setattr(command_queue, "MAX_QUEUED_TOKENS", 0)
    guard.submit(step_of(2))

    assert guard.collect(deadline_ms=LONG_MS) is None


def test_lost_handles_of_a_late_answer_come_with_the_next_collect_once(guard_of: Any) -> None:
    client = HangingClient(lambda step: drafts_of(step, resync=(1,) if step.step_id == 1 else ()))
    guard = guard_of(client)
    guard.submit(step_of(1))
    guard.collect(deadline_ms=SHORT_MS)
    client.let_go.set()
    guard.submit(step_of(2))
    settle(guard)
    second = guard.collect(deadline_ms=0)
    guard.submit(step_of(3))
    settle(guard)
    third = guard.collect(deadline_ms=0)

    assert second is not None
    assert third is not None
    assert second.resync_handles.tolist() == [1]
    assert second.draft_token_ids.tolist() == [3, 3, 3, 3]
    assert third.resync_handles.tolist() == []


def test_lost_handles_arrive_without_drafts_too(guard_of: Any) -> None:
    client = HangingClient(lambda step: drafts_of(step, resync=(0,)), hanging_steps=(2,))
    guard = guard_of(client)
    guard.submit(step_of(1))
    settle(guard)
    guard.submit(step_of(2))
    client.is_hanging.wait(30)
    drafts = guard.collect(deadline_ms=0)
    client.let_go.set()

    assert drafts is not None
    assert drafts.step_id == 2
    assert drafts.draft_lengths.tolist() == [0, 0]
    assert drafts.resync_handles.tolist() == [0]


def test_shutdown_leaves_a_hung_thread_behind(fallbacks: Fallbacks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "JOIN_TIMEOUT_S", 0.05)
    client = HangingClient()
    guard = GuardedClient(client, vocab_size=VOCAB_SIZE, fallbacks=fallbacks, deadline_ms=SHORT_MS)
    guard.submit(step_of(1))
    client.is_hanging.wait(30)

    assert seconds(guard.shutdown) < 10
    client.let_go.set()
    guard._thread.join(30)
    assert not guard._thread.is_alive()


def test_shutdown_may_be_repeated(guard_of: Any) -> None:
    client = ScriptedClient()
    guard = guard_of(client)
    guard.shutdown()
    guard.shutdown()
    guard.submit(step_of(1))

    assert client.calls == [("shutdown", 0)]


def test_each_reason_is_logged_once_a_minute(agentspec_log: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    fallbacks = Fallbacks(lambda: now[0])
    for now[0] in (0.0, 1.0, 59.0, 60.0, 61.0):
        fallbacks.note("deadline", "3 ms")
    fallbacks.note("client_error", "gone")

    reasons = [record.args[0] for record in agentspec_log.records if isinstance(record.args, tuple)]
    assert reasons == ["deadline", "deadline", "client_error"]
    assert fallbacks.counts() == {"deadline": 5, "client_error": 1}


@pytest.fixture
def engine() -> Engine:
    return Engine([bytes([65 + i]) for i in range(VOCAB_SIZE)], CHAT, num_speculative_tokens=4, history_bytes=1 << 24)


def row_of(step_id: int, handle: int, position: int, *tokens: int) -> StepRequest:
    return replace(
        step_of(step_id, num_rows=1),
        handles=np.array([handle], np.int64),
        positions=tokens_of(position),
        token_offsets=tokens_of(0, len(tokens)),
        token_ids=tokens_of(*tokens),
    )


def test_step_behind_a_long_prompt_is_not_waited_for(guard_of: Any, fallbacks: Fallbacks) -> None:
    let_go = threading.Event()

    class SlowToOpen(ScriptedClient):
        def open(self, handle: int, tokens: TokenIds, tags: Tags, sampling: Sampling, *, namespace: str) -> None:
            assert let_go.wait(60)

    guard = guard_of(SlowToOpen())
    guard.open(1, np.zeros(100_000, np.int32), UNTAGGED, GREEDY, namespace="default")
    guard.submit(step_of(1))
    drafts = guard.collect(deadline_ms=SHORT_MS)
    let_go.set()

    assert drafts is None
    assert fallbacks.counts() == {"behind": 1}


def test_embedded_client_drafts_what_another_request_wrote(engine: Engine, guard_of: Any) -> None:
    text = (5, 6, 7, 8, 9, 10, 11, 12)
    guard = guard_of(EmbeddedClient(engine))
    for handle in (1, 2, 3):
        open_handle(guard, handle)
        guard.submit(row_of(handle, handle, 0, *text))
        guard.close(handle, FinishReason.STOP, len(text), tokens_of())
    settle(guard)
    open_handle(guard, 9)
    guard.submit(row_of(9, 9, 0, *text[:4]))

    drafts = guard.collect(deadline_ms=LONG_MS)

    assert drafts is not None
    assert drafts.draft_token_ids.tolist() == list(text[4:8])


def test_embedded_client_closes_all_requests(engine: Engine, guard_of: Any) -> None:
    guard = guard_of(EmbeddedClient(engine))
    for handle in (1, 2, 3):
        open_handle(guard, handle)
    guard.submit(row_of(1, 1, 0, 5))
    for handle in (1, 2, 3):
        guard.close(handle, FinishReason.ABORT, 1, tokens_of())
    settle(guard)
    guard.close(1 << 40, FinishReason.ABORT, 0, tokens_of())
    guard.shutdown()

    assert engine.num_open_requests() == 0


def test_embedded_client_reports_a_request_that_it_does_not_know(engine: Engine, guard_of: Any) -> None:
    guard = guard_of(EmbeddedClient(engine))
    guard.submit(row_of(1, 4, 0, 5))

    drafts = guard.collect(deadline_ms=LONG_MS)

    assert drafts is not None
    assert drafts.resync_handles.tolist() == [4]


PLAN = {"blocks": [{"name": "plan", "start": "ab", "end": None}]}


@pytest.fixture
def letters() -> Engine:
    return Engine([bytes([97 + token]) for token in range(VOCAB_SIZE)], CHAT)


def path_after_ab(engine: Engine, client: EmbeddedClient, tags: Tags) -> str:
    """Block path of a request that wrote ``ab``."""
    client.open(1, tokens_of(), tags, GREEDY, namespace="default")
    client.submit(row_of(1, 1, 0, 0, 1))
    client.collect(deadline_ms=LONG_MS)
    path = engine.block_path(1)
    client.close(1, FinishReason.STOP, 2, tokens_of())
    return path


def test_embedded_client_follows_the_grammar_of_the_request(letters: Engine) -> None:
    client = EmbeddedClient(letters, grammars=GrammarStore(letters, {"mine": parse_grammar(PLAN)}))

    assert path_after_ab(letters, client, Tags(grammar=PLAN)) == "plan"
    assert path_after_ab(letters, client, Tags(grammar="mine")) == "plan"
    assert path_after_ab(letters, client, UNTAGGED) == "text"


@pytest.mark.parametrize("grammar", ["nobody", {"blocks": 3}, {"blocks": [], "pad": "x" * 2000}])
def test_request_with_a_grammar_that_cannot_be_had_follows_the_engines_own(
    grammar: dict[str, Any] | str, letters: Engine, fallbacks: Fallbacks
) -> None:
    client = EmbeddedClient(letters, fallbacks=fallbacks)

    assert path_after_ab(letters, client, Tags(grammar=grammar)) == "text"
    assert fallbacks.counts() == {"bad_grammar": 1}


def test_embedded_client_starts_in_the_tool_that_the_request_must_call(letters: Engine) -> None:
    client = EmbeddedClient(letters)
    client.open(1, tokens_of(), UNTAGGED, Sampling(is_structured=True, forced_tool="search"), namespace="default")

    assert letters.block_path(1) == "tool_call/search"
