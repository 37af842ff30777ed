"""Plays recorded agent runs on one engine, step by step, on the engine's own clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from agentspec.benchmarks.serving.protocol import CellJob, ServedCall, ServedRun
from agentspec.sidecar.engine import TokenIds


class MismatchError(RuntimeError):
    """A forced output differs from its trace; the message says where."""


@dataclass(frozen=True, slots=True)
class Step:
    """What one step of the engine did.

    Attributes:
        request_ids: of the requests in it.
        num_draft_tokens, num_accepted_tokens: by request, where it verified a draft.
        num_prefill_tokens: of prompts; 0 in a run that skips them.
        token_ids: new output tokens by request.
        finished: requests that ended with it.
        cpu_s: time of the process, all threads.
        wall_s: time on the clock on the wall.
    """

    request_ids: tuple[str, ...]
    num_draft_tokens: dict[str, int]
    num_accepted_tokens: dict[str, int]
    num_prefill_tokens: int
    token_ids: dict[str, list[int]]
    finished: frozenset[str]
    cpu_s: float
    wall_s: float


class Engine(Protocol):
    """An engine that is stepped by hand."""

    def submit(
        self, request_id: str, call: ServedCall, prompt: TokenIds, output: TokenIds, *, is_recorded: bool
    ) -> None:
        """Begin a request; `output` is what it is forced to write, or as long as it may become."""

    def step(self) -> Step:
        """Run one step."""

    def abort(self, request_ids: list[str]) -> None:
        """End requests and let the engine come to rest."""


@dataclass(slots=True)
class CallTimes:
    """When things happened to one request, in seconds on the engine's clock.

    Attributes:
        is_whole: it began in the cell at its first token, and ended in it.
        token_at: when tokens came out, one entry a step.
        num_tokens: that came out.
    """

    submitted_at: float
    is_whole: bool
    is_warm_up: bool
    token_at: list[float] = field(default_factory=list)
    num_tokens: int = 0


@dataclass(slots=True)
class CellLog:
    """All that a cell's figures are made from; steps and calls of the warm-up are left out.

    Attributes:
        steps: that count.
        calls: that have ended.
        run_s: time of each run that was played from its first call to its last, tools included.
        blocks: draft and accepted tokens by the block in which the step of the request began.
        outputs: of ended calls, by `call_id`.
    """

    steps: list[Step] = field(default_factory=list)
    calls: list[CallTimes] = field(default_factory=list)
    run_s: list[float] = field(default_factory=list)
    blocks: dict[int, list[int]] = field(default_factory=dict)
    outputs: dict[int, tuple[int, ...]] = field(default_factory=dict)


@dataclass(slots=True)
class _Lane:
    """One agent."""

    rng: np.random.Generator
    run: ServedRun
    started_at: float
    index: int = 0
    request_id: str = ""
    offset: int = 0  # output tokens of the call that were moved to its prompt
    output: list[int] = field(default_factory=list)
    times: CallTimes = field(default_factory=lambda: CallTimes(0.0, is_whole=False, is_warm_up=True))
    wake_at: float = 0.0  # when its tool is done

    @property
    def call(self) -> ServedCall:
        return self.run.calls[self.index]


class CellPlayer:
    """One cell: as many agents as the batch size, each with its runs one after the other.

    The clock is the engine's: it advances by the time of each step, and jumps when all agents wait for their tools.

    Args:
        engine: idle.
        job: what is played.
        is_forced: outputs are compared with the traces; the first outputs begin somewhere in their middle, so that not
            all agents start a text at once.
        step_s: seconds that a step counts.
    """

    def __init__(self, engine: Engine, job: CellJob, *, is_forced: bool, step_s: Callable[[Step], float]) -> None:
        self._engine = engine
        self._job = job
        self._is_forced = is_forced
        self._step_s = step_s
        self._clock_s = 0.0
        self._num_requests = 0
        self._num_played = 0
        self._waiting = list(reversed(job.runs))
        self._by_request: dict[str, _Lane] = {}
        self._sleeping: list[_Lane] = []
        self.is_dry = False
        self.log = CellLog()
        for index in range(job.batch_size):
            self._start_lane(np.random.default_rng([job.seed, index]))

    @property
    def is_warm(self) -> bool:
        """Whether steps count by now."""
        return self._num_played >= self._job.num_warm_up_steps

    def step(self) -> None:
        """Run one step of the engine and let agents that have their answer go on.

        Raises:
            MismatchError: a forced output is not the trace's.
        """
        self._wake_lanes()
        if not self._by_request:
            return
        positions = {request_id: lane.offset + len(lane.output) for request_id, lane in self._by_request.items()}
        step = self._engine.step()
        self._clock_s += self._step_s(step)
        if self.is_warm and step.request_ids:
            self.log.steps.append(step)
            self._count_blocks(step, positions)
        self._num_played += bool(step.request_ids)
        for request_id, token_ids in step.token_ids.items():
            self._take_tokens(self._by_request[request_id], token_ids)
        for request_id in step.finished:
            self._end_call(self._by_request.pop(request_id))

    def finish(self) -> CellLog:
        """End what runs and return what happened.

        Raises:
            MismatchError: the output of a request that still runs is not the beginning of the trace's.
        """
        self._engine.abort(list(self._by_request))
        for lane in self._by_request.values():
            self._check(lane, is_whole=False)
        return self.log

    def _start_lane(self, rng: np.random.Generator) -> None:
        if not self._waiting:
            self.is_dry = True
            return
        lane = _Lane(rng, self._waiting.pop(), self._clock_s)
        call = lane.call
        offset = int(rng.random() * (len(call.output) - 1)) if self._is_forced else 0
        self._submit(lane, offset)

    def _submit(self, lane: _Lane, offset: int = 0) -> None:
        call = lane.call
        lane.request_id = f"call-{self._num_requests}"
        self._num_requests += 1
        lane.offset, lane.output = offset, []
        lane.times = CallTimes(self._clock_s, is_whole=offset == 0, is_warm_up=not self.is_warm)
        prompt = np.concatenate([call.prompt, call.output[:offset]]).astype(np.int32)
        self._by_request[lane.request_id] = lane
        output = call.output[offset:]
        self._engine.submit(lane.request_id, call, prompt, output, is_recorded=lane.run.is_recorded)

    def _wake_lanes(self) -> None:
        """Agents whose tools are done go on; when all wait, the clock jumps to the first of them."""
        if not self._by_request and self._sleeping:
            self._clock_s = max(self._clock_s, min(lane.wake_at for lane in self._sleeping))
        due = [lane for lane in self._sleeping if lane.wake_at <= self._clock_s]
        self._sleeping = [lane for lane in self._sleeping if lane.wake_at > self._clock_s]
        for lane in due:
            self._submit(lane)

    def _take_tokens(self, lane: _Lane, token_ids: list[int]) -> None:
        lane.output += token_ids
        lane.times.num_tokens += len(token_ids)
        lane.times.token_at.append(self._clock_s)

    def _end_call(self, lane: _Lane) -> None:
        self._check(lane, is_whole=True)
        if not lane.times.is_warm_up:
            self.log.calls.append(lane.times)
        if not self._is_forced:
            self.log.outputs[lane.call.call_id] = tuple(lane.output)
        lane.index += 1
        if lane.index < len(lane.run.calls):
            lane.wake_at = self._clock_s + self._job.tool_time.draw(lane.rng)
            self._sleeping.append(lane)
            return
        if lane.started_at > 0:
            self.log.run_s.append(self._clock_s - lane.started_at)
        if not self._waiting:
            self.is_dry = True
            return
        lane.run, lane.index, lane.started_at = self._waiting.pop(), 0, self._clock_s
        self._submit(lane)

    def _count_blocks(self, step: Step, positions: dict[str, int]) -> None:
        for request_id, num_draft in step.num_draft_tokens.items():
            call = self._by_request[request_id].call
            place = min(positions[request_id], len(call.blocks) - 1)
            counts = self.log.blocks.setdefault(int(call.blocks[place]), [0, 0, 0])
            counts[0] += 1
            counts[1] += num_draft
            counts[2] += step.num_accepted_tokens[request_id]

    def _check(self, lane: _Lane, *, is_whole: bool) -> None:
        if not self._is_forced:
            return
        expected = lane.call.output[lane.offset :].tolist()
        if not is_whole:
            expected = expected[: len(lane.output)]
        if lane.output != expected:
            pairs = zip(lane.output, expected, strict=False)
            place = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(lane.output), len(expected)))
            raise MismatchError(
                f"the output of call {lane.call.call_id} (run {lane.call.run_id}) differs from its trace at token "
                f"{lane.offset + place}: {len(lane.output)} tokens came, {len(expected)} were expected"
            )
