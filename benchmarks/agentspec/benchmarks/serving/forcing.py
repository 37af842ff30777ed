"""Makes the target model write what a trace says, while it does the full work of answering."""

from __future__ import annotations

import functools
from typing import Any

FORCED_KEY = "forced"
"""Key of `SamplingParams.extra_args`: the output as a list of token ids."""

# Above every real logit; finite, because softmax turns +inf into NaN. Exactly one-hot after softmax, also in bf16.
_FORCED_LOGIT = 1.0e4


class ForcingError(RuntimeError):
    """Outputs cannot be forced in this engine; the message says why."""


def force_outputs(runner: Any) -> None:
    """Wrap the sampling of a V1 model runner: row j of a request with drafts becomes token `position + j` of its trace.

    `_sample` stands before both the plain and the rejection sampler, so a draft token is accepted if, and only if, it
    is the trace's; rows after the first difference are dropped by vLLM as ever.

    Raises:
        ForcingError: the runner samples in another way, or schedules ahead of its samples.
    """
    stock = getattr(runner, "_sample", None)
    if stock is None:
        raise ForcingError("this vLLM's model runner has no _sample to wrap")
    if getattr(runner, "use_async_scheduling", False):
        raise ForcingError("async scheduling is on: the position of a row is not known when it is sampled")

    @functools.wraps(stock)
    def sample(logits: Any, spec_decode_metadata: Any) -> Any:
        if logits is not None:
            _force_rows(runner, logits, spec_decode_metadata)
        return stock(logits, spec_decode_metadata)

    runner._sample = sample


def _force_rows(runner: Any, logits: Any, spec_decode_metadata: Any) -> None:
    import torch  # noqa: PLC0415  # in the engine's process only

    rows: list[int] = []
    token_ids: list[int] = []
    row = 0
    request_ids = runner.input_batch.req_ids
    num_drafts = [0] * len(request_ids) if spec_decode_metadata is None else spec_decode_metadata.num_draft_tokens
    for request_id, num_draft in zip(request_ids, num_drafts, strict=True):
        request = runner.requests[request_id]
        forced = (request.sampling_params.extra_args or {}).get(FORCED_KEY)
        if forced is not None:
            position = len(request.output_token_ids)
            tokens = forced[position : position + num_draft + 1]
            rows += range(row, row + len(tokens))
            token_ids += tokens
        row += num_draft + 1
    if rows:
        logits[torch.tensor(rows), torch.tensor(token_ids)] = _FORCED_LOGIT
