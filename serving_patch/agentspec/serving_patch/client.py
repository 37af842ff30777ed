"""The seam between a vLLM hook and whatever drafts for it, and the guard that keeps a bad drafter from hurting vLLM."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import numpy as np

from agentspec.sidecar.engine import Engine, FinishReason, Sampling, StepDrafts, StepRequest, TokenIds
from agentspec.sidecar.grammar_store import OWN_GRAMMAR, GrammarStore
from agentspec.sidecar.grammars import GrammarError
from agentspec.sidecar.tags import Tags

# vLLM configures only its own logger tree; a line under any other name would not be seen in `vllm serve`.
logger = logging.getLogger("vllm.agentspec")

LOG_INTERVAL_S = 60.0
MAX_QUEUED_TOKENS = 1 << 22  # 16 MiB of prompts and steps that wait for a stuck client
COMMAND_TOKENS = 64  # what a queued command counts beside its tokens
CLIENT_SHARE = 0.75  # of the deadline goes to the client, so that its partial answer still arrives in time
MAX_SKIPPED_STEPS = 64
INDEXED_TOKENS_PER_MS = 4000  # of prompts that wait in the queue; more than fit into the deadline are not waited for
JOIN_TIMEOUT_S = 2.0


class DraftClient(Protocol):
    """Drafts for one vLLM engine. Calls come from one thread at a time; `GuardedClient` sees to that.

    `open` takes the prompt. It is an idempotent resync: a known handle goes back to its prompt, and the hook hands over
    its output from position 0 in the next step. `submit` hands over a step and returns; `collect` waits for its answer.
    `close` ends a request with the true length of its output and the tokens that no step has brought.
    """

    def open(self, handle: int, tokens: TokenIds, tags: Tags, sampling: Sampling, *, namespace: str) -> None:
        """Make a request known; `namespace` is the tenant, which no history crosses."""
        ...

    def submit(self, step: StepRequest) -> None:
        """Hand over what the last verification step brought."""
        ...

    def collect(self, *, deadline_ms: float) -> StepDrafts | None:
        """Return the drafts of the step submitted last, or None when there are none within `deadline_ms`."""
        ...

    def close(self, handle: int, reason: FinishReason, true_length: int, tail: TokenIds) -> None:
        """End a request; an unknown handle is ignored."""
        ...

    def shutdown(self) -> None:
        """Let go of threads, sockets and memory; no call follows."""
        ...


class Fallbacks:
    """Counts by reason why requests were not drafted for as they should, and logs each reason once a minute.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._logged_at: dict[str, float] = {}

    def note(self, reason: str, detail: object = "") -> None:
        """Count one event; `detail` must hold no prompt or output text."""
        now = self._clock()
        with self._lock:
            self._counts[reason] += 1
            count = self._counts[reason]
            is_due = now - self._logged_at.get(reason, -LOG_INTERVAL_S) >= LOG_INTERVAL_S
            if is_due:
                self._logged_at[reason] = now
        if is_due:
            logger.warning("agentspec fallback %s (%d so far): %s", reason, count, detail)

    def counts(self) -> dict[str, int]:
        """Events since the start, by reason."""
        with self._lock:
            return dict(self._counts)


class EmbeddedClient:
    """Drafts from an engine in this process.

    Args:
        engine: the draft engine; it may be shared, it locks itself.
        grammars: those that requests name in their tags; of this engine, and no other store's.
        fallbacks: counts requests whose grammar can't be had; they follow the engine's own.
    """

    def __init__(
        self, engine: Engine, *, grammars: GrammarStore | None = None, fallbacks: Fallbacks | None = None
    ) -> None:
        self._engine = engine
        self._grammars = grammars or GrammarStore(engine)
        self._fallbacks = fallbacks or Fallbacks()
        self._step: StepRequest | None = None

    def open(self, handle: int, tokens: TokenIds, tags: Tags, sampling: Sampling, *, namespace: str) -> None:
        """See `Engine.open`; builds the grammar that the tags name if no request has named it before."""
        grammar_id = self._find_grammar(namespace, tags)
        self._engine.open(handle, tokens, tags, sampling, namespace=namespace, grammar_id=grammar_id)

    def submit(self, step: StepRequest) -> None:
        """Keep the step for `collect`; the engine has no thread of its own."""
        self._step = step

    def collect(self, *, deadline_ms: float) -> StepDrafts | None:
        """Draft now; rows that are not reached by the deadline get no draft."""
        step, self._step = self._step, None
        return None if step is None else self._engine.step(step, deadline_us=max(1, int(deadline_ms * 1000)))

    def close(self, handle: int, reason: FinishReason, true_length: int, tail: TokenIds) -> None:
        """See `Engine.close`."""
        self._engine.close(handle, reason, true_length, tail)

    def shutdown(self) -> None:
        """Nothing to let go of: the engine belongs to its maker."""

    def _find_grammar(self, namespace: str, tags: Tags) -> int:
        try:
            return self._grammars.find(namespace, tags.grammar)
        except GrammarError as error:
            self._fallbacks.note("bad_grammar", error)
            return OWN_GRAMMAR


def check_drafts(step: StepRequest, drafts: StepDrafts, vocab_size: int) -> None:
    """Verify that drafts answer the step and may be given to vLLM.

    Raises:
        ValueError: another step, a wrong shape, a row over its room, the batch over its budget, or a token id outside
            the vocabulary. The message names the row or the value.
    """
    if drafts.step_id != step.step_id:
        raise ValueError(f"drafts of step {drafts.step_id} came for step {step.step_id}")
    lengths = np.asarray(drafts.draft_lengths)
    tokens = np.asarray(drafts.draft_token_ids)
    if lengths.dtype.kind not in "iu" or lengths.shape != step.handles.shape:
        raise ValueError(f"draft lengths: expected integers of shape {step.handles.shape}, got shape {lengths.shape}")
    if tokens.dtype.kind not in "iu" or tokens.ndim != 1:
        raise ValueError(f"draft token ids: expected a flat array of integers, got shape {tokens.shape}")
    if ((lengths < 0) | (lengths > step.max_draft_tokens)).any():
        row = int(np.argmax((lengths < 0) | (lengths > step.max_draft_tokens)))
        raise ValueError(f"draft length {lengths[row]} of row {row}, room is {step.max_draft_tokens[row]}")
    if not lengths.sum() == tokens.size <= step.token_budget:
        raise ValueError(f"{tokens.size} draft tokens for lengths of {lengths.sum()}, budget {step.token_budget}")
    if tokens.size and not 0 <= tokens.min() <= tokens.max() < vocab_size:
        raise ValueError(f"draft token ids from {tokens.min()} to {tokens.max()}, vocab_size {vocab_size}")


class GuardedClient:
    """Runs another client on one helper thread, its only caller, so that it can neither block nor break the hook.

    Commands run in order, also while the engine is idle. A client that raises costs nothing, one that hangs costs one
    deadline and then no further waiting until its thread comes back; what was dropped meanwhile is brought in again
    through `resync_handles`, which the client itself reports.

    Args:
        client: what really drafts.
        vocab_size: token ids of a draft must be below it.
        fallbacks: counts why a step got no drafts.
        deadline_ms: longest wait for one step, given to the client.
    """

    def __init__(self, client: DraftClient, *, vocab_size: int, fallbacks: Fallbacks, deadline_ms: float) -> None:
        self._client = client
        self._vocab_size = vocab_size
        self._fallbacks = fallbacks
        self._client_deadline_ms = deadline_ms * CLIENT_SHARE
        self._changed = threading.Condition()
        # All below is guarded by the condition's lock.
        self._commands: deque[tuple[int, Callable[[], None]]] = deque()
        self._num_queued_tokens = 0  # of the running command too
        self._known_handles: set[int] = set()  # opened at the client and not closed: only these need a close
        self._step: StepRequest | None = None  # submitted last
        self._answered_step_id = -1
        self._drafts: StepDrafts | None = None  # of the answered step
        self._lost_handles: set[int] = set()  # the client asked to open them again
        self._first_resync_step_id = 0  # answers to older steps do not know the last resync yet
        self._is_behind = False
        self._num_misses = 0  # in a row
        self._num_steps_to_skip = 0
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="agentspec-draft", daemon=True)
        self._thread.start()

    def open(self, handle: int, tokens: TokenIds, tags: Tags, sampling: Sampling, *, namespace: str) -> None:
        """Queue `open`; dropped when the queue is full, and then asked for again by the client."""
        command = functools.partial(self._client.open, handle, tokens, tags, sampling, namespace=namespace)
        with self._changed:
            if self._enqueue(tokens.size, command):
                self._known_handles.add(handle)

    def submit(self, step: StepRequest) -> None:
        """Queue the step for drafting; dropped when the queue is full."""
        with self._changed:
            if self._enqueue(step.token_ids.size + step.handles.size, functools.partial(self._answer, step)):
                self._step = step
            else:
                self._step = None

    def collect(self, *, deadline_ms: float) -> StepDrafts | None:
        """Return checked drafts of the last submitted step if they come within `deadline_ms`.

        A deadline of 0 takes what is there. The reply may hold no drafts but handles to open again.
        """
        with self._changed:
            step = self._step
            if step is None:
                return None
            if self._answered_step_id != step.step_id and deadline_ms > 0:
                self._wait_for(step, deadline_ms)
            drafts = self._drafts if self._answered_step_id == step.step_id else None
            self._drafts = None
            if self._lost_handles:
                lost = np.array(sorted(self._lost_handles), np.int64)
                self._lost_handles.clear()
                self._first_resync_step_id = step.step_id + 1
                drafts = replace(drafts or _no_drafts(step), resync_handles=lost)
            return drafts

    def close(self, handle: int, reason: FinishReason, true_length: int, tail: TokenIds) -> None:
        """Queue `close`; never dropped for a handle that the client knows, so its histories cannot leak."""
        with self._changed:
            if handle in self._known_handles:
                self._known_handles.remove(handle)
                self._append(tail.size, functools.partial(self._client.close, handle, reason, true_length, tail))

    def shutdown(self) -> None:
        """Finish what is queued, shut the client down and join the thread; a stuck thread is left behind after 2 s."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify_all()
        self._thread.join(JOIN_TIMEOUT_S)
        if self._thread.is_alive():
            logger.warning("agentspec: the draft client hangs; its thread ends with the process")

    def _enqueue(self, num_tokens: int, command: Callable[[], None]) -> bool:
        if self._is_stopping or self._num_queued_tokens + num_tokens + COMMAND_TOKENS > MAX_QUEUED_TOKENS:
            self._fallbacks.note("queue_full", f"{len(self._commands)} commands wait for the draft client")
            return False
        self._append(num_tokens, command)
        return True

    def _append(self, num_tokens: int, command: Callable[[], None]) -> None:
        self._num_queued_tokens += num_tokens + COMMAND_TOKENS
        self._commands.append((num_tokens + COMMAND_TOKENS, command))
        self._changed.notify_all()

    def _wait_for(self, step: StepRequest, deadline_ms: float) -> None:
        if self._is_behind:
            self._fallbacks.note("behind", "the draft client has not come back from an earlier step")
            return
        if self._num_queued_tokens > deadline_ms * INDEXED_TOKENS_PER_MS:
            self._fallbacks.note("behind", f"{self._num_queued_tokens} tokens wait for the draft client")
            return
        if self._num_steps_to_skip > 0:
            self._num_steps_to_skip -= 1
            self._fallbacks.note("skipped", "the draft client was late several times in a row")
            return
        if self._changed.wait_for(lambda: self._answered_step_id == step.step_id, deadline_ms / 1000):
            self._num_misses = 0
            return
        self._is_behind = True
        self._num_steps_to_skip = min(2**self._num_misses, MAX_SKIPPED_STEPS) - 1
        self._num_misses += 1
        self._fallbacks.note("deadline", f"no drafts within {deadline_ms} ms")

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._commands or self._is_stopping)
                if not self._commands:
                    break
                num_tokens, command = self._commands.popleft()
            try:
                command()
            except Exception as error:  # noqa: BLE001  # the boundary: a failing drafter must never reach vLLM
                self._fallbacks.note("client_error", repr(error))
            with self._changed:
                self._num_queued_tokens -= num_tokens
                self._changed.notify_all()
        try:
            self._client.shutdown()
        except Exception as error:  # noqa: BLE001  # see above
            self._fallbacks.note("client_error", repr(error))

    def _answer(self, step: StepRequest) -> None:
        drafts: StepDrafts | None = None
        try:
            self._client.submit(step)
            drafts = self._client.collect(deadline_ms=self._client_deadline_ms)
            if drafts is None:
                self._fallbacks.note("no_answer", "the draft client had no drafts for a step")
            else:
                drafts = self._checked(step, drafts)
        finally:
            self._deliver(step, drafts)

    def _checked(self, step: StepRequest, drafts: StepDrafts) -> StepDrafts | None:
        try:
            check_drafts(step, drafts, self._vocab_size)
        except (ValueError, TypeError, AttributeError) as error:
            self._fallbacks.note("bad_drafts", repr(error))
            return None
        return drafts

    def _deliver(self, step: StepRequest, drafts: StepDrafts | None) -> None:
        with self._changed:
            self._answered_step_id = step.step_id
            self._drafts = drafts
            if drafts is not None and step.step_id >= self._first_resync_step_id:
                self._lost_handles.update(drafts.resync_handles.tolist())
            if self._step is None or self._step.step_id == step.step_id:
                self._is_behind = False
            self._changed.notify_all()


def _no_drafts(step: StepRequest) -> StepDrafts:
    num_rows = len(step.handles)
    return StepDrafts(
        step_id=step.step_id,
        draft_lengths=np.zeros(num_rows, np.int32),
        draft_token_ids=np.empty(0, np.int32),
        survival=np.empty(0, np.float32),
        redundancy=np.zeros(num_rows, np.float32),
        token_budget=step.token_budget,
    )
