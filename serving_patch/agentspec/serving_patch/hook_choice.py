"""Which hook an engine gets: that of Model Runner V2 where vLLM would run it, else that of V1."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from .model_reader import has_gpu

HookName = Literal["v1", "v2"]
RUNNER_VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"
V1_PRICE = "drafts are known before the next step is scheduled: no asynchronous scheduling, no Model Runner V2"
V2_PRICE = "asynchronous scheduling and vLLM's own runner stay; each step waits for its drafts, deadline_ms at most"


@dataclass(frozen=True, slots=True)
class HookChoice:
    """A hook, and why it was chosen.

    Attributes:
        name: which.
        reason: what decided.
    """

    name: HookName
    reason: str

    @property
    def price(self) -> str:
        """What the hook costs."""
        return V1_PRICE if self.name == "v1" else V2_PRICE


def choose_hook(
    asked: Literal["auto", "v1", "v2"], environ: Mapping[str, str], find_gpu: Callable[[], bool] = has_gpu
) -> HookChoice:
    """Choose the hook of an engine that is to start.

    Args:
        asked: the option `hook`.
        environ: where vLLM's own switch is.
        find_gpu: tells whether vLLM would run on a GPU; asked last, because it imports vLLM.
    """
    if asked != "auto":
        return HookChoice(asked, f"option hook={asked}")
    switch = environ.get(RUNNER_VARIABLE)
    if switch is not None:
        is_v2 = switch.strip().lower() in {"1", "true"}
        return HookChoice("v2" if is_v2 else "v1", f"{RUNNER_VARIABLE}={switch}")
    return (
        HookChoice("v2", "vLLM runs on a GPU") if find_gpu() else HookChoice("v1", "vLLM runs on a CPU, or is not here")
    )
