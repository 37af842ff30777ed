"""What sharing histories through Redis costs and brings: delay, warm start, memory, and the step path."""

from __future__ import annotations

import gc
import platform
import resource
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Any, cast

import numpy as np
import redis
from numpy.typing import NDArray

from agentspec.benchmarks.corpus import TokenCall
from agentspec.benchmarks.figures import Figures
from agentspec.benchmarks.redis_process import running_redis
from agentspec.sidecar.block_sharing import BlockSharing
from agentspec.sidecar.engine import Engine, FinishReason, Sampling, StepRequest, TokenIds
from agentspec.sidecar.grammars import CHAT
from agentspec.sidecar.store.keeper import MIN_SNAPSHOT_TOKENS
from agentspec.sidecar.store.keys import ModelKeys
from agentspec.sidecar.store.options import RedisOptions
from agentspec.sidecar.store.store import HistoryStore
from agentspec.sidecar.tags import Tags

MODEL = "0123456789abcdef"
NAMESPACE = "default"
HISTORY_BYTES = 4 << 30
WAIT_S = 120.0
DELAY_BLOCKS_PER_S = 2000
DELAY_BLOCK_TOKENS = 40
DELAY_S = 5.0
STEP_BATCH = 64
NUM_STEPS = 600
IDLE_NAMESPACES = 1000
IDLE_S = 10.0
_NO_TOKENS = np.empty(0, np.int32)
_GREEDY = Sampling()


class RedisBenchError(RuntimeError):
    """redis-server is missing or did not start, or sharing took too long; the message says which."""


@dataclass(frozen=True, slots=True)
class RedisBench:
    """Engines of this process and a Redis of its own.

    Attributes:
        calls: recorded calls, whose outputs are written as blocks.
        vocabulary: of the tokens in them.
        num_warm_tokens: sizes of the histories that a new engine loads.
    """

    calls: Sequence[TokenCall]
    vocabulary: Sequence[bytes]
    num_warm_tokens: Sequence[int]

    def run(self, on_phase: Callable[[str], None] = lambda _phase: None) -> list[Figures]:
        """Measure everything; one cell for each measurement.

        Raises:
            RedisBenchError: see there.
        """
        cells: list[Figures] = []
        for name, measure in (
            ("memory", self._memory),
            ("delay", self._delay),
            ("step", self._step),
            ("idle", self._idle),
        ):
            on_phase(name)
            with running_redis() as url, redis.Redis.from_url(url) as client:
                cells.append({"measurement": name, **measure(url, client)})
        for num_tokens in self.num_warm_tokens:
            on_phase(f"warm start with {num_tokens} tokens")
            with running_redis() as url, redis.Redis.from_url(url) as client:
                cells.append({"measurement": "warm", **self._warm(url, client, num_tokens)})
        return cells

    def meta(self) -> Figures:
        """Conditions of the run."""
        return {
            "num_calls": len(self.calls),
            "workloads": ", ".join(sorted({call.workload for call in self.calls})),
            "delay_blocks_per_s": DELAY_BLOCKS_PER_S,
            "delay_block_tokens": DELAY_BLOCK_TOKENS,
            "step_batch": STEP_BATCH,
            "idle_namespaces": IDLE_NAMESPACES,
            "redis_py": redis.__version__,
            "machine": platform.platform(),
            "python": platform.python_version(),
        }

    def _engine(self) -> Engine:
        return Engine(self.vocabulary, CHAT, num_speculative_tokens=16, history_bytes=HISTORY_BYTES)

    @contextmanager
    def _shared(self, url: str) -> Iterator[tuple[Engine, HistoryStore]]:
        engine = self._engine()
        sharing = BlockSharing(engine, MODEL, RedisOptions(redis=url), roots=[NAMESPACE], ttl_s=3600)
        sharing.start()
        try:
            yield engine, cast(HistoryStore, sharing.store)
        finally:
            sharing.shutdown()

    def _memory(self, url: str, client: Any) -> Figures:
        """Bytes of Redis for each token: in the log, a block an entry and in company, and in a snapshot."""
        figures: Figures = {}
        with self._shared(url) as (engine, store):
            _await(lambda: store.figures().is_complete)
            num_tokens = 0
            for number, call in enumerate(cycle(self.calls)):
                if number >= len(self.calls) and num_tokens > 2 * MIN_SNAPSHOT_TOKENS:
                    break
                num_tokens += _write(engine, number, call.output, call)
                if number % 8 == 7:  # as eight agents that end within one round
                    time.sleep(0.02)
            _await(lambda: store.figures().num_tokens.get("published", 0) >= num_tokens)
            used = client.memory_usage(ModelKeys(MODEL).log(NAMESPACE), samples=0)
            entries = store.figures().num_entries["published"]
            figures |= {
                "tokens": num_tokens,
                "tokens_per_entry": num_tokens / entries,
                "log_bytes_per_token": used / num_tokens,
            }
            _await(lambda: store.figures().num_snapshots)
            figures["snapshot_bytes_per_token"] = (
                sum(client.memory_usage(key, samples=0) for key in client.scan_iter("as1:{*part:*")) / num_tokens
            )
        return figures

    def _delay(self, url: str, client: Any) -> Figures:
        """From the end of a block on one engine to its place in the other's history."""
        del client
        num_blocks = int(DELAY_S * DELAY_BLOCKS_PER_S)
        tokens = _stream(self.calls, num_blocks * DELAY_BLOCK_TOKENS).reshape(num_blocks, -1)
        with self._shared(url) as (source, _), self._shared(url) as (target, store):
            _use(target, store)
            sampler = _Sampler(target)
            written = np.zeros(num_blocks)
            with sampler:
                begin = time.perf_counter()
                for number, block in enumerate(tokens):
                    _sleep_until(begin + number / DELAY_BLOCKS_PER_S)
                    _write(source, number, block)
                    written[number] = time.perf_counter()
                duration_s = time.perf_counter() - begin
                _await(lambda: target.num_history_tokens() >= tokens.size)
        delays_ms = 1000 * (sampler.times_of(np.arange(1, num_blocks + 1) * DELAY_BLOCK_TOKENS) - written)
        return {
            "blocks_per_s": num_blocks / duration_s,
            "delay_p50_ms": float(np.median(delays_ms)),
            "delay_p99_ms": float(np.percentile(delays_ms, 99)),
        }

    def _step(self, url: str, client: Any) -> Figures:
        """CPU time of a step with and without sharing, in turns."""
        del client
        lone, times = self._engine(), np.zeros((NUM_STEPS, 2))
        with self._shared(url) as (shared, _):
            outputs = _stream(self.calls, STEP_BATCH * NUM_STEPS).reshape(STEP_BATCH, NUM_STEPS)
            for engine in (lone, shared):
                for handle in range(STEP_BATCH):
                    engine.open(handle, _NO_TOKENS, Tags(stage=f"s{handle % 4}"), _GREEDY, namespace=NAMESPACE)
            for position in range(NUM_STEPS):
                for column, engine in enumerate((lone, shared)[:: 1 if position % 2 else -1]):
                    step = _one_token_each(outputs, position)
                    begin = time.thread_time_ns()
                    engine.step(step)
                    times[position, column if position % 2 else 1 - column] = time.thread_time_ns() - begin
        lone_us, shared_us = np.median(times[NUM_STEPS // 10 :], axis=0) / 1000
        return {"batch_size": STEP_BATCH, "step_us": float(lone_us), "sharing_us": float(shared_us - lone_us)}

    def _idle(self, url: str, client: Any) -> Figures:
        """CPU time of two engines that follow many namespaces in which nothing happens."""
        del client
        with self._shared(url) as (first, first_store), self._shared(url) as (second, second_store):
            for engine, store in ((first, first_store), (second, second_store)):
                for number in range(IDLE_NAMESPACES):
                    _write(engine, number, _NO_TOKENS, namespace=f"{NAMESPACE}/{number}", history="read")
                _await(partial(_follows_all, store))
            time.sleep(1)
            begin, cpu_begin = time.perf_counter(), _cpu_s()
            time.sleep(IDLE_S)
            return {"cores_per_engine": (_cpu_s() - cpu_begin) / (time.perf_counter() - begin) / 2}

    def _warm(self, url: str, client: Any, num_tokens: int) -> Figures:
        """A new engine beside a Redis that holds a snapshot, and the same text inserted from memory."""
        del client
        with self._shared(url) as (source, store):
            written = 0
            for number, call in enumerate(cycle(self.calls)):
                written += _write(source, number, _varied(call.output, number, len(self.vocabulary)), call)
                if written >= num_tokens:
                    break
                if number % 64 == 0:  # the publisher has to follow
                    _await(lambda: store.figures().num_tokens.get("published", 0) > written - 500_000)  # noqa: B023
            _await(lambda: store.figures().num_tokens.get("published", 0) >= written)
            _await(lambda: store.figures().num_snapshots)
            _await(lambda: _is_settled(store), WAIT_S)
            archives = source.export_parts(NAMESPACE, 10)
        insert = self._engine()
        begin = time.perf_counter()
        for archive in archives:
            insert.import_histories(archive)
        insert_s = time.perf_counter() - begin
        del insert, archives
        gc.collect()
        begin = time.perf_counter()
        with self._shared(url) as (late, late_store):
            _await(lambda: late.num_history_tokens() >= num_tokens / 10, pause_s=0.001)
            tenth_s = time.perf_counter() - begin
            _await(lambda: late_store.figures().is_complete, pause_s=0.001)
            complete_s = time.perf_counter() - begin
            held = late.num_history_tokens()
        return {
            "tokens": written,
            "tenth_s": tenth_s,
            "complete_s": complete_s,
            "insert_s": insert_s,
            "ratio": complete_s / insert_s,
            "held_share": held / written,
        }


class _Sampler:
    """Watches how an engine's history grows."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._seen: list[tuple[float, int]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def _watch(self) -> None:
        while not self._stop.wait(0.0005):
            self._seen.append((time.perf_counter(), self._engine.num_history_tokens()))

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        time.sleep(0.01)
        self._stop.set()
        self._thread.join()

    def times_of(self, counts: NDArray[np.int64]) -> NDArray[np.float64]:
        """When each count was reached, by a clock in seconds."""
        times, sizes = (np.array(column) for column in zip(*self._seen, strict=True))
        return cast(NDArray[np.float64], times[np.searchsorted(sizes, counts).clip(max=len(times) - 1)])


def _await(
    fact: Callable[[], Any], timeout_s: float = WAIT_S, failure: str = "sharing took too long", pause_s: float = 0.01
) -> None:
    end = time.monotonic() + timeout_s
    while not fact():
        if time.monotonic() > end:
            raise RedisBenchError(failure)
        time.sleep(pause_s)


def _is_settled(store: HistoryStore) -> bool:
    """Whether the last snapshot holds all but a little."""
    return store.num_fresh_tokens(NAMESPACE) < 20_000


def _follows_all(store: HistoryStore) -> bool:
    return store.figures().num_namespaces == IDLE_NAMESPACES


def _write(
    engine: Engine,
    handle: int,
    tokens: TokenIds,
    call: TokenCall | None = None,
    *,
    namespace: str = NAMESPACE,
    history: str = "rw",
) -> int:
    tags = Tags(stage=call.node if call else "s", workflow_id=call.workflow if call else "", history=cast(Any, history))
    engine.open(handle, _NO_TOKENS, tags, _GREEDY, namespace=namespace)
    engine.close(handle, FinishReason.STOP, len(tokens), tokens)
    return len(tokens)


def _use(engine: Engine, store: HistoryStore) -> None:
    _write(engine, 0, _NO_TOKENS, history="read")
    _await(lambda: store.figures().num_namespaces)


def _stream(calls: Sequence[TokenCall], num_tokens: int) -> TokenIds:
    pieces: list[TokenIds] = []
    size = 0
    for call in cycle(calls):
        pieces.append(call.output)
        size += len(call.output)
        if size >= num_tokens:
            return np.ascontiguousarray(np.concatenate(pieces)[:num_tokens])
    raise RedisBenchError("there are no calls")


def _varied(tokens: TokenIds, number: int, vocabulary_size: int) -> TokenIds:
    """The text, in other words each time it comes again: every fifth token is another one."""
    varied = tokens.copy()
    varied[number % 5 :: 5] = (varied[number % 5 :: 5] * 31 + number) % vocabulary_size
    return varied


def _one_token_each(outputs: NDArray[np.int32], position: int) -> StepRequest:
    num_rows = len(outputs)
    zeros = np.zeros(num_rows, np.int32)
    return StepRequest(
        step_id=position + 1,
        handles=np.arange(num_rows, dtype=np.int64),
        positions=np.full(num_rows, position, np.int32),
        token_offsets=np.arange(num_rows + 1, dtype=np.int32),
        token_ids=np.ascontiguousarray(outputs[:, position]),
        num_draft_tokens=zeros,
        num_accepted_tokens=zeros,
        max_draft_tokens=np.full(num_rows, 8, np.int32),
        num_decode_rows=num_rows,
        num_prefill_tokens=0,
        token_budget=num_rows * 8,
    )


def _sleep_until(moment: float) -> None:
    if (left := moment - time.perf_counter()) > 0:
        time.sleep(left)


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
