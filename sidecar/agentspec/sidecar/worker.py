"""A thread that talks to a peer as long as the process lives, whatever the peer does."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

# vLLM configures only its own logger tree; a line under any other name would not be seen in `vllm serve`.
logger = logging.getLogger("vllm.agentspec")

FIRST_PAUSE_S = 0.1
LAST_PAUSE_S = 5.0
MAX_REASON = 200


class Closable(Protocol):
    """A connection."""

    def close(self) -> object:
        """Let go of it."""
        ...


_Client = TypeVar("_Client", bound=Closable)


class Worker(Generic[_Client]):
    """Calls a round of work again and again; after a failure it lets go of the connection and backs off with jitter.

    Args:
        name: of the thread.
        peer: what it talks to, for the log.
        connect: makes a client.
        begin: called with each new client, before the first round.
        work: one round; returns soon when there is nothing to do.
        failures: errors that a peer is known to cause; others are logged with their place.
        on_failure: told of each.
        end: called once after the last round, if a client is at hand.
    """

    def __init__(
        self,
        name: str,
        *,
        peer: str,
        connect: Callable[[], _Client],
        begin: Callable[[_Client], None],
        work: Callable[[_Client], None],
        failures: tuple[type[Exception], ...],
        on_failure: Callable[[Exception], None],
        end: Callable[[_Client], None] | None = None,
    ) -> None:
        self._peer = peer
        self._connect = connect
        self._begin = begin
        self._work = work
        self._end = end
        self._failures = failures
        self._on_failure = on_failure
        self._stop = threading.Event()
        self.is_connected = False
        self._has_told = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """Ask for an end; see `join`."""
        self._stop.set()

    def join(self, timeout_s: float) -> None:
        """Wait for the end."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    @property
    def is_stopping(self) -> bool:
        """Whether `stop` was called."""
        return self._stop.is_set()

    def _run(self) -> None:
        longest_s = FIRST_PAUSE_S
        while not self._stop.is_set():
            try:
                self._serve()
            except self._failures as error:
                self._fail(error)
            except Exception as error:  # the boundary: whatever it is, drafts go on without the peer
                self._fail(error)
                logger.exception("agentspec: sharing histories failed; it is tried again")
            if self.is_connected:
                longest_s = FIRST_PAUSE_S
            self.is_connected = False
            self._stop.wait(random.uniform(0, longest_s))  # noqa: S311  # jitter
            longest_s = min(2 * longest_s, LAST_PAUSE_S)

    def _serve(self) -> None:
        client = self._connect()
        try:
            self._begin(client)
            if self._has_told:
                logger.warning("agentspec: %s reaches %s again", self._thread.name, self._peer)
            self.is_connected, self._has_told = True, False
            while not self._stop.is_set():
                self._work(client)
            if self._end is not None:
                self._end(client)
        finally:
            client.close()

    def _fail(self, error: Exception) -> None:
        if self._stop.is_set():
            return
        self._on_failure(error)
        if not self._has_told:
            self._has_told = True
            logger.warning(
                "agentspec: %s can't reach %s: %s; drafts go on", self._thread.name, self._peer, _reason(error)
            )


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:MAX_REASON]}"
