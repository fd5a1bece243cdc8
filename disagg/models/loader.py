"""Loads a Hugging Face directory that `check` found to be a model which is served.

Knows files, transformers' modules and ranks; nothing of pools or batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from disagg.convert.sense import making_sense
from disagg.messages.layout import LayerGroup
from disagg.models.attention.calls import ATTENTION_NAME
from disagg.models.check import check_model
from disagg.models.experts import Spread, noting_experts, spread_experts
from disagg.models.identity import detach_from_files, hash_threads, stamps, weights_hash
from disagg.models.layers import LayerPlaces, lay_out, max_model_len_of
from disagg.models.pool import TORCH_DTYPES
from disagg.models.ranks import Ranks
from disagg.models.sharding import shard
from disagg.models.stage_links import StageLinks
from disagg.models.stages import StageCut, cuts_of, hidden_of, places_of
from disagg.models.states import attach
from disagg.text.model_files import CONFIG, ModelFiles
from disagg.types.errors import ConfigError, FilesChanged

CHANGED = "files in {} were written or replaced while they were loaded"


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A module in eval mode on its device, cut for its stage and its rank, and what its directory says about the whole model."""

    module: PreTrainedModel
    places: LayerPlaces
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    weights_hash: str  # see models/identity
    files: Mapping[str, str]  # digests of the small files beside the weights, see text/model_files
    whole_groups: tuple[LayerGroup, ...] = ()  # of all stages; `places` are of this one's layers
    own_groups: tuple[int, ...] = ()  # which of those this stage has layers of, by their indices
    cuts: tuple[int, ...] = ()  # see models/stages.cuts_of; none where there is one stage
    stage: StageCut | None = None


def load(
    model_dir: Path,
    dtype: str,
    device: str,
    ranks: Ranks | None = None,
    spread: Spread | None = None,
    links: StageLinks | None = None,
) -> LoadedModel:
    """Raises ConfigError when the directory holds no model that this version can serve exactly, or not on these ranks; and
    FilesChanged when its files were written or replaced meanwhile.

    ranks, links: not yet connected; None for one that computes all of it. spread: over which ranks its experts are spread, if
    they are.
    """
    before = stamps(model_dir)
    try:
        loaded = _load(model_dir, dtype, device, ranks or Ranks(), spread, links or StageLinks())
    except ConfigError as error:
        if stamps(model_dir) != before:
            raise FilesChanged(f"{CHANGED.format(model_dir)}: {error}") from error
        raise
    if stamps(model_dir) != before:
        raise FilesChanged(CHANGED.format(model_dir))
    return loaded


def _load(
    model_dir: Path, dtype: str, device: str, ranks: Ranks, spread: Spread | None, links: StageLinks
) -> LoadedModel:
    with making_sense(model_dir):
        files = ModelFiles.read(model_dir)
        check_model(files, dtype, ranks.size, links.count)
    module, report = _from_pretrained(model_dir, dtype)
    if report["missing_keys"]:
        missing = sorted(report["missing_keys"])
        raise ConfigError(f"{model_dir} lacks {len(missing)} weights, such as {missing[0]}")
    eos_token_ids = _eos_token_ids(module)
    if device == "cpu":
        detach_from_files(module)
    digests = files.digests()
    identity = weights_hash(module, digests[CONFIG], eos_token_ids, hash_threads(ranks.size * links.count))
    cut = ranks.size > 1 or spread is not None or links.several
    if not cut:
        _move(module, device)
    module.train(False).requires_grad_(False)
    try:
        attach(module)
    except ConfigError as error:
        raise ConfigError(f"{model_dir}: {error}") from error
    max_model_len = max_model_len_of(model_dir, module.config)
    with noting_experts(module) as experts:
        places = whole = lay_out(model_dir, module, dtype, max_model_len)
    own, cuts, stage = tuple(range(len(whole.groups))), tuple[int, ...](), None
    if links.several:
        hidden = hidden_of(module, lambda: lay_out(model_dir, module, dtype, max_model_len))
        cuts = cuts_of(module, whole, links.count)
        first, stop = cuts[links.stage : links.stage + 2]
        places, own = places_of(whole, first, stop)
        stage = StageCut(module, hidden, first, stop)
    if spread is not None:
        spread_experts(module, experts, spread)
    if ranks.size > 1:
        places = _on_rank(model_dir, module, places, ranks)
    if cut:  # what layers ask was found out on the CPU: no device needs to hold more than its rank's part
        _move(module, device)
    _refuse_no_numbers(model_dir, module)
    return LoadedModel(
        module=module,
        places=places,
        vocab_size=module.config.vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=eos_token_ids,
        weights_hash=identity,
        files=digests,
        whole_groups=whole.groups,
        own_groups=own,
        cuts=cuts,
        stage=stage,
    )


def _from_pretrained(model_dir: Path, dtype: str) -> tuple[PreTrainedModel, dict[str, Any]]:
    """The module on the CPU, and transformers' report of missing and unexpected weights."""
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            model_dir,
            dtype=TORCH_DTYPES[dtype],
            attn_implementation=ATTENTION_NAME,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
        )
    except MemoryError:
        raise
    except Exception as error:  # the libraries raise exceptions of every kind for files that make no sense
        raise ConfigError(f"{model_dir} cannot be loaded: {type(error).__name__}: {str(error)[:2000]}") from error
    module, report = loaded
    return module, report


def _move(module: PreTrainedModel, device: str) -> None:
    """Raises ConfigError where the device could not hold the weights if it had nothing else to hold."""
    try:
        torch.nn.Module.to(module, device)
    except torch.OutOfMemoryError as error:
        weights = {each.data_ptr(): each.nbytes for each in (*module.parameters(), *module.buffers())}
        needed, total = sum(weights.values()), torch.cuda.get_device_properties(device).total_memory
        if needed <= total:
            raise  # others have some of it
        raise ConfigError(f"the weights of a rank take {needed} bytes, and {device} has {total} in all") from error


@torch.no_grad()
def _refuse_no_numbers(model_dir: Path, module: PreTrainedModel) -> None:
    """Weights that are infinite or no numbers make logits of which nothing can be chosen: answers would be token 0 alone."""
    named = [(name, each) for name, each in module.named_parameters() if each.is_floating_point() and each.numel()]
    # A sum tells of every element, at the rate of memory; only a few could be infinite by themselves.
    sums = torch.stack([each.sum(dtype=torch.float32) for _, each in named]).isfinite().tolist() if named else []
    doubtful = [pair for pair, finite in zip(named, sums, strict=True) if not finite]
    wrong = sorted(name for name, each in doubtful if not each.isfinite().all())
    if wrong:
        raise ConfigError(
            f"{model_dir}: {len(wrong)} weights have values that are not finite numbers, such as {wrong[0]}"
        )


def _on_rank(model_dir: Path, module: PreTrainedModel, places: LayerPlaces, ranks: Ranks) -> LayerPlaces:
    """Cuts the module, and notes what attention has to cut itself."""
    try:
        cuts = shard(module, places.calls, ranks)
    except ConfigError as error:
        raise ConfigError(f"{model_dir}: {error}") from error
    attention = {layer: replace(place, cut=cuts.get(layer)) for layer, place in places.attention.items()}
    return replace(places, attention=attention)


def _eos_token_ids(module: PreTrainedModel) -> tuple[int, ...]:
    """The generation config's, which chat models extend by their end-of-turn token; else the config's.

    Less those for which the model has no row: they are never sampled, and the sampler must not look for them.
    """
    generation = module.generation_config
    ids = generation.eos_token_id if generation is not None else None
    if ids is None:
        ids = getattr(module.config, "eos_token_id", None)
    if ids is None:
        return ()
    listed = ids if isinstance(ids, (list, tuple)) else (ids,)
    return tuple(token_id for token_id in listed if 0 <= token_id < module.config.vocab_size)
