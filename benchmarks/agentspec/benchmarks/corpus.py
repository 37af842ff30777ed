"""Recorded calls as tokens: what a replay plays. Tokenised once, then read from the cache."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentspec.benchmarks.blocks import block_starts
from agentspec.benchmarks.tokenizer import EncodedText, Tokenizer
from agentspec.sidecar.engine import TokenIds
from agentspec.sidecar.traces import Call, Problem, TraceFile, read_trace, refs_path

CACHE_VERSION = 1
_CHUNK_CHARS = 1 << 20
_NAMES = ("workload", "workflow", "run_id", "node", "agent_id")

Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class TokenCall:
    """One recorded call as tokens; the arrays are shared with other calls and must not be written.

    Attributes:
        workload, workflow, run_id, node, agent_id: as in `traces.Call`.
        prompt: pieces of the prompt in order, chat markers included; each int32.
        output: what the model wrote, with the end token where the tokenizer has one; int32, not empty.
        blocks: label of the block of each output token; index into `Corpus.block_names`; uint16, shape of `output`.
        is_block_start: whether a block begins with the token; bool, shape of `output`.
    """

    workload: str
    workflow: str
    run_id: str
    node: str
    agent_id: str
    prompt: tuple[TokenIds, ...]
    output: TokenIds
    blocks: NDArray[np.uint16]
    is_block_start: NDArray[np.bool_]

    def prompt_tokens(self, limit: int) -> TokenIds:
        """The last `limit` tokens of the prompt."""
        pieces: list[TokenIds] = []
        missing = limit
        for piece in reversed(self.prompt):
            if missing <= 0:
                break
            pieces.append(piece[-missing:])
            missing -= len(pieces[-1])
        return np.concatenate(pieces[::-1]) if pieces else np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class Corpus:
    """The calls of one or more trace files.

    Attributes:
        calls: in the order of files and lines.
        block_names: labels that `TokenCall.blocks` index.
        problems: lines and files that could not be used.
        prompt_files: files that hold prompts without outputs alone, with the number of such lines.
    """

    calls: tuple[TokenCall, ...]
    block_names: tuple[str, ...]
    problems: tuple[Problem, ...]
    prompt_files: tuple[tuple[str, int], ...]


def read_corpus(
    paths: Sequence[Path],
    tokenizer: Tokenizer,
    cache: Path,
    on_progress: Callable[[str, float], None] = lambda _what, _share: None,
) -> Corpus:
    """Read and tokenise trace files; what could not be read is left out and listed.

    Args:
        paths: files, in the order in which they are to be read.
        tokenizer: turns text into tokens.
        cache: folder for tokenised files; one that can't be written is done without.
        on_progress: called with the file's name and the share of it that is done.
    """
    calls: list[TokenCall] = []
    block_names: dict[str, int] = {}
    problems: list[Problem] = []
    prompt_files: list[tuple[str, int]] = []
    for path in paths:
        arrays = _cached_arrays(path, tokenizer, cache, functools.partial(on_progress, path.name))
        strings = json.loads(bytes(arrays["strings"]).decode())
        problems += [Problem(str(path) if row["path"] == "" else row["path"], row["line"], row["reason"])
                     for row in strings["problems"]]  # fmt: skip
        block_ids = np.array([block_names.setdefault(name, len(block_names)) for name in strings["blocks"]], np.uint16)
        before = len(calls)
        calls += _token_calls(arrays, strings["names"], block_ids, tokenizer)
        if len(calls) == before and strings["num_prompts"]:
            prompt_files.append((str(path), strings["num_prompts"]))
    return Corpus(tuple(calls), tuple(block_names), tuple(problems), tuple(prompt_files))


def _token_calls(
    arrays: Arrays, names: list[str], block_ids: NDArray[np.uint16], tokenizer: Tokenizer
) -> Iterator[TokenCall]:
    texts = _Pieces(arrays["text_tokens"], arrays["text_offsets"])
    outputs = _Pieces(arrays["output_tokens"], arrays["output_offsets"])
    blocks = _Pieces(block_ids[arrays["blocks"]] if len(block_ids) else arrays["blocks"], arrays["output_offsets"])
    starts = _Pieces(arrays["is_block_start"], arrays["output_offsets"])
    prompts = _Pieces(arrays["prompt_texts"], arrays["prompt_offsets"])
    roles = _Pieces(arrays["prompt_roles"], arrays["prompt_offsets"])
    answer = tokenizer.header("assistant")
    for call, row in enumerate(arrays["call_names"]):
        prompt = [
            piece
            for role, text in zip(roles[call], prompts[call], strict=True)
            for piece in (tokenizer.header(names[role]), texts[text], tokenizer.footer)
        ]
        workload, workflow, run_id, node, agent_id = (names[index] for index in row)
        pieces = (*prompt, answer)
        yield TokenCall(workload, workflow, run_id, node, agent_id, pieces, outputs[call], blocks[call], starts[call])


class _Pieces:
    """A flat array and where its pieces begin."""

    def __init__(self, flat: NDArray[Any], offsets: NDArray[np.int64]) -> None:
        self._flat = flat
        self._offsets = offsets

    def __getitem__(self, index: int) -> NDArray[Any]:
        return self._flat[self._offsets[index] : self._offsets[index + 1]]


def _cached_arrays(path: Path, tokenizer: Tokenizer, cache: Path, on_progress: Callable[[float], None]) -> Arrays:
    digest = hashlib.sha256(f"{CACHE_VERSION} {tokenizer.digest}".encode())
    for part in (path, refs_path(path)):
        digest.update(hashlib.sha256(part.read_bytes()).digest() if part.is_file() else b"none")
    cached = cache / f"{digest.hexdigest()}.npz"
    try:
        with cached.open("rb") as source, np.load(source) as arrays:
            return dict(arrays)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile):
        pass  # not there, or cut off while it was written
    built = _build_arrays(read_trace(path), tokenizer, on_progress)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        descriptor, unfinished = tempfile.mkstemp(dir=cache, suffix=".part")
        with os.fdopen(descriptor, "wb") as file:
            np.savez(file, **built)  # type: ignore[arg-type]  # the stub takes every keyword for allow_pickle
        os.replace(unfinished, cached)
    except OSError:
        pass  # the cache saves time alone
    return built


def _build_arrays(trace: TraceFile, tokenizer: Tokenizer, on_progress: Callable[[float], None]) -> Arrays:
    problems = [asdict(problem) | {"path": "" if problem.path == trace.path else problem.path}
                for problem in trace.problems]  # fmt: skip
    texts = {message.content: 0 for call in trace.calls for message in call.prompt}
    num_chars = sum(map(len, texts)) + sum(len(call.output) for call in trace.calls) + 1
    done = 0

    def advance(chunk: Sequence[str]) -> None:
        nonlocal done
        done += sum(map(len, chunk))
        on_progress(done / num_chars)

    calls, encoded = _encode_outputs(trace.calls, tokenizer, problems, advance)
    text_tokens = [tokens for chunk in _chunks(list(texts), advance) for tokens in tokenizer.encode(chunk)]
    text_ids = {text: index for index, text in enumerate(texts)}
    names: dict[str, int] = {}
    blocks: dict[str, int] = {}
    labels = [_label(call.output, output, blocks) for call, output in zip(calls, encoded, strict=True)]
    outputs = [np.append(output.token_ids, tokenizer.end).astype(np.int32) for output in encoded]
    prompts = [message for call in calls for message in call.prompt]
    call_names = [[names.setdefault(getattr(call, name), len(names)) for name in _NAMES] for call in calls]
    arrays: Arrays = {
        "text_tokens": _flat(text_tokens, np.int32),
        "text_offsets": _offsets(map(len, text_tokens)),
        "output_tokens": _flat(outputs, np.int32),
        "output_offsets": _offsets(map(len, outputs)),
        "blocks": _flat([_pad(ids, len(o)) for (ids, _), o in zip(labels, outputs, strict=True)], np.uint16),
        "is_block_start": _flat([_pad(s, len(o), False) for (_, s), o in zip(labels, outputs, strict=True)], np.bool_),
        "prompt_texts": np.array([text_ids[message.content] for message in prompts], np.int32),
        "prompt_roles": np.array([names.setdefault(message.role, len(names)) for message in prompts], np.int32),
        "prompt_offsets": _offsets(len(call.prompt) for call in calls),
        "call_names": np.array(call_names, np.int32).reshape(-1, len(_NAMES)),
    }
    strings = {"names": list(names), "blocks": list(blocks), "problems": problems, "num_prompts": trace.num_prompts}
    arrays["strings"] = np.frombuffer(json.dumps(strings).encode(), np.uint8)
    return arrays


def _encode_outputs(
    calls: Sequence[Call],
    tokenizer: Tokenizer,
    problems: list[dict[str, Any]],
    advance: Callable[[Sequence[str]], None],
) -> tuple[list[Call], list[EncodedText]]:
    """The calls that the tokenizer can write; the first of the others becomes a problem, with their number."""
    chunks = _chunks([call.output for call in calls], advance)
    encoded = [output for chunk in chunks for output in tokenizer.encode_checked(chunk)]
    has_tokens = [len(output.token_ids) + len(tokenizer.end) > 0 for output in encoded]
    rows = zip(calls, encoded, has_tokens, strict=True)
    fitting = [(call, output) for call, output, is_written in rows if is_written and not output.misfit]
    misfits = [(call, output) for call, output in zip(calls, encoded, strict=True) if output.misfit]
    if misfits:
        call, output = misfits[0]
        reason = f"{output.misfit} ({len(misfits)} of {len(calls)} outputs of the file left out)"
        problems.append(asdict(Problem("", call.line, reason)))
    return [call for call, _ in fitting], [output for _, output in fitting]


def _label(text: str, encoded: EncodedText, blocks: dict[str, int]) -> tuple[NDArray[np.uint16], NDArray[np.bool_]]:
    """Block label of each token, by the character at which it begins, and whether it is the first of its block."""
    begins = block_starts(text)
    ids = np.array([blocks.setdefault(name, len(blocks)) for _, name in begins], np.uint16)
    spans = np.searchsorted([offset for offset, _ in begins], encoded.starts, side="right") - 1
    return ids[spans], np.diff(spans, prepend=-1) != 0


def _pad(values: NDArray[Any], length: int, fill: bool | None = None) -> NDArray[Any]:
    """Append what holds for the end token: it belongs to the last block (`fill` None) or is `fill`."""
    if len(values) == length:
        return values
    last = (values[-1] if len(values) else 0) if fill is None else (fill or not len(values))
    return np.append(values, np.full(length - len(values), last, values.dtype))


def _chunks(texts: Sequence[str], advance: Callable[[Sequence[str]], None]) -> Iterator[Sequence[str]]:
    begin = num_chars = 0
    for index, text in enumerate(texts):
        num_chars += len(text)
        if num_chars >= _CHUNK_CHARS or index == len(texts) - 1:
            yield texts[begin : index + 1]
            advance(texts[begin : index + 1])
            begin, num_chars = index + 1, 0


def _flat(pieces: Sequence[NDArray[Any]], dtype: type[np.generic]) -> NDArray[Any]:
    return np.concatenate(pieces).astype(dtype, copy=False) if pieces else np.empty(0, dtype)


def _offsets(lengths: Any) -> NDArray[np.int64]:
    return np.append(0, np.cumsum(np.fromiter(lengths, np.int64))).astype(np.int64)
