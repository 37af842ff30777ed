"""A KV connector of vLLM that claims prompts as computed. Imports vLLM.

What keys and values hold can't change a forced output, and how many there are still costs attention its time.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

# With one token left vLLM pads the request with placeholders for a whole draft, which would all be rejected.
NUM_TOKENS_LEFT = 2


class SkipPrefill(KVConnectorBase_V1):
    """All but the last two tokens of a prompt count as computed elsewhere; nothing is loaded."""

    def register_kv_caches(self, kv_caches: Any) -> None:
        """Nothing is loaded into them."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing to load."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for."""

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        """Nothing is kept."""

    def wait_for_save(self) -> None:
        """Nothing is kept."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """All tokens of the prompt but the last two, at once."""
        return max(0, request.num_tokens - num_computed_tokens - NUM_TOKENS_LEFT), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """No state."""

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """No state."""
        return KVConnectorMetadata()
