"""When a choice ends by its tokens. Pure; stop strings are the router's business."""

from __future__ import annotations

from disagg.types.ids import FinishReason
from disagg.types.sampling import SamplingParams


def finish_of(
    token_id: int, output_index: int, params: SamplingParams, eos_token_ids: tuple[int, ...], tokens_left: int
) -> FinishReason | None:
    """Why the choice ends with this token, the one at `output_index` of its outputs; None if it goes on.

    tokens_left: how many more tokens the model's context has room for after this one.
    """
    if output_index >= params.min_tokens:
        if token_id in eos_token_ids and not params.ignore_eos:
            return FinishReason.STOP
        if token_id in params.stop_token_ids:
            return FinishReason.STOP
    if output_index + 1 >= params.max_tokens or tokens_left <= 0:
        return FinishReason.LENGTH
    return None
