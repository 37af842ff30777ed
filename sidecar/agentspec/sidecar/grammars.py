"""Which markers open and close semantic blocks in the output of a model."""

from __future__ import annotations

from dataclasses import dataclass

BLOCK_KINDS = ("reasoning", "tool_call", "code", "text")
ROOT_BLOCK = "text"


@dataclass(frozen=True, slots=True)
class BlockRule:
    """One kind of block: the bytes that open and close it, and the blocks in which it may stand.

    Attributes:
        name: kind of the block, one of `BLOCK_KINDS` or a name of the application's own.
        start: marker that opens it; not empty.
        end: marker that closes it; not empty; may equal `start`.
        parents: names of the blocks that may hold it; `ROOT_BLOCK` is the top level.
    """

    name: str
    start: bytes
    end: bytes
    parents: tuple[str, ...] = (ROOT_BLOCK,)


@dataclass(frozen=True, slots=True)
class Grammar:
    """A set of block rules; text outside all of them is one `ROOT_BLOCK` block.

    Raises:
        ValueError: a marker or name is empty, a name is `ROOT_BLOCK` or a path, a parent is unknown, or two rules open
            with the same marker.
    """

    rules: tuple[BlockRule, ...]

    def __post_init__(self) -> None:
        names = {ROOT_BLOCK, *(rule.name for rule in self.rules)}
        starts: set[bytes] = set()
        for rule in self.rules:
            if not rule.name or not rule.start or not rule.end:
                raise ValueError(f"block rule {rule.name!r}: name, start and end must not be empty")
            if rule.name == ROOT_BLOCK or "/" in rule.name:
                raise ValueError(f"block rule {rule.name!r}: the name must not be {ROOT_BLOCK!r} nor hold a '/'")
            if unknown := set(rule.parents) - names:
                raise ValueError(f"block rule {rule.name!r}: unknown parent {sorted(unknown)[0]!r}")
            if rule.start in starts:
                raise ValueError(f"block rule {rule.name!r}: start marker {rule.start!r} is used twice")
            starts.add(rule.start)


CHAT = Grammar(
    (
        BlockRule("reasoning", b"<think>", b"</think>"),
        BlockRule("tool_call", b"<tool_call>", b"</tool_call>", (ROOT_BLOCK, "reasoning")),
        BlockRule("code", b"```", b"```", (ROOT_BLOCK, "reasoning", "tool_call")),
    )
)
"""Qwen and Hermes markers with fenced code inside any of them; what most open chat models write."""
