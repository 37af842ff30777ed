"""How long a verification step takes, by the tokens in it: models of hardware, named or from a file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray


class CostCurveError(ValueError):
    """A cost curve is neither a known name nor a readable file; the message says what was expected."""


@dataclass(frozen=True, slots=True)
class CostCurve:
    """Time of one step, linear between points, constant before the first and straight on after the last.

    Attributes:
        name: as the user wrote it.
        points: (tokens in the step, ms), tokens rising, ms > 0; at least one.
    """

    name: str
    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        tokens, ms = np.array(self.points, np.float64).reshape(-1, 2).T
        if not len(tokens) or not np.all(np.isfinite(tokens)) or np.any(np.diff(tokens) <= 0) or tokens[0] < 1:
            raise CostCurveError(f"{self.name}: expected points whose tokens rise from 1 or more")
        if not np.all((ms > 0) & np.isfinite(ms)):
            raise CostCurveError(f"{self.name}: expected times above 0 ms")

    def step_ms(self, num_tokens: ArrayLike) -> NDArray[np.float64]:
        """Time of a step with `num_tokens` tokens, decode rows and draft tokens together; any shape."""
        tokens, ms = np.array(self.points, np.float64).T
        num_tokens = np.asarray(num_tokens, np.float64)
        slope = (ms[-1] - ms[-2]) / (tokens[-1] - tokens[-2]) if len(tokens) > 1 else 0.0
        beyond = np.maximum(num_tokens - tokens[-1], 0.0)
        return np.asarray(np.interp(num_tokens, tokens, ms) + slope * beyond)

    def knee(self) -> float:
        """Tokens from which on each further one costs most: the arithmetic intensity; infinite without a bend."""
        tokens, ms = np.array(self.points, np.float64).T
        slopes = np.append(0.0, np.diff(ms) / np.diff(tokens))
        bends = np.diff(slopes)
        if not len(bends) or bends.max() <= 0:
            return float("inf")
        return float(tokens[int(np.argmax(bends))])

    def token_budget(self, batch_size: int) -> float:
        """M(b): draft tokens that a step verifies for free beside `batch_size` decode rows; >= 0, may be infinite."""
        return max(0.0, self.knee() - batch_size)


def _roofline(name: str, intensity: int, memory_ms: float, slope: float = 0.0) -> CostCurve:
    """A step reads the weights in `memory_ms`; from `intensity` tokens on it computes for longer than that."""
    at_knee = 1 + slope * intensity
    beyond = (1 + slope * intensity + slope + 1 / intensity) * memory_ms
    return CostCurve(name, ((1, (1 + slope) * memory_ms), (intensity, at_knee * memory_ms), (intensity + 1, beyond)))


# bf16 FLOP/s over bytes/s of HBM; ms to read the 48 GB of a 24 B model.
CURVES = {
    curve.name: curve
    for curve in (
        _roofline("h100", 295, 14.3),
        _roofline("h200", 206, 10.0),
        _roofline("a100", 153, 23.5),
        _roofline("h200-sloped", 206, 10.0, slope=0.001),
        CostCurve("cpu-steep", ((1, 113), (24, 113), (25, 116))),
    )
}


def find_curve(name: str) -> CostCurve:
    """A curve by name, or from a JSON file ``{"points": [[tokens, ms], ...]}``.

    Raises:
        CostCurveError: no such name and no such file, or the file is not of that form.
    """
    if name in CURVES:
        return CURVES[name]
    path = Path(name)
    if not path.is_file():
        raise CostCurveError(f"{name}: no such file, and no curve of that name: {', '.join(CURVES)}")
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        return CostCurve(name, tuple((float(tokens), float(ms)) for tokens, ms in record["points"]))
    except CostCurveError:
        raise
    except (OSError, ValueError, TypeError, LookupError) as error:
        raise CostCurveError(f'{name}: expected {{"points": [[tokens, ms], ...]}}: {error}') from None
