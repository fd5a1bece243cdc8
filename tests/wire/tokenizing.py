"""What a client does of tokenizing: asks, and reads the answer."""

from __future__ import annotations

from collections.abc import Sequence

from disagg.wire import pb


def tokenize_request_to_proto(
    *, model: str, text: str, add_special_tokens: bool = True
) -> pb.inference.TokenizeRequest:
    return pb.inference.TokenizeRequest(model=model, text=text, add_special_tokens=add_special_tokens)


def tokenize_response_from_proto(message: pb.inference.TokenizeResponse) -> tuple[int, ...]:
    return tuple(message.token_ids)


def detokenize_request_to_proto(
    *, model: str, token_ids: Sequence[int], skip_special_tokens: bool = True
) -> pb.inference.DetokenizeRequest:
    return pb.inference.DetokenizeRequest(model=model, token_ids=token_ids, skip_special_tokens=skip_special_tokens)


def detokenize_response_from_proto(message: pb.inference.DetokenizeResponse) -> str:
    return message.text
