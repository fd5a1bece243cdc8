"""Why a leg can never run on an engine, whichever its role. Pure; knows the model's limits, and trusts no router.

A router checks requests before it dispatches them, but a server does not rely on it: one id beyond the vocabulary, in a
prompt or in a parameter, ends the worker that looks it up, and with it everybody's requests.
"""

from __future__ import annotations

from disagg.messages.legs import StartLeg
from disagg.types.errors import InvalidRequest
from disagg.types.sampling import MAX_CHOICES, check_ids


def refusal(start: StartLeg, *, max_model_len: int, vocab_size: int) -> str:
    """Empty if nothing is wrong with the leg itself; whether it fits the pool is the engine's business.

    Lengths go first: what follows looks at no more tokens than the model's context holds.
    """
    tokens = len(start.token_ids)
    if not 0 < start.num_prompt <= tokens or not start.choices:
        return "a leg needs at least one token and one choice"
    if tokens >= max_model_len:
        return f"{tokens} tokens leave no room within the model's {max_model_len}"
    if len(start.choices) > MAX_CHOICES:
        return f"{len(start.choices)} choices are more than a request may have, {MAX_CHOICES}"
    if len(set(start.choices)) < len(start.choices) or not all(0 <= choice < MAX_CHOICES for choice in start.choices):
        return f"the choices are {list(start.choices)}; they must differ, and be from 0 to {MAX_CHOICES - 1}"
    try:
        check_ids("prompt", start.token_ids, vocab_size)
        start.params.validate(vocab_size)
    except InvalidRequest as error:
        return str(error)
    return ""
