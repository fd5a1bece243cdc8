"""Which backend attends for which layer group: decided once, at start, and said in the log.

Knows what backends can do; nothing of tensors or batches. A backend's module is imported when it is chosen, so that a CPU
server never loads Triton.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from disagg.models.attention.backend import (
    HALF_DTYPES,
    Ask,
    AttentionBackend,
    Capabilities,
    DecodeWork,
    Phase,
    PrefillWork,
)
from disagg.types.errors import ConfigError

AUTO = "auto"

_ANYWHERE = frozenset({"cpu", "cuda"})
_GPU = frozenset({"cuda"})


@dataclass(frozen=True, slots=True)
class Offer:
    """A backend by name. where: module:class."""

    name: str
    where: str
    capabilities: Capabilities

    def make(self) -> Any:
        module, _, name = self.where.partition(":")
        return getattr(importlib.import_module(module), name)()


# In order of preference, of those that can do what is asked. Measured on an H200 in bfloat16 (docs/benchmarks.md): the own
# kernel for Hopper is the fastest for chunks of any length; on other chips cuDNN is for long ones. Triton is for all that these
# cannot do, and for decode. torch runs anywhere.
OFFERS = (
    Offer(
        "hopper",
        "disagg.models.attention.hopper.prefill:HopperPrefill",
        Capabilities(
            Phase.PREFILL,
            _GPU,
            HALF_DTYPES,
            head_dims=(64, 128),
            windows=False,
            softcaps=False,
            sinks=False,
            captured=True,
            whole_pages=True,
            hopper=True,
        ),
    ),
    Offer(
        "cudnn",
        "disagg.models.attention.cudnn_prefill:CudnnPrefill",
        Capabilities(
            Phase.PREFILL,
            _GPU,
            HALF_DTYPES,
            head_dims=(8, 128),
            windows=False,
            softcaps=False,
            sinks=False,
            least_tokens=1024,
            step_tokens=512,  # see cudnn_prefill
            prefix_tokens=2048,
        ),
    ),
    Offer(
        "triton",
        "disagg.models.attention.triton_prefill:TritonPrefill",
        Capabilities(Phase.PREFILL, _GPU, head_dims=(1, 256), captured=True),
    ),
    Offer(
        "torch",
        "disagg.models.attention.torch_backend:TorchPrefill",
        Capabilities(Phase.PREFILL, _ANYWHERE, whole_pages=True),
    ),
    Offer(
        "triton",
        "disagg.models.attention.triton_decode:TritonDecode",
        Capabilities(Phase.DECODE, _GPU, head_dims=(1, 256), captured=True),
    ),
    Offer(
        "torch",
        "disagg.models.attention.torch_backend:TorchDecode",
        Capabilities(Phase.DECODE, _ANYWHERE, whole_pages=True),
    ),
)


@dataclass(frozen=True, slots=True)
class GroupBackends:
    """What attends for one layer group. prefill: in order of preference; the last one takes runs of any length."""

    prefill: tuple[Offer, ...]
    decode: Offer

    def describe(self) -> str:
        """Such as "prefill cudnn (from 1024 tokens), triton; decode triton"."""
        names = []
        for offer in self.prefill:
            least = offer.capabilities.least_tokens
            names.append(offer.name + (f" (from {least} tokens)" if least > 1 else ""))
        return f"prefill {', '.join(names)}; decode {self.decode.name}"

    def make(self) -> MadeBackends:
        prefill = tuple((offer.capabilities, offer.make()) for offer in self.prefill)
        return MadeBackends(prefill, self.decode.make())


@dataclass(frozen=True, slots=True)
class MadeBackends:
    """prefill: with what each one can, in order of preference."""

    prefill: tuple[tuple[Capabilities, AttentionBackend[PrefillWork]], ...]
    decode: AttentionBackend[DecodeWork]


def choose(asks: Sequence[Ask], wanted_prefill: str = AUTO, wanted_decode: str = AUTO) -> GroupBackends:
    """asks: one per phase. wanted: a backend's name, or "auto". Raises ConfigError when it cannot do what is asked."""
    wanted = {Phase.PREFILL: wanted_prefill, Phase.DECODE: wanted_decode}
    able = {ask.phase: _able(ask, wanted[ask.phase]) for ask in asks}
    prefill = []
    for offer in able[Phase.PREFILL]:
        prefill.append(offer)
        if offer.capabilities.least_tokens == 1:
            break
    return GroupBackends(tuple(prefill), able[Phase.DECODE][0])


def _able(ask: Ask, wanted: str) -> list[Offer]:
    """Offers that can do what is asked; the one that is wanted before all others."""
    offers = [offer for offer in OFFERS if offer.capabilities.phase == ask.phase]
    able = [offer for offer in offers if not offer.capabilities.lacks(ask)]
    names = [offer.name for offer in offers]
    setting = f"model.{ask.phase}_attention"
    if wanted not in (AUTO, *names):
        raise ConfigError(f'{setting} = "{wanted}": it must be one of {", ".join((AUTO, *names))}')
    for offer in offers:
        if offer.name == wanted and (lacks := offer.capabilities.lacks(ask)):
            raise ConfigError(
                f'{setting} = "{wanted}": it cannot do what this model asks here ({lacks}); it must be one of '
                f"{', '.join((AUTO, *(each.name for each in able)))}"
            )
    return sorted(able, key=lambda offer: offer.name != wanted)
