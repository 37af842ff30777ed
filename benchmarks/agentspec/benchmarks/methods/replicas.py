"""Two replicas of the engine behind a router, each with histories of its own."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from agentspec.benchmarks.corpus import TokenCall
from agentspec.benchmarks.methods.agentspec import AgentSpec
from agentspec.benchmarks.methods.interface import Drafts, Setting
from agentspec.sidecar.engine import StepRequest, TokenIds

NUM_REPLICAS = 2

Route = Callable[[TokenCall, int], int]
"""The replica of a call, of which so many went before."""


def by_group(call: TokenCall, _num_before: int) -> int:
    """As `x-agentspec-group` does: calls of one workflow and stage go to one replica."""
    return zlib.crc32(f"{call.workflow}\0{call.node}".encode()) % NUM_REPLICAS


def round_robin(_call: TokenCall, num_before: int) -> int:
    """Each call to the next replica."""
    return num_before % NUM_REPLICAS


class Replicas:
    """One batch whose rows are served by several engines.

    The cost of a step belongs to all of them together, so none is told: each keeps to its prior.

    Args:
        setting: of each engine.
        route: see `Route`.
    """

    def __init__(self, setting: Setting, route: Route) -> None:
        self._engines = [AgentSpec(setting) for _ in range(NUM_REPLICAS)]
        self._route = route
        self._num_calls = 0
        self._places: dict[int, int] = {}  # replica of each open request

    def _place(self, call: TokenCall) -> int:
        self._num_calls += 1
        return self._route(call, self._num_calls - 1)

    def warm(self, call: TokenCall) -> None:
        """A call of the past was routed, too."""
        self._engines[self._place(call)].warm(call)

    def open(self, handle: int, call: TokenCall, prompt: TokenIds, *, is_recorded: bool) -> None:
        """Routed once, for all its steps."""
        self._places[handle] = self._place(call)
        self._engines[self._places[handle]].open(handle, call, prompt, is_recorded=is_recorded)

    def step(self, request: StepRequest) -> Drafts:
        """A step of each replica that has rows."""
        places = np.array([self._places[handle] for handle in request.handles.tolist()])
        lengths = np.zeros(len(places), np.int32)
        tokens: list[NDArray[np.int32]] = [np.empty(0, np.int32)] * len(places)
        survival: list[NDArray[np.float32]] = [np.empty(0, np.float32)] * len(places)
        for place, engine in enumerate(self._engines):
            rows = np.flatnonzero(places == place)
            if not rows.size:
                continue
            drafts = engine.step(_part(request, rows))
            lengths[rows] = drafts.lengths
            borders = np.cumsum(drafts.lengths)[:-1]
            values = np.split(drafts.survival, borders) if drafts.survival is not None else []
            for row, ids, chances in zip(rows.tolist(), np.split(drafts.token_ids, borders), values, strict=True):
                tokens[row], survival[row] = ids, chances
        return Drafts(lengths, np.concatenate(tokens), np.concatenate(survival))

    def close(self, handle: int, tail: TokenIds, num_draft_tokens: int, num_accepted_tokens: int) -> None:
        """By the replica that served it."""
        self._engines[self._places.pop(handle)].close(handle, tail, num_draft_tokens, num_accepted_tokens)


def _part(request: StepRequest, rows: NDArray[np.intp]) -> StepRequest:
    """Some rows of a step as a step."""
    counts = np.diff(request.token_offsets)[rows]
    begins = request.token_offsets[rows]
    tokens = [request.token_ids[begin : begin + count] for begin, count in zip(begins, counts, strict=True)]
    return replace(
        request,
        handles=request.handles[rows],
        positions=request.positions[rows],
        token_offsets=np.append(0, np.cumsum(counts)).astype(np.int32),
        token_ids=np.concatenate(tokens),
        num_draft_tokens=request.num_draft_tokens[rows],
        num_accepted_tokens=request.num_accepted_tokens[rows],
        max_draft_tokens=request.max_draft_tokens[rows],
        num_decode_rows=len(rows),
        token_budget=request.token_budget * len(rows) // len(request.handles),
        timing=None,
    )
