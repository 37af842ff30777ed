"""What the engine is told of the target model: the bytes of each token, block markers, chat template, device."""

from __future__ import annotations

import logging
from typing import Any

from agentspec.sidecar.grammars import CHAT, Grammar, choose_grammar

# vLLM configures only its own logger tree; a line under any other name would not be seen in `vllm serve`.
logger = logging.getLogger("vllm.agentspec")


def read_vocabulary(model_config: Any) -> list[bytes]:
    """Read the bytes of each token id from the tokenizer of a model; special tokens are their text.

    Returns:
        One entry per row of the model's output layer. Ids without text are empty; all are when the engine runs without
        a tokenizer or with one that is not understood: then there are no semantic blocks, and drafting goes on.
    """
    from vllm.tokenizers import cached_tokenizer_from_config  # noqa: PLC0415  # the CLI imports this without vLLM

    vocab_size = int(model_config.get_vocab_size())
    tokenizer = cached_tokenizer_from_config(model_config)
    if tokenizer is None:
        logger.warning("agentspec: the engine has no tokenizer, so semantic blocks are not followed")
        return [b""] * vocab_size
    return vocabulary_of(tokenizer, vocab_size)


def read_model(model: str) -> tuple[list[bytes], Grammar]:
    """Read what `read_vocabulary` and `read_grammar` read, of a model that no engine serves yet.

    Args:
        model: hub id or folder.

    Raises:
        ImportError, OSError, RuntimeError, ValueError: there is no such tokenizer, or it cannot be loaded.
    """
    from vllm.tokenizers import get_tokenizer  # noqa: PLC0415  # the CLI imports this without vLLM

    tokenizer = get_tokenizer(model)
    return vocabulary_of(tokenizer, len(tokenizer)), grammar_of(tokenizer)


def vocabulary_of(tokenizer: Any, vocab_size: int) -> list[bytes]:
    """See `read_vocabulary`."""
    import xgrammar  # noqa: PLC0415  # the CLI imports this without xgrammar

    try:
        vocabulary = xgrammar.TokenizerInfo.from_huggingface(tokenizer).decoded_vocab
    except (ValueError, TypeError, AttributeError, RuntimeError) as error:
        logger.warning(
            "agentspec: tokenizer %s is not understood (%r), so semantic blocks are not followed; drafting goes on",
            type(tokenizer).__name__,
            error,
        )
        return [b""] * vocab_size
    return [*map(bytes, vocabulary[:vocab_size]), *[b""] * (vocab_size - len(vocabulary))]


def read_grammar(model_config: Any) -> Grammar:
    """Choose the block markers of a model's family by the chat template and special tokens of its tokenizer.

    A template given to vLLM's API server (`--chat-template`) is not known here.
    """
    from vllm.tokenizers import cached_tokenizer_from_config  # noqa: PLC0415  # the CLI imports this without vLLM

    tokenizer = cached_tokenizer_from_config(model_config)
    return CHAT if tokenizer is None else grammar_of(tokenizer)


def device_name() -> str:
    """Name of the device that vLLM runs on, as its platform gives it."""
    from vllm.platforms import current_platform  # noqa: PLC0415  # the CLI imports this without vLLM

    return str(current_platform.get_device_name())


def read_chat_template(model_config: Any) -> str:
    """Read the chat template of a model's tokenizer; empty: it has none."""
    from vllm.tokenizers import cached_tokenizer_from_config  # noqa: PLC0415  # the CLI imports this without vLLM

    return _template_of(cached_tokenizer_from_config(model_config)) or ""


def _template_of(tokenizer: Any) -> str | None:
    template = getattr(tokenizer, "chat_template", None)
    return "\n".join(template.values()) if isinstance(template, dict) else template


def grammar_of(tokenizer: Any) -> Grammar:
    """Choose the block markers of a model's family by its tokenizer, of transformers or of vLLM."""
    return choose_grammar(_template_of(tokenizer), [*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()])


def has_gpu() -> bool:
    """Whether vLLM is here and would run on a GPU."""
    try:
        from vllm.platforms import current_platform  # noqa: PLC0415  # the CLI imports this without vLLM
    except ImportError:
        return False
    return bool(current_platform.is_cuda_alike())
