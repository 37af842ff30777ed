"""Runs vLLM's Model Runner V2 on a CPU, under Triton's interpreter. Import it before vLLM; for tests alone.

vLLM has a CPU runner of V2, made for triton-cpu; Triton's own interpreter takes the place of that wheel. It is slow,
and its streams and events do nothing: order and bookkeeping are tested, races are not.
"""

from __future__ import annotations

import os
from typing import Any

ENVIRONMENT = {
    "TORCHDYNAMO_DISABLE": "1",
    "TRITON_INTERPRET": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
os.environ.update(ENVIRONMENT)

import triton.backends  # noqa: E402  # reads the environment


class _Driver:
    @staticmethod
    def is_active() -> bool:
        return True


class _Backend:
    driver = _Driver
    compiler = None


triton.backends.backends["cpu"] = _Backend  # without a driver Triton refuses to be imported


def force_async(*, is_async: bool) -> None:
    """vLLM schedules synchronously on CPUs, whatever is asked for."""
    from vllm.platforms.cpu import CpuPlatform  # noqa: PLC0415  # after the environment

    stock = CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(cls: type, vllm_config: Any) -> None:
        stock(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = is_async

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)


def mend_kernels() -> None:
    """Kernels that the interpreter can't run: top-k by torch instead, and masks as booleans."""
    import numpy as np  # noqa: PLC0415
    from triton.runtime import interpreter  # noqa: PLC0415
    from vllm.v1.sample.ops import topk_topp_sampler  # noqa: PLC0415

    topk_topp_sampler.HAS_TRITON = False
    builder = interpreter.InterpreterBuilder

    def with_boolean_mask(stock: Any, place: int) -> Any:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            words = list(args)
            mask = words[place]
            if mask is not None and mask.data.dtype != np.bool_:
                words[place] = interpreter.TensorHandle(mask.data.astype(np.bool_), mask.dtype)
            return stock(self, *words, **kwargs)

        return call

    builder.create_masked_load = with_boolean_mask(builder.create_masked_load, 1)
    builder.create_masked_store = with_boolean_mask(builder.create_masked_store, 2)
