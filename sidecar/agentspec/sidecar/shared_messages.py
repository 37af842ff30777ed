"""Shared blocks and deletions as the contract has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from agentspec.draft.v1 import history_pb2
from agentspec.sidecar.callers import Caller
from agentspec.sidecar.epochs import MAX_AHEAD_MS, now_ms
from agentspec.sidecar.refusal import RefusalError, invalid
from agentspec.sidecar.shared_blocks import SharedBlocks
from agentspec.sidecar.wire import check_batch, check_name

MAX_NAMESPACES = 4096
MAX_DELETIONS = 4096


@dataclass(frozen=True, slots=True)
class FollowRequest:
    """What an engine wants to follow.

    Attributes:
        namespaces: from `position` on.
        new_namespaces: from now on; one at least of both.
        origin: number of the engine.
        boot_id: of the server that it followed before; 0: none.
        position: that came last from that server.
        deletions: that it knows, ms by namespace.
    """

    namespaces: frozenset[str]
    new_namespaces: frozenset[str]
    origin: int
    boot_id: int
    position: int
    deletions: Mapping[str, int]


def shared_blocks_message(blocks: SharedBlocks) -> history_pb2.SharedBlocks:
    """Blocks for the wire."""
    return history_pb2.SharedBlocks(
        namespace=blocks.namespace,
        origin=blocks.origin,
        sequence=blocks.sequence,
        epoch=blocks.epoch,
        num_tokens=blocks.num_tokens,
        blocks=blocks.blocks,
    )


def blocks_of(message: history_pb2.SharedBlocks) -> SharedBlocks:
    """Blocks from a peer that is trusted with their namespace."""
    return SharedBlocks(
        message.namespace, message.origin, message.sequence, message.epoch, message.num_tokens, message.blocks
    )


def deletion_messages(epochs: Mapping[str, int]) -> list[history_pb2.Deletion]:
    """Deletions for the wire, the latest ones.

    Args:
        epochs: ms, by namespace.
    """
    latest = sorted(epochs.items(), key=lambda item: item[1])[-MAX_DELETIONS:]
    return [history_pb2.Deletion(namespace=namespace, epoch=epoch) for namespace, epoch in latest]


def read_shared_blocks(message: history_pb2.SharedBlocks, caller: Caller) -> SharedBlocks:
    """Blocks that a caller brings.

    Raises:
        RefusalError: a foreign namespace, or a field out of its bound.
    """
    _check_namespace(message.namespace, caller)
    _check_epoch(message.epoch)
    return blocks_of(message)


def read_following(request: history_pb2.FollowBlocksRequest, caller: Caller) -> FollowRequest:
    """What a caller wants to follow.

    Raises:
        RefusalError: a foreign namespace, or a field out of its bound.
    """
    num_namespaces = len(request.namespaces) + len(request.new_namespaces)
    check_batch(num_namespaces, "namespaces", MAX_NAMESPACES)
    check_batch(len(request.deletions), "deletions", MAX_DELETIONS)
    if not num_namespaces:
        raise invalid("namespaces", "expected at least 1, got 0")
    for index, namespace in enumerate(request.namespaces):
        _check_namespace(namespace, caller, f"namespaces[{index}]")
    for index, namespace in enumerate(request.new_namespaces):
        _check_namespace(namespace, caller, f"new_namespaces[{index}]")
    for index, deletion in enumerate(request.deletions):
        try:
            _check_namespace(deletion.namespace, caller)
            _check_epoch(deletion.epoch)
        except RefusalError as error:
            raise error.within(f"deletions[{index}]") from None
    return FollowRequest(
        frozenset(request.namespaces),
        frozenset(request.new_namespaces),
        request.origin,
        request.boot_id,
        request.position,
        {deletion.namespace: deletion.epoch for deletion in request.deletions},
    )


def _check_namespace(namespace: str, caller: Caller, field: str = "namespace") -> None:
    check_name(namespace, field, can_be_empty=False)
    caller.namespace(namespace, field)


def _check_epoch(epoch: int) -> None:
    if epoch > now_ms() + MAX_AHEAD_MS:
        raise invalid("epoch", "expected at most a day from now, in ms since 1970")
