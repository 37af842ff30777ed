"""What a hook drafts with, by vLLM's configuration and our options: the client, its metrics, a saved cost model."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from agentspec.sidecar.budget import DEFAULT_INTENSITY, BudgetOptions
from agentspec.sidecar.engine import Engine
from agentspec.sidecar.grammar_store import GrammarStore, server_grammars
from agentspec.sidecar.grammars import preset_name
from agentspec.sidecar.options import ADDITIONAL_CONFIG_KEY, Options, read_options
from agentspec.sidecar.store.metrics import register_store
from agentspec.sidecar.telemetry import METER_NAME, MetricsExport, export_link_metrics, export_metrics

from .client import DraftClient, EmbeddedClient, GuardedClient
from .cost_model import CostModelFile, find_intensity, measure_cpu_intensity
from .mailbox import Fallbacks
from .model_reader import device_name, read_chat_template, read_grammar, read_vocabulary

if TYPE_CHECKING:
    from agentspec.sidecar.block_sharing import BlockSharing

    from .history_link import HistoryLink
    from .sidecar_messages import Vocabulary

# vLLM configures only its own logger tree; a line under any other name would not be seen in `vllm serve`.
logger = logging.getLogger("vllm.agentspec")

GPU_DEADLINE_MS = 3.0
CPU_DEADLINE_MS = 30.0


class Drafting:
    """The draft client of one engine and what belongs to it.

    Args:
        vllm_config: of the engine.
        num_spec_tokens: longest draft that vLLM has room for.

    Attributes:
        options: see `Options`.
        max_draft_tokens: longest draft of a request.
        vocab_size: of the target model.
        deadline_ms: longest wait of a step for its drafts.
        fallbacks: counts why a step got no drafts.
        client: neither blocks, but in `collect` up to its deadline, nor raises.

    Raises:
        OptionsError: ``additional_config["agentspec"]`` or an ``AGENTSPEC_*`` variable is wrong.
    """

    def __init__(self, vllm_config: Any, num_spec_tokens: int) -> None:
        self._config = vllm_config
        self.options = _read_options(vllm_config)
        self.max_draft_tokens = min(num_spec_tokens, self.options.num_speculative_tokens)
        self.vocab_size = int(vllm_config.model_config.get_vocab_size())
        self.deadline_ms = self.options.deadline_ms or _default_deadline_ms(vllm_config)
        self.fallbacks = Fallbacks()
        self._grammar = read_grammar(vllm_config.model_config)
        self._metrics: MetricsExport | None = None
        self._engine: Engine | None = None
        self._sharing: BlockSharing | HistoryLink | None = None
        self._budget = self._make_budget()
        self._cost_model_file = CostModelFile(self.options.cost_model_file, _machine(vllm_config))
        self.client = self._connect() if self.options.mode == "sidecar" else self._embed()

    def shutdown(self) -> None:
        """Stop the client and the export of metrics, and save the cost model."""
        self.client.shutdown()
        if self._sharing is not None:
            self._sharing.shutdown()
        if self._metrics is not None:
            self._metrics.shutdown()
        if self._engine is not None:
            self._cost_model_file.save(self._engine)

    def log_start(self, hook: str) -> None:
        """Say once what drafts, and how."""
        options = self.options
        logger.info(
            "agentspec: hook=%s mode=%s policy=%s K=%d arithmetic_intensity=%.0f deadline_ms=%g namespace=%s "
            "isolation=%s grammar=%s redis=%s metrics_port=%s otlp_endpoint=%s",
            hook,
            options.mode if options.mode == "embedded" else f"{options.mode} socket={options.socket}",
            options.policy,
            self.max_draft_tokens,
            self._budget.arithmetic_intensity or DEFAULT_INTENSITY,
            self.deadline_ms,
            options.namespace,
            options.isolation,
            preset_name(self._grammar),
            options.redis_address() or "off",
            (self._metrics and self._metrics.port) or "off",
            options.otlp_endpoint or "off",
        )

    def _make_budget(self) -> BudgetOptions:
        intensity = self.options.arithmetic_intensity or _find_intensity(self._config)
        if intensity is None:
            self.fallbacks.note("unknown_device", "set arithmetic_intensity; until steps tell, that of an H200 counts")
        return BudgetOptions(self.options.policy, intensity, capture_sizes=_capture_sizes(self._config))

    def _connect(self) -> DraftClient:
        """The client of a draft server, which may come later."""
        from .sidecar_client import SidecarClient  # noqa: PLC0415  # imports grpc, 0.2 s

        client = SidecarClient(self.options.socket, self._vocabulary(), fallbacks=self.fallbacks)
        self._metrics = self._export(partial(export_link_metrics, client.figures))
        return client

    def _vocabulary(self) -> Vocabulary:
        from .sidecar_messages import Vocabulary  # noqa: PLC0415  # imports grpc, 0.2 s

        model = self._config.model_config
        return Vocabulary.of(str(model.model), read_vocabulary(model), read_chat_template(model))

    def _share(self, engine: Engine) -> BlockSharing | HistoryLink | None:
        """Shares the histories of an engine as the options say; the peer may come later."""
        if self.options.mode == "hybrid":
            return self._link(engine)
        return self._share_by_redis(engine) if self.options.redis is not None else None

    def _link(self, engine: Engine) -> HistoryLink:
        from .history_figures import register_histories  # noqa: PLC0415  # for those who share
        from .history_link import HistoryLink  # noqa: PLC0415  # imports grpc, 0.2 s

        options = self.options
        link = HistoryLink(
            engine,
            options.socket,
            self._vocabulary(),
            namespace=options.namespace,
            ttl_s=options.ttl_s,
            # Histories take four times the bytes of their archive: what is larger would not stay.
            max_archive_bytes=options.history_bytes // 2,
        )
        link.start()
        if self._metrics is not None:
            register_histories(self._metrics.provider.get_meter(METER_NAME), link.figures)
        return link

    def _share_by_redis(self, engine: Engine) -> BlockSharing:
        from agentspec.sidecar.block_sharing import BlockSharing  # noqa: PLC0415  # imports redis, 0.2 s
        from agentspec.sidecar.store.keys import model_id, vocabulary_digest  # noqa: PLC0415  # for those who share

        vocabulary = self._vocabulary()
        model = model_id(vocabulary.fingerprint, vocabulary_digest(vocabulary.token_lengths, vocabulary.token_bytes))
        sharing = BlockSharing(engine, model, self.options, roots=[self.options.namespace], ttl_s=self.options.ttl_s)
        sharing.start()
        if self._metrics is not None and (store := sharing.store) is not None:
            register_store(self._metrics.provider.get_meter(METER_NAME), store.figures)
        return sharing

    def _embed(self) -> DraftClient:
        """An engine in this process, behind a guard."""
        options = self.options
        engine = Engine(
            read_vocabulary(self._config.model_config),
            self._grammar,
            num_speculative_tokens=self.max_draft_tokens,
            history_bytes=options.history_bytes,
            namespace_bytes=options.namespace_bytes,
            ttl_s=options.ttl_s,
            stored_tokens_per_s=options.stored_tokens_per_s,
            is_strict=options.isolation == "strict",
            budget=self._budget,
        )
        self._engine = engine
        self._cost_model_file.load(engine)
        self._metrics = self._export(partial(export_metrics, engine))
        self._sharing = self._share(engine)
        return GuardedClient(
            EmbeddedClient(engine, grammars=GrammarStore(engine, server_grammars(options)), fallbacks=self.fallbacks),
            vocab_size=self.vocab_size,
            fallbacks=self.fallbacks,
            deadline_ms=self.deadline_ms,
        )

    def _export(self, export: Callable[..., MetricsExport]) -> MetricsExport | None:
        port = self.options.metrics_port
        if port:
            port += self._config.parallel_config.data_parallel_index
        if not port and not self.options.otlp_endpoint:
            return None
        return export(self.fallbacks.counts, port, self.options.otlp_endpoint)


def _read_options(vllm_config: Any) -> Options:
    config = vllm_config.additional_config
    return read_options(config.get(ADDITIONAL_CONFIG_KEY) if isinstance(config, dict) else None)


def _find_intensity(vllm_config: Any) -> float | None:
    if vllm_config.device_config.device_type == "cpu":
        return measure_cpu_intensity(vllm_config.model_config.dtype.itemsize)
    return find_intensity(device_name())


def _capture_sizes(vllm_config: Any) -> tuple[int, ...]:
    """Tokens per step that vLLM has CUDA graphs for: a step is padded to the next one."""
    compilation = vllm_config.compilation_config
    mode = compilation.cudagraph_mode
    if vllm_config.device_config.device_type == "cpu" or mode is None or mode.name == "NONE":
        return ()
    return tuple(sorted({int(size) for size in compilation.cudagraph_capture_sizes or ()}))


def _machine(vllm_config: Any) -> str:
    """What a saved cost model belongs to."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    device = device_name()
    return f"{device} | {model.model} | {model.dtype} | tp={parallel.tensor_parallel_size}"


def _default_deadline_ms(vllm_config: Any) -> float:
    return CPU_DEADLINE_MS if vllm_config.device_config.device_type == "cpu" else GPU_DEADLINE_MS
