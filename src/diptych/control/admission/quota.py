"""What one name may use: requests at once and waiting, requests per minute, tokens per minute and per day.

Owns the accounting of one name, and nothing of any other. Pure: time is an argument, in nanoseconds, and never goes
back. Tokens are counted when they were really used, at the end of a request; until then a request holds what it is
expected to use, so that many that come at once cannot all pass by the same room. A request is admitted while anything
is left, and is never cut off: a limit is exceeded by what the last request admitted uses, and by nothing else unless
requests use more than was expected of them.
"""

from dataclasses import dataclass, fields
from typing import Literal

from diptych.control.admission.rate_window import RateWindow
from diptych.control.errors import ConfigError
from diptych.control.slo import NS_PER_S

MINUTE_NS, DAY_NS = 60 * NS_PER_S, 86_400 * NS_PER_S
MOST = 10**15  # of any limit

LimitName = Literal["max_requests", "max_queued", "requests_per_minute", "tokens_per_minute", "tokens_per_day"]


@dataclass(frozen=True, slots=True)
class QuotaLimits:
    """None: no limit. max_requests: open at once. max_queued: of these, without a worker that has begun with them."""

    max_requests: int | None = None
    max_queued: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    tokens_per_day: int | None = None

    def __post_init__(self) -> None:
        for found in fields(self):
            value = getattr(self, found.name)
            if value is not None and not 1 <= value <= MOST:
                raise ConfigError(f"{found.name} is {value}; it must be in [1, {MOST}]", param=found.name)


@dataclass(frozen=True, slots=True)
class QuotaRefusal:
    """Why a request is not admitted. used: of the limit, what open requests are expected to use included. retry_ns:
    when enough of what was used is forgotten (0: as soon as an open request ends)."""

    limit_name: LimitName
    limit: int
    used: int
    retry_ns: int


@dataclass(frozen=True, slots=True)
class Allowance:
    """What is left of a limit. reset_ns: until all of it is there again, if nothing more is used."""

    limit: int
    remaining: int
    reset_ns: int


class Quota:
    """The use of one name. ``limits`` may change at any time; what was used stays counted."""

    def __init__(self, limits: QuotaLimits) -> None:
        self.limits = limits
        self.num_open = 0
        self.held_tokens = 0
        self._requests = RateWindow(MINUTE_NS)
        self._minute = RateWindow(MINUTE_NS)
        self._day = RateWindow(DAY_NS)

    def admit(self, now: int, held: int, num_waiting: int = 0, *, counts_open: bool = True) -> QuotaRefusal | None:
        """Take a request that is expected to use ``held`` tokens (0: it computes none, and the limits of tokens do not
        apply), or say why not; then nothing has changed.
        num_waiting: open requests of the name that no worker has begun with. counts_open: whether the limits of open
        and waiting requests apply (not to lines of batches, which have limits of their own)."""
        refusal = self._full_queue(num_waiting) if counts_open else None
        refusal = refusal or self._full_window(now, computes=held > 0)
        if refusal is None:
            self._requests.charge(now, 1)
            self.num_open += counts_open
            self.held_tokens += held
        return refusal

    def hold(self, more: int) -> None:
        """Expect an open request to use ``more`` tokens more (less: negative)."""
        self.held_tokens += more
        assert self.held_tokens >= 0

    def end(self, now: int, held: int, used: int, *, counts_open: bool = True) -> None:
        """A request that was admitted is over. held: all that it was expected to use. used: what it did."""
        self.num_open -= counts_open
        self.hold(-held)
        assert self.num_open >= 0
        self._minute.charge(now, used)
        self._day.charge(now, used)

    def requests(self, now: int) -> Allowance | None:
        """What is left of the requests per minute; None without that limit."""
        limit = self.limits.requests_per_minute
        return None if limit is None else _allowance(self._requests, now, limit, 0)

    def tokens(self, now: int) -> Allowance | None:
        """What is left of the tokens, by the limit of which least is left; None without any."""
        found = [
            _allowance(window, now, limit, self.held_tokens)
            for limit, window in (
                (self.limits.tokens_per_minute, self._minute),
                (self.limits.tokens_per_day, self._day),
            )
            if limit is not None
        ]
        return min(found, key=lambda allowance: allowance.remaining, default=None)

    def _full_queue(self, num_waiting: int) -> QuotaRefusal | None:
        limits = self.limits
        if limits.max_requests is not None and self.num_open >= limits.max_requests:
            return QuotaRefusal("max_requests", limits.max_requests, self.num_open, 0)
        if limits.max_queued is not None and num_waiting >= limits.max_queued:
            return QuotaRefusal("max_queued", limits.max_queued, num_waiting, 0)
        return None

    def _full_window(self, now: int, *, computes: bool) -> QuotaRefusal | None:
        """The refusal of the window that is full for longest; None if no window is full."""
        limits = self.limits
        windows: tuple[tuple[LimitName, int | None, RateWindow, int], ...] = (
            ("requests_per_minute", limits.requests_per_minute, self._requests, 0),
            ("tokens_per_minute", limits.tokens_per_minute, self._minute, self.held_tokens),
            ("tokens_per_day", limits.tokens_per_day, self._day, self.held_tokens),
        )
        refusals = [
            QuotaRefusal(name, limit, window.used(now) + held, window.wait_ns(now, limit - 1))
            for name, limit, window, held in (windows if computes else windows[:1])
            if limit is not None and window.used(now) + held >= limit
        ]
        return max(refusals, key=lambda refusal: refusal.retry_ns, default=None)


def _allowance(window: RateWindow, now: int, limit: int, held: int) -> Allowance:
    return Allowance(limit, max(0, limit - window.used(now) - held), window.reset_ns(now))
