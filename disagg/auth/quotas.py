"""How much each tenant may ask for: the file that says so, and what has been used. Time is an argument; knows no network.

# a comment
TENANT requests_per_minute=60 tokens_per_minute=100000 concurrent=8
*      concurrent=2                        every tenant that has no line of its own

A call is let in whole or not at all, with as many requests as it has prompts. One that alone exceeds a limit is the client's
mistake, since no later time is better.

A rate is a bucket: it holds a minute's worth and fills steadily, and there must be one in it for each request that begins. What
the cluster refuses or gives up is put back (`NOT_COUNTED`). What an answer comes to is not known before it ends, so tokens are
paid for afterwards: the prompt once it is accepted, the answer at its end, and who has overdrawn waits until that is made up for:
one token is enough to begin with, so no request is too large for the rate. Over time nobody has more than its rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from msgspec import Struct
from msgspec.structs import fields

from disagg.auth.reloaded import LOOK_S, Reloaded
from disagg.config.tree import AuthConfig
from disagg.types.errors import ConfigError, InvalidRequest, Overloaded, QuotaExceeded, Unavailable
from disagg.types.plain import quoted
from disagg.types.small_files import home_expanded, read_small
from disagg.types.tenants import TENANT, TENANT_SIGNS

SETTING = "auth.limits_file"
LIMITS_BYTES = 16 << 20
MAX_LINES = 100_000
MAX_LIMIT = 10**12
MAX_TENANTS = 100_000  # whose use is remembered; those that use nothing now are forgotten first
EVERYBODY = "*"
MINUTE_S = 60.0
BUSY_RETRY_S = 1.0  # when one of its requests will have ended is not known
NOT_COUNTED = (Overloaded, Unavailable)  # how a call ends that the cluster refused or gave up


class Limits(Struct, frozen=True, kw_only=True):
    """Of one tenant, over both faces of one router. None: there is none."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent: int | None = None


NO_LIMITS = Limits()
KEYS = tuple(field.name for field in fields(Limits))


def parse_limits(content: bytes, path: Path) -> dict[str, Limits]:
    """By tenant. path: for messages. Raises ConfigError naming the line that is at fault."""
    found: dict[str, Limits] = {}
    for number, line in enumerate(content.split(b"\n"), start=1):
        words = line.decode("utf-8", "replace").split()
        if not words or words[0].startswith("#"):
            continue
        at = f"{SETTING} = {path}, line {number}"
        tenant = words[0]
        if tenant != EVERYBODY and not TENANT.fullmatch(tenant):
            raise ConfigError(f"{at}: the tenant must be * or have letters, digits and {TENANT_SIGNS} only")
        if tenant in found:
            raise ConfigError(f"{at}: {tenant} stands in an earlier line, too; every tenant must be there once")
        if len(found) == MAX_LINES:
            raise ConfigError(f"{at}: {MAX_LINES} lines are the most")
        found[tenant] = _limits(words[1:], at)
    if not found:
        raise ConfigError(f"{SETTING} = {path}: there is no limit in it; add TENANT {KEYS[0]}=60, or unset it")
    return found


def _limits(words: list[str], at: str) -> Limits:
    said: dict[str, int] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if key not in KEYS or key in said or not equals:
            raise ConfigError(f"{at}: {quoted(word)}: it must be LIMIT=NUMBER, each LIMIT once, of {', '.join(KEYS)}")
        if not (value.isascii() and value.isdecimal() and len(value) <= 13 and 1 <= int(value) <= MAX_LIMIT):
            raise ConfigError(f"{at}: {quoted(word)}: it must be a whole number from 1 to {MAX_LIMIT}")
        said[key] = int(value)
    if not said:
        raise ConfigError(f"{at}: it says no limit; it must have LIMIT=NUMBER, LIMIT one of {', '.join(KEYS)}")
    return Limits(**said)


def read_limits(path: Path) -> dict[str, Limits]:
    try:
        content = read_small(path, LIMITS_BYTES)
    except FileNotFoundError as error:
        raise ConfigError(f"{SETTING} = {path}: there is no such file") from error
    except ConfigError as error:  # which names the path only
        raise ConfigError(f"{SETTING} = {error}") from error
    return parse_limits(content, path)


class Bucket:
    """What may be taken at a rate; see the module. level: what is in it; below 0: overdrawn."""

    def __init__(self, per_minute: float, now_s: float) -> None:
        self.level = per_minute
        self._at_s = now_s

    def wait_s(self, per_minute: float, now_s: float, amount: float = 1) -> float:
        """Until there is so much in it; 0 if there is. amount: at most per_minute, which is all that it can hold."""
        elapsed_s = max(0.0, now_s - self._at_s)
        self.level = min(per_minute, self.level + elapsed_s * per_minute / MINUTE_S)
        self._at_s = max(self._at_s, now_s)
        return max(0.0, amount - self.level) * MINUTE_S / per_minute

    def take(self, amount: float) -> None:
        self.level -= amount


class _Tenant:
    """What one has used. Buckets are there once a limit asked for them."""

    __slots__ = ("requests", "running", "tokens")

    def __init__(self) -> None:
        self.running = 0
        self.requests: Bucket | None = None
        self.tokens: Bucket | None = None


class Use:
    """What one call has of its tenant's limits. Has nothing before `Quotas.ask`, and of a tenant without limits nothing then.

    As a context it ends with its block.
    """

    def __init__(self, owner: str) -> None:
        """owner: whose key was shown; empty: nobody's."""
        self.owner = owner
        self._tenant: _Tenant | None = None
        self._requests: Bucket | None = None  # out of which `_taken` came
        self._taken = 0
        self._places = 0  # of its requests that have not ended

    def tokens(self, count: int) -> None:
        """A prompt's or an answer's."""
        if self._tenant is not None and self._tenant.tokens is not None:
            self._tenant.tokens.take(count)

    def leave(self) -> None:
        """One of its requests has ended."""
        if self._tenant is not None and self._places:
            self._places -= 1
            self._tenant.running -= 1

    def end(self, error: BaseException | None = None) -> None:
        """The call has ended, in an answer or in this. Its first end is what counts."""
        self._let_go(counts=not isinstance(error, NOT_COUNTED))

    def give_back(self) -> None:
        """As if it had not asked."""
        self._let_go(counts=False)

    def _let_go(self, *, counts: bool) -> None:
        if self._requests is not None and not counts:
            self._requests.take(-self._taken)
        self._taken = 0
        if self._tenant is not None:
            self._tenant.running -= self._places
        self._places = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.end(error)

    def take(self, tenant: _Tenant, count: int) -> None:
        """count: requests."""
        self._tenant, self._requests = tenant, tenant.requests
        self._taken = self._places = count
        tenant.running += count
        if tenant.requests is not None:
            tenant.requests.take(count)


class Quotas:
    """Of one router. limits: what is now allowed, by tenant."""

    def __init__(self, limits: Callable[[], Mapping[str, Limits]]) -> None:
        self._limits = limits
        self._tenants: dict[str, _Tenant] = {}  # who has come last is last

    def ask(self, use: Use, count: int, now_s: float) -> None:
        """For count requests in all, those of one call; `use` is to be ended then. Who has asked before, when it did not know how
        many there are, gives that back first.

        Raises InvalidRequest where so many can never be let in, QuotaExceeded where they cannot now; `use` has nothing then.
        """
        use.give_back()
        allowed, owner = self._limits(), use.owner
        limits = allowed.get(owner) or allowed.get(EVERYBODY, NO_LIMITS)
        if not owner or limits is NO_LIMITS:
            return
        _check_possible(limits, count, owner)
        tenant = self._tenants.pop(owner, None) or _Tenant()
        self._tenants[owner] = tenant
        self._forget_idle()
        if limits.concurrent is not None and tenant.running + count > limits.concurrent:
            raise QuotaExceeded(
                f"{tenant.running} requests of {owner} are under way{_more(count)}; {limits.concurrent} at once are its limit",
                BUSY_RETRY_S,
            )
        tenant.requests = _bucket(tenant.requests, limits.requests_per_minute, now_s)
        tenant.tokens = _bucket(tenant.tokens, limits.tokens_per_minute, now_s)
        _check(tenant.requests, limits.requests_per_minute, count, f"requests of {owner}", now_s)
        _check(tenant.tokens, limits.tokens_per_minute, 1, f"tokens of {owner}", now_s)
        use.take(tenant, count)

    def _forget_idle(self) -> None:
        """Never one that runs something."""
        while len(self._tenants) > MAX_TENANTS:
            oldest = next((name for name, each in self._tenants.items() if not each.running), None)
            if oldest is None:
                return
            del self._tenants[oldest]


def _bucket(bucket: Bucket | None, per_minute: int | None, now_s: float) -> Bucket | None:
    if per_minute is None:
        return None
    return bucket or Bucket(per_minute, now_s)


def _check_possible(limits: Limits, count: int, owner: str) -> None:
    """Raises InvalidRequest. One request is always possible: limits are at least 1."""
    at_once, per_minute = limits.concurrent, limits.requests_per_minute
    if at_once is not None and count > at_once:
        most = f"{at_once} requests of {owner} may be under way at once (concurrent={at_once}"
    elif per_minute is not None and count > per_minute:
        most = f"{per_minute} requests of {owner} may begin in a minute (requests_per_minute={per_minute}"
    else:
        return
    raise InvalidRequest(
        f"the call has {count} prompts, each of which is a request; at most {most} in {SETTING}): send fewer at a time",
        "prompt",
    )


def _check(bucket: Bucket | None, per_minute: int | None, count: int, what: str, now_s: float) -> None:
    if bucket is None or per_minute is None:
        return
    wait_s = bucket.wait_s(per_minute, now_s, count)
    if wait_s > 0:
        raise QuotaExceeded(
            f"the {what} are used up{_more(count)}: {per_minute} a minute are its limit; try again in {math.ceil(wait_s)} s",
            wait_s,
        )


def _more(count: int) -> str:
    return f", and the call has {count} more" if count > 1 else ""


class ReloadedQuotas(Quotas):
    """With limits out of auth.limits_file, if there is one. Raises ConfigError for one that cannot be used."""

    def __init__(self, auth: AuthConfig) -> None:
        self._file: Reloaded[dict[str, Limits]] | None = None
        if auth.limits_file:
            path = home_expanded(auth.limits_file, SETTING)
            self._file = Reloaded((path,), lambda: read_limits(path), SETTING)
        file = self._file
        super().__init__((lambda: file.value) if file is not None else dict)

    async def look_always(self, every_s: float = LOOK_S) -> None:
        """Keeps up with the file. Runs until it is cancelled."""
        if self._file is not None:
            await self._file.look_always(every_s)
