"""Block grammars: which markers open and close the semantic blocks in the answers of a stage."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import permutations
from typing import Any, Literal

ROOT_BLOCK = "text"
MAX_BLOCKS = 60
MAX_INLINE_BYTES = 1024
Anchor = Literal["anywhere", "line", "output"]
ANCHORS: tuple[Anchor, ...] = ("anywhere", "line", "output")

_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,64}")


@dataclass(frozen=True, slots=True)
class Block:
    """One kind of semantic block in an answer.

    !!! example

        ```python
        Block("plan", start="## Plan", end="## End", anchor="line")
        ```

    Attributes:
        name: ``reasoning``, ``tool_call``, ``code`` or a name of your own: 1 to 64 letters, digits, "_", "-", ".".
        start: marker that opens it, or several.
        end: marker that closes it, or several; None: it lasts until a marker opens or closes a block around it, or
            opens the next one of its own kind.
        parents: names of the blocks that may hold it; ``text`` is the top level.
        anchor: where a start marker counts: anywhere, only at the start of a line, or only at that of the answer.
        tool_name_after: what stands right before the name of the called tool, which then refines the block path.

    Raises:
        TypeError: a value of the wrong type.
        ValueError: an empty, duplicate or unencodable marker, a bad name or anchor; the message holds the value.
    """

    name: str
    start: str | tuple[str, ...]
    end: str | tuple[str, ...] | None = None
    parents: tuple[str, ...] = (ROOT_BLOCK,)
    anchor: Anchor = "anywhere"
    tool_name_after: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise TypeError(f"block name: expected a str, got {type(self.name).__name__}: {self.name!r}")
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"block name: expected 1 to 64 letters, digits, '_', '-' or '.', got {self.name!r}")
        where = f"block {self.name!r}"
        _check_markers(f"{where}: start", self.start)
        if self.end is not None:
            _check_markers(f"{where}: end", self.end)
        if self.tool_name_after is not None:
            _check_markers(f"{where}: tool_name_after", self.tool_name_after, may_be_empty=True)
        if self.name == ROOT_BLOCK and (self.end is not None or self.tool_name_after is not None):
            raise ValueError(f"{where}: opens nothing, so it takes no end and no tool name, got {self.end!r}")
        if not isinstance(self.parents, tuple) or not all(isinstance(parent, str) for parent in self.parents):
            raise TypeError(f"{where}: parents: expected a tuple of names, got {self.parents!r}")
        if self.anchor not in ANCHORS:
            raise ValueError(f"{where}: anchor: expected one of {', '.join(ANCHORS)}, got {self.anchor!r}")

    @property
    def starts(self) -> tuple[str, ...]:
        """The start markers."""
        return (self.start,) if isinstance(self.start, str) else self.start

    def to_json(self) -> dict[str, Any]:
        """The form that the server reads; what has its default value is left out."""
        block: dict[str, Any] = {"name": self.name, "start": _plain(self.start), "end": _plain(self.end)}
        if self.parents != (ROOT_BLOCK,):
            block["parents"] = list(self.parents)
        if self.anchor != "anywhere":
            block["anchor"] = self.anchor
        if self.tool_name_after is not None:
            block["tool_name_after"] = _plain(self.tool_name_after)
        return block


class BlockGrammar:
    """The blocks of a stage's answers; text outside all of them is one ``text`` block.

    !!! example

        ```python
        grammar = BlockGrammar(
            Block("reasoning", start="Thought:", anchor="line"),
            Block("tool_call", start="Action:", anchor="line", tool_name_after=" "),
        )
        spec = AgentSpecMiddleware(workflow_id="triage", grammars={"decide": grammar})
        ```

    It travels with each call of its stage. For larger ones give the server a file in `grammars_dir` and name its id.

    Args:
        *blocks: 1 to 60 of them; several may share a name.

    Raises:
        TypeError: something that is no `Block`.
        ValueError: no block, an unknown parent, a start marker that is used twice or hides another one, or more than
            1 KiB as JSON; the message holds the value.
    """

    __slots__ = ("_json", "blocks")

    def __init__(self, *blocks: Block) -> None:
        for block in blocks:
            if not isinstance(block, Block):
                raise TypeError(f"grammar: expected blocks, got {type(block).__name__}: {block!r}")
        if not 1 <= len(blocks) <= MAX_BLOCKS:
            raise ValueError(f"grammar: expected 1 to {MAX_BLOCKS} blocks, got {len(blocks)}")
        _check_parents(blocks)
        _check_unambiguous(blocks)
        self.blocks = blocks
        self._json = {"blocks": [block.to_json() for block in blocks]}
        num_bytes = len(json.dumps(self._json, separators=(",", ":")))
        if num_bytes > MAX_INLINE_BYTES:
            raise ValueError(
                f"grammar: expected at most {MAX_INLINE_BYTES} bytes as JSON, got {num_bytes}: {blocks[0].name!r} and "
                f"{len(blocks) - 1} more blocks; put it into the server's grammars_dir and name its id instead"
            )

    def __repr__(self) -> str:
        return f"BlockGrammar({', '.join(map(repr, self.blocks))})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BlockGrammar) and self.blocks == other.blocks

    def __hash__(self) -> int:
        return hash(self.blocks)

    def to_json(self) -> dict[str, Any]:
        """The form that the server reads, for the tag or for a file in its `grammars_dir`."""
        return self._json


def _plain(markers: str | tuple[str, ...] | None) -> str | list[str] | None:
    return list(markers) if isinstance(markers, tuple) else markers


def _check_markers(where: str, markers: object, *, may_be_empty: bool = False) -> None:
    listed = (markers,) if isinstance(markers, str) else markers
    if not isinstance(listed, tuple) or not all(isinstance(marker, str) for marker in listed):
        raise TypeError(f"{where}: expected a str or a tuple of them, got {type(markers).__name__}: {markers!r}")
    if not listed or not (may_be_empty or all(listed)):
        raise ValueError(f"{where}: expected markers that are not empty, got {markers!r}")
    if duplicate := _duplicate(listed):
        raise ValueError(f"{where}: marker {duplicate!r} is given twice")
    for marker in listed:
        try:
            marker.encode()
        except UnicodeEncodeError:
            raise ValueError(f"{where}: no answer contains the lone surrogate in {marker!r}") from None


def _duplicate(markers: Iterable[str]) -> str | None:
    seen: set[str] = set()
    for marker in markers:
        if marker in seen:
            return marker
        seen.add(marker)
    return None


def _check_parents(blocks: tuple[Block, ...]) -> None:
    names = {ROOT_BLOCK, *(block.name for block in blocks)}
    for block in blocks:
        for parent in block.parents:
            if parent not in names:
                raise ValueError(f"block {block.name!r}: unknown parent {parent!r}")


def _check_unambiguous(blocks: tuple[Block, ...]) -> None:
    owners = [(start, block) for block in blocks for start in block.starts]
    if duplicate := _duplicate(start for start, _ in owners):
        raise ValueError(f"grammar: start marker {duplicate!r} is used twice")
    for hiding, hidden in _hidden(owners):
        raise ValueError(f"grammar: start marker {hiding!r} is complete before {hidden!r}, which is never found")


def _hidden(owners: list[tuple[str, Block]]) -> Iterator[tuple[str, str]]:
    """Pairs of markers of which the second holds the first before its own end, where both may stand."""
    for (short, short_block), (long, long_block) in permutations(owners, 2):
        if set(short_block.parents) & set(long_block.parents):
            is_inside = short in long[:-1] if short_block.anchor == "anywhere" else long[:-1].startswith(short)
            if is_inside and short_block.anchor in (long_block.anchor, "anywhere"):
                yield short, long
