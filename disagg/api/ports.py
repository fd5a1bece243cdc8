"""What the HTTP face needs of the router and of the text package, and nothing more. No behaviour.

The face relies on this of `generate`: `Started` comes first and waits for no free place, so that several requests of one
HTTP call can be started together; errors are of `types.errors`; `Finished` is last; closing the iterator aborts.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import ParamSpec, Protocol, TypeVar

from disagg.auth.quotas import Use
from disagg.messages.legs import TimelineEvent
from disagg.router.budget import Held
from disagg.router.mailbox import Taker
from disagg.router.requests import GenerateRequest, Update
from disagg.text.limits import TextLimits
from disagg.types.errors import DisaggError

P = ParamSpec("P")
T = TypeVar("T")


class ServedModel(Protocol):
    """A model that clients may name. max_model_len: prompt and output together, in tokens."""

    @property
    def name(self) -> str: ...

    @property
    def max_model_len(self) -> int: ...


class RouterPort(Protocol):
    """The router, as the HTTP face sees it. Everything runs in the caller's event loop."""

    def ask_quota(self, use: Use, count: int = 1) -> None:
        """For all requests of a call, of which there are count; again, once it is known how many there are. Whoever asks ends
        `use`. Raises QuotaExceeded, or InvalidRequest where so many can never be let in.
        """
        ...

    def generate(self, request: GenerateRequest, use: Use, taker: Taker | None = None) -> AsyncGenerator[Update, None]:
        """The updates of one request of a call. Raises DisaggError; before `Started` if the request was not accepted.

        taker: is given deltas that come while all before them have been read, and may take them in the iterator's place.
        """
        ...

    def note_refused(self, error: DisaggError, client_request_id: str = "") -> None:
        """Counts a request that the face refused before there was a GenerateRequest."""
        ...

    @property
    def limits(self) -> TextLimits:
        """How much text a request may bring."""
        ...

    async def beside(self, tenant: str, size: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Does work on `size` bytes in a thread of the router's. tenant: who asks; they take turns."""
        ...

    def hold(self) -> Held:
        """An account of the memory that requests may take in this process."""
        ...

    def models(self) -> Sequence[ServedModel]: ...

    def healthy(self) -> bool:
        """Whether a request that arrives now can be served."""
        ...

    def open(self) -> bool:
        """Whether a request that arrives now is taken, be it that it waits for servers that are to come back."""
        ...

    def status(self) -> Mapping[str, object]:
        """The cluster as the router sees it; JSON-encodable. "state", if present, is one word for the whole."""
        ...

    def drain_server(self, server: str, on: bool, force: bool) -> Mapping[str, object]:
        """Has a server take nothing new, and hand over what can go on elsewhere; or undoes it. force: also the last one of
        its role. The answer: the server as `status` has it, before it has heard. Raises UnknownServer, InvalidRequest or
        Unavailable.
        """
        ...

    async def set_role(self, server: str, role: str, force: bool) -> bool:
        """Has a server drain, and become one of another role; False where it is that already. force: also the last one of its
        role. Raises UnknownServer, InvalidRequest or Unavailable.
        """
        ...

    def timeline(self, request_id: str) -> tuple[TimelineEvent, ...] | None:
        """What happened to a request, while the router still remembers it."""
        ...

    def known_requests(self) -> Mapping[str, object]:
        """Those that run and the last that ended, with the ids that `timeline` knows; JSON-encodable."""
        ...

    async def dump(self) -> object:
        """Everything the router knows, for debugging: text, or something JSON-encodable."""
        ...


class ChatTemplatePort(Protocol):
    """Turns messages into a prompt."""

    async def render(self, messages: bytes, max_chars: int, tenant: str) -> str:
        """messages: as `text.render_messages.packed` writes them. tenant: who asks; they take turns.

        Raises InvalidRequest for messages that the model's template refuses, or of which it makes more than max_chars.
        """
        ...
