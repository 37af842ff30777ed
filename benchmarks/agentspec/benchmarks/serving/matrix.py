"""The matrix of workloads, batch sizes and methods: which engines run, in which order, and what is kept of it."""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from agentspec.benchmarks.figures import Figures
from agentspec.benchmarks.serving.engine_process import EngineError, EngineProcess
from agentspec.benchmarks.serving.protocol import CellDone, CellJob, EngineSettings, ServedCall, ServedRun, Signal
from agentspec.benchmarks.serving.quality import Decode, compare_outputs
from agentspec.benchmarks.serving.results import Cell, CellKey, Results
from agentspec.benchmarks.serving.tool_time import ToolTime

BASELINE = "plain"
_MAX_STARTS = 3

OnProgress = Callable[[str, int, int | None], None]
"""Called with the name of what runs, steps done and steps to do (None: not known)."""


@dataclass(frozen=True, slots=True)
class Workload:
    """What a workload plays.

    Attributes:
        past: calls of the past, for histories.
        runs: by batch size, in the order in which they begin.
    """

    past: tuple[ServedCall, ...]
    runs: Mapping[int, tuple[ServedRun, ...]]


@dataclass(frozen=True, slots=True)
class MatrixPlan:
    """What is measured, and how.

    Attributes:
        workloads, batch_sizes: the cells.
        methods: `kind` or `agentspec:policy`; `plain` is measured beside them whether it is named or not.
        num_repeats: lockstep runs of each cell, each with another order of the agents' runs.
        num_steps: of each engine that count in a cell.
        num_warm_up_steps: before those.
        max_cell_s: a cell ends after so long, with fewer steps.
        max_engines: that are alive at the same time, >= 2.
        tool_time: how long agents wait for their tools.
        start_deadline_s, step_deadline_s: longest wait for an engine.
    """

    workloads: tuple[str, ...]
    batch_sizes: tuple[int, ...]
    methods: tuple[str, ...]
    num_repeats: int
    num_steps: int
    num_warm_up_steps: int
    max_cell_s: float
    max_engines: int
    tool_time: ToolTime
    start_deadline_s: float = 600.0
    step_deadline_s: float = 120.0


def kind_of(method: str) -> str:
    """The engine that serves a method."""
    return method.partition(":")[0]


def policy_of(method: str) -> str | None:
    """The policy that a method names."""
    return method.partition(":")[2] or None


class Matrix:
    """Measures what the results do not hold yet.

    In a cell one engine of each kind plays the same runs; each does one step in turn, in rotating order, so that a
    neighbour on the machine slows all of them alike. Methods of one kind take turns on its engine.

    Args:
        plan: see `MatrixPlan`.
        settings: of every engine but for its kind.
        workloads: by name.
        block_names: labels that `ServedCall.blocks` index.
        results: what was measured before; gets what is measured now.
        decode: token ids to text, for the comparison of answers.
    """

    def __init__(
        self,
        plan: MatrixPlan,
        settings: EngineSettings,
        workloads: Mapping[str, Workload],
        *,
        block_names: Sequence[str],
        results: Results,
        decode: Decode,
    ) -> None:
        self._plan = plan
        self._settings = settings
        self._workloads = workloads
        self._block_names = block_names
        self._results = results
        self._decode = decode
        self._on_progress: OnProgress = lambda _cell, _done, _total: None

    def run(self, on_progress: OnProgress = lambda _cell, _done, _total: None) -> None:
        """Measure all cells; the results are kept after each."""
        self._on_progress = on_progress
        with tempfile.TemporaryDirectory(prefix="agentspec-serve-") as logs:
            for methods in self._groups():
                if not any(True for _ in self._rounds(methods)):
                    continue  # all of it was measured before
                with self._fleet({BASELINE, *map(kind_of, methods)}, Path(logs)) as fleet:
                    for key, round_methods in self._rounds(methods):
                        self._play_round(fleet, key, round_methods)

    def _groups(self) -> Iterator[list[str]]:
        """Methods whose engines fit on the machine at the same time, beside plain decoding."""
        by_kind: dict[str, list[str]] = {}
        for method in self._plan.methods:
            if method != BASELINE:
                by_kind.setdefault(kind_of(method), []).append(method)
        kinds = list(by_kind) or [BASELINE]
        size = self._plan.max_engines - 1
        for begin in range(0, len(kinds), size):
            yield [method for kind in kinds[begin : begin + size] for method in by_kind.get(kind, [])]

    def _rounds(self, methods: Sequence[str]) -> Iterator[tuple[CellKey, list[str]]]:
        """Cells that miss something, with at most one method of each kind."""
        plan = self._plan
        by_kind: dict[str, list[str]] = {}
        for method in methods:
            by_kind.setdefault(kind_of(method), []).append(method)
        for repeat, workload, batch_size in itertools.product(
            range(plan.num_repeats), plan.workloads, plan.batch_sizes
        ):
            key = CellKey(workload, batch_size, BASELINE, repeat)
            missing = {
                kind: [name for name in names if not self._results.has(replace(key, method=name))]
                for kind, names in by_kind.items()
            }
            num_rounds = max([*map(len, missing.values()), int(not self._results.has(key))])
            for index in range(num_rounds):
                yield key, [names[index] for names in missing.values() if index < len(names)]

    @contextmanager
    def _fleet(self, kinds: set[str], logs: Path) -> Iterator[_Fleet]:
        fleet = _Fleet(self._settings, self._plan, logs, self._results, self._on_progress)
        try:
            fleet.start(kinds)
            yield fleet
        finally:
            fleet.stop()

    def _play_round(self, fleet: _Fleet, key: CellKey, methods: Sequence[str]) -> None:
        engines: dict[str, EngineProcess] = {}
        for method in (BASELINE, *methods):
            try:
                engine = fleet.engine(kind_of(method))
                engine.ask(self._job(key, method), self._plan.start_deadline_s)
                engines[method] = engine
            except EngineError as failure:
                self._fail(fleet, replace(key, method=method), failure)
        self._step(fleet, key, engines)
        done: dict[str, CellDone] = {}
        for method, engine in engines.items():
            try:
                done[method] = engine.ask(Signal.FINISH, self._plan.step_deadline_s)
            except EngineError as failure:
                self._fail(fleet, replace(key, method=method), failure)
        plain = done.get(BASELINE)
        for method, result in done.items():
            cell_key = replace(key, method=method)
            if method != BASELINE or not self._results.has(cell_key):
                quality = None if method == BASELINE or plain is None else self._compare(key, plain, result)
                self._results.add(Cell.of(cell_key, result, plain, self._block_names, quality))
        self._results.save()

    def _step(self, fleet: _Fleet, key: CellKey, engines: dict[str, EngineProcess]) -> None:
        """One step of each engine in turn, until each has enough, one has nothing to play, or time is up."""
        plan = self._plan
        give_up_at = time.monotonic() + plan.max_cell_s
        title = f"{key.workload} b={key.batch_size} {' '.join(engines)} #{key.repeat}"
        is_dry = False
        while engines and not is_dry and time.monotonic() < give_up_at:
            counts = []
            order = list(engines)
            for method in order:
                try:
                    answer = engines[method].ask(Signal.STEP, plan.step_deadline_s)
                except EngineError as failure:
                    del engines[method]
                    self._fail(fleet, replace(key, method=method), failure)
                    continue
                counts.append(answer.num_steps)
                is_dry |= answer.is_dry
            first = next(iter(engines), None)
            if first is not None:
                engines[first] = engines.pop(first)  # the next turn begins with another engine
            self._on_progress(title, min(counts, default=0), plan.num_steps)
            if min(counts, default=0) >= plan.num_steps:
                break

    def _compare(self, key: CellKey, plain: CellDone, result: CellDone) -> Figures | None:
        """How far the answers are plain decoding's; None where outputs are forced."""
        if self._settings.is_forced:
            return None
        runs = self._workloads[key.workload].runs[key.batch_size]
        return compare_outputs(plain.outputs, result.outputs, runs, self._decode)

    def _fail(self, fleet: _Fleet, key: CellKey, failure: EngineError) -> None:
        self._results.add(Cell.failed(key, str(failure), failure.log_tail))
        if failure.is_gone:
            fleet.lose(kind_of(key.method))

    def _job(self, key: CellKey, method: str) -> CellJob:
        workload = self._workloads[key.workload]
        return CellJob(
            method=method,
            policy=policy_of(method),
            batch_size=key.batch_size,
            runs=workload.runs[key.batch_size],
            past=workload.past,
            tool_time=self._plan.tool_time,
            num_warm_up_steps=self._plan.num_warm_up_steps,
            seed=key.repeat,
        )


class _Fleet:
    """The engines that are alive; one that is lost is started again when it is next needed, at most twice."""

    def __init__(
        self, settings: EngineSettings, plan: MatrixPlan, logs: Path, results: Results, on_progress: OnProgress
    ) -> None:
        self._settings = settings
        self._plan = plan
        self._logs = logs
        self._results = results
        self._on_progress = on_progress
        self._engines: dict[str, EngineProcess] = {}
        self._num_starts: dict[str, int] = {}
        self._broken: dict[str, EngineError] = {}

    def start(self, kinds: set[str]) -> None:
        """Start several at once: most of a start waits for the disk or imports."""
        self._on_progress(f"starting {', '.join(sorted(kinds))}", 0, None)
        starting = {kind: self._spawn(kind) for kind in sorted(kinds)}
        for kind, engine in starting.items():
            self._await(kind, engine)

    def engine(self, kind: str) -> EngineProcess:
        """The running engine of a kind.

        Raises:
            EngineError: it did not start, or was lost too often.
        """
        if kind not in self._engines and kind not in self._broken:
            self._on_progress(f"starting {kind} again", 0, None)
            self._await(kind, self._spawn(kind))
        if kind in self._broken:
            raise self._broken[kind]
        return self._engines[kind]

    def lose(self, kind: str) -> None:
        """Forget an engine whose process has ended."""
        engine = self._engines.pop(kind, None)
        if engine is not None:
            engine.stop()
        if self._num_starts[kind] == _MAX_STARTS:
            self._broken[kind] = EngineError(f"the engine was lost {_MAX_STARTS} times", "", is_gone=False)

    def stop(self) -> None:
        """End all."""
        for engine in self._engines.values():
            engine.stop()
        self._engines.clear()

    def _spawn(self, kind: str) -> EngineProcess:
        self._num_starts[kind] = self._num_starts.get(kind, 0) + 1
        log = self._logs / f"{kind}-{self._num_starts[kind]}.log"
        return EngineProcess(replace(self._settings, kind=kind), log)

    def _await(self, kind: str, engine: EngineProcess) -> None:
        try:
            ready = engine.wait_until_ready(self._plan.start_deadline_s)
        except EngineError as failure:
            self._broken[kind] = EngineError(f"did not start: {failure}", failure.log_tail, is_gone=False)
            engine.stop()
            return
        self._results.note_facts(ready.facts)
        self._engines[kind] = engine
