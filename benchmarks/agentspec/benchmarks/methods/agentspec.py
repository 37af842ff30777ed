"""AgentSpec's own engine as a method."""

from __future__ import annotations

import hashlib
import math
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from agentspec.benchmarks.corpus import TokenCall
from agentspec.benchmarks.methods.interface import Drafts, Setting
from agentspec.sidecar.budget import BudgetOptions, Policy
from agentspec.sidecar.engine import (
    ALL_PARTS,
    MIN_SURVIVAL,
    Engine,
    FinishReason,
    Parts,
    Sampling,
    StepRequest,
    TokenIds,
)
from agentspec.sidecar.grammars import CHAT
from agentspec.sidecar.tags import Tags

_GREEDY = Sampling()
_SWEEP_MIN_SURVIVAL = 0.01  # a sweep's threshold cuts the drafts, not the engine
_PROMPT_END_TOKENS = 32  # of a past prompt; a history keeps the last 15 of them as context


class AgentSpec:
    """The engine itself, driven as the hook in vLLM drives it.

    Args:
        setting: see `Setting`. The cost model begins with the curve's arithmetic intensity, as it would on a machine
            whose accelerator is known, and learns the rest from the steps.
        policy: which drafts are verified; without a curve all of them.
        is_tagged: whether calls carry what the trace knows of them: workflow, node, agent, run.
        is_strict: see `Engine`.
        has_shared: without it no request reads or writes a history.
        has_live: without it an answer enters the history when it has ended, not while it is written.
        has_wide: without it a stage's history is cut by workflow.
        parts: see `Engine`.
    """

    def __init__(
        self,
        setting: Setting,
        *,
        policy: Policy = "goodput",
        is_tagged: bool = True,
        is_strict: bool = False,
        has_shared: bool = True,
        has_live: bool = True,
        has_wide: bool = True,
        parts: Parts = ALL_PARTS,
    ) -> None:
        self._is_tagged = is_tagged
        self._has_shared = has_shared
        self._has_live = has_live
        self._has_wide = has_wide
        self._engine = Engine(
            setting.vocabulary,
            CHAT,
            num_speculative_tokens=setting.num_speculative_tokens,
            is_strict=is_strict,
            min_survival=_SWEEP_MIN_SURVIVAL if setting.curve is None else MIN_SURVIVAL,
            parts=parts,
            budget=_budget(setting, policy),
        )
        self._is_skipping = False
        self._num_ended = 0
        self._calls: dict[int, TokenCall] = {}  # of open requests
        self._to_record: set[int] = set()  # requests whose answer enters the history at its end

    def warm(self, call: TokenCall) -> None:
        """A request that ends at once, with the end of its prompt, which is all that a history keeps of it."""
        self._num_ended += 1
        prompt_end = call.prompt_tokens(_PROMPT_END_TOKENS)
        self._engine.open(-self._num_ended, prompt_end, self._tags(call, "rw"), _GREEDY)
        self._engine.close(-self._num_ended, FinishReason.STOP, len(call.output), call.output)

    def open(self, handle: int, call: TokenCall, prompt: TokenIds, *, is_recorded: bool) -> None:
        """A piece that is not recorded may read the history."""
        self._calls[handle] = call
        if is_recorded and not self._has_live:
            self._to_record.add(handle)
        self._engine.open(handle, prompt, self._tags(call, "rw" if is_recorded and self._has_live else "read"), _GREEDY)

    def step(self, request: StepRequest) -> Drafts:
        """One call of the engine."""
        drafts = self._engine.step(request)
        if drafts.resync_handles.size:
            raise RuntimeError(f"the engine lost the position of requests {drafts.resync_handles.tolist()}")
        has_looked = not self._is_skipping
        self._is_skipping = drafts.skip_steps > 0
        return Drafts(drafts.draft_lengths, drafts.draft_token_ids, drafts.survival, has_looked)

    def close(self, handle: int, tail: TokenIds, num_draft_tokens: int, num_accepted_tokens: int) -> None:
        """The engine compares the tail with its own last draft."""
        del num_draft_tokens, num_accepted_tokens
        call = self._calls.pop(handle)
        self._engine.close(handle, FinishReason.STOP, len(call.output), tail)
        if handle in self._to_record:
            self._to_record.remove(handle)
            self.warm(call)

    def calibration_counts(self) -> NDArray[np.float32]:
        """See `Engine`."""
        return self._engine.calibration_counts()

    def _tags(self, call: TokenCall, history: Literal["rw", "read"]) -> Tags:
        access: Literal["rw", "read", "off"] = history if self._has_shared else "off"
        if not self._is_tagged:
            return Tags(history=access)
        stage = call.node if self._has_wide else hashlib.sha256(f"{call.workflow}/{call.node}".encode()).hexdigest()
        return Tags(
            workflow_id=call.workflow, stage=stage, agent_id=call.agent_id, query_id=call.run_id, history=access
        )


def _budget(setting: Setting, policy: Policy) -> BudgetOptions:
    if setting.curve is None:
        return BudgetOptions("fixed", draft_us=setting.draft_us)
    knee = setting.curve.knee()
    return BudgetOptions(policy, knee if math.isfinite(knee) else None, draft_us=setting.draft_us)
