"""Finds stop strings in text that arrives in pieces. Knows text only; nothing of tokens or requests.

The stop string that is complete first ends the text, whatever the pieces: generation is causal, and nobody waits to
see whether a longer stop string that began earlier would have been completed too. Of several that are complete at the
same character, the longest counts. An Aho-Corasick automaton makes the cost linear in the text: its depth is exactly
the length of the text that might still become a stop string.

A `StopTable` is the automaton, some 130 to 260 bytes per character of the stop strings: it never changes once it is made, so all
choices of all prompts with the same stop strings share one. A `StopFinder` is one text's place in it.
"""

from __future__ import annotations

from array import array


class StopFinder:
    """`include`: whether the text that is emitted ends after the stop string, rather than before it."""

    def __init__(self, table: StopTable, include: bool = False) -> None:
        self._include = include
        self._automaton = table
        self._state = 0
        self._held = ""  # always of length depth[state]: what might be the beginning of a stop string
        self._hit: str | None = None

    @property
    def hit(self) -> str | None:
        """The stop string that was found."""
        return self._hit

    def push(self, text: str, sought: bool = True) -> tuple[str, bool]:
        """The text that is safe to emit now, and whether a stop string was found. After a hit nothing is emitted.

        sought: whether one that is complete in this text counts. It may begin where none did.
        """
        if self._hit is not None:
            return "", True
        automaton, state = self._automaton, self._state
        pending = self._held + text
        for at, char in enumerate(text, start=len(self._held) + 1):
            state = automaton.step(state, char)
            length = automaton.stop_chars[state]
            if length and sought:
                self._hit = pending[at - length : at]
                self._held, self._state = "", 0
                return pending[: at if self._include else at - length], True
        safe = len(pending) - automaton.depth[state]
        self._held, self._state = pending[safe:], state
        return pending[:safe], False

    def finish(self) -> str:
        """The text still held back, which is final now that nothing follows."""
        held, self._held, self._state = self._held, "", 0
        return held


class StopTable:
    """A trie of the stop strings with links to the longest suffix that is a prefix too. State 0 is the root."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        assert all(stops), "an empty stop string would stop everything"
        self._next: dict[
            tuple[int, str], int
        ] = {}  # (state, character): one table, where one per state is twice as large
        self._fall = array("i", [0])
        self.depth = array("i", [0])
        self.stop_chars = array("i", [0])  # length of the longest stop string that ends here; 0: none
        for stop in stops:
            self._insert(stop)
        self._link()

    def step(self, state: int, char: str) -> int:
        while state and (state, char) not in self._next:
            state = self._fall[state]
        return self._next.get((state, char), 0)

    def _insert(self, stop: str) -> None:
        state = 0
        for char in stop:
            if (state, char) not in self._next:
                self._next[state, char] = len(self.depth)
                self._fall.append(0)
                self.depth.append(self.depth[state] + 1)
                self.stop_chars.append(0)
            state = self._next[state, char]
        self.stop_chars[state] = len(stop)

    def _link(self) -> None:
        # Shallow states first, since a state falls to a shallower one.
        for (state, char), child in sorted(self._next.items(), key=lambda edge: self.depth[edge[1]]):
            self._fall[child] = self.step(self._fall[state], char) if state else 0
            # A node's own stop string is longer than any that ends in its suffix.
            self.stop_chars[child] = self.stop_chars[child] or self.stop_chars[self._fall[child]]
