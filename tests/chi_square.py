"""Whether two samples are of one distribution."""

from __future__ import annotations

import math
from collections import Counter


def p_value(one: Counter[tuple[int, ...]], other: Counter[tuple[int, ...]]) -> float:
    """Of the hypothesis that two samples of about equal size are of one distribution: chi-square; rare texts are one.

    The tail of chi-square is that of Wilson and Hilferty's normal variable.
    """
    common = [text for text in one | other if one[text] + other[text] >= 20]
    cells = [(one[text], other[text]) for text in common]
    rest = one.total() - sum(cell[0] for cell in cells), other.total() - sum(cell[1] for cell in cells)
    cells += [rest] if sum(rest) >= 20 else []
    statistic = sum((left - right) ** 2 / (left + right) for left, right in cells)
    freedom = len(cells) - 1
    spread = 2 / (9 * freedom)
    return 0.5 * math.erfc(((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(2 * spread))
