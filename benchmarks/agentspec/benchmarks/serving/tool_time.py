"""How long an agent waits for its tool between two calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

Shape = Literal["constant", "exponential", "lognormal"]


@dataclass(frozen=True, slots=True)
class ToolTime:
    """A distribution of waiting times.

    Attributes:
        shape: of the distribution.
        scale_s: the constant, the mean of the exponential, or the median of the log-normal one, in seconds, >= 0.
        sigma: of the logarithm, for the log-normal one, >= 0.
    """

    shape: Shape = "constant"
    scale_s: float = 0.0
    sigma: float = 0.0

    def draw(self, rng: np.random.Generator) -> float:
        """One waiting time in seconds."""
        if self.shape == "exponential":
            return float(rng.exponential(self.scale_s))
        if self.shape == "lognormal":
            return float(self.scale_s * np.exp(rng.normal(0.0, self.sigma)))
        return self.scale_s

    def __str__(self) -> str:
        names = {"constant": f"{self.scale_s:g}", "exponential": f"exp:{self.scale_s:g}"}
        return names.get(self.shape, f"lognormal:{self.scale_s:g}:{self.sigma:g}")


def parse_tool_time(text: str) -> ToolTime:
    """Read `SECONDS`, `exp:MEAN` or `lognormal:MEDIAN:SIGMA`.

    Raises:
        ValueError: none of these, or a negative or infinite number.
    """
    name, *numbers = text.split(":") if ":" in text else ("constant", text)
    expected = {"constant": 1, "exp": 1, "lognormal": 2}.get(name)
    try:
        values = [float(number) for number in numbers]
    except ValueError:
        values = []
    if expected != len(values) or not all(0 <= value < float("inf") for value in values):
        raise ValueError(f"{text!r}: expected SECONDS, exp:MEAN or lognormal:MEDIAN:SIGMA, in seconds")
    shapes: dict[str, Shape] = {"constant": "constant", "exp": "exponential", "lognormal": "lognormal"}
    return ToolTime(shapes[name], *values)
