"""One model on the server: its engine, its grammars, and the requests that each client has open."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from agentspec.draft.v1 import draft_pb2, history_pb2
from agentspec.sidecar.block_sharing import BlockSharing
from agentspec.sidecar.callers import Caller
from agentspec.sidecar.engine import ArchiveError, Engine, FinishReason, StepDrafts
from agentspec.sidecar.grammar_store import OWN_GRAMMAR, GrammarStore
from agentspec.sidecar.grammars import GrammarError
from agentspec.sidecar.refusal import RefusalError, exhausted, invalid, not_found
from agentspec.sidecar.shared_messages import read_shared_blocks
from agentspec.sidecar.tags import Tags
from agentspec.sidecar.wire import (
    HANDLE_BITS,
    MAX_COUNT,
    check_name,
    read_handle,
    read_reason,
    read_sampling,
    read_step,
    read_tags,
    read_tokens,
    refusal_of,
)

MAX_BLOCK_TOKENS = 65536
MAX_GRAMMAR_BYTES = 4096
NO_TOKENS = np.empty(0, np.int32)


@dataclass(slots=True)
class Limits:
    """What all clients of a server may hold together; shared by its models.

    Attributes:
        max_open_requests: requests.
        request_bytes: memory of them.
        step_deadline_us: rows of a step that are not drafted by then get no draft.
        measure_bytes: tells the memory that they hold now.
        num_open: requests that are open now.
    """

    max_open_requests: int
    request_bytes: int
    step_deadline_us: int
    measure_bytes: Callable[[], int]
    num_open: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, change: int) -> None:
        """Note requests that were opened or closed, on whatever thread."""
        with self._lock:
            self.num_open += change

    def check(self, num_new: int) -> None:
        """Refuse what there is no room for.

        Raises:
            RefusalError: a limit is reached.
        """
        if self.num_open + num_new > self.max_open_requests:
            raise exhausted("handle", f"{self.num_open} requests are open, the limit is {self.max_open_requests}")
        if (size := self.measure_bytes()) >= self.request_bytes:
            raise exhausted("prompt_token_ids", f"open requests hold {size} bytes, the limit is {self.request_bytes}")


@dataclass(slots=True)
class Client:
    """One engine that asks for drafts; its handles are its own.

    Attributes:
        client_id: 1 or more.
        caller: whose it is.
        handles: its open requests, and when each was last heard of, in seconds; only kept true outside of streams.
    """

    client_id: int
    caller: Caller
    handles: dict[int, float] = field(default_factory=dict)

    @property
    def first_handle(self) -> int:
        """What handle 0 of the client is called in the engine."""
        return self.client_id << HANDLE_BITS


class ServedModel:
    """Drafts for the clients of one model.

    Args:
        fingerprint: its name on the wire.
        digest: of its vocabulary.
        vocabulary_size: tokens.
        num_speculative_tokens: longest draft.
        engine: of this model alone.
        sharing: of its histories, begun.
        grammars: built in that engine.
        limits: shared with the other models of the server.
        new_client_id: gives the next number.
        note_fallback: counts, by reason, what could not be done as asked.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        *,
        fingerprint: str,
        digest: bytes,
        vocabulary_size: int,
        num_speculative_tokens: int,
        engine: Engine,
        sharing: BlockSharing,
        grammars: GrammarStore,
        limits: Limits,
        new_client_id: Callable[[], int],
        note_fallback: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.fingerprint = fingerprint
        self.digest = digest
        self.vocabulary_size = vocabulary_size
        self.num_speculative_tokens = num_speculative_tokens
        self.engine = engine
        self.sharing = sharing
        self._grammars = grammars
        self._limits = limits
        self._new_client_id = new_client_id
        self._note_fallback = note_fallback
        self._clock = clock
        self._streams: dict[int, Client] = {}
        self._outside: dict[str, Client] = {}  # by the caller's name
        self.last_used = clock()

    @property
    def num_streams(self) -> int:
        """Clients that are connected by a stream."""
        return len(self._streams)

    @property
    def is_idle(self) -> bool:
        """Whether nobody is connected and nothing is open."""
        return not (self._streams or self.sharing.relay.num_readers) and not any(
            client.handles for client in self._outside.values()
        )

    def describe(self) -> draft_pb2.Model:
        """The model as the contract names it."""
        return draft_pb2.Model(
            model_fingerprint=self.fingerprint,
            vocabulary_size=self.vocabulary_size,
            num_speculative_tokens=self.num_speculative_tokens,
        )

    def shutdown(self) -> None:
        """Publish what waits; no call follows."""
        self.sharing.shutdown()

    # --- clients ---

    def connect(self, caller: Caller) -> Client:
        """A new client with a stream of its own; its owner calls `disconnect`."""
        client = Client(self._new_client_id(), caller)
        self._streams[client.client_id] = client
        return client

    def disconnect(self, client: Client) -> None:
        """Close what a client has left open, as aborted."""
        self._streams.pop(client.client_id, None)
        self._abort(client, [*client.handles])

    def client(self, client_id: int, caller: Caller) -> Client:
        """The client that a call means; 0: the one of the caller's calls outside of streams.

        Raises:
            RefusalError: no such client, or another caller's.
        """
        self.last_used = self._clock()
        if client_id == 0:
            if caller.name not in self._outside:
                self._outside[caller.name] = Client(self._new_client_id(), caller)
            return self._outside[caller.name]
        client = self._streams.get(client_id)
        if client is None or client.caller.name != caller.name:
            raise not_found("client_id", f"no stream of {caller.name} has the number {client_id}")
        return client

    def close_unheard(self, max_age_s: float) -> int:
        """Close requests of calls outside of streams that nobody has asked for; return their number."""
        oldest = self._clock() - max_age_s
        num_closed = 0
        for name, client in [*self._outside.items()]:
            unheard = [handle for handle, heard_at in [*client.handles.items()] if heard_at < oldest]
            self._abort(client, unheard)
            num_closed += len(unheard)
            if not client.handles:
                del self._outside[name]
        return num_closed

    def _abort(self, client: Client, handles: list[int]) -> None:
        for handle in handles:
            self.engine.close(client.first_handle + handle, FinishReason.ABORT, MAX_COUNT, NO_TOKENS)
            self._forget(client, handle)

    def _forget(self, client: Client, handle: int) -> None:
        if client.handles.pop(handle, None) is not None:
            self._limits.count(-1)

    # --- requests ---

    def open(self, client: Client, request: draft_pb2.OpenRequest) -> None:
        """Make a request known, or bring a known one back to its prompt.

        Raises:
            RefusalError: a field is out of its bound, a foreign namespace, or no room for another request.
        """
        handle = read_handle(request.handle)
        namespace = client.caller.namespace(request.namespace)
        tags = read_tags(request.tags_json)
        sampling = read_sampling(request.sampling)
        tokens = read_tokens(request.prompt_token_ids, "prompt_token_ids")
        self._limits.check(0 if handle in client.handles else 1)
        try:
            grammar_id = self._grammars.find(namespace, tags.grammar)
        except GrammarError:
            self._note_fallback("bad_grammar")
            grammar_id = OWN_GRAMMAR
        inside = client.first_handle + handle
        try:
            self.engine.open(inside, tokens, tags, sampling, namespace=namespace, grammar_id=grammar_id)
        except ValueError as error:
            raise refusal_of(error, client.first_handle) from None
        if handle not in client.handles:
            self._limits.count(1)
        client.handles[handle] = self._clock()

    def close(self, client: Client, request: draft_pb2.CloseRequest) -> bool:
        """End a request; returns whether it was open.

        Raises:
            RefusalError: a field is out of its bound; the request stays open.
        """
        handle = read_handle(request.handle)
        reason = read_reason(request.reason)
        tail = read_tokens(request.tail_token_ids, "tail_token_ids")
        if handle not in client.handles:
            return False
        inside = client.first_handle + handle
        try:
            self.engine.close(inside, reason, min(request.num_output_tokens, MAX_COUNT), tail)
        except ValueError as error:
            raise refusal_of(error, client.first_handle) from None
        self._forget(client, handle)
        return True

    def step(self, client: Client, step: draft_pb2.Step) -> StepDrafts:
        """Draft for one verification step.

        Raises:
            RefusalError: a field has a wrong length or value; nothing has changed.
        """
        request = read_step(step, client.first_handle, client.client_id)
        try:
            return self.engine.step(request, deadline_us=self._limits.step_deadline_us)
        except ValueError as error:
            raise refusal_of(error, client.first_handle) from None

    def hear_of(self, client: Client, handles: Iterable[int]) -> None:
        """Note that requests outside of a stream are in use."""
        now = self._clock()
        client.handles.update((handle, now) for handle in handles if handle in client.handles)

    def num_open_requests(self, caller: Caller) -> int:
        """Open requests of a caller; for one on the socket, of all."""
        if caller.is_local:
            return self.engine.num_open_requests()
        clients = [*self._streams.values(), *self._outside.values()]
        return sum(len(client.handles) for client in clients if client.caller.name == caller.name)

    def append(self, caller: Caller, blocks: Iterable[history_pb2.Block]) -> int:
        """Add finished texts; return the number of their tokens.

        Raises:
            RefusalError: a field of a block is out of its bound; those before it are stored.
        """
        num_tokens = 0
        for index, block in enumerate(blocks):
            try:
                num_tokens += self._append(caller, block)
            except RefusalError as error:
                raise error.within(f"blocks[{index}]") from None
        return num_tokens

    def _append(self, caller: Caller, block: history_pb2.Block) -> int:
        namespace = caller.namespace(block.namespace)
        for name in ("workflow_id", "stage", "block_path"):
            check_name(getattr(block, name), name)
        tokens = read_tokens(block.token_ids, "token_ids")
        if not 1 <= len(tokens) <= MAX_BLOCK_TOKENS:
            raise invalid("token_ids", f"expected 1 to {MAX_BLOCK_TOKENS} tokens, got {len(tokens)}")
        tags = Tags(workflow_id=block.workflow_id, stage=block.stage, block=block.block_path)
        try:
            self.engine.append(tokens, tags, namespace=namespace)
        except ValueError as error:
            raise refusal_of(error, 0, {"tail": "token_ids"}) from None
        return len(tokens)

    def append_shared(self, caller: Caller, messages: Iterable[history_pb2.SharedBlocks]) -> tuple[int, int]:
        """Add what another engine wrote; return the numbers of tokens that were stored and of messages that were not.

        Raises:
            RefusalError: a field of a message is out of its bound; those before it are stored.
        """
        num_tokens = num_skipped = 0
        for index, message in enumerate(messages):
            try:
                blocks = read_shared_blocks(message, caller)
                stored = self.sharing.append(blocks)
            except RefusalError as error:
                raise error.within(f"shared_blocks[{index}]") from None
            except ArchiveError as error:
                raise invalid(f"shared_blocks[{index}].blocks", str(error)) from None
            num_tokens += stored or 0
            num_skipped += stored is None
        return num_tokens, num_skipped

    def register_grammar(self, namespace: str, grammar_id: str, grammar_json: str) -> None:
        """Make a grammar known to the requests of a namespace by an id.

        Raises:
            RefusalError: the id is out of its bound, or the text is no grammar.
        """
        check_name(grammar_id, "grammar_id", can_be_empty=False)
        size = len(grammar_json.encode())
        if size > MAX_GRAMMAR_BYTES:
            raise invalid("grammar_json", f"expected at most {MAX_GRAMMAR_BYTES} bytes, got {size}")
        try:
            self._grammars.register(namespace, grammar_id, grammar_json)
        except GrammarError as error:
            raise invalid("grammar_json", str(error)) from None
