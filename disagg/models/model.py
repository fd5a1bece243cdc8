"""A Hugging Face decoder that keeps its caches in our pages.

Knows one model, or a rank's part of it, on one device. Which tokens to run, where their pages are and what to do with the
logits is the caller's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from disagg.messages.control import Computation
from disagg.messages.layout import LayerGroup
from disagg.models.attention.backend import Ask, Phase
from disagg.models.attention.calls import PagedAttention, active
from disagg.models.attention.choice import choose
from disagg.models.batch import ForwardBatch
from disagg.models.ends import Ends, logits_into
from disagg.models.experts import Spread
from disagg.models.gemv import add_gemv_copies
from disagg.models.layers import LayerPlaces
from disagg.models.loader import LoadedModel, load
from disagg.models.pool import TORCH_DTYPES, Pool
from disagg.models.ranks import Ranks
from disagg.models.stage_links import StageLinks
from disagg.models.states import PagedStates, active_states

HOPPER = 9  # its compute capability
logger = logging.getLogger(__name__)


class PagedModel:
    """`PagedModel.load(model_dir, dtype, device)`, then `forward` per step."""

    def __init__(
        self,
        loaded: LoadedModel,
        ranks: Ranks,
        computation: Computation,
        spread: Spread | None = None,
        links: StageLinks | None = None,
    ) -> None:
        """Raises ConfigError when an attention backend that is wanted by name cannot do what the layers ask."""
        self._loaded = loaded
        self.ranks = ranks
        self.spread = spread if spread is not None and spread.parts else None
        """Of its experts; None where there are none, or all of them are here."""
        self.links = links or StageLinks()
        self._ends = Ends()
        self._fuse(computation.fusions)
        self.groups = tuple(group.on_rank(ranks.size) for group in loaded.places.groups)
        """Layer groups as this rank keeps them, each with pages of its own in the pool: those of which its stage has layers."""
        backends = {
            index: choose(asks, computation.prefill_attention, computation.decode_attention)
            for index, asks in asks_of(loaded.places, self.device).items()
        }
        self._may_be_captured = all(
            not group.is_state and backends[index].decode.capabilities.captured
            for index, group in enumerate(self.groups)
        )
        self._prefill_may_be_captured = all(
            not group.is_state and any(offer.capabilities.captured for offer in backends[index].prefill)
            for index, group in enumerate(self.groups)
        )
        self._one_prefill_backend = all(chosen.prefill[0].capabilities.captured for chosen in backends.values())
        self._backends = {index: chosen.make() for index, chosen in backends.items()}
        for index, chosen in backends.items():
            logger.info("attention of layer group %s: %s", self.groups[index].name, chosen.describe())

    def _fuse(self, wanted: Sequence[str]) -> None:
        """On a GPU: the kernels have no other device."""
        if not wanted or self.device.type != "cuda":
            return
        from disagg.models.fused.ends import FusedEnds
        from disagg.models.fused.passes import fuse

        whole = [layer for layer, place in self._loaded.places.attention.items() if place.writes and place.cut is None]
        counts = fuse(self._loaded.module, wanted, whole, self._loaded.max_model_len)
        self._ends = FusedEnds(self._loaded.module)
        said = ", ".join(f"{name} {count}" for name, count in counts.items())
        logger.info("fused modules: %s", said)

    def share_sums(self) -> None:
        """Where layers can: let ranks, which are connected now, add up few rows in memory of their own, as many as pay here. All
        of them call it."""
        if self.ranks.size == 1 or self.device.type != "cuda":
            return
        from disagg.models.fused.passes import norm_of_sums
        from disagg.models.fused.sum_times import limit
        from disagg.models.sums.shared import share_rows

        norm = norm_of_sums(self._loaded.module)
        if norm is None:
            return
        shared = share_rows(self.ranks, norm.weight.shape[0], norm.weight.dtype.itemsize, self.device)
        if shared is not None:
            limit(norm, self.ranks, shared)
        self.ranks.shared = shared

    @classmethod
    def load(
        cls,
        model_dir: Path,
        dtype: str,
        device: str,
        ranks: Ranks | None = None,
        computation: Computation | None = None,
        spread: Spread | None = None,
        links: StageLinks | None = None,
    ) -> PagedModel:
        """dtype: "float32", "bfloat16" or "float16". ranks, links: connected before the first forward; None for a single one.
        computation: None for what fits the device best. spread: of experts, among ranks that are connected as late; by default
        among `ranks`.

        Raises ConfigError for a model that cannot be served exactly, or not on so many ranks.
        """
        ranks, links = ranks or Ranks(), links or StageLinks()
        if spread is None and ranks.size > 1:
            spread = Spread(ranks, Ranks())
        loaded = load(model_dir, dtype, device, ranks, spread, links)
        return cls(loaded, ranks, computation or Computation(), spread, links)

    def add_gemv_copies(self) -> int:
        """Make steps of one row faster on CPU, for the weights' bytes once more; returns how many."""
        return add_gemv_copies(self._loaded.module)

    @property
    def whole_groups(self) -> tuple[LayerGroup, ...]:
        """Layer groups of the model, with all layers and KV heads, on however many ranks and stages."""
        return self._loaded.whole_groups

    @property
    def own_groups(self) -> tuple[int, ...]:
        """Which of these `groups` are, by their indices."""
        return self._loaded.own_groups

    @property
    def cuts(self) -> tuple[int, ...]:
        """Stage s has layers [cuts[s], cuts[s + 1]); empty where there is one stage."""
        return self._loaded.cuts

    @property
    def samples(self) -> bool:
        """Whether tokens are sampled on this rank."""
        return self.ranks.samples and self.links.is_last

    def receive(self, rows: int) -> torch.Tensor | None:
        """Hidden states of so many rows from the stage before, once they are here; None in the first stage."""
        stage = self._loaded.stage
        if stage is None or stage.incoming is None:
            return None
        return self.links.receive(rows, stage.incoming.width, stage.incoming.dtype, self.device)

    def blank_hidden(self, rows: int) -> torch.Tensor | None:
        """As if they had been received: for steps of which no other stage knows."""
        stage = self._loaded.stage
        if stage is None or stage.incoming is None:
            return None
        return torch.zeros((1, rows, stage.incoming.width), dtype=stage.incoming.dtype, device=self.device)

    @property
    def vocab_size(self) -> int:
        return self._loaded.vocab_size

    @property
    def max_model_len(self) -> int:
        """Tokens that a sequence may have."""
        return self._loaded.max_model_len

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self._loaded.eos_token_ids

    @property
    def weights_hash(self) -> str:
        """Of all that was loaded, whatever the rank; see models/identity."""
        return self._loaded.weights_hash

    @property
    def files(self) -> Mapping[str, str]:
        """Digests of the small files beside the weights, by name."""
        return self._loaded.files

    @property
    def device(self) -> torch.device:
        return self._loaded.module.device

    def make_pool(self, num_large: int, large_bytes: int, strides: Sequence[int], page_tokens: int) -> Pool:
        """strides: bytes from one small page to the next, per group."""
        return Pool.create(self.groups, num_large, large_bytes, strides, page_tokens, self.device)

    @property
    def may_be_captured(self) -> bool:
        """Whether all that decode steps ask of attention may be part of a CUDA graph; of the rest only a try tells."""
        return self._may_be_captured

    @property
    def prefill_may_be_captured(self) -> bool:
        """The same of chunks of prompts."""
        return self._prefill_may_be_captured

    @property
    def chunks_are_captured_as_launched(self) -> bool:
        """Whether the backend that a captured chunk has is that of any other chunk, however long."""
        return self._one_prefill_backend

    @property
    def writing_layers(self) -> tuple[int, ...]:
        """Layers that have K and V of their own, in rising order."""
        return tuple(sorted(layer for layer, place in self._loaded.places.attention.items() if place.writes))

    @torch.inference_mode()
    def forward(
        self,
        batch: ForwardBatch,
        pool: Pool,
        written: Callable[[int], None] | None = None,
        logits_out: torch.Tensor | None = None,
        hidden: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Writes the batch's K and V, and the states after its runs, into the pool.

        hidden: of a later stage, from `receive`. A stage that is not the last returns what is for the next one, [1, N, width],
        instead of logits.

        written: called with the index of each layer that has K and V of its own, in rising order, when (on a GPU: when
        what has been launched by then is over) they are in the pool. Returns logits, [R, vocab] in the model's
        dtype, of `batch.logits_rows`: in `logits_out`, if that is given. Every rank runs the same batch, and has the logits.
        """
        assert pool.groups == self.groups, f"a pool of {pool.groups} for a model of {self.groups}"
        batch.check()
        attention = PagedAttention(batch, pool, self._loaded.places.attention, self._backends, self.ranks, written)
        states = PagedStates(batch, pool, self._loaded.places.states)
        stage = self._loaded.stage
        if stage is not None:
            stage.receive(hidden)
        with active(attention), active_states(states), self._ends.keeping(batch, logits_out) as kept:
            output = self._loaded.module(
                input_ids=self._ends.token_ids(batch).unsqueeze(0),
                position_ids=batch.positions.unsqueeze(0),
                use_cache=False,
                logits_to_keep=kept,
            )
        attention.assert_every_layer_ran_once()
        states.assert_every_layer_ran_once()
        if stage is not None and stage.outgoing is not None:
            return stage.left()
        return logits_into(output.logits[0], logits_out)


def asks_of(places: LayerPlaces, device: torch.device) -> dict[int, tuple[Ask, ...]]:
    """What each group of attention layers asks of its backends, by its index: one Ask per phase."""
    found = {}
    for index, group in enumerate(places.groups):
        if group.is_state:
            continue
        options = [call.options for call in places.calls if places.attention[call.layer].group == index]
        found[index] = tuple(
            Ask(
                phase,
                device.type,
                TORCH_DTYPES[group.dtype],
                group.head_dim,
                window=group.window > 0,
                softcap=any(option.get("softcap") is not None for option in options),
                sinks=any(option.get("s_aux") is not None for option in options),
                hopper=device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == HOPPER,
            )
            for phase in Phase
        )
    return found
