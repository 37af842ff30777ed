"""The interface of a drafter in a replay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from agentspec.benchmarks.corpus import TokenCall
from agentspec.benchmarks.cost_curves import CostCurve
from agentspec.sidecar.engine import StepRequest, TokenIds


@dataclass(frozen=True, slots=True)
class Drafts:
    """What a method drafts for one step; rows in the order of the `StepRequest`.

    Attributes:
        lengths: draft tokens of each row; int32, shape (num_rows,).
        token_ids: of all rows, flat; int32.
        survival: probability, as the method sees it, that a token and all before it are accepted; it never rises along
            a draft; float32, same shape; None where the method has no idea of it.
        has_looked: False: the method did not even look for drafts, which costs less.
    """

    lengths: NDArray[np.int32]
    token_ids: TokenIds
    survival: NDArray[np.float32] | None
    has_looked: bool = True


class Method(Protocol):
    """A drafter as a server would run it: requests come, step together and go. No method reads a clock."""

    def warm(self, call: TokenCall) -> None:
        """Take in a call of the past: its output, and of its prompt what a history of the method keeps."""

    def open(self, handle: int, call: TokenCall, prompt: TokenIds, *, is_recorded: bool) -> None:
        """Begin a request; `is_recorded` False: no other request may draft from its output."""

    def step(self, request: StepRequest) -> Drafts:
        """Take in what the last step brought and draft for the next one."""

    def close(self, handle: int, tail: TokenIds, num_draft_tokens: int, num_accepted_tokens: int) -> None:
        """End a request; `tail` is what its last step brought, the counts are that step's verdict."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What every method of a replay is given.

    Attributes:
        vocabulary: the bytes of each token id.
        num_speculative_tokens: longest draft of a row.
        curve: cost of a step, for methods that spend a budget; None: draft all that there is (threshold sweeps).
        draft_us: what drafting is charged, µs a row and step.
    """

    vocabulary: Sequence[bytes]
    num_speculative_tokens: int
    curve: CostCurve | None
    draft_us: float = 0.0
