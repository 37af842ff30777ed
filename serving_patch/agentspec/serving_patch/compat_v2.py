"""What the V2 hook assumes of vLLM, and the configurations that it refuses."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from typing import Any

from .compat import LOSSY_REJECTION_METHODS, SUPPORTED, CompatibilityError, check_version

# By class or module of vLLM, and by what the hook overrides, calls or replaces there.
V2_SIGNATURES: dict[str, dict[str, tuple[str, ...]]] = {
    "vllm.v1.worker.gpu.model_runner.GPUModelRunner": {
        "add_requests": ("self", "scheduler_output"),
        "finish_requests": ("self", "scheduler_output"),
        "postprocess_sampled": ("self", "idx_mapping", "sampled_tokens", "num_sampled", "num_rejected"),
        "execute_model": ("self", "scheduler_output"),
        "prepare_inputs": ("self", "scheduler_output"),
        "sample_tokens": ("self", "grammar_output"),
        "take_draft_token_ids": ("self",),
        "initialize_kv_cache": ("self", "kv_cache_config"),
        "shutdown": ("self",),
    },
    "vllm.v1.worker.gpu.model_runner": {
        "init_speculator": ("vllm_config", "device", "req_states"),
        "ModelCudaGraphManager": ("vllm_config", "device", "cudagraph_mode", "decode_query_len"),
    },
    "vllm.v1.worker.gpu.spec_decode.speculator.BaseSpeculator": {
        "init_cudagraph_manager": ("self", "cudagraph_mode"),
        "capture": ("self",),
        "propose": ("self", "input_batch"),
    },
    "vllm.v1.worker.gpu.attn_utils": {
        "get_varlen_cudagraph_unsupported_backend": ("attn_groups", "vllm_config", "max_query_len"),
    },
    "vllm.v1.worker.gpu.async_utils": {"async_copy_to_np": ("x",), "stream": ("to_stream", "from_stream")},
    "vllm.v1.worker.gpu_worker.Worker": {"_make_model_runner": ("self",), "compile_or_warm_up_model": ("self",)},
    "vllm.v1.core.sched.async_scheduler.AsyncScheduler": {
        "schedule": ("self", "throttle_prefills"),
        "update_from_output": ("self", "scheduler_output", "model_runner_output"),
        "_free_request": ("self", "request"),
    },
}
"""The first parameters of each; later ones are passed through as they come."""
V2_FIELDS = {
    "vllm.v1.core.sched.output.SchedulerOutput": (
        *("scheduled_new_reqs", "num_scheduled_tokens", "total_num_scheduled_tokens", "scheduled_spec_decode_tokens"),
        *("finished_req_ids", "has_structured_output_requests", "num_invalid_spec_tokens"),
    ),
    "vllm.v1.core.sched.output.NewRequestData": (
        *("req_id", "prompt_token_ids", "prompt_is_token_ids", "sampling_params", "lora_request", "prefill_token_ids"),
    ),
}
V2_SPEC_METHOD = "ngram_gpu"
V2_WORKER_CLS = "agentspec.serving_patch.hook_v2.AgentSpecWorker"
V2_SCHEDULERS = {
    True: "agentspec.serving_patch.scheduler_v2.AgentSpecAsyncScheduler",
    False: "agentspec.serving_patch.scheduler_v2.AgentSpecSyncScheduler",
}
"""By whether scheduling is asynchronous."""


def check_v2() -> None:
    """Refuse an installed vLLM whose Model Runner V2 is not the one that the hook was written for; imports vLLM.

    Raises:
        CompatibilityError: names what moved.
    """
    for path, functions in V2_SIGNATURES.items():
        owner = _find(path)
        for name, expected in functions.items():
            function = getattr(owner, name, None)
            found = None if function is None else tuple(inspect.signature(function).parameters)[: len(expected)]
            if found != expected:
                raise CompatibilityError(
                    f"{path}.{name} takes {found}, AgentSpec expects {expected}: the V2 hook does not know this build "
                    f'of vLLM; install a release of {SUPPORTED}, or set {{"agentspec": {{"hook": "v1"}}}}'
                )
    for path, fields in V2_FIELDS.items():
        known = {field.name for field in dataclasses.fields(_find(path))}
        if missing := [name for name in fields if name not in known]:
            raise CompatibilityError(
                f"{path} has no {missing[0]}: the V2 hook does not know this build of vLLM; install a release of "
                f'{SUPPORTED}, or set {{"agentspec": {{"hook": "v1"}}}}'
            )


def _find(path: str) -> Any:
    """A module, or a class of one."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name, None) or importlib.import_module(path)
    except ImportError as error:
        raise CompatibilityError(f"vLLM has no {path} ({error}); install a release of {SUPPORTED}") from error


def probe_v2(vllm_config: Any) -> None:
    """Refuse what the V2 hook does not support before the engine starts.

    Raises:
        CompatibilityError: version, signature or configuration; with the reason and the fix.
    """
    check_version()
    check_v2()
    spec = vllm_config.speculative_config
    fix = "start it with `agentspec-vllm serve MODEL`, or with the flags that `agentspec-vllm flags` prints"
    if not vllm_config.use_v2_model_runner:
        raise CompatibilityError(f"hook v2 needs Model Runner V2, this engine runs V1; {fix}")
    if spec is None or spec.method != V2_SPEC_METHOD:
        raise CompatibilityError(
            f"hook v2 needs the speculative method {V2_SPEC_METHOD!r}, which admits asynchronous drafts; this "
            f"engine has {None if spec is None else spec.method!r}; {fix}"
        )
    if (num_stages := vllm_config.parallel_config.pipeline_parallel_size) > 1:
        raise CompatibilityError(f"pipeline_parallel_size is {num_stages}: drafts are cut on one stage alone; use -tp")
    if (rejection := getattr(spec, "rejection_sample_method", "standard")) in LOSSY_REJECTION_METHODS:
        raise CompatibilityError(
            f"rejection_sample_method {rejection!r} changes the output of the target model; remove it"
        )
    for name in ("enable_adaptive_verification", "num_speculative_tokens_per_batch_size"):
        if getattr(spec, name, None):
            raise CompatibilityError(f"{name} chooses draft lengths, and so does AgentSpec; remove it")
    if vllm_config.parallel_config.worker_cls != V2_WORKER_CLS and not _is_our_worker(vllm_config):
        raise CompatibilityError(
            f"worker_cls is {vllm_config.parallel_config.worker_cls!r}: the V2 hook brings its own; remove it, or {fix}"
        )


def _is_our_worker(vllm_config: Any) -> bool:
    """Whether the worker class is one of ours, of a test or a platform."""
    module, _, name = str(vllm_config.parallel_config.worker_cls).rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError):
        return False
    return bool(getattr(found, "is_agentspec_worker", False))
