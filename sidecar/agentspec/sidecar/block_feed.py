"""What the requests of an engine write, taken out of it as numbered blocks for whoever shares them."""

from __future__ import annotations

import atexit
import secrets
import threading
import time
from collections.abc import Callable, Sequence

from agentspec.sidecar.engine import Engine
from agentspec.sidecar.epochs import Epochs
from agentspec.sidecar.shared_blocks import SharedBlocks

WAIT_S = 0.25
"""Longest wait for something to take."""
GATHER_S = 0.01
"""Least time from one round to the next: small blocks travel together, and the engine's process has other work."""
MAX_WAITING_TOKENS = 2_000_000
"""Written and not yet taken; of more the oldest are dropped."""
STOP_TIMEOUT_S = 2.0


class BlockFeed:
    """Takes blocks out of one engine on a thread of its own.

    Args:
        engine: whose blocks they are; it may draft meanwhile, it locks itself.
        epochs: of its namespaces.

    Attributes:
        origin: number of the engine, as others see it.
    """

    def __init__(self, engine: Engine, epochs: Epochs) -> None:
        self.origin = secrets.randbits(64)
        self.epochs = epochs
        self._engine = engine
        self._sequence = 0
        self._on_blocks: list[Callable[[SharedBlocks], object]] = []
        self._on_use: list[Callable[[Sequence[str]], object]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="agentspec-feed", daemon=True)

    def subscribe(
        self, on_blocks: Callable[[SharedBlocks], object], on_use: Callable[[Sequence[str]], object] | None = None
    ) -> None:
        """Have functions called with what comes, and with namespaces that requests have used; before `start`.

        They must neither block nor raise.
        """
        self._on_blocks.append(on_blocks)
        if on_use is not None:
            self._on_use.append(on_use)

    def start(self) -> None:
        """Begin."""
        self._engine.share_blocks(MAX_WAITING_TOKENS)
        atexit.register(self.shutdown)  # a thread in the core must not outlive the interpreter
        self._thread.start()

    def shutdown(self) -> None:
        """Hand out what waits, and end."""
        atexit.unregister(self.shutdown)
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(STOP_TIMEOUT_S)
        self._take()
        self._engine.share_blocks(0)

    @property
    def num_dropped_tokens(self) -> int:
        """Tokens that were never taken: too many waited."""
        return self._engine.num_unshared_tokens()

    def _run(self) -> None:
        while not self._stop.is_set():
            if self._engine.wait_for_blocks(WAIT_S):
                self._take()
                time.sleep(GATHER_S)

    def _take(self) -> None:
        with self.epochs.lock:  # a deletion takes what waits out of the engine before it raises the epoch
            taken = self._engine.take_blocks()
            epochs = [self.epochs.of(batch.namespace) for batch in taken.batches]
        if taken.namespaces:
            for on_use in self._on_use:
                on_use(taken.namespaces)
        for batch, epoch in zip(taken.batches, epochs, strict=True):
            self._sequence += 1
            shared = SharedBlocks(batch.namespace, self.origin, self._sequence, epoch, batch.num_tokens, batch.blocks)
            for on_blocks in self._on_blocks:
                on_blocks(shared)
