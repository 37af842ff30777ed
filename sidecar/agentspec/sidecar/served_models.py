"""The models of a server: registered by their vocabulary, measured as one, forgotten when unused."""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import grpc
import numpy as np
import structlog

from agentspec.draft.v1 import draft_pb2
from agentspec.sidecar.block_sharing import BlockSharing
from agentspec.sidecar.budget import POLICIES, BudgetOptions, BudgetStats, Policy
from agentspec.sidecar.callers import Caller
from agentspec.sidecar.engine import BlockStats, Engine, pooled_bytes
from agentspec.sidecar.epochs import ANY_MODEL, epoch_field
from agentspec.sidecar.grammar_store import GrammarStore
from agentspec.sidecar.grammars import Grammar, choose_grammar
from agentspec.sidecar.refusal import RefusalError, exhausted, invalid
from agentspec.sidecar.served_model import Limits, ServedModel
from agentspec.sidecar.server_options import ServerOptions
from agentspec.sidecar.store.figures import StoreFigures, sum_figures
from agentspec.sidecar.store.keys import model_id, vocabulary_digest
from agentspec.sidecar.wire import HANDLE_BITS, read_array

log = structlog.get_logger()

MAX_VOCABULARY = 8_388_607
MAX_VOCABULARY_BYTES = 64 << 20
MAX_TEMPLATE_BYTES = 256 << 10
MAX_PART_BYTES = 1 << 20
FINGERPRINT_LENGTH = 64
MAX_SPECIAL_BYTES = 64
MAX_DELETIONS = 4096
MAX_CLIENT_ID = (1 << 63 - HANDLE_BITS) - 1


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What a client registers.

    Attributes:
        fingerprint: its name on the wire, 64 hex digits.
        chat_template: tells the model's family; may be empty.
        tokens: bytes of each token id, in order.
    """

    fingerprint: str
    chat_template: str
    tokens: list[bytes]

    def digest(self) -> bytes:
        """Equal for equal tokens alone."""
        lengths = np.fromiter(map(len, self.tokens), np.uint32, len(self.tokens))
        return vocabulary_digest(lengths, b"".join(self.tokens))

    def grammar(self) -> Grammar:
        """Block markers of the model's family."""
        return choose_grammar(self.chat_template or None, [*filter(None, map(_special_text, self.tokens))])


def _special_text(token: bytes) -> str:
    """The text of a token that looks like a special one; else empty."""
    if len(token) > MAX_SPECIAL_BYTES or not token.startswith((b"<", b"[", "\uff5c".encode())):
        return ""
    return token.decode(errors="replace")


def check_fingerprint(fingerprint: str, field: str = "model_fingerprint") -> None:
    """Check the name of a model.

    Raises:
        RefusalError: not 64 hex digits.
    """
    if len(fingerprint) != FINGERPRINT_LENGTH or not set(fingerprint) <= set("0123456789abcdef"):
        raise invalid(field, f"expected {FINGERPRINT_LENGTH} lower-case hex digits, got {len(fingerprint)} characters")


class VocabularyParts:
    """Puts the parts of a vocabulary together, in order."""

    def __init__(self) -> None:
        self._fingerprint = ""
        self._template = ""
        self._tokens: list[bytes] = []
        self._num_bytes = 0

    def add(self, part: draft_pb2.RegisterTokenizerRequest) -> None:
        """Take the next part.

        Raises:
            RefusalError: a field is out of its bound, or the vocabulary becomes too large.
        """
        if not self._fingerprint:
            check_fingerprint(part.model_fingerprint)
            self._fingerprint = part.model_fingerprint
            self._template = part.chat_template
            if len(self._template.encode()) > MAX_TEMPLATE_BYTES:
                raise invalid("chat_template", f"expected at most {MAX_TEMPLATE_BYTES} bytes")
        elif part.model_fingerprint not in ("", self._fingerprint):
            raise invalid("model_fingerprint", "expected that of the first part, or none")
        lengths = read_array(part.token_lengths, np.uint32, "token_lengths")
        if len(part.token_bytes) > MAX_PART_BYTES:
            raise exhausted("token_bytes", f"expected at most {MAX_PART_BYTES} bytes, got {len(part.token_bytes)}")
        ends = np.cumsum(lengths, dtype=np.int64)
        total = int(ends[-1]) if len(ends) else 0
        if total != len(part.token_bytes):
            raise invalid(
                "token_bytes", f"expected {total} bytes, the sum of token_lengths, got {len(part.token_bytes)}"
            )
        self._num_bytes += total
        if len(self._tokens) + len(lengths) > MAX_VOCABULARY or self._num_bytes > MAX_VOCABULARY_BYTES:
            raise exhausted(
                "token_lengths", f"expected at most {MAX_VOCABULARY} tokens of {MAX_VOCABULARY_BYTES} bytes"
            )
        starts = (ends - lengths).tolist()
        self._tokens += [part.token_bytes[start:end] for start, end in zip(starts, ends.tolist(), strict=True)]

    def finish(self) -> Vocabulary:
        """The vocabulary.

        Raises:
            RefusalError: it has no token.
        """
        if not self._tokens:
            raise invalid("token_lengths", "expected at least one token")
        return Vocabulary(self._fingerprint, self._template, self._tokens)


class ServedModels:
    """Every model that clients have registered. Used by the server's loop alone, but for `build` and the figures.

    Args:
        options: of the server.
        grammars: of the server, by id.
        roots: namespaces that its callers may use, each with those within it.
    """

    def __init__(
        self, options: ServerOptions, grammars: Mapping[str, Grammar], *, roots: Callable[[], Sequence[str]]
    ) -> None:
        self.boot_id = secrets.randbits(64) | 1
        self._options = options
        self._policy: Policy = options.policy
        self._grammars = grammars
        self._roots = roots
        self._by_fingerprint: dict[str, ServedModel] = {}
        self._deletions: dict[str, int] = {}
        self._building = asyncio.Lock()
        self._last_client_id = 0
        self._fallbacks: Counter[str] = Counter()
        self._limits = Limits(
            max_open_requests=options.max_open_requests,
            request_bytes=options.request_bytes,
            step_deadline_us=int(options.step_deadline_ms * 1000),
            measure_bytes=self.request_bytes,
        )

    def all(self) -> list[ServedModel]:
        """The models, in the order in which they were registered."""
        return [*self._by_fingerprint.values()]

    def get(self, fingerprint: str, *, code: grpc.StatusCode = grpc.StatusCode.NOT_FOUND) -> ServedModel:
        """A model by its name on the wire.

        Raises:
            RefusalError: malformed, or no such model (with `code`).
        """
        check_fingerprint(fingerprint)
        model = self._by_fingerprint.get(fingerprint)
        if model is None:
            raise RefusalError(code, "model_fingerprint", f"{fingerprint} is not registered: call RegisterTokenizer")
        return model

    def note_deletion(self, namespace: str, epoch: int) -> None:
        """Have models that are registered later refuse what was written before, as those that are known do."""
        self._deletions[namespace] = epoch
        if len(self._deletions) > MAX_DELETIONS:
            del self._deletions[min(self._deletions, key=lambda name: self._deletions[name])]

    async def register(self, vocabulary: Vocabulary, caller: Caller) -> ServedModel:
        """Make a model known, with an engine of its own; idempotent.

        Raises:
            RefusalError: the name is that of another vocabulary, or there is no room for another model.
        """
        async with self._building:
            digest = await asyncio.to_thread(vocabulary.digest)
            known = self._by_fingerprint.get(vocabulary.fingerprint)
            if known is not None:
                if known.digest != digest:
                    raise invalid("model_fingerprint", f"{vocabulary.fingerprint} names another vocabulary here")
                return known
            await self._make_room(caller)
            engine = await asyncio.to_thread(self._build, vocabulary)
            sharing = await asyncio.to_thread(self._share, engine, model_id(vocabulary.fingerprint, digest))
            sharing.epochs.raise_to({epoch_field(ANY_MODEL, name): epoch for name, epoch in self._deletions.items()})
            model = ServedModel(
                fingerprint=vocabulary.fingerprint,
                digest=digest,
                vocabulary_size=len(vocabulary.tokens),
                num_speculative_tokens=self._options.num_speculative_tokens,
                engine=engine,
                sharing=sharing,
                grammars=GrammarStore(engine, self._grammars),
                limits=self._limits,
                new_client_id=self._new_client_id,
                note_fallback=self.note_fallback,
            )
            self._by_fingerprint[model.fingerprint] = model
            engine.set_policy(self._policy)
            return model

    async def _make_room(self, caller: Caller) -> None:
        if len(self._by_fingerprint) < self._options.max_models:
            return
        idle = [model for model in self._by_fingerprint.values() if model.is_idle]
        # Who comes over TCP may not make the server forget what others wrote.
        if not idle or not caller.is_local:
            raise exhausted(
                "model_fingerprint",
                f"the server holds {len(self._by_fingerprint)} models, its option max_models is "
                f"{self._options.max_models}",
            )
        oldest = min(idle, key=lambda model: model.last_used)
        del self._by_fingerprint[oldest.fingerprint]
        await asyncio.to_thread(oldest.shutdown)
        log.warning("model_forgotten", model_fingerprint=oldest.fingerprint, reason="max_models")

    def _build(self, vocabulary: Vocabulary) -> Engine:
        options = self._options
        return Engine(
            vocabulary.tokens,
            vocabulary.grammar(),
            num_speculative_tokens=options.num_speculative_tokens,
            history_bytes=options.history_bytes // options.max_models,
            namespace_bytes=options.namespace_bytes and options.namespace_bytes // options.max_models,
            ttl_s=options.ttl_s,
            stored_tokens_per_s=options.stored_tokens_per_s,
            is_strict=options.isolation == "strict",
            budget=BudgetOptions(self._policy, options.arithmetic_intensity),
        )

    def _share(self, engine: Engine, model: str) -> BlockSharing:
        sharing = BlockSharing(engine, model, self._options, roots=self._roots(), ttl_s=self._options.ttl_s)
        sharing.start()
        return sharing

    def shutdown(self) -> None:
        """Let all models publish what waits."""
        with ThreadPoolExecutor(max(1, len(self._by_fingerprint))) as pool:
            for model in self.all():
                pool.submit(model.shutdown)

    def _new_client_id(self) -> int:
        self._last_client_id = self._last_client_id % MAX_CLIENT_ID + 1
        return self._last_client_id

    def keep_house(self) -> None:
        """Close requests of calls outside of streams that nobody has asked for."""
        for model in self.all():
            model.close_unheard(self._options.idle_request_s)

    # --- figures of all models together, see `MeasuredEngine` ---

    def note_fallback(self, reason: str) -> None:
        """Count something that could not be done as asked."""
        self._fallbacks[reason] += 1

    def fallbacks(self) -> dict[str, int]:
        """Counts by reason since the server started."""
        return dict(self._fallbacks)

    def stats(self) -> list[BlockStats]:
        """Counts by namespace, workflow, stage and block."""
        merged: dict[tuple[str, str, str, str], BlockStats] = {}
        for model in self.all():
            for row in model.engine.stats():
                key = (row.namespace, row.workflow_id, row.stage, row.block)
                merged[key] = _sum(merged[key], row) if key in merged else row
        return [*merged.values()]

    def num_open_requests(self) -> int:
        """Requests that were opened and not closed."""
        return sum(model.engine.num_open_requests() for model in self.all())

    def num_history_tokens(self) -> int:
        """Output tokens that can be drafted from."""
        return sum(model.engine.num_history_tokens() for model in self.all())

    def memory_bytes(self) -> int:
        """Bytes of all histories."""
        return sum(model.engine.memory_bytes() for model in self.all())

    def num_dropped_tokens(self) -> int:
        """Output tokens that were not stored."""
        return sum(model.engine.num_dropped_tokens() for model in self.all())

    def num_recoveries(self) -> int:
        """Block markers that did not fit the open blocks."""
        return sum(model.engine.num_recoveries() for model in self.all())

    def budget_stats(self) -> list[BudgetStats]:
        """What the budget of each client did, whatever its model."""
        return [stats for model in self.all() for stats in model.engine.budget_stats()]

    @property
    def policy(self) -> Policy:
        """Which draft tokens are verified."""
        return self._policy

    def set_policy(self, policy: Policy) -> None:
        """Verify other draft tokens from the next step on, whatever the model.

        Raises:
            ValueError: no such policy.
        """
        if policy not in POLICIES:
            raise ValueError(f"policy: expected one of {', '.join(POLICIES)}, got {policy!r}")
        self._policy = policy  # before the loop: a model that is being built takes it when it is registered
        for model in self.all():
            model.engine.set_policy(policy)

    def num_streams(self) -> int:
        """Clients that are connected by a stream."""
        return sum(model.num_streams for model in self.all())

    def store_figures(self) -> StoreFigures | None:
        """What the shared histories have seen; None: there are none."""
        return sum_figures(model.sharing.store.figures() for model in self.all() if model.sharing.store is not None)

    def request_bytes(self) -> int:
        """Memory of the open requests, bytes."""
        return pooled_bytes() - self.memory_bytes()


def _sum(a: BlockStats, b: BlockStats) -> BlockStats:
    counts = ("num_steps", "num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_tokens")
    return replace(a, **{name: getattr(a, name) + getattr(b, name) for name in counts})
