"""Recorded chats as blocks of the contract, to warm a server's histories."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from agentspec.draft.v1 import history_pb2
from agentspec.sidecar.traces import Call, TraceFile

MAX_BLOCK_TOKENS = 65536
MAX_BATCH_BLOCKS = 1024
MAX_BATCH_BYTES = 4 << 20

Encode = Callable[[Sequence[str]], list[list[int]]]


class TokenizerFileError(RuntimeError):
    """The tokenizer can't be read; the message says what to do."""


def load_encoder(path: Path, end: str = "") -> Encode:
    """Read a `tokenizer.json`.

    Args:
        path: the file that the model was published with.
        end: text of the special token that ends an answer; empty: none is added.

    Returns:
        What turns answers into token ids as the model wrote them.

    Raises:
        TokenizerFileError: the library is not installed, the file is no tokenizer, or it has no such token.
    """
    try:
        from tokenizers import Tokenizer  # noqa: PLC0415  # only this command needs it
    except ImportError:
        raise TokenizerFileError("the package tokenizers is not installed: pip install tokenizers") from None
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001  # the library raises plain Exception
        raise TokenizerFileError(f"{path}: {error}") from None
    tail: list[int] = []
    if end:
        end_id = tokenizer.token_to_id(end)
        if end_id is None:
            raise TokenizerFileError(f"{path}: no token {end!r}")
        tail = [end_id]

    def encode(texts: Sequence[str]) -> list[list[int]]:
        encodings = tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [[*encoding.ids, *tail] for encoding in encodings]

    return encode


def batches_of(trace: TraceFile, namespace: str, encode: Encode) -> Iterator[list[history_pb2.Block]]:
    """Cut the answers of a trace into messages of blocks.

    Args:
        trace: the calls; those without tokens are left out, of one with too many the end is taken.
        namespace: of all of them.
        encode: from `load_encoder`.
    """
    batch: list[history_pb2.Block] = []
    size = 0
    for begin in range(0, len(trace.calls), MAX_BATCH_BLOCKS):
        calls = trace.calls[begin : begin + MAX_BATCH_BLOCKS]
        for call, token_ids in zip(calls, encode([call.output for call in calls]), strict=True):
            if not token_ids:
                continue
            block = _block(call, namespace, token_ids[-MAX_BLOCK_TOKENS:])
            if batch and (len(batch) == MAX_BATCH_BLOCKS or size + len(block.token_ids) > MAX_BATCH_BYTES):
                yield batch
                batch, size = [], 0
            batch.append(block)
            size += len(block.token_ids)
    if batch:
        yield batch


def _block(call: Call, namespace: str, token_ids: Sequence[int]) -> history_pb2.Block:
    return history_pb2.Block(
        namespace=namespace,
        workflow_id=call.workflow,
        stage=call.node,
        token_ids=np.array(token_ids, np.int32).tobytes(),
    )
