"""The block tracker in slow, plain Python: it compares the end of the text with every marker at every byte."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agentspec.sidecar.grammars import ROOT_BLOCK, BlockRule, Grammar

MAX_DEPTH = 16
MAX_PROMPT_BYTES = 512
MAX_NAME_BYTES = 64
MAX_NAME_OFFSET = 256
NAME_BYTES = frozenset(b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz_.-")
WHITESPACE = b" \t\r\n"


@dataclass(frozen=True, slots=True)
class Frame:
    """An open block."""

    rule: BlockRule | None  # None: the top level, or a block that no marker closes
    names: tuple[str, ...]

    @property
    def kind(self) -> str:
        return ROOT_BLOCK if self.rule is None else self.rule.name

    @property
    def is_open_ended(self) -> bool:
        return self.rule is not None and not self.rule.ends


class ReferenceTracker:
    """Follows the block path of one output.

    Args:
        grammar: the markers.
        start_path: block path at the first byte; empty: read from the prompt, else from the request.
        prompt: text of the prompt.
        is_structured: the answer is bare JSON.
        tool: the tool that the answer must call.
    """

    def __init__(
        self,
        grammar: Grammar,
        start_path: str = "",
        prompt: bytes = b"",
        *,
        is_structured: bool = False,
        tool: str = "",
    ) -> None:
        self.grammar = grammar
        self.frames = [Frame(None, ())]
        self.unmatched = b""  # bytes since the last marker that counted
        self.is_at_output_start = True  # they are all bytes of the output
        self.call: bytes | None = None  # text of the innermost block while its tool's name is looked for
        self.num_recoveries = 0
        self.has_changed = False
        if start_path:
            self._enter(start_path)
            return
        self._read_prompt(prompt[-MAX_PROMPT_BYTES:])
        self.num_recoveries = 0
        if len(self.frames) == 1 and (is_structured or tool):
            self.frames = [Frame(None, ("tool_call", tool) if tool else ("tool_call",))]

    @property
    def path(self) -> str:
        """Names of the open blocks, outermost first."""
        return "/".join(self.frames[-1].names) or ROOT_BLOCK

    def advance(self, token: bytes) -> bool:
        """Take a token; returns True if a block began, ended or got its tool's name in it."""
        self.has_changed = False
        for byte in token:
            self.unmatched += bytes([byte])
            if self._take_markers():
                self.unmatched = b"\n" if byte == ord("\n") else b""
                self.is_at_output_start = False
            elif self.call is not None:
                self.call += bytes([byte])
                self._read_name(self.call)
        return self.has_changed

    def _enter(self, path: str) -> None:
        rules = {rule.name: rule for rule in reversed(self.grammar.rules)}
        for name in filter(None, path.split("/")):
            if len(self.frames) == 1 and name == ROOT_BLOCK:
                continue
            names = (*self.frames[-1].names, name)
            if name not in rules and len(self.frames) > 1:
                self.frames[-1] = Frame(self.frames[-1].rule, names)
            elif len(self.frames) <= MAX_DEPTH:
                self.frames.append(Frame(rules.get(name), names))

    def _read_prompt(self, tail: bytes) -> None:
        ends = [tail.rfind(start) + len(start) for start in self.grammar.answer_starts if start in tail]
        last_line = tail.rstrip(WHITESPACE).rfind(b"\n") + 1
        prefill = tail[max(ends) :] if ends else tail[last_line:]
        if not prefill.strip(WHITESPACE):
            return
        self.advance(prefill)
        is_cut = any(frame.rule and set(frame.rule.starts) & set(frame.rule.ends) for frame in self.frames)
        if not ends and is_cut:
            self._close(1)

    def _take_markers(self) -> bool:
        may_replace = True
        for depth in reversed(range(len(self.frames))):
            holder = self.frames[depth]
            if holder.rule is not None and self.unmatched.endswith(holder.rule.ends):
                self._close(depth)
                return True
            rule = self._opened_in(holder) if may_replace else None
            if rule is not None:
                is_next_of_its_kind = holder.is_open_ended and holder.kind == rule.name
                self._open(rule, depth - 1 if is_next_of_its_kind else depth)
                return True
            may_replace = may_replace and holder.is_open_ended
        self.num_recoveries += any(self.unmatched.endswith(rule.ends) for rule in self.grammar.rules)
        return False

    def _opened_in(self, holder: Frame) -> BlockRule | None:
        fitting = [
            (len(start) + (rule.anchor != "anywhere"), -index, rule)
            for index, rule in enumerate(self.grammar.rules)
            for start in rule.starts
            if holder.kind in rule.parents and self._ends_in(start, rule)
        ]
        return max(fitting, key=lambda fit: fit[:2])[2] if fitting else None

    def _ends_in(self, start: bytes, rule: BlockRule) -> bool:
        is_first = self.is_at_output_start and self.unmatched == start
        if rule.anchor == "output":
            return is_first
        if rule.anchor == "line":
            return is_first or self.unmatched.endswith(b"\n" + start)
        return self.unmatched.endswith(start)

    def _open(self, rule: BlockRule, depth: int) -> None:
        self.has_changed |= depth + 1 < len(self.frames)
        self.frames = self.frames[: depth + 1]
        self.call = None
        if rule.name == ROOT_BLOCK:
            return
        if len(self.frames) > MAX_DEPTH:
            self.num_recoveries += 1
            return
        names = self.frames[-1].names
        has_tool_calls = any(other.name == "tool_call" for other in self.grammar.rules)
        if depth == 0 and has_tool_calls and "tool_call" not in rule.parents:  # bare JSON lasts until here
            names = ()
        self.frames.append(Frame(rule, (*names, rule.name)))
        self.has_changed = True
        if rule.name_marks:
            self.call = b""

    def _close(self, depth: int) -> None:
        self.num_recoveries += sum(not frame.is_open_ended for frame in self.frames[depth + 1 :])
        self.frames = self.frames[:depth]
        self.call = None
        self.has_changed = True

    def _read_name(self, call: bytes) -> None:
        frame = self.frames[-1]
        assert frame.rule is not None
        name = name_before_end(call, frame.rule.name_marks)
        if name == b"" and len(call) < MAX_NAME_OFFSET:
            return
        self.call = None
        if name:
            self.frames[-1] = Frame(frame.rule, (*frame.names, name.decode()))
            self.has_changed = True


def name_before_end(call: bytes, marks: Sequence[bytes]) -> bytes | None:
    """The tool's name that the last byte of `call` ends; ``b""``: none does; None: it is too long."""
    *before, last = call
    starts = [
        place
        for place in range(len(call))
        if any(call[:place].endswith(mark) and (mark or place == 0) for mark in marks)
        and NAME_BYTES.issuperset(before[place:])
    ]
    if not starts:
        return b""
    name = bytes(before[max(starts) :])
    if last in NAME_BYTES:
        return None if len(name) == MAX_NAME_BYTES else b""
    return b"" if name == b"function" else name
