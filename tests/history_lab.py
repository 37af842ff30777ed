"""Engines that draft by themselves and share their histories through a draft server, without vLLM."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.engine_player import bold_engine
from tests.reference import Row, drafts_by_row, step_request, token_ids
from tests.sidecar_lab import VOCABULARY

from agentspec.serving_patch.history_link import HistoryLink
from agentspec.serving_patch.sidecar_messages import Vocabulary
from agentspec.sidecar.engine import Engine, FinishReason, Sampling
from agentspec.sidecar.tags import Tags

NAMESPACE = "default"
TTL_S = 3600.0
MODEL = Vocabulary.of("test", VOCABULARY)


@dataclass(slots=True)
class LinkedEngine:
    """An engine whose histories are shared."""

    engine: Engine
    link: HistoryLink
    _next_handle: int = 0

    def open(self, *, namespace: str = NAMESPACE, stage: str = "s", history: str = "rw") -> int:
        self._next_handle += 1
        tags = Tags.model_validate({"stage": stage, "history": history})
        self.engine.open(self._next_handle, token_ids(*b"prompt"), tags, Sampling(), namespace=namespace)
        return self._next_handle

    def write(self, words: str, *, namespace: str = NAMESPACE, stage: str = "s") -> None:
        """One request, opened and closed."""
        tokens = token_ids(*words.encode())
        self.engine.close(self.open(namespace=namespace, stage=stage), FinishReason.STOP, len(tokens), tokens)

    def step(self, handle: int, position: int, words: str) -> None:
        """A step of one request, which brings these tokens."""
        self.engine.step(step_request([Row(handle, position, list(words.encode()), 0)]))

    def use(self, namespace: str = NAMESPACE) -> None:
        """A request that writes nothing."""
        self.engine.close(self.open(namespace=namespace, history="read"), FinishReason.ERROR, 0, token_ids())

    def knows(self, words: str, *, namespace: str = NAMESPACE, stage: str = "s") -> bool:
        """Whether it drafts the second half of a text after the first."""
        half = len(words) // 2
        handle = self.open(namespace=namespace, stage=stage, history="read")
        drafts = self.engine.step(step_request([Row(handle, 0, list(words[:half].encode()), 16)]))
        self.engine.close(handle, FinishReason.ERROR, 0, token_ids())
        return bytes(drafts_by_row(drafts)[0]).decode().startswith(words[half : half + 4])

    def sizes(self, namespace: str = NAMESPACE) -> Sequence[int]:
        return [size.num_tokens for size in self.engine.history_sizes(namespace)]

    @property
    def is_linked(self) -> bool:
        seen = self.link.figures()
        return seen.is_sending and seen.is_receiving


@contextmanager
def linked_engine(
    socket: Path,
    *,
    namespace: str = NAMESPACE,
    ttl_s: float = TTL_S,
    model: Vocabulary = MODEL,
    max_archive_bytes: int = 1 << 28,
) -> Iterator[LinkedEngine]:
    engine = bold_engine(VOCABULARY)
    link = HistoryLink(engine, socket, model, namespace=namespace, ttl_s=ttl_s, max_archive_bytes=max_archive_bytes)
    link.start()
    try:
        yield LinkedEngine(engine, link)
    finally:
        link.shutdown()
