"""The scheduler hook with a draft client that tests can change while the engine runs. Imports vLLM."""

from __future__ import annotations

from typing import Any

from tests.vllm_lab import SwitchClient

from agentspec.serving_patch.client import GuardedClient
from agentspec.serving_patch.hook_v1 import AgentSpecScheduler


class SwitchScheduler(AgentSpecScheduler):
    """Puts a `SwitchClient` before the client of the hook."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        assert isinstance(self._client, GuardedClient)
        self.switch = SwitchClient(self._client._client)
        self._client._client = self.switch
