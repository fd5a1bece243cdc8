"""What one step may cost, and how much of a prompt that buys. Pure.

A run of n tokens behind `start` others costs n for what is the same for every token (projections, MLPs), and for attention
as many more as it attends to, in shares of `attention_tokens`, the context at which a token's attention costs as much as
all the rest:

    cost    = n + n * (start + n / 2) / attention_tokens

    context ├──────────────────────────────────────────────┤
    chunks  │   200   │  160  │  134  │ 116 │ 103 │  94 │..│    each costs the same, so steps are equally long
"""

from __future__ import annotations

import math

from msgspec import Struct


class Budget(Struct, frozen=True):
    """Of one step. attention_tokens: see the module; infinite: tokens alone count. most_tokens: of all runs, whatever they
    cost.
    """

    cost: float
    attention_tokens: float = math.inf
    most_tokens: int = 1 << 31

    def cost_of(self, start: int, num_tokens: int) -> float:
        """Of a run of num_tokens behind `start` others."""
        return num_tokens + num_tokens * (start + num_tokens / 2) / self.attention_tokens

    def tokens_at(self, start: int) -> int:
        """How many tokens behind `start` others this pays for."""
        if self.cost < 1:
            return 0
        if math.isinf(self.attention_tokens):
            tokens = int(self.cost)
        else:
            each = 1 + start / self.attention_tokens
            # The positive root of n^2 / (2 A) + each n - cost, in the form that loses no digits.
            tokens = int(2 * self.cost / (each + math.sqrt(each * each + 2 * self.cost / self.attention_tokens)))
        return max(0, min(tokens, self.most_tokens))

    def less(self, cost: float, num_tokens: int) -> Budget:
        """What is left when so many tokens have cost so much, which may be more than there was."""
        return Budget(max(0.0, self.cost - cost), self.attention_tokens, max(0, self.most_tokens - num_tokens))


def of_tokens(num_tokens: int) -> Budget:
    """So many tokens, wherever they stand."""
    return Budget(num_tokens, most_tokens=num_tokens)
