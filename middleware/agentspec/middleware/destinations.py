"""Which servers may get tags."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from urllib.parse import urlsplit

_PORTS = {"http": 80, "https": 443}
# They answer an unknown body field with an error, and our ids are none of their business.
_HOSTED = (
    *("ai21.com", "aliyuncs.com", "anthropic.com", "baseten.co", "bigmodel.cn", "cerebras.ai", "cloudflare.com"),
    *("cohere.ai", "cohere.com", "databricks.com", "azuredatabricks.net", "deepinfra.com", "deepseek.com"),
    *("fireworks.ai", "friendli.ai", "github.ai", "githubcopilot.com", "googleapis.com", "groq.com"),
    *("huggingface.co", "hyperbolic.xyz", "minimax.chat", "minimax.io", "minimaxi.com", "mistral.ai"),
    *("moonshot.ai", "moonshot.cn", "nebius.ai", "nebius.com", "novita.ai", "nvidia.com", "openai.com"),
    *("cognitiveservices.azure.com", "openai.azure.com", "services.ai.azure.com", "models.ai.azure.com"),
    *("inference.ai.azure.com", "openrouter.ai", "perplexity.ai", "sambanova.ai", "siliconflow.cn"),
    *("siliconflow.com", "stepfun.com", "together.ai", "together.xyz", "vercel.sh", "volces.com", "writer.com"),
    *("x.ai", "z.ai"),
)


def endpoints(base_urls: Sequence[str]) -> frozenset[str]:
    """``host:port`` of each base URL; paths do not matter.

    Raises:
        TypeError: a single string, or an element that is none.
        ValueError: no URL at all, or one that is not ``http(s)://host[:port]…``; the message holds it.
    """
    if isinstance(base_urls, str) or not isinstance(base_urls, Sequence):
        raise TypeError(f"base_urls: expected a list of URLs, got {type(base_urls).__name__}: {base_urls!r}")
    if not base_urls:
        raise ValueError("base_urls: expected at least one URL, got []: no call would carry tags")
    for url in base_urls:
        if not isinstance(url, str):
            raise TypeError(f"base_urls: expected URLs as str, got {type(url).__name__}: {url!r}")
        if _endpoint(url) is None:
            raise ValueError(f"base_urls: expected http(s)://host[:port], got {url!r}")
    return frozenset(endpoint for url in base_urls if (endpoint := _endpoint(url)))


def _endpoint(url: str) -> str | None:
    try:
        parts = urlsplit(url)
        port = parts.port or _PORTS.get(parts.scheme)
    except ValueError:
        return None
    return f"{parts.hostname}:{port}" if parts.hostname and port else None


@functools.lru_cache(maxsize=256)
def may_be_tagged(url: str, allowed: frozenset[str] | None) -> bool:
    """Whether tags may go to `url`: its endpoint is in `allowed`, or, with `None`, no known hosted provider's."""
    if allowed is not None:
        return _endpoint(url) in allowed
    host = urlsplit(url).hostname or ""
    is_bedrock = host.startswith("bedrock") and host.endswith(".amazonaws.com")
    return not is_bedrock and not any(host == hosted or host.endswith("." + hosted) for hosted in _HOSTED)
