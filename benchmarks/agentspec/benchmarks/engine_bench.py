"""Time and memory of the engine beside its peers: the same streams in one process, in turns, thread CPU time."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import math
import platform
import statistics
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np

from agentspec.benchmarks.contestants import ArcticTree, Batch, Contestant, Drafter, NgramScan, Ours
from agentspec.benchmarks.figures import Figures
from agentspec.benchmarks.methods.arctic import MissingPeerError
from agentspec.benchmarks.tokenizer import Tokenizer
from agentspec.sidecar.engine import TokenIds, pooled_bytes

STORED_RESULT = Path(__file__).parent / "engine.json"
PROMPT_TOKENS = 1500
LONG_PROMPT_TOKENS = 8192
NUM_CHUNKS = 20
NUM_STEPS = 100
NUM_FIRST_STEPS = 32  # not measured
NUM_STARTS = 15
HUGE_PROMPT_TOKENS = 131_072
KEY_TOKENS = 1000
BESIDE_BATCH_SIZE = 64
NUM_BESIDE_STEPS = 300
_CHUNK_CHARS = 1 << 18
DEPTHS = {"arctic-d24": 24, "arctic-d64": 64}


class EngineBenchError(RuntimeError):
    """The benchmark cannot run here; the message says why."""


def stored_draft_us(batch_size: int) -> float:
    """Drafting of one request and step, in µs, by the result in the repository at the nearest batch size."""
    cells = json.loads(STORED_RESULT.read_text(encoding="utf-8"))["cells"]
    steps = [cell for cell in cells if cell["metric"] == "step_us_per_request"]
    return float(min(steps, key=lambda cell: abs(math.log(cell["batch_size"] / batch_size)))["agentspec"])


def source_files() -> Iterator[Path]:
    """Python files that a machine has, well mixed: the standard library's, then those of the installed packages."""
    for folder in ("stdlib", "purelib"):
        root = Path(sysconfig.get_path(folder))
        files = [file for file in root.rglob("*.py") if "site-packages" not in file.relative_to(root).parts]
        yield from sorted(files, key=lambda file: hashlib.sha256(str(file.relative_to(root)).encode()).digest())


def read_documents(tokenizer: Tokenizer, num_tokens: int) -> list[TokenIds]:
    """Texts with at least `num_tokens` tokens together.

    Raises:
        EngineBenchError: there is not so much text on this machine.
    """
    documents: list[TokenIds] = []
    missing = num_tokens
    texts: list[str] = []
    for file in source_files():
        try:
            texts.append(file.read_text(encoding="utf-8", errors="replace"))
        except OSError:
            continue
        if sum(map(len, texts)) > _CHUNK_CHARS:
            found = [tokens for tokens in tokenizer.encode(texts) if len(tokens)]
            documents += found
            missing -= sum(map(len, found))
            texts.clear()
            if missing <= 0:
                return documents
    raise EngineBenchError(f"{num_tokens} tokens asked for, {num_tokens - missing} are on this machine")


class _MallocInfo(ctypes.Structure):
    """`struct mallinfo2` of glibc: ten counts; the fifth is what was mapped, the eighth what is used of the rest."""

    _fields_: ClassVar = [(f"count_{index}", ctypes.c_size_t) for index in range(10)]


def allocated_bytes() -> int:
    """Bytes that native code holds, from malloc and from the engine's own pool.

    Raises:
        EngineBenchError: the C library is not glibc 2.33 or later.
    """
    try:
        mallinfo2 = ctypes.CDLL(None).mallinfo2
    except AttributeError:
        raise EngineBenchError("memory is read with mallinfo2, which needs glibc 2.33 or later") from None
    mallinfo2.restype = _MallocInfo
    found = mallinfo2()
    return int(found.count_4) + int(found.count_7) + pooled_bytes()


def _thread_us(call: Callable[[], object]) -> float:
    begin = time.thread_time_ns()
    call()
    return (time.thread_time_ns() - begin) / 1000


class EngineBench:
    """One run: histories are built, then requests step, everything in turns.

    Args:
        tokenizer: for the text, which is the Python source on this machine.
        history_tokens: of the shared history.
        batch_sizes: requests that step together.
    """

    def __init__(self, tokenizer: Tokenizer, history_tokens: int, batch_sizes: tuple[int, ...]) -> None:
        self._history_tokens = history_tokens
        self._batch_sizes = batch_sizes
        held_out = max(HUGE_PROMPT_TOKENS, max(batch_sizes) * (PROMPT_TOKENS + NUM_STEPS)) + (1 << 16)
        documents = read_documents(tokenizer, history_tokens + held_out)
        flat = np.concatenate(documents)
        self._history = flat[:history_tokens]
        self._held_out = flat[history_tokens:]
        borders = np.cumsum([len(document) for document in documents])
        self._borders = [0, *borders[borders < history_tokens].tolist(), history_tokens]
        self._vocabulary = tokenizer.vocabulary()
        self._digest = tokenizer.digest
        self._cells: list[Figures] = []

    def run(self, on_phase: Callable[[str], None] = lambda _phase: None) -> list[Figures]:
        """Measure; a cell for each metric, batch size and peer.

        Raises:
            MissingPeerError: Arctic Inference is not installed; without vLLM the `ngram` cells are left out.
            EngineBenchError: memory cannot be read here.
        """
        on_phase("building the histories")
        ours = Ours(self._vocabulary)
        contestants: dict[str, Contestant] = {"agentspec": ours}
        contestants |= {name: ArcticTree(depth) for name, depth in DEPTHS.items()}
        self._insert(contestants)
        on_phase("starting requests")
        self._start(contestants, "start_8k_ms", LONG_PROMPT_TOKENS, NUM_STARTS)
        self._start(contestants, "start_128k_ms", HUGE_PROMPT_TOKENS, 3)
        scans = _scans()
        for batch_size in self._batch_sizes:
            on_phase(f"steps of {batch_size} requests")
            self._step(contestants, scans, batch_size)
        on_phase("steps beside another thread")
        self._step_beside(ours)
        on_phase("forgetting")
        self._forget(contestants)
        on_phase("many small histories")
        self._insert_keys({"agentspec": Ours(self._vocabulary), "arctic-d24": ArcticTree(DEPTHS["arctic-d24"])})
        return self._cells

    def meta(self) -> Figures:
        """Conditions of the run."""
        return {
            "history_tokens": self._history_tokens,
            "batch_sizes": self._batch_sizes,
            "prompt_tokens": PROMPT_TOKENS,
            "num_steps": NUM_STEPS - NUM_FIRST_STEPS,
            "clock": "thread CPU time, medians of interleaved repeats; step_beside_* wall time",
            "num_keys": self._history_tokens // KEY_TOKENS,
            "text": "Python source files of this machine",
            "tokenizer_sha256": self._digest,
            "machine": platform.platform(),
            "python": platform.python_version(),
        }

    def _insert(self, contestants: Mapping[str, Contestant]) -> None:
        chunks = np.array_split(np.arange(len(self._borders) - 1), NUM_CHUNKS)
        times: dict[str, list[float]] = {name: [] for name in contestants}
        held = dict.fromkeys(contestants, 0)
        for chunk in chunks:
            documents = [self._history[self._borders[i] : self._borders[i + 1]] for i in chunk]
            num_tokens = sum(map(len, documents))
            for name, contestant in contestants.items():
                before = allocated_bytes()
                times[name].append(
                    _thread_us(functools.partial(_insert_all, contestant, documents)) / max(1, num_tokens)
                )
                held[name] += allocated_bytes() - before
        self._compare("insert_us_per_token", None, {name: statistics.median(values) for name, values in times.items()})
        self._compare("bytes_per_token", None, {name: size / self._history_tokens for name, size in held.items()})

    def _start(self, contestants: Mapping[str, Contestant], metric: str, num_tokens: int, num_starts: int) -> None:
        times: dict[str, list[float]] = {name: [] for name in contestants}
        spare = len(self._held_out) - num_tokens
        for repeat in range(num_starts):
            begin = repeat * spare // num_starts
            prompt = self._held_out[begin : begin + num_tokens]
            for name, contestant in contestants.items():
                times[name].append(_thread_us(functools.partial(contestant.start, 0, prompt)) / 1000)
                contestant.stop(0)
        self._compare(metric, None, {name: statistics.median(values) for name, values in times.items()})

    def _step_beside(self, ours: Ours) -> None:
        """Steps by the wall clock, alone and while another thread works; the peers have one thread and no locks."""
        batch = self._batch(BESIDE_BATCH_SIZE)
        for handle, prompt in enumerate(batch.prompts):
            ours.start(handle, prompt)
        chunk = self._history[:KEY_TOKENS]
        alone = _wall_us(ours, batch, lambda: time.sleep(0.001))
        works: dict[str, Callable[[], object]] = {"insert": lambda: ours.insert(chunk), "export": ours.export}
        for name, work in works.items():
            beside = _wall_us(ours, batch, work)
            for share in (50, 99):
                values = {"agentspec": float(np.percentile(beside, share)), "alone": float(np.percentile(alone, share))}
                self._compare(f"step_beside_{name}_p{share}_us", BESIDE_BATCH_SIZE, values)
        for handle in range(BESIDE_BATCH_SIZE):
            ours.stop(handle)

    def _forget(self, contestants: Mapping[str, Contestant]) -> None:
        self._compare(
            "forget_us_per_token",
            None,
            {name: _thread_us(contestant.forget) / self._history_tokens for name, contestant in contestants.items()},
        )

    def _insert_keys(self, contestants: Mapping[str, Contestant]) -> None:
        num_keys = self._history_tokens // KEY_TOKENS
        held, times = {}, {}
        for name, contestant in contestants.items():
            before = allocated_bytes()
            insert_keys = functools.partial(_insert_keys, contestant, self._history, num_keys)
            times[name] = _thread_us(insert_keys) / (num_keys * KEY_TOKENS)
            held[name] = (allocated_bytes() - before) / (num_keys * KEY_TOKENS)
        self._compare("keys_insert_us_per_token", None, times)
        self._compare("keys_bytes_per_token", None, held)

    def _step(self, contestants: Mapping[str, Contestant], scans: Mapping[str, NgramScan], batch_size: int) -> None:
        batch = self._batch(batch_size)
        for contestant in contestants.values():
            for handle, prompt in enumerate(batch.prompts):
                contestant.start(handle, prompt)
        drafters: dict[str, Drafter] = {**contestants, **scans}
        steps: dict[str, list[float]] = {name: [] for name in drafters}
        queries: dict[str, list[float]] = {name: [] for name in steps}
        for step in range(NUM_STEPS):
            for name, drafter in drafters.items():
                steps[name].append(_thread_us(drafter.prepare(batch, step, 1)) / batch_size)
                queries[name].append(_thread_us(drafter.prepare(batch, step + 1, 0)) / batch_size)
        for contestant in contestants.values():
            for handle in range(batch_size):
                contestant.stop(handle)
        for metric, times in (("step_us_per_request", steps), ("query_us", queries)):
            medians = {name: statistics.median(values[NUM_FIRST_STEPS:]) for name, values in times.items()}
            self._compare(metric, batch_size, medians)

    def _batch(self, batch_size: int) -> Batch:
        begins = np.arange(batch_size) * (PROMPT_TOKENS + NUM_STEPS)
        texts = self._held_out[begins[:, None] + np.arange(PROMPT_TOKENS + NUM_STEPS)]
        return Batch([np.ascontiguousarray(text[:PROMPT_TOKENS]) for text in texts], texts[:, PROMPT_TOKENS:])

    def _compare(self, metric: str, batch_size: int | None, values: Mapping[str, float]) -> None:
        ours = values["agentspec"]
        self._cells += [
            {
                "metric": metric,
                "batch_size": batch_size,
                "history_tokens": self._history_tokens,
                "peer": peer,
                "agentspec": ours,
                "peer_value": value,
                "ratio": value / ours,
            }
            for peer, value in values.items()
            if peer != "agentspec"
        ]


def _insert_all(contestant: Contestant, documents: Sequence[TokenIds]) -> None:
    for document in documents:
        contestant.insert(document)


def _insert_keys(contestant: Contestant, history: TokenIds, num_keys: int) -> None:
    for key in range(num_keys):
        contestant.insert(history[key * KEY_TOKENS : (key + 1) * KEY_TOKENS], f"key-{key}")


def _wall_us(ours: Ours, batch: Batch, work: Callable[[], object]) -> list[float]:
    """Wall time of steps without new tokens while another thread repeats `work`."""
    is_over = threading.Event()

    def repeat() -> None:
        while not is_over.is_set():
            work()

    worker = threading.Thread(target=repeat)
    worker.start()
    try:
        times = []
        for _ in range(NUM_BESIDE_STEPS):
            step = ours.prepare(batch, 0, 0)
            begin = time.perf_counter_ns()
            step()
            times.append((time.perf_counter_ns() - begin) / 1000)
        return times
    finally:
        is_over.set()
        worker.join()


def _scans() -> dict[str, NgramScan]:
    try:
        return {"ngram": NgramScan()}
    except MissingPeerError:
        return {}
