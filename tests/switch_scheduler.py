"""The scheduler hook with a draft client that tests can change while the engine runs. Imports vLLM."""

from __future__ import annotations

from tests.vllm_lab import SwitchClient

from agentspec.serving_patch.client import DraftClient
from agentspec.serving_patch.hook_v1 import AgentSpecScheduler


class SwitchScheduler(AgentSpecScheduler):
    """Puts a `SwitchClient` before the client of the hook."""

    def _make_client(self) -> DraftClient:
        self.switch = SwitchClient(super()._make_client())
        return self.switch
