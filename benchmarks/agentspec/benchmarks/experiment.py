"""A replay experiment: workloads x batch sizes x methods x thresholds, one cell each."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from agentspec.benchmarks.corpus import TokenCall
from agentspec.benchmarks.cost_curves import CostCurve
from agentspec.benchmarks.figures import Figures, breakdown, flatten, summarise, tokens_at_rejection
from agentspec.benchmarks.methods import METHODS
from agentspec.benchmarks.methods.interface import Setting
from agentspec.benchmarks.replay import NUM_SPECULATIVE_TOKENS, Queue, Replay, StepLog, cut_runs

MIX = "mix"
OURS = ("agentspec", "untagged")

OnProgress = Callable[[str, int, int | None], None]
"""Called with the name of a cell, tokens played and the tokens that are to be played (None: all that there are)."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is played, and how.

    Attributes:
        workloads: names; `MIX` plays all the others together, each with the same share of the lanes.
        batch_sizes: lanes, each > 0.
        methods: keys of `METHODS`.
        thresholds: drafts are cut below each in turn, without a token budget; empty: each method spends its own.
        curve: cost of a step.
        draft_us: charged for each row of a step for which drafts are looked for; for the others a share of it.
        max_tokens: evaluated output tokens of a cell; None: all.
        seed: order of the runs.
    """

    workloads: tuple[str, ...]
    batch_sizes: tuple[int, ...]
    methods: tuple[str, ...]
    thresholds: tuple[float, ...]
    curve: CostCurve
    draft_us: float
    max_tokens: int | None = None
    seed: int = 0


@dataclass(slots=True)
class Result:
    """Figures of all cells.

    Attributes:
        cells: one for each workload, batch size, method and threshold.
        breakdown: the same by node and by block.
        equal_rejection: each peer's cell beside our sweep at its rejection rate; empty without thresholds.
    """

    cells: list[Figures] = field(default_factory=list)
    breakdown: list[Figures] = field(default_factory=list)
    equal_rejection: list[Figures] = field(default_factory=list)


class Experiment:
    """Plays every cell of a plan.

    Args:
        plan: see `Plan`.
        warm: calls of the past; a workload warms up on its own ones.
        evaluated: calls to play.
        block_names: labels that the calls' `blocks` index.
        vocabulary: the bytes of each token id.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        warm: Sequence[TokenCall],
        evaluated: Sequence[TokenCall],
        block_names: Sequence[str],
        vocabulary: Sequence[bytes],
    ) -> None:
        self._plan = plan
        self._warm = _by_workload(warm)
        self._evaluated = _by_workload(evaluated)
        self._block_names = block_names
        self._vocabulary = vocabulary

    def run(self, on_progress: OnProgress = lambda _cell, _done, _total: None) -> Result:
        """Play all cells, one after the other.

        Raises:
            MissingPeerError: a peer is not installed.
        """
        result = Result()
        plan = self._plan
        for workload, batch_size in itertools.product(plan.workloads, plan.batch_sizes):
            members = self._members(workload)
            past = [call for name in members for call in self._warm.get(name, ())]
            lanes = max(1, batch_size // len(members))
            pieces = [piece for name in members for piece in cut_runs(self._evaluated.get(name, ()), lanes)]
            for method, threshold in itertools.product(plan.methods, plan.thresholds or (None,)):
                key = {"workload": workload, "batch_size": batch_size, "method": method, "threshold": threshold}
                title = f"{workload} b={batch_size} {method}" + ("" if threshold is None else f" P={threshold:g}")
                show = functools.partial(on_progress, title)
                show(0, plan.max_tokens)
                queue = Queue(pieces, plan.seed)
                log = self._play(method, past, queue, batch_size, threshold=threshold, show=show)
                nodes: dict[str, int] = {}
                rows = flatten(log, nodes)
                result.cells.append(key | summarise(log, rows, plan.curve, plan.draft_us))
                result.breakdown += [key | figures for figures in breakdown(rows, list(nodes), self._block_names)]
        result.equal_rejection = equal_rejection(result.cells) if plan.thresholds else []
        return result

    def _members(self, workload: str) -> list[str]:
        if workload != MIX:
            return [workload]
        return [name for name in self._plan.workloads if name != MIX] or sorted(self._evaluated)

    def _play(
        self,
        method: str,
        past: Iterable[TokenCall],
        queue: Queue,
        batch_size: int,
        *,
        threshold: float | None,
        show: Callable[[int, int | None], None],
    ) -> StepLog:
        curve = self._plan.curve if threshold is None else None
        drafter = METHODS[method](Setting(self._vocabulary, NUM_SPECULATIVE_TOKENS, curve, self._plan.draft_us))
        for call in past:
            drafter.warm(call)
        replay = Replay(drafter, queue, batch_size, curve=curve, threshold=threshold)
        return replay.run(self._plan.max_tokens, lambda done: show(done, self._plan.max_tokens))


def _by_workload(calls: Iterable[TokenCall]) -> dict[str, list[TokenCall]]:
    found: dict[str, list[TokenCall]] = {}
    for call in calls:
        found.setdefault(call.workload, []).append(call)
    return found


def equal_rejection(cells: Iterable[Figures]) -> list[Figures]:
    """Put each peer's cell beside each of our sweeps, interpolated at the peer's own rejection rate."""
    groups: dict[tuple[str, int], dict[str, list[Figures]]] = {}
    for cell in cells:
        group = groups.setdefault((cell["workload"], cell["batch_size"]), {})
        group.setdefault(cell["method"], []).append(cell)
    found = []
    for methods in groups.values():
        ours = [name for name in methods if name.partition(":")[0] in OURS]
        peers = [cell for name, cells_of in methods.items() if name not in ours for cell in cells_of]
        for name, peer in itertools.product(ours, peers):
            if peer["rejection_rate"] is not None:
                found.append(_beside(name, methods[name], peer))
    return found


def _beside(method: str, sweep: Sequence[Figures], peer: Figures) -> Figures:
    points = [(cell["rejection_rate"], cell["tokens_per_step"]) for cell in sweep if cell["rejection_rate"] is not None]
    tokens = tokens_at_rejection(points, peer["rejection_rate"])
    return {
        "workload": peer["workload"],
        "batch_size": peer["batch_size"],
        "method": method,
        "peer": peer["method"],
        "peer_threshold": peer["threshold"],
        "rejection_rate": peer["rejection_rate"],
        "peer_tokens_per_step": peer["tokens_per_step"],
        "tokens_per_step": tokens,
        "gain": None if tokens is None else tokens / peer["tokens_per_step"] - 1,
    }
