"""The states of one recurrent layer, as transformers' recurrent modules see them. Knows tensors; nothing of pages."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import torch
from torch.nn.functional import pad

CONV, RECURRENT = "conv", "recurrent"


class LayerStates:
    """What a recurrent module finds where it looks for transformers' cache: its own states, of the sequences of one call.

    The methods and attributes are those of `transformers.Cache` that such modules use, in transformers 5.17 to 5.23.
    Modules may also write into the tensors that they get, which are copies.
    """

    record_past = False

    def __init__(self, states: Mapping[str, torch.Tensor] | None = None) -> None:
        """states: by name, batch first; None where the sequences begin."""
        self._begins = states is None
        self.states: dict[str, torch.Tensor] = dict(states or {})

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return not self._begins

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """[B, channels, kernel size], the last inputs of the convolution."""
        return None if self._begins else self.states[CONV]

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return None if self._begins else self.states[RECURRENT]

    @property
    def layers(self) -> Mapping[int, LayerStates]:
        """Whichever layer the module asks for, it is its own."""
        return defaultdict(lambda: self)

    @property
    def conv_states(self) -> Mapping[int, torch.Tensor]:
        return {0: self.states[CONV]}

    @property
    def recurrent_states(self) -> Mapping[int, torch.Tensor]:
        return {0: self.states[RECURRENT]}

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, *, conv_kernel_size: int
    ) -> torch.Tensor:
        """conv_states: [B, channels, n], the run's inputs. Returns them with the state's before them."""
        assert state_idx == 0, "a layer with several states"
        if not self._begins:
            conv_states = torch.cat((self.states[CONV], conv_states), dim=-1)
        missing = max(0, conv_kernel_size - conv_states.shape[-1])
        self.states[CONV] = pad(conv_states, (missing, 0))[..., -conv_kernel_size:]
        return conv_states

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0
    ) -> torch.Tensor:
        assert state_idx == 0, "a layer with several states"
        self.states[RECURRENT] = recurrent_states
        return recurrent_states

    def is_recording_past(self, layer_idx: int) -> bool:
        return self.record_past
