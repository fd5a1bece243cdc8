"""disagg.v1.Inference on a Router: parses, calls, formats. Knows the wire and the router's face; decides nothing."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any, TypeAlias
from urllib.parse import unquote

import grpc
from msgspec.structs import replace

from disagg.auth.quotas import Use
from disagg.router.requests import ChoiceDelta, Finished, GenerateRequest, Started, Update
from disagg.router.service import Router
from disagg.router.tenants import TENANT_HEADER, tenant_of
from disagg.types.addresses import bare, unmapped
from disagg.types.errors import DisaggError, InvalidRequest
from disagg.types.trace_context import MAX_CHARS
from disagg.wire import pb
from disagg.wire.entry import owner_of_call
from disagg.wire.inference import (
    abort_request_from_proto,
    choice_delta_to_proto,
    detokenize_request_from_proto,
    detokenize_response_to_proto,
    finished_to_proto,
    generate_request_from_proto,
    list_models_response_to_proto,
    started_to_proto,
    tokenize_request_from_proto,
    tokenize_response_to_proto,
)
from disagg.wire.services import InferenceServicer
from disagg.wire.status import abort_with

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class InferenceService(InferenceServicer):
    """A client that cancels its call, or whose gRPC deadline passes, closes the request's iterator, which aborts it."""

    def __init__(self, router: Router) -> None:
        self._router = router

    async def generate(
        self, request: pb.inference.GenerateRequest, context: Context
    ) -> AsyncIterator[pb.inference.GenerateResponse]:
        try:
            with Use(owner_of_call()) as use:
                updates = self._router.generate(self._asked(request, context, use), use)
                async with aclosing(updates):
                    async for update in updates:
                        yield _to_proto(update)
            return
        except DisaggError as error:
            failure = error
        del request  # see abort_with
        await abort_with(context, failure)

    def _asked(self, request: pb.inference.GenerateRequest, context: Context, use: Use) -> GenerateRequest:
        """Raises QuotaExceeded before anything is read of it, or InvalidRequest. Either is noted as a refusal."""
        try:
            self._router.ask_quota(use)
            fields = generate_request_from_proto(request, self._router.limits.max_tokens)
            tenant = _tenant(context)
        except DisaggError as error:
            self._router.note_refused(error, request.request_id)
            raise
        trace = _traceparent(context)
        asked = GenerateRequest(**fields, tenant=tenant, owner=use.owner, traceparent=trace)
        left_s = context.time_remaining()  # until the call's own deadline
        if left_s is None or not math.isfinite(left_s):
            return asked
        return replace(asked, deadline_s=min(self._router.deadline_s(asked), max(0.001, left_s)))

    async def tokenize(self, request: pb.inference.TokenizeRequest, context: Context) -> pb.inference.TokenizeResponse:
        try:
            return tokenize_response_to_proto(
                await self._router.tokenize(**tokenize_request_from_proto(request), tenant=_tenant(context))
            )
        except DisaggError as error:
            failure = error
        del request  # see abort_with
        await abort_with(context, failure)

    async def detokenize(
        self, request: pb.inference.DetokenizeRequest, context: Context
    ) -> pb.inference.DetokenizeResponse:
        most = self._router.limits.max_tokens
        try:
            return detokenize_response_to_proto(
                await self._router.detokenize(**detokenize_request_from_proto(request, most), tenant=_tenant(context))
            )
        except DisaggError as error:
            failure = error
        del request  # see abort_with
        await abort_with(context, failure)

    async def list_models(
        self, request: pb.inference.ListModelsRequest, context: Context
    ) -> pb.inference.ListModelsResponse:
        return list_models_response_to_proto(self._router.models())

    async def abort(self, request: pb.inference.AbortRequest, context: Context) -> pb.inference.AbortResponse:
        try:
            found = self._router.abort(*abort_request_from_proto(request))
        except DisaggError as error:
            failure = error
        else:
            if found:
                return pb.inference.AbortResponse(found=True)
            # Unknown and not the caller's look the same, so that nobody can try ids out.
            await context.abort(grpc.StatusCode.NOT_FOUND, "no request of this id and abort_token runs here")
        await abort_with(context, failure)


def _traceparent(context: Context) -> str:
    said = (value for name, value in context.invocation_metadata() or () if name == "traceparent")
    first = next(said, "")
    return first[:MAX_CHARS] if isinstance(first, str) else ""


def _tenant(context: Context) -> str:
    """Raises InvalidRequest where it is named more than once: which one is meant, nobody knows."""
    pairs = tuple(context.invocation_metadata() or ())
    named = sum(name == TENANT_HEADER for name, _ in pairs)
    if named > 1:
        raise InvalidRequest(f"{TENANT_HEADER} is there {named} times: give it once", TENANT_HEADER)
    if owner := owner_of_call():
        return tenant_of("", name=owner)
    peer = context.peer()
    kind, _, rest = peer.partition(":")
    address = unmapped(bare(unquote(rest).rpartition(":")[0])) if kind in ("ipv4", "ipv6") else rest
    said = {
        name: value if isinstance(value, str) else value.decode("latin-1")
        for name, value in reversed(pairs)
        if name in (TENANT_HEADER, "authorization")
    }
    return tenant_of(address, said.get("authorization", ""), peer, said.get(TENANT_HEADER, ""))


def _to_proto(update: Update) -> pb.inference.GenerateResponse:
    match update:
        case Started():
            return started_to_proto(update)
        case ChoiceDelta():
            return choice_delta_to_proto(update)
        case Finished():
            return finished_to_proto(update)
