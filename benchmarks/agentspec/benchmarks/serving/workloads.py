"""Recorded calls as the engines play them: cut to length, grouped into runs, with a past of their own."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from agentspec.benchmarks.corpus import TokenCall
from agentspec.benchmarks.replay import Queue, cut_runs
from agentspec.benchmarks.serving.matrix import Workload
from agentspec.benchmarks.serving.protocol import ServedCall, ServedRun

MAX_PAST_TOKENS = 500_000


@dataclass(frozen=True, slots=True)
class Cut:
    """How much of a call is played.

    Attributes:
        prompt_tokens: the last ones, > 0.
        output_tokens: the first ones, > 0.
    """

    prompt_tokens: int
    output_tokens: int


def split_by_run(calls: Sequence[TokenCall], warm_share: float) -> tuple[list[TokenCall], list[TokenCall]]:
    """Split calls into past and present: about `warm_share` of the runs are past; the same runs every time."""
    past: list[TokenCall] = []
    present: list[TokenCall] = []
    for call in calls:
        digest = hashlib.sha256(f"{call.workload}/{call.run_id}".encode()).digest()
        (past if int.from_bytes(digest[:4]) < warm_share * 2**32 else present).append(call)
    return past, present


def make_workload(
    past: Sequence[TokenCall], present: Sequence[TokenCall], batch_sizes: Sequence[int], cut: Cut, seed: int
) -> Workload:
    """What the engines play of one workload.

    Args:
        past: calls of its past, at most `MAX_PAST_TOKENS` output tokens of them count.
        present: calls to play, those of a run in their order.
        batch_sizes: each gets its own order of runs.
        cut: see `Cut`.
        seed: of the order.
    """
    runs = {}
    ids = {id(call): index for index, call in enumerate(present)}
    for batch_size in batch_sizes:
        queue = Queue(cut_runs(present, batch_size), seed)
        found = []
        while (piece := queue.take()) is not None:
            calls = tuple(_served(call, ids[id(call)], cut) for call in piece.calls)
            found.append(ServedRun(calls, piece.is_recorded))
        runs[batch_size] = tuple(found)
    kept, num_tokens = [], 0
    for index, call in enumerate(past):
        num_tokens += len(call.output)
        if num_tokens > MAX_PAST_TOKENS:
            break
        kept.append(_served(call, index, Cut(32, len(call.output))))
    return Workload(tuple(kept), runs)


def _served(call: TokenCall, call_id: int, cut: Cut) -> ServedCall:
    return ServedCall(
        call_id,
        call.workflow,
        call.node,
        call.agent_id,
        call.run_id,
        call.prompt_tokens(cut.prompt_tokens),
        call.output[: cut.output_tokens],
        call.blocks[: cut.output_tokens],
    )
