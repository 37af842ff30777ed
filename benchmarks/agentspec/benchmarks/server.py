"""A real vLLM server process of our own: plain, with vLLM's n-gram drafter, or with AgentSpec."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal

import httpx

Decoding = Literal["plain", "ngram", "agentspec"]
DECODINGS: tuple[Decoding, ...] = ("plain", "ngram", "agentspec")
SERVED_NAME = "demo"

Mode = Literal["embedded", "hybrid", "sidecar"]

_VLLM = "vllm.entrypoints.cli.main"
_AGENTSPEC = "agentspec.serving_patch"
_SIDECAR = "agentspec.sidecar"
_LOG_TAIL_LINES = 25
_STOP_S = 15.0
_POLL_S = 0.25


class ServerError(RuntimeError):
    """The server did not start or has died; the message ends with the last lines of its log."""


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """What all three servers have in common.

    Attributes:
        model: folder in Hugging Face format or hub id.
        log_folder: exists; each server writes its own log there.
        max_num_seqs: requests that run at once, > 0.
        num_speculative_tokens: longest draft of a request, for both drafters.
        max_model_len: tokens of prompt and output together.
        start_deadline_s: longest wait for the server to answer.
        vllm_flags: further flags of `vllm serve`.
        mode: whether AgentSpec drafts inside vLLM, there with a draft server beside it, or in that server.
        redis: URL through which histories are shared with other servers; empty: they are not.
    """

    model: str
    log_folder: Path
    max_num_seqs: int
    num_speculative_tokens: int
    max_model_len: int = 1024
    start_deadline_s: float = 300.0
    vllm_flags: tuple[str, ...] = ()
    mode: Mode = "embedded"
    redis: str = ""


class ProcessGroup:
    """A process and all that it starts, which end together.

    Args:
        log_path: of what they print; written anew.
    """

    def __init__(self, command: Sequence[str], log_path: Path, environment: Mapping[str, str]) -> None:
        with log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                start_new_session=True,  # Ctrl-C in the terminal is ours to pass on, and the group is ours to end
            )

    @property
    def process_id(self) -> int:
        """Of the process, and of the group."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def stop(self) -> None:
        """End the whole group: first politely, then by force."""
        self._signal(signal.SIGTERM)
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            pass
        finally:
            self._signal(signal.SIGKILL)
            self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            return


class VllmServer:
    """One server, with the draft server that its mode needs; as a context manager it is always stopped.

    Args:
        decoding: how it decodes.
        options: see `ServerOptions`.
        name: of its log; default: that of the decoding.
    """

    def __init__(self, decoding: Decoding, options: ServerOptions, name: str = "") -> None:
        self.decoding = decoding
        self.name = name or decoding
        self.log_path = options.log_folder / f"server-{self.name}.log"
        self._options = options
        self._port, self._metrics_port, self._sidecar_metrics_port = _free_ports(3)
        self._process: ProcessGroup | None = None
        self._sidecar: ProcessGroup | None = None
        self._socket_folder: tempfile.TemporaryDirectory[str] | None = None

    @property
    def base_url(self) -> str:
        """Where OpenAI clients find it."""
        return f"http://127.0.0.1:{self._port}/v1"

    @property
    def metrics_url(self) -> str:
        """Where vLLM's counters are."""
        return f"http://127.0.0.1:{self._port}/metrics"

    @property
    def agentspec_metrics_urls(self) -> tuple[str, ...]:
        """Where AgentSpec's counters are; empty for the other ways of decoding."""
        if self.decoding != "agentspec":
            return ()
        drafts_elsewhere = self._options.mode == "sidecar"
        ports = (self._metrics_port, self._sidecar_metrics_port) if drafts_elsewhere else (self._metrics_port,)
        return tuple(f"http://127.0.0.1:{port}/metrics" for port in ports)

    @property
    def process_id(self) -> int | None:
        """Process and process group while it was started and not stopped, else None."""
        return None if self._process is None else self._process.process_id

    @property
    def _has_sidecar(self) -> bool:
        return self.decoding == "agentspec" and self._options.mode != "embedded"

    @property
    def _socket(self) -> str:
        if self._socket_folder is None:  # short: a socket's path has 107 bytes
            self._socket_folder = tempfile.TemporaryDirectory(prefix="agentspec-")
            Path(self._socket_folder.name).chmod(0o2770)
        return f"{self._socket_folder.name}/draft.sock"

    def start(self) -> None:
        """Start the processes and return at once."""
        environment = self.environment(os.environ)
        if self._has_sidecar:
            log_path = self.log_path.with_stem(self.log_path.stem.replace(self.decoding, "sidecar"))
            self._sidecar = ProcessGroup(self.sidecar_command(), log_path, environment)
        self._process = ProcessGroup(self.command(), self.log_path, environment)

    def sidecar_command(self) -> list[str]:
        """Module and arguments of the draft server."""
        drafts = str(self._options.num_speculative_tokens)
        ports = ("--metrics-port", str(self._sidecar_metrics_port))
        redis = ("--redis", self._options.redis) if self._options.redis else ()
        return [_SIDECAR, "serve", "--socket", self._socket, "--num-speculative-tokens", drafts, *ports, *redis]

    def command(self) -> list[str]:
        """Module and arguments that `python -m` runs."""
        options = self._options
        flags = ["serve", options.model, "--served-model-name", SERVED_NAME]
        flags += ["--host", "127.0.0.1", "--port", str(self._port)]
        flags += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
        flags += ["--dtype", "float32", "--enforce-eager", "--max-model-len", str(options.max_model_len)]
        flags += ["--max-num-seqs", str(options.max_num_seqs), "--max-num-batched-tokens", str(options.max_model_len)]
        flags += options.vllm_flags
        if self.decoding == "plain":
            return [_VLLM, *flags]
        flags += ["--per-request-spec-decode-metrics", "detailed"]
        if self.decoding == "agentspec":
            agentspec: dict[str, str | int] = {
                "num_speculative_tokens": options.num_speculative_tokens,
                "metrics_port": self._metrics_port,
            }
            if self._has_sidecar:
                agentspec |= {"mode": options.mode, "socket": self._socket}
            elif options.redis:
                agentspec |= {"redis": options.redis}
            return [_AGENTSPEC, *flags, "--additional-config", json.dumps({"agentspec": agentspec})]
        ngram = {
            "method": "ngram",
            "num_speculative_tokens": options.num_speculative_tokens,
            "prompt_lookup_min": 2,
            "prompt_lookup_max": 5,
        }
        return [_VLLM, *flags, "--speculative-config", json.dumps(ngram)]

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """The caller's environment with defaults that suit a small machine; what the caller set stays."""
        defaults = {
            "DO_NOT_TRACK": "1",
            "NUMBA_NUM_THREADS": "1",  # of the n-gram drafter; more spin against the model's threads
            "OMP_NUM_THREADS": str(os.cpu_count() or 1),
            # Threads that spin at a barrier wait 20 times longer as soon as another process wants one of their cores.
            "OMP_WAIT_POLICY": "PASSIVE",
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else all servers of a machine are bound to the same cores
            "VLLM_NO_USAGE_STATS": "1",
        }
        if Path(self._options.model).is_dir():
            defaults["HF_HUB_OFFLINE"] = "1"
        return defaults | dict(environ)

    def wait_until_ready(self, on_wait: Callable[[float], None] = lambda _seconds: None) -> None:
        """Wait for the server to answer.

        Args:
            on_wait: called four times a second with the seconds waited.

        Raises:
            ServerError: it died, or did not answer in time.
        """
        start = time.monotonic()
        while (waited_s := time.monotonic() - start) < self._options.start_deadline_s:
            self.check_alive()
            if self._is_healthy():
                return
            on_wait(waited_s)
            time.sleep(_POLL_S)
        raise ServerError(
            f"the {self.name} server did not answer within {self._options.start_deadline_s:.0f} s{self._log_tail()}"
        )

    def check_alive(self) -> None:
        """Do nothing while the process runs.

        Raises:
            ServerError: it has ended, or was never started.
        """
        if self._process is None:
            raise ServerError(f"the {self.name} server was not started")
        if (code := self._process.exit_code) is not None:
            raise ServerError(f"the {self.name} server ended with code {code}{self._log_tail()}")

    def stop(self) -> None:
        """End all that was started. May be called again."""
        process, self._process = self._process, None
        sidecar, self._sidecar = self._sidecar, None
        for group in (process, sidecar):
            if group is not None:
                group.stop()
        if self._socket_folder is not None:
            self._socket_folder.cleanup()
            self._socket_folder = None

    def __enter__(self) -> VllmServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def _is_healthy(self) -> bool:
        try:
            return httpx.get(f"http://127.0.0.1:{self._port}/health", timeout=5).status_code == httpx.codes.OK
        except httpx.HTTPError:
            return False

    def _log_tail(self) -> str:
        lines = self.log_path.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_TAIL_LINES:]
        return "\n".join([f". The end of {self.log_path}:", *(f"  {line}" for line in lines)])


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for probe in sockets:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in sockets]
    finally:
        for probe in sockets:
            probe.close()
