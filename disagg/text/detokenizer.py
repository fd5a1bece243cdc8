"""Token ids to text, a few at a time, giving out only text that no later token can change.

Pushing everything and finishing gives exactly what decoding the whole list gives (wherever that holds no U+FFFD), at
a cost per token that does not grow with the text. After a prompt, the text is what decode(prompt + output) adds to
decode(prompt), so a word that continues the prompt gets the space it should. Restored after a replay by pushing the
accepted ids again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from disagg.text.tokenizer import Tokenizer

CONTEXT_TOKENS: Final = 16  # of the prompt: more than the bytes of a character, so that any half of one is among them


class Detokenizer:
    """One choice's output text. `start_ids`: the prompt or its tail; only its last tokens matter."""

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, start_ids: Sequence[int] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._decoder = tokenizer.new_decoder()
        for token in self._last_tokens(start_ids):
            self._decoder.feed(token)

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that has become final: never half a character."""
        feed = self._decoder.feed
        return "".join([feed(token) for token_id in token_ids if (token := self._shown(token_id)) is not None])

    def finish(self) -> str:
        """The rest, given that no token follows: nothing, or U+FFFD for a character that was cut off."""
        return self._decoder.flush()

    def _shown(self, token_id: int) -> str | None:
        if self._skip_special_tokens and self._tokenizer.is_special(token_id):
            return None
        return self._tokenizer.token(token_id)

    def _last_tokens(self, ids: Sequence[int]) -> list[str]:
        found: list[str] = []
        for at in range(len(ids) - 1, -1, -1):
            token = self._shown(ids[at])
            if token is not None:
                found.append(token)
            if len(found) == CONTEXT_TOKENS:
                break
        return found[::-1]
