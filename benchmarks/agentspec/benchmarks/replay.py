"""Plays recorded agent runs as a batch would: each step every running request gets a draft, which is checked against
what its model really wrote; the verdict and the new tokens go back to the method."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from agentspec.benchmarks.corpus import TokenCall
from agentspec.benchmarks.cost_curves import CostCurve
from agentspec.benchmarks.methods.interface import Drafts, Method
from agentspec.sidecar.engine import StepRequest, StepTiming, TokenIds

NUM_SPECULATIVE_TOKENS = 16
MAX_PROMPT_TOKENS = 8192  # what the engine indexes of a prompt; the peers get the same
_PIECES_PER_ROW = 2


@dataclass(frozen=True, slots=True)
class Piece:
    """Calls of one agent run that one lane plays in order.

    Attributes:
        workload: of the run.
        calls: not empty.
        is_recorded: False for all but the first piece of a run that was cut: the others are played at the same time, so
            their text would tell the first one its own future.
    """

    workload: str
    calls: tuple[TokenCall, ...]
    is_recorded: bool = True

    @property
    def num_tokens(self) -> int:
        """Output tokens."""
        return sum(len(call.output) for call in self.calls)


@dataclass(slots=True)
class StepLog:
    """What happened, one entry a step or one a row and step (or one a draft token), in order.

    Attributes:
        calls: the calls that rows index.
        row_counts: rows of each step.
        draft_counts: draft tokens of each step.
        looked_counts: rows of each step for which drafts were looked for.
        call_ids, positions: of each row: index into `calls`, output tokens known before the step; int32.
        num_draft_tokens, num_accepted_tokens, num_new_tokens: of each row; int32.
        survival: of each draft token, where the method tells; float32.
    """

    calls: list[TokenCall] = field(default_factory=list)
    row_counts: list[int] = field(default_factory=list)
    draft_counts: list[int] = field(default_factory=list)
    looked_counts: list[int] = field(default_factory=list)
    call_ids: list[NDArray[np.int32]] = field(default_factory=list)
    positions: list[NDArray[np.int32]] = field(default_factory=list)
    num_draft_tokens: list[NDArray[np.int32]] = field(default_factory=list)
    num_accepted_tokens: list[NDArray[np.int32]] = field(default_factory=list)
    num_new_tokens: list[NDArray[np.int32]] = field(default_factory=list)
    survival: list[NDArray[np.float32]] = field(default_factory=list)


def cut_runs(calls: Iterable[TokenCall], batch_size: int) -> list[Piece]:
    """Group calls by run, and cut runs at calls when there are too few to keep a batch busy.

    Args:
        calls: of one workload, those of a run in their order.
        batch_size: lanes to fill; two pieces a lane are aimed at.
    """
    runs: dict[str, list[TokenCall]] = {}
    for call in calls:
        runs.setdefault(call.run_id, []).append(call)
    pieces_per_run = -(-_PIECES_PER_ROW * batch_size // max(1, len(runs)))
    pieces = []
    for run in runs.values():
        for index, part in enumerate(_split(run, pieces_per_run)):
            pieces.append(Piece(part[0].workload, tuple(part), is_recorded=index == 0))
    return pieces


def _split(run: Sequence[TokenCall], num_parts: int) -> list[Sequence[TokenCall]]:
    """Cut a run into at most `num_parts` parts of about as many output tokens."""
    lengths = np.array([len(call.output) for call in run])
    parts_of_calls = (np.cumsum(lengths) - lengths) * num_parts // lengths.sum()
    borders = [0, *(np.flatnonzero(np.diff(parts_of_calls)) + 1).tolist(), len(run)]
    return [run[begin:end] for begin, end in itertools.pairwise(borders)]


class Queue:
    """Pieces that wait for a lane. A free lane takes one of the workload that has the fewest lanes.

    Args:
        pieces: of one workload or several.
        seed: shuffles them.
    """

    def __init__(self, pieces: Sequence[Piece], seed: int) -> None:
        self._waiting: dict[str, list[Piece]] = {}
        for index in np.random.default_rng(seed).permutation(len(pieces)):
            self._waiting.setdefault(pieces[index].workload, []).append(pieces[index])
        self._num_lanes = dict.fromkeys(sorted(self._waiting), 0)
        self._num_tokens = dict(self._num_lanes)

    def take(self, done: Piece | None = None) -> Piece | None:
        """The next piece for a lane that has played `done`; None when nothing waits."""
        if done is not None:
            self._num_lanes[done.workload] -= 1
        waiting = [workload for workload in self._num_lanes if self._waiting[workload]]
        if not waiting:
            return None
        workload = min(waiting, key=lambda name: (self._num_lanes[name], self._num_tokens[name]))
        piece = self._waiting[workload].pop()
        self._num_lanes[workload] += 1
        self._num_tokens[workload] += piece.num_tokens
        return piece


@dataclass(slots=True)
class _Lane:
    """One row of the batch: an agent run, and in it the request that is running."""

    piece: Piece
    handle: int = -1
    index: int = -1  # of the call in the piece
    call_id: int = -1
    output: TokenIds = field(default_factory=lambda: np.empty(0, np.int32))
    position: int = 0  # output tokens known
    num_new: int = 0  # of them from the last step, not handed over yet
    num_draft: int = 0
    num_accepted: int = 0

    def new_tokens(self) -> TokenIds:
        return self.output[self.position - self.num_new : self.position]


class Replay:
    """One method, one batch.

    Args:
        method: already warm.
        queue: what to play.
        batch_size: lanes; fewer when fewer pieces wait.
        curve: how long a step takes, which the method is told as a server would measure it; None: it is told nothing.
        threshold: draft tokens with a lower survival are cut; None: none are.
        num_speculative_tokens: longest draft of a row.
    """

    def __init__(
        self,
        method: Method,
        queue: Queue,
        batch_size: int,
        *,
        curve: CostCurve | None = None,
        threshold: float | None = None,
        num_speculative_tokens: int = NUM_SPECULATIVE_TOKENS,
    ) -> None:
        self._method = method
        self._queue = queue
        self._curve = curve
        self._threshold = threshold
        self._max_draft = num_speculative_tokens
        self._num_handles = 0
        self._num_steps = 0
        self._timing: StepTiming | None = None  # of the last step
        self._log = StepLog()
        pieces = [piece for _ in range(batch_size) if (piece := queue.take()) is not None]
        self._lanes = [_Lane(piece) for piece in pieces]
        for lane in self._lanes:
            self._open_next(lane)

    def run(self, max_tokens: int | None, on_progress: Callable[[int], None] = lambda _num_tokens: None) -> StepLog:
        """Play until a lane finds no piece to play, so that every step has the whole batch, or to `max_tokens`.

        Args:
            max_tokens: output tokens of all lanes.
            on_progress: called after each step with the tokens played so far.
        """
        num_tokens = 0
        while self._lanes and (max_tokens is None or num_tokens < max_tokens):
            request = self._request()
            drafts = self._method.step(request)
            if self._threshold is not None:
                drafts = _cut(drafts, self._threshold)
            num_tokens += self._verify(drafts)
            on_progress(num_tokens)
            has_next = [self._advance(lane) for lane in self._lanes if lane.position == len(lane.output)]
            if not all(has_next):
                break
        return self._log

    def _request(self) -> StepRequest:
        lanes = self._lanes
        new = [lane.new_tokens() for lane in lanes]
        num_new = np.array([len(tokens) for tokens in new], np.int32)
        positions = np.array([lane.position for lane in lanes], np.int32)
        self._num_steps += 1
        return StepRequest(
            step_id=self._num_steps,
            handles=np.array([lane.handle for lane in lanes], np.int64),
            positions=positions - num_new,
            token_offsets=np.append(0, np.cumsum(num_new)).astype(np.int32),
            token_ids=np.concatenate(new),
            num_draft_tokens=np.array([lane.num_draft for lane in lanes], np.int32),
            num_accepted_tokens=np.array([lane.num_accepted for lane in lanes], np.int32),
            max_draft_tokens=np.full(len(lanes), self._max_draft, np.int32),
            num_decode_rows=len(lanes),
            num_prefill_tokens=0,
            token_budget=len(lanes) * self._max_draft,
            timing=self._timing,
        )

    def _verify(self, drafts: Drafts) -> int:
        """Let every lane go on by its accepted draft tokens and one more; returns how many tokens that brought."""
        begin = 0
        for lane, length in zip(self._lanes, drafts.lengths.tolist(), strict=True):
            recorded = lane.output[lane.position : lane.position + length]
            differs = np.flatnonzero(drafts.token_ids[begin : begin + len(recorded)] != recorded)
            begin += length
            lane.num_draft = length
            lane.num_accepted = int(differs[0]) if differs.size else len(recorded)
            lane.num_new = min(lane.num_accepted + 1, len(lane.output) - lane.position)
            lane.position += lane.num_new
        log, lanes = self._log, self._lanes
        num_new = np.array([lane.num_new for lane in lanes], np.int32)
        log.row_counts.append(len(lanes))
        log.draft_counts.append(begin)
        log.looked_counts.append(len(lanes) if drafts.has_looked else 0)
        log.call_ids.append(np.array([lane.call_id for lane in lanes], np.int32))
        log.positions.append(np.array([lane.position for lane in lanes], np.int32) - num_new)
        log.num_draft_tokens.append(drafts.lengths)
        log.num_accepted_tokens.append(np.array([lane.num_accepted for lane in lanes], np.int32))
        log.num_new_tokens.append(num_new)
        if drafts.survival is not None:
            log.survival.append(drafts.survival)
        if self._curve is not None:
            self._timing = StepTiming(
                duration_ms=float(self._curve.step_ms(len(lanes) + begin)),
                num_decode_rows=len(lanes),
                num_draft_tokens=begin,
                num_draft_rows=int(np.count_nonzero(drafts.lengths)),
            )
        return int(num_new.sum())

    def _advance(self, lane: _Lane) -> bool:
        """End the request of a lane and begin its next one; False when there is none."""
        self._method.close(lane.handle, lane.new_tokens(), lane.num_draft, lane.num_accepted)
        if lane.index + 1 == len(lane.piece.calls):
            piece = self._queue.take(lane.piece)
            if piece is None:
                return False
            lane.piece, lane.index = piece, -1
        self._open_next(lane)
        return True

    def _open_next(self, lane: _Lane) -> None:
        lane.index += 1
        call = lane.piece.calls[lane.index]
        lane.handle, lane.call_id = self._num_handles, len(self._log.calls)
        self._num_handles += 1
        self._log.calls.append(call)
        lane.output = call.output
        lane.position = lane.num_new = lane.num_draft = lane.num_accepted = 0
        prompt = call.prompt_tokens(MAX_PROMPT_TOKENS)
        self._method.open(lane.handle, call, prompt, is_recorded=lane.piece.is_recorded)


def _cut(drafts: Drafts, threshold: float) -> Drafts:
    """Cut each draft where its survival falls below the threshold."""
    if drafts.survival is None:
        return drafts
    is_kept = drafts.survival >= threshold
    rows = np.repeat(np.arange(len(drafts.lengths)), drafts.lengths)
    lengths = np.bincount(rows[is_kept], minlength=len(drafts.lengths)).astype(np.int32)
    return Drafts(lengths, drafts.token_ids[is_kept], drafts.survival[is_kept])
