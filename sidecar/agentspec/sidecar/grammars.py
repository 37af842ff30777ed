"""Which markers open and close semantic blocks in the output of a model: the rules, and a preset per model family."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

BLOCK_KINDS = ("reasoning", "tool_call", "code", "text")
ROOT_BLOCK = "text"
MAX_RULES = 60
MAX_MARKER_BYTES = 4096

Markers = bytes | tuple[bytes, ...]
Anchor = Literal["anywhere", "line", "output"]

_BLOCK_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,64}")


class GrammarError(ValueError):
    """A grammar breaks a rule of its form; the message names the block, the field and the value."""


@dataclass(frozen=True, slots=True)
class BlockRule:
    """One kind of block: the bytes that open and close it, and the blocks in which it may stand.

    Attributes:
        name: kind of the block, one of `BLOCK_KINDS` or a name of the application's own; rules may share one. A rule
            named `ROOT_BLOCK` opens nothing: it only ends the open-ended blocks that it stands in.
        start: marker that opens it, or several; none empty.
        end: marker that closes it, or several; none empty; may equal a start. A block without one is open-ended: it
            lasts until a marker opens or closes a block around it, or opens the next one of its own kind.
        parents: names of the blocks that may hold it; `ROOT_BLOCK` is the top level.
        anchor: where a start marker counts: anywhere, only at the start of a line, or only at that of the output.
        tool_name_after: what stands right before the name of the called tool, which then refines the block path
            (``tool_call/search``); ``b""`` means the start marker itself.
    """

    name: str
    start: Markers
    end: Markers = ()
    parents: tuple[str, ...] = (ROOT_BLOCK,)
    anchor: Anchor = "anywhere"
    tool_name_after: Markers = ()

    @property
    def starts(self) -> tuple[bytes, ...]:
        """The start markers."""
        return (self.start,) if isinstance(self.start, bytes) else self.start

    @property
    def ends(self) -> tuple[bytes, ...]:
        """The end markers; none: the block is open-ended."""
        return (self.end,) if isinstance(self.end, bytes) else self.end

    @property
    def name_marks(self) -> tuple[bytes, ...]:
        """What may stand before a tool's name; none: the path is not refined."""
        return (self.tool_name_after,) if isinstance(self.tool_name_after, bytes) else self.tool_name_after


# What chat templates write right before the answer of the model, by family.
ANSWER_STARTS = (
    b"<|im_start|>assistant",
    b"<|start_header_id|>assistant<|end_header_id|>",
    b"<|start|>assistant",
    "<｜Assistant｜>".encode(),
    "<｜tool▁output▁end｜>".encode(),
    "<｜tool▁outputs▁end｜>".encode(),
    b"[/INST]",
    b"[/TOOL_RESULTS]",
    b"<|assistant|>",
    b"<|im_assistant|>assistant<|im_middle|>",
    b"<|start_of_role|>assistant<|end_of_role|>",
    b"<|CHATBOT_TOKEN|>",
    b"<start_of_turn>model",
)


@dataclass(frozen=True, slots=True)
class Grammar:
    """A set of block rules; text outside all of them is one `ROOT_BLOCK` block.

    Attributes:
        rules: at most `MAX_RULES`.
        answer_starts: what a prompt holds right before the answer. What follows the last one of a prompt belongs to
            the answer, so that a template's ``<think>`` and the application's prefill open blocks.

    Raises:
        GrammarError: a name or marker is out of bounds, a parent is unknown, or a start marker is used twice.
    """

    rules: tuple[BlockRule, ...]
    answer_starts: tuple[bytes, ...] = ANSWER_STARTS

    def __post_init__(self) -> None:
        if len(self.rules) > MAX_RULES:
            raise GrammarError(f"grammar: expected at most {MAX_RULES} rules, got {len(self.rules)}")
        names = {ROOT_BLOCK, *(rule.name for rule in self.rules)}
        used: set[bytes] = set()
        for rule in self.rules:
            _check_rule(rule, names)
            for start in rule.starts:
                if start in used:
                    raise GrammarError(f"block rule {rule.name!r}: start marker {start!r} is used twice")
                used.add(start)
        if not all(self.answer_starts):
            raise GrammarError("grammar: an answer start must not be empty")
        markers = [mark for rule in self.rules for mark in (*rule.starts, *rule.ends, *rule.name_marks)]
        num_bytes = sum(map(len, (*markers, *self.answer_starts)))
        if num_bytes > MAX_MARKER_BYTES:
            raise GrammarError(f"grammar: expected at most {MAX_MARKER_BYTES} bytes of markers, got {num_bytes}")


def _check_rule(rule: BlockRule, names: set[str]) -> None:
    where = f"block rule {rule.name[:80]!r}"
    if not _BLOCK_NAME.fullmatch(rule.name):
        raise GrammarError(f"{where}: name must be 1 to 64 letters, digits, '_', '-' or '.'")
    if not rule.starts:
        raise GrammarError(f"{where}: expected a start marker, got none")
    if not all((*rule.starts, *rule.ends)):
        raise GrammarError(f"{where}: a start or end marker must not be empty")
    if rule.name == ROOT_BLOCK and (rule.ends or rule.name_marks):
        raise GrammarError(f"{where}: opens nothing, so it takes no end and no tool name")
    if unknown := set(rule.parents) - names:
        raise GrammarError(f"{where}: unknown parent {sorted(unknown)[0][:80]!r}")


_JSON_NAME = (b'"name": "', b'"name":"')
_IN_TEXT_OR_REASONING = (ROOT_BLOCK, "reasoning")
_THINK = BlockRule("reasoning", b"<think>", b"</think>")
_CODE = BlockRule("code", b"```", b"```", (ROOT_BLOCK, "reasoning", "tool_call"))

# Qwen, Hermes, GLM and Granite; MiniMax; Seed; Nemotron.
_CALL_TAGS = (b"tool_call", b"tool_calls", b"minimax:tool_call", b"seed:tool_call", b"TOOLCALL")

CHAT = Grammar(
    (
        _THINK,
        BlockRule(
            "tool_call",
            (*(b"<%s>" % tag for tag in _CALL_TAGS), b"<|tool_call_begin|>"),  # the last one: Kimi
            (*(b"</%s>" % tag for tag in _CALL_TAGS), b"<|tool_call_end|>"),
            _IN_TEXT_OR_REASONING,
            tool_name_after=(b"", *_JSON_NAME, b"<function=", b'<invoke name="', b"functions."),
        ),
        _CODE,
    )
)
"""Tool calls in tags, as most open chat models write them; fenced code inside any block, here and below."""

LLAMA = Grammar(
    (
        _THINK,
        BlockRule("tool_call", b"<|python_tag|>", (b"<|eom_id|>", b"<|eot_id|>"), tool_name_after=_JSON_NAME),
        BlockRule("tool_call", b"<function=", (b"</function>", b"<|eom_id|>", b"<|eot_id|>"), tool_name_after=b""),
        # Bare JSON is its usual form of a call; several are separated by semicolons.
        BlockRule("tool_call", (b'{"name": "', b'{"name":"'), anchor="output", tool_name_after=b""),
        BlockRule(
            "tool_call", (b'{"type": "function"', b'{"type":"function"'), anchor="output", tool_name_after=_JSON_NAME
        ),
        BlockRule("tool_call", (b'; {"name": "', b';{"name": "'), parents=("tool_call",), tool_name_after=b""),
        _CODE,
    )
)
"""Llama 3: calls after ``<|python_tag|>``, in ``<function=…>``, or as bare JSON."""

MISTRAL = Grammar(
    (
        BlockRule("reasoning", b"[THINK]", b"[/THINK]"),
        _THINK,
        BlockRule("tool_call", b"[TOOL_CALLS]", tool_name_after=(b"", *_JSON_NAME)),
        # The next one of a JSON list of calls.
        BlockRule("tool_call", (b'}}, {"name": "', b'}},{"name":"'), parents=("tool_call",), tool_name_after=b""),
        _CODE,
    )
)
"""Mistral: ``[TOOL_CALLS]name[ARGS]{…}`` and the older JSON list."""

HARMONY = Grammar(
    (
        BlockRule("reasoning", b"<|channel|>analysis<|message|>", (b"<|end|>", b"<|return|>", b"<|call|>")),
        BlockRule(
            "tool_call",
            (b"<|channel|>commentary to=", b"<|channel|>analysis to=", b"<|start|>assistant to="),
            (b"<|call|>", b"<|end|>", b"<|return|>"),
            tool_name_after=(b"", b"functions."),
        ),
        BlockRule(
            "tool_call",
            b" to=",
            (b"<|call|>", b"<|end|>", b"<|return|>"),
            anchor="output",
            tool_name_after=(b"", b"functions."),
        ),
        _CODE,
    )
)
"""gpt-oss: the channels of harmony; its final channel and preambles are text."""

DEEPSEEK = Grammar(
    (
        _THINK,
        BlockRule(
            "tool_call",
            "<｜tool▁call▁begin｜>".encode(),
            ("<｜tool▁call▁end｜>".encode(), "<｜tool▁calls▁end｜>".encode()),
            _IN_TEXT_OR_REASONING,
            tool_name_after=(b"", "<｜tool▁sep｜>".encode()),
        ),
        BlockRule(
            "tool_call",
            ('<｜DSML｜invoke name="'.encode(), '<｜DSML｜ invoke name="'.encode()),
            ("</｜DSML｜invoke>".encode(), "</｜DSML｜ invoke>".encode()),
            _IN_TEXT_OR_REASONING,
            tool_name_after=b"",
        ),
        _CODE,
    )
)
"""DeepSeek: the special tokens of V3, V3.1 and R1, the tags of V3.2 and V4."""


def _label(label: str) -> tuple[bytes, ...]:
    """``Thought:``, and ``Thought 1`` to ``Thought 9`` of numbered transcripts; a second digit is content."""
    return (f"{label}:".encode(), *(f"{label} {number}".encode() for number in range(1, 10)))


REACT = Grammar(
    (
        BlockRule("reasoning", _label("Thought"), anchor="line"),
        BlockRule("tool_call", _label("Action"), anchor="line", tool_name_after=b" "),
        BlockRule("observation", _label("Observation"), anchor="line"),
        BlockRule(ROOT_BLOCK, b"Final Answer:", anchor="line"),
        *CHAT.rules,
    )
)
"""``Thought:``, ``Action:`` and ``Observation:`` at line starts, over the markers of `CHAT`."""

PRESETS = {
    "chat": CHAT,
    "llama": LLAMA,
    "mistral": MISTRAL,
    "harmony": HARMONY,
    "deepseek": DEEPSEEK,
    "react": REACT,
}

# By what tells the family; the first one that is found wins, since a fine-tuned model keeps tokens of its base model.
_FAMILY_MARKS = (
    (HARMONY, ("<|channel|>analysis", "<|constrain|>")),
    (DEEPSEEK, ("｜tool▁calls▁begin｜", "｜DSML｜")),
    (MISTRAL, ("[TOOL_CALLS]", "[THINK]")),
    (CHAT, ("<tool_call>",)),
    (LLAMA, ("<|python_tag|>", "<|eom_id|>", "<|start_header_id|>")),
)
_REACT_LABELS = ("Thought:", "Action:", "Observation:")


def choose_grammar(chat_template: str | None, special_tokens: Sequence[str]) -> Grammar:
    """Choose the preset of a model's family: by its chat template, or by its special tokens where it has none.

    Args:
        chat_template: Jinja source; of several templates, all of them one after the other.
        special_tokens: texts of the special and the added tokens.

    Returns:
        One of `PRESETS`; `CHAT` if nothing tells the family.
    """
    evidence = chat_template or "\n".join(special_tokens)
    for grammar, marks in _FAMILY_MARKS:
        if any(mark in evidence for mark in marks):
            return grammar
    return REACT if all(label in evidence for label in _REACT_LABELS) else CHAT


def preset_name(grammar: Grammar) -> str:
    """Name of a preset; ``custom`` for any other grammar."""
    return next((name for name, preset in PRESETS.items() if preset == grammar), "custom")
