"""Where a hook waits for the drafts of its last step, and for how long: the bookkeeping that draft clients share."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from agentspec.sidecar.engine import StepDrafts, StepRequest

# vLLM configures only its own logger tree; a line under any other name would not be seen in `vllm serve`.
logger = logging.getLogger("vllm.agentspec")

LOG_INTERVAL_S = 60.0
MAX_SKIPPED_STEPS = 64
INDEXED_TOKENS_PER_MS = 4000  # of prompts that wait before a step; more than fit into the deadline are not waited for


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


class StepMailbox:
    """Pairs the last step that was handed over with its answer.

    One thread posts steps and collects, another delivers. A step without an answer costs one deadline; after it nobody
    waits until the latest step is answered (the answers to older ones are dropped, but for the handles to resync), and
    where answers keep coming too late, only every second, fourth, … step is waited for, as a probe.

    Args:
        changed: the owner's condition; its lock guards the mailbox. Only `deliver` takes it by itself.
        vocab_size: token ids of a draft must be below it.
        fallbacks: counts why a step got no drafts.
    """

    def __init__(self, changed: threading.Condition, *, vocab_size: int, fallbacks: Fallbacks) -> None:
        self._changed = changed
        self._vocab_size = vocab_size
        self._fallbacks = fallbacks
        self._step: StepRequest | None = None  # handed over last
        self._answered_step_id = -1
        self._drafts: StepDrafts | None = None  # of the answered step
        self._lost_handles: set[int] = set()  # to be opened again
        self._first_resync_step_id = 0  # answers to older steps do not know the last resync yet
        self._is_behind = False
        self._num_misses = 0  # in a row
        self._num_steps_to_skip = 0

    def post(self, step: StepRequest | None) -> None:
        """Note the step that was handed over; None: it was not, and there is nothing to collect."""
        self._step = step

    def reset(self) -> None:
        """Forget what was handed over to a peer that is gone; whoever follows owes no answer to it."""
        self._step = None
        self._is_behind = False
        self._changed.notify_all()

    def collect(self, *, deadline_ms: float, num_tokens_ahead: int) -> StepDrafts | None:
        """Wait for the answer to the posted step.

        Args:
            deadline_ms: longest wait; 0 takes what is there.
            num_tokens_ahead: of commands that the drafter has to carry out before it.

        Returns:
            The answer, which may hold no drafts but handles to open again, or None.
        """
        step = self._step
        if step is None:
            return None
        if self._answered_step_id != step.step_id and deadline_ms > 0:
            self._wait_for(step, deadline_ms, num_tokens_ahead)
        drafts = self._drafts if self._answered_step_id == step.step_id else None
        self._drafts = None
        if self._lost_handles:
            lost = np.array(sorted(self._lost_handles), np.int64)
            self._lost_handles.clear()
            self._first_resync_step_id = step.step_id + 1
            drafts = replace(drafts or _no_drafts(step), resync_handles=lost)
        return drafts

    def deliver(self, step_id: int, drafts: StepDrafts | None) -> bool:
        """Bring the answer to a step: drafts, checked here, or None for a failure that was counted.

        Returns:
            Whether it answers the step that was handed over last.
        """
        step = self._step
        if drafts is not None and step is not None and step.step_id == step_id:
            drafts = self._checked(step, drafts)
        with self._changed:
            self._answered_step_id = step_id
            self._drafts = drafts
            if drafts is not None and step_id >= self._first_resync_step_id:
                self._lost_handles.update(drafts.resync_handles.tolist())
            is_latest = self._step is None or self._step.step_id == step_id
            if is_latest:
                self._is_behind = False
            self._changed.notify_all()
            return is_latest

    def _checked(self, step: StepRequest, drafts: StepDrafts) -> StepDrafts | None:
        try:
            check_drafts(step, drafts, self._vocab_size)
        except (ValueError, TypeError, AttributeError) as error:
            self._fallbacks.note("bad_drafts", repr(error))
            return None
        return drafts

    def _wait_for(self, step: StepRequest, deadline_ms: float, num_tokens_ahead: int) -> None:
        if self._is_behind:
            self._fallbacks.note("behind", "the draft client has not come back from an earlier step")
            return
        if num_tokens_ahead > deadline_ms * INDEXED_TOKENS_PER_MS:
            self._fallbacks.note("behind", f"{num_tokens_ahead} tokens wait for the draft client")
            return
        if self._num_steps_to_skip > 0:
            self._num_steps_to_skip -= 1
            self._fallbacks.note("skipped", "the draft client was late several times in a row")
            return
        is_over = self._changed.wait_for(
            lambda: self._answered_step_id == step.step_id or self._step is not step, deadline_ms / 1000
        )
        if is_over:
            self._num_misses = 0
            return
        self._is_behind = True
        self._num_steps_to_skip = min(2**self._num_misses, MAX_SKIPPED_STEPS) - 1
        self._num_misses += 1
        self._fallbacks.note("deadline", f"no drafts within {deadline_ms} ms")


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
