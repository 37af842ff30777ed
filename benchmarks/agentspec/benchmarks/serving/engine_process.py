"""The benchmark's end of an engine process: start, ask with a deadline, stop."""

from __future__ import annotations

import ctypes.util
import os
import socket
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from agentspec.benchmarks.serving.protocol import CellJob, EngineSettings, Failed, Ready, Signal

_LOG_TAIL_LINES = 25
_POLL_S = 0.5
_STOP_S = 20.0

# One process a engine, so that it can be stepped; one thread, so that engines do not spin against each other.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "OMP_NUM_THREADS": "1",
    "NUMBA_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


class EngineError(RuntimeError):
    """An engine did not start, died, hung or could not play a cell.

    Attributes:
        log_tail: last lines of its log.
        is_gone: the process has ended, or was ended because it did not answer.
    """

    def __init__(self, reason: str, log_tail: str, *, is_gone: bool) -> None:
        super().__init__(reason)
        self.log_tail = log_tail
        self.is_gone = is_gone


def find_allocator() -> str | None:
    """tcmalloc, which vLLM recommends on CPUs: without it a large step is mostly page faults. None: not installed."""
    return ctypes.util.find_library("tcmalloc_minimal") or ctypes.util.find_library("tcmalloc")


class EngineProcess:
    """One engine process.

    Args:
        settings: see `EngineSettings`.
        log_path: where its output goes.
    """

    def __init__(self, settings: EngineSettings, log_path: Path) -> None:
        self.settings = settings
        self._log_path = log_path
        ours, theirs = socket.socketpair()
        environment = {**ENVIRONMENT, **os.environ, "PYTHONUNBUFFERED": "1"}
        environment |= {name: ENVIRONMENT[name] for name in ("VLLM_ENABLE_V1_MULTIPROCESSING",)}
        if allocator := find_allocator():
            environment["LD_PRELOAD"] = allocator
        with log_path.open("wb") as log, theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "agentspec.benchmarks.serving.worker", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                pass_fds=[theirs.fileno()],
            )
        self._connection = Connection(ours.detach())
        self._connection.send(settings)

    @property
    def process_id(self) -> int:
        """Of the engine process."""
        return self._process.pid

    def receive(self, deadline_s: float) -> Any:
        """Wait for an answer.

        Raises:
            EngineError: it is `Failed`, or none came; then the process is ended.
        """
        give_up_at = time.monotonic() + deadline_s
        while not self._connection.poll(_POLL_S):
            if self._process.poll() is not None:
                break
            if time.monotonic() > give_up_at:
                raise self._gone(f"the engine gave no answer in {deadline_s:g} s")
        try:
            answer = self._connection.recv()
        except (EOFError, OSError):
            raise self._gone("the engine died") from None
        if isinstance(answer, Failed):
            raise EngineError(answer.reason, self._log_tail(), is_gone=False)
        return answer

    def wait_until_ready(self, deadline_s: float) -> Ready:
        """Wait until it has started.

        Raises:
            EngineError: it did not.
        """
        ready: Ready = self.receive(deadline_s)
        return ready

    def ask(self, message: CellJob | Signal, deadline_s: float) -> Any:
        """Send a message and wait for the answer.

        Raises:
            EngineError: see `receive`.
        """
        try:
            self._connection.send(message)
        except OSError:
            raise self._gone("the engine died") from None
        return self.receive(deadline_s)

    def stop(self) -> None:
        """End the process; a process that does not end by itself is killed."""
        try:
            self._connection.send(Signal.STOP)
            self._process.wait(_STOP_S)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        self._connection.close()

    def _gone(self, reason: str) -> EngineError:
        self._process.kill()
        code = self._process.wait()
        detail = f"{reason} (exit code {code})" if "died" in reason else reason
        return EngineError(detail, self._log_tail(), is_gone=True)

    def _log_tail(self) -> str:
        lines = self._log_path.read_text(errors="replace").splitlines()
        return "\n".join(line[:300] for line in lines[-_LOG_TAIL_LINES:])
