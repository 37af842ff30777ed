"""AgentSpec's own engine as a method."""

from __future__ import annotations

from typing import Literal

import numpy as np

from agentspec.benchmarks.corpus import TokenCall
from agentspec.benchmarks.methods.interface import Drafts, Setting
from agentspec.sidecar.engine import Engine, FinishReason, Sampling, StepRequest, TokenIds
from agentspec.sidecar.grammars import CHAT
from agentspec.sidecar.tags import UNTAGGED, Tags

_GREEDY = Sampling()
_NO_TOKENS = np.empty(0, np.int32)


class AgentSpec:
    """The engine itself, driven as the hook in vLLM drives it.

    Args:
        setting: see `Setting`.
        is_tagged: whether calls carry what the trace knows of them: workflow, node, agent, run.
        is_strict: see `Engine`.
    """

    def __init__(self, setting: Setting, *, is_tagged: bool = True, is_strict: bool = False) -> None:
        self._setting = setting
        self._is_tagged = is_tagged
        self._engine = Engine(
            setting.vocabulary, CHAT, num_speculative_tokens=setting.num_speculative_tokens, is_strict=is_strict
        )
        self._num_warm = 0

    def warm(self, call: TokenCall) -> None:
        """A request without a prompt that ends at once."""
        self._num_warm += 1
        self._engine.open(-self._num_warm, _NO_TOKENS, self._tags(call, is_recorded=True), _GREEDY)
        self._engine.close(-self._num_warm, FinishReason.STOP, len(call.output), call.output)

    def open(self, handle: int, call: TokenCall, prompt: TokenIds, *, is_recorded: bool) -> None:
        """A piece that is not recorded may read the history."""
        self._engine.open(handle, prompt, self._tags(call, is_recorded=is_recorded), _GREEDY)

    def step(self, request: StepRequest) -> Drafts:
        """One call of the engine."""
        drafts = self._engine.step(request)
        if drafts.resync_handles.size:
            raise RuntimeError(f"the engine lost the position of requests {drafts.resync_handles.tolist()}")
        return Drafts(drafts.draft_lengths, drafts.draft_token_ids, drafts.survival)

    def close(self, handle: int, tail: TokenIds, num_draft_tokens: int, num_accepted_tokens: int) -> None:
        """The engine compares the tail with its own last draft."""
        del num_draft_tokens, num_accepted_tokens
        self._engine.close(handle, FinishReason.STOP, np.iinfo(np.int64).max, tail)

    def _tags(self, call: TokenCall, *, is_recorded: bool) -> Tags:
        history: Literal["rw", "read"] = "rw" if is_recorded else "read"
        if not self._is_tagged:
            return UNTAGGED if is_recorded else Tags(history=history)
        return Tags(
            workflow_id=call.workflow, stage=call.node, agent_id=call.agent_id, query_id=call.run_id, history=history
        )
