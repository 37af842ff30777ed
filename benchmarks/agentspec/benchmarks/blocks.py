"""Which kind of text each part of an output is: labels for the figures, the same whatever method is measured."""

from __future__ import annotations

import re

PROSE = "prose"
_ENDS = {
    "<think>": ("think", re.compile("</think>")),
    "<tool_call>": ("tool_call", re.compile("</tool_call>")),
    "<<<<<<< SEARCH": ("search_replace", re.compile(">>>>>>> REPLACE")),
    "```": ("code", re.compile("```")),
    "<thoughts>": ("thoughts", re.compile("</thoughts>")),
    "<replace>": ("replace", re.compile("</replace>")),
    "{": ("json", re.compile(r"^\}", re.MULTILINE)),
}
_START = re.compile(r"^\{|" + "|".join(re.escape(marker) for marker in _ENDS if marker != "{"), re.MULTILINE)
_TOOL_NAME = re.compile(r'"name"\s*:\s*"([^"\n]{1,128})"')


def block_starts(text: str) -> list[tuple[int, str]]:
    """Cut an output into blocks that do not nest.

    A block begins after its opening marker and ends with its closing one, as a tracker sees it that reads token by
    token; the name of a tool refines its block from the name's closing quote on. A block that nobody closes runs to
    the end, a brace at a line start without its partner is prose.

    Returns:
        Character offset and label of each block, in order; the first is ``(0, "prose")``. Blocks may be empty.
    """
    starts = [(0, PROSE)]
    position = 0
    while opening := _START.search(text, position):
        label, end = _ENDS[opening[0]]
        closing = end.search(text, opening.end())
        if closing is None and label == "json":
            position = opening.end()
            continue
        position = closing.end() if closing else len(text)
        starts.append((opening.end(), label))
        if label == "tool_call" and (name := _TOOL_NAME.search(text, opening.end(), position)):
            starts.append((name.end(), f"{label}/{name[1]}"))
        if closing:
            starts.append((position, PROSE))
    return starts
