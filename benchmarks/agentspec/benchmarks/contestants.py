"""The engine and its peers as `agentspec-bench engine` drives them: insert, start, step, stop."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from agentspec.benchmarks.methods.arctic import MissingPeerError, SuffixCache, make_suffix_cache
from agentspec.benchmarks.replay import NUM_SPECULATIVE_TOKENS
from agentspec.sidecar.engine import Engine, FinishReason, Sampling, StepRequest, TokenIds
from agentspec.sidecar.grammars import CHAT
from agentspec.sidecar.tags import Tags

INTENSITY = 206  # H200 in bf16; beyond it one draft token a row is allotted, so that the engine always drafts

_NO_TOKENS = np.empty(0, np.int32)
_TAGS = Tags(workflow_id="engine", stage="file")
_GREEDY = Sampling()


class Drafter(Protocol):
    """What steps. `prepare` is not timed, the call that it returns is."""

    def prepare(self, batch: Batch, step: int, num_new: int) -> Callable[[], object]:
        """A call that hands over `num_new` tokens (0 or 1) of every request and drafts."""


class Contestant(Drafter, Protocol):
    """What has histories and requests of its own."""

    def insert(self, document: TokenIds, key: str = "file") -> None:
        """Take a finished answer into the history of a key."""

    def forget(self) -> None:
        """Drop all histories."""

    def start(self, handle: int, prompt: TokenIds) -> None:
        """Begin a request."""

    def stop(self, handle: int) -> None:
        """End a request; its text is dropped."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The same requests for every contestant.

    Attributes:
        prompts: one for each request.
        outputs: what each goes on with; int32, shape (num_requests, num_steps).
    """

    prompts: Sequence[TokenIds]
    outputs: NDArray[np.int32]

    def texts(self, num_output: int) -> list[TokenIds]:
        """Prompt and the first output tokens of each request."""
        return [
            np.concatenate([prompt, output[:num_output]])
            for prompt, output in zip(self.prompts, self.outputs, strict=True)
        ]


class Ours:
    """The engine; a step is tracker, history, vote and allocation of the whole batch."""

    def __init__(self, vocabulary: Sequence[bytes]) -> None:
        self._engine = Engine(vocabulary, CHAT, num_speculative_tokens=NUM_SPECULATIVE_TOKENS, history_bytes=1 << 36)
        self._num_documents = 0
        self._step_id = 0

    def insert(self, document: TokenIds, key: str = _TAGS.stage) -> None:
        """A request without a prompt that ends at once; a key is a stage."""
        self._num_documents += 1
        tags = _TAGS if key == _TAGS.stage else Tags(workflow_id=_TAGS.workflow_id, stage=key)
        self._engine.open(-self._num_documents, _NO_TOKENS, tags, _GREEDY)
        self._engine.close(-self._num_documents, FinishReason.STOP, len(document), document)

    def forget(self) -> None:
        """Whatever no open request uses."""
        self._engine.forget_unused(0)

    def export(self) -> None:
        """All histories as bytes, which are dropped."""
        self._engine.export_histories("")

    def start(self, handle: int, prompt: TokenIds) -> None:
        """Its prompt is indexed at once."""
        self._engine.open(handle, prompt, _TAGS, _GREEDY)

    def stop(self, handle: int) -> None:
        """As after an error: nothing of it is kept."""
        self._engine.close(handle, FinishReason.ERROR, 0, _NO_TOKENS)

    def prepare(self, batch: Batch, step: int, num_new: int) -> Callable[[], object]:
        """One call for the batch."""
        num_rows = len(batch.prompts)
        zeros = np.zeros(num_rows, np.int32)
        self._step_id += 1
        request = StepRequest(
            step_id=self._step_id,
            handles=np.arange(num_rows, dtype=np.int64),
            positions=np.full(num_rows, step, np.int32),
            token_offsets=np.arange(num_rows + 1, dtype=np.int32) * np.int32(num_new),
            token_ids=np.ascontiguousarray(batch.outputs[:, step : step + num_new]).reshape(-1),
            num_draft_tokens=zeros,
            num_accepted_tokens=zeros,
            max_draft_tokens=np.full(num_rows, NUM_SPECULATIVE_TOKENS, np.int32),
            num_decode_rows=num_rows,
            num_prefill_tokens=0,
            token_budget=max(INTENSITY - num_rows, num_rows),
        )
        return lambda: self._engine.step(request)


class ArcticTree:
    """Arctic's cache, called as vLLM's `suffix` method calls it."""

    def __init__(self, depth: int) -> None:
        self._cache: SuffixCache = make_suffix_cache(depth)
        self._depth = depth
        self._num_documents = 0
        self._caches: dict[str, SuffixCache] = {}
        self._documents: list[tuple[SuffixCache, int]] = []

    def insert(self, document: TokenIds, key: str = _TAGS.stage) -> None:
        """A request without a prompt that ends at once; each key has a cache of its own."""
        self._num_documents += 1
        if key not in self._caches:
            self._caches[key] = self._cache if key == _TAGS.stage else make_suffix_cache(self._depth)
        cache = self._caches[key]
        cache.start_request(-self._num_documents, _NO_TOKENS)
        cache.add_active_response(-self._num_documents, document)
        cache.stop_request(-self._num_documents)
        self._documents.append((cache, -self._num_documents))

    def forget(self) -> None:
        """One answer after the other, as its own limit on cached requests does."""
        for cache, document in self._documents:
            cache.evict_cached_response(document)
        self._documents.clear()

    def start(self, handle: int, prompt: TokenIds) -> None:
        """Its prompt gets a tree of its own."""
        self._cache.start_request(handle, prompt)

    def stop(self, handle: int) -> None:
        """Its answer leaves the shared tree, too."""
        self._cache.stop_request(handle)
        self._cache.evict_cached_response(handle)

    def prepare(self, batch: Batch, step: int, num_new: int) -> Callable[[], object]:
        """Two calls a request."""
        known = [text[-self._depth :] for text in batch.texts(step + num_new)]
        new = np.ascontiguousarray(batch.outputs[:, step : step + num_new])

        def run() -> None:
            for handle, context in enumerate(known):
                if num_new:
                    self._cache.add_active_response(handle, new[handle])
                self._cache.speculate(
                    handle, context, max_spec_tokens=NUM_SPECULATIVE_TOKENS, max_spec_factor=1.0, min_token_prob=0.1
                )

        return run


class NgramScan:
    """vLLM's own `ngram` code on one thread, with 2 to 5 tokens and drafts of 5.

    Raises:
        MissingPeerError: vLLM is not installed.
    """

    def __init__(self) -> None:
        try:
            rule = importlib.import_module("vllm.v1.spec_decode.ngram_proposer")
            njit = importlib.import_module("numba").njit
        except ImportError as error:
            raise MissingPeerError(f"ngram is vLLM's own code, and vLLM is not installed ({error})") from error
        propose = rule._find_longest_matched_ngram_and_propose_tokens

        def scan(tokens: NDArray[np.int32], lengths: NDArray[np.int64]) -> int:
            num_drafted = 0
            for row in range(len(lengths)):
                num_drafted += len(propose(tokens[row, : lengths[row]], 2, 5, 1 << 20, 5))
            return num_drafted

        self._scan = njit(scan)
        self._scan(np.zeros((1, 8), np.int32), np.array([8]))  # compiles

    def prepare(self, batch: Batch, step: int, num_new: int) -> Callable[[], object]:
        """New tokens cost nothing: they stand in vLLM's own array."""
        rows = batch.texts(step + num_new)
        lengths = np.array([len(row) for row in rows])
        tokens = np.zeros((len(rows), lengths.max()), np.int32)
        for row, known in enumerate(rows):
            tokens[row, : len(known)] = known
        return lambda: self._scan(tokens, lengths)
