"""A tokenizer of single bytes and trace files made by hand, for the tests of the replay."""

from __future__ import annotations

import gzip
import importlib.util
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tokenizers import Tokenizer as HfTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers

from agentspec.benchmarks.corpus import Corpus, TokenCall, read_corpus
from agentspec.benchmarks.tokenizer import Tokenizer
from agentspec.sidecar.engine import StepRequest


def write_tokenizer(
    path: Path, *, is_lossy: bool = False, special: Sequence[str] = ("<|im_start|>", "<|im_end|>")
) -> Path:
    """A byte is a token; lossy: letters lose their case."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = HfTokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    if is_lossy:
        tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.add_special_tokens([*special])
    tokenizer.save(str(path))
    return path


def byte_tokenizer(folder: Path, **options: Any) -> Tokenizer:
    return Tokenizer(write_tokenizer(folder / "tokenizer.json", **options))


def trace_line(run_id: str, step: int, output: str, **fields: Any) -> dict[str, Any]:
    line = {
        "workload": "qa",
        "workflow": "react",
        "run_id": run_id,
        "step": step,
        "node": "thought",
        "agent_id": "solver",
        "prompt_base": None,
        "prompt_keep": 0,
        "prompt": [{"role": "user", "content": f"question of {run_id}"}],
        "output": output,
    }
    return line | fields


def write_lines(path: Path, lines: Sequence[dict[str, Any] | str]) -> Path:
    text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def corpus_of(folder: Path, lines: Sequence[dict[str, Any] | str], **options: Any) -> Corpus:
    folder.mkdir(exist_ok=True)
    return read_corpus(
        [write_lines(folder / "trace.jsonl", lines)], byte_tokenizer(folder, **options), folder / "cache"
    )


def ids(*tokens: int) -> NDArray[np.int32]:
    return np.array(tokens, np.int32)


def token_call(
    output: Sequence[int], *, run_id: str = "r", prompt: Sequence[int] = (), workload: str = "qa"
) -> TokenCall:
    """A call in which every token is of block 0, and the first one starts it."""
    is_block_start = np.arange(len(output)) == 0
    return TokenCall(
        workload, "react", run_id, "thought", "solver", (ids(*prompt),), ids(*output),
        np.zeros(len(output), np.uint16), is_block_start,
    )  # fmt: skip


def step_of(
    handle: int, new: Sequence[int] = (), *, num_draft: int = 0, num_accepted: int = 0, room: int = 16
) -> StepRequest:
    """A step of one request."""
    return StepRequest(
        step_id=1,
        handles=np.array([handle], np.int64),
        positions=ids(0),
        token_offsets=ids(0, len(new)),
        token_ids=ids(*new),
        num_draft_tokens=ids(num_draft),
        num_accepted_tokens=ids(num_accepted),
        max_draft_tokens=ids(room),
        num_decode_rows=1,
        num_prefill_tokens=0,
        token_budget=room,
    )


def require_arctic() -> None:
    """Skip a test where Arctic Inference is missing; in CI that is a failure."""
    if importlib.util.find_spec("arctic_inference") is None:
        if os.environ.get("CI"):
            pytest.fail("Arctic Inference is not installed: run .ci/build-arctic")
        pytest.skip("Arctic Inference is not installed")
