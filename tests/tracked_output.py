"""One output that is fed to an engine for its block path alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from agentspec.sidecar.engine import Engine, Sampling, StepRequest
from agentspec.sidecar.grammars import Grammar
from agentspec.sidecar.tags import Tags

BYTES = [bytes([byte]) for byte in range(256)]


class Output:
    """One open request of an engine that is fed with pieces of text as tokens."""

    def __init__(
        self,
        grammar: Grammar,
        *,
        prompt: bytes = b"",
        block: str = "",
        is_structured: bool = False,
        tool: str = "",
        vocabulary: Sequence[bytes] = BYTES,
    ) -> None:
        self.ids = {piece: token for token, piece in enumerate(vocabulary)}
        self.engine = Engine(vocabulary, grammar)
        self.num_output = 0
        tokens = np.frombuffer(prompt, np.uint8).astype(np.int32)
        self.engine.open(1, tokens, Tags(block=block), Sampling(is_structured=is_structured, forced_tool=tool))

    @property
    def path(self) -> str:
        return self.engine.block_path(1)

    def write(self, *pieces: bytes) -> str:
        """Hand over the pieces, each one token; returns the block path after them."""
        tokens = np.array([self.ids[piece] for piece in pieces], np.int32)
        step = StepRequest(
            step_id=1,
            handles=np.array([1], np.int64),
            positions=np.array([self.num_output], np.int32),
            token_offsets=np.array([0, tokens.size], np.int32),
            token_ids=tokens,
            num_draft_tokens=np.zeros(1, np.int32),
            num_accepted_tokens=np.zeros(1, np.int32),
            max_draft_tokens=np.zeros(1, np.int32),
            num_decode_rows=1,
            num_prefill_tokens=0,
            token_budget=0,
        )
        assert not self.engine.step(step).resync_handles.size
        self.num_output += tokens.size
        return self.path

    def write_bytes(self, text: bytes) -> str:
        return self.write(*(text[i : i + 1] for i in range(len(text))))
