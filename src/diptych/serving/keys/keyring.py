"""All keys that a server takes: those of --api-key, and those of a file that is read again when it changes.

Owns who a key belongs to, the quota of each name and the record of what it used. A change of the file counts for the
requests that come after it; those that run end as they would have. A file that cannot be used leaves the last one in
force, is logged once, and shows in metrics.
"""

import asyncio
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from prometheus_client.core import GaugeMetricFamily, Metric

from diptych.base.limited_log import LimitedLog, kind_of
from diptych.control.admission.quota import Quota, QuotaRefusal
from diptych.control.errors import ConfigError
from diptych.serving import edge_limits
from diptych.serving.keys.key_file import check_distinct, read_keys
from diptych.serving.keys.key_meter import KeyMeter
from diptych.serving.keys.key_record import KeyRecord, digest_of, option_record
from diptych.serving.keys.key_usage import UsageBook

LOOK_S = 1.0  # between two looks at the file
Signature = tuple[int, ...] | None

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Account:
    """What a name has besides its record. num_meters: of its open requests, lines of batches included. waiting: those
    that no worker had begun with at the last look."""

    quota: Quota
    num_meters: int = 0
    waiting: set[KeyMeter] = field(default_factory=set)


class Keyring:
    """path: the file (None: none). Raises ConfigError for keys that cannot be used. clock: nanoseconds that never go
    back; now_s: Unix seconds."""

    def __init__(
        self,
        api_keys: Sequence[str] = (),
        path: Path | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        self.path = path
        self.complaint = ""  # why the file as it is now is not used
        self.loaded_s = 0.0
        self.usage = UsageBook()
        self._log = LimitedLog(logger)
        self._clock, self._now_s = clock, now_s
        self._options = tuple(option_record(number, key) for number, key in enumerate(dict.fromkeys(api_keys), 1))
        self._by_digest: dict[bytes, KeyRecord] = {}
        self._by_name: dict[str, KeyRecord] = {}
        self._accounts: dict[str, _Account] = {}
        self._read_as: Signature = None
        self._seen_as: Signature = None
        self._watching: asyncio.Task[None] | None = None
        if path is None:
            self._take(())
        else:
            self._read_as = self._seen_as = _signature(path)
            self._take(read_keys(path))

    # -- who asks -----------------------------------------------------------------------------------------------------

    def find(self, key: bytes) -> KeyRecord | None:
        """The record of a key; None for one that is unknown. (What is compared is a hash: the time that takes tells
        nothing of a key.) Whether it has expired is for the caller to ask."""
        if not key or len(key) > edge_limits.KEY_CHARACTERS:
            return None
        return self._by_digest.get(digest_of(key))

    def named(self, name: str) -> KeyRecord | None:
        """The entry of a name; None for one that there is not, or not any more."""
        return self._by_name.get(name)

    def is_expired(self, record: KeyRecord) -> bool:
        """Whether the time of its keys is over."""
        return record.expires_s is not None and self._now_s() >= record.expires_s

    @property
    def has_tenants(self) -> bool:
        """Whether there are several tenants, or may be after the next change of the file."""
        return self.path is not None or len(self._by_name) > 1

    def records(self) -> Iterable[KeyRecord]:
        """All entries."""
        return self._by_name.values()

    # -- what it may use ----------------------------------------------------------------------------------------------

    def admit(self, record: KeyRecord, held: int, *, counts_open: bool = True) -> KeyMeter | QuotaRefusal:
        """Take a request of a name; its meter is to be ended. See Quota."""
        account, usage = self._account(record), self.usage.of(record.name)
        if account.waiting:
            account.waiting = {meter for meter in account.waiting if meter.is_waiting}
        refusal = account.quota.admit(self._clock(), held, len(account.waiting), counts_open=counts_open)
        if refusal is not None:
            usage.refused[refusal.limit_name] += 1
            return refusal
        usage.requests += 1
        usage.used_s = self._now_s()
        meter = KeyMeter(
            account.quota, usage, held, self._clock, lambda ended: self._on_end(record, ended), counts_open=counts_open
        )
        account.num_meters += 1
        if counts_open and record.limits.max_queued is not None:  # no more than that: each look is short
            account.waiting.add(meter)
        return meter

    def quota(self, record: KeyRecord) -> Quota:
        """What a name has left."""
        return self._account(record).quota

    def now_ns(self) -> int:
        """The time of quotas."""
        return self._clock()

    def _account(self, record: KeyRecord) -> _Account:
        found = self._accounts.get(record.name)
        if found is None:
            self._accounts[record.name] = found = _Account(Quota(record.limits))
        return found

    def _on_end(self, record: KeyRecord, meter: KeyMeter) -> None:
        account = self._accounts[record.name]
        account.num_meters -= 1
        account.waiting.discard(meter)
        if not account.num_meters and record.name not in self._by_name:
            del self._accounts[record.name]

    # -- the file -----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Look at the file from now on, inside the event loop of the server."""
        if self.path is not None:
            self._watching = asyncio.create_task(self._watch())

    def stop(self) -> None:
        """Look no more."""
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self.look()
            except Exception as error:  # a key that is taken back must not stay because an earlier look has failed
                self._complain(error)

    def _complain(self, error: Exception) -> None:
        """The file cannot be looked at, for a reason that is no fault of the file; /metrics says so."""
        self.complaint = "it cannot be read; the log has the details"
        self._read_as = None  # the next look reads it whatever it is
        self._log.error(kind_of(error), "the API keys stay as they were", error=error)

    async def look(self) -> None:
        """Take the file anew if it is another than the one that was read, and the same as at the last look: one that is
        being written is left until it is whole. (A link is followed, so that a Secret of Kubernetes that is swapped is
        seen.) Never raises."""
        assert self.path is not None
        found = _signature(self.path)
        is_steady, self._seen_as = found == self._seen_as, found
        if found == self._read_as or not is_steady:
            return
        self._read_as = found
        try:
            records = await asyncio.to_thread(read_keys, self.path)
            if _signature(self.path) != found:
                self._read_as = None  # it was changed meanwhile
                return
            self._take(records)
        except ConfigError as error:
            if error.message != self.complaint:
                logger.error("the API keys stay as they were: %s", error.message)
            self.complaint = error.message
        except Exception as error:
            self._complain(error)
        else:
            self.complaint = ""
            logger.warning("%s was read again: %d names", self.path, len(records))

    def _take(self, records: Sequence[KeyRecord]) -> None:
        """Raises ConfigError, and then nothing has changed."""
        together = (*self._options, *records)
        check_distinct(together, "the API keys" if self.path is None else str(self.path))
        self._by_name = {record.name: record for record in together}
        self._by_digest = {digest: record for record in together for digest in record.digests}
        self.loaded_s = self._now_s()
        for name in [name for name, account in self._accounts.items() if not account.num_meters]:
            if name not in self._by_name:
                del self._accounts[name]
        for name, record in self._by_name.items():
            if (account := self._accounts.get(name)) is not None:
                account.quota.limits = record.limits

    # -- metrics ------------------------------------------------------------------------------------------------------

    def families(self, model: str, only: str | None = None) -> Iterator[Metric]:
        """What Prometheus reads. only: the name whose use is shown (None: all)."""
        yield from self.usage.families(model, only)
        if self.path is None:
            return
        gauges = (
            (
                "diptych:key_file_valid",
                "Whether the file of keys, as it is now, is the one in force",
                not self.complaint,
            ),
            ("diptych:key_file_loaded_timestamp_seconds", "When the file of keys in force was read", self.loaded_s),
            ("diptych:key_file_names", "Names in the file of keys in force", len(self._by_name) - len(self._options)),
        )
        for name, text, value in gauges:
            gauge = GaugeMetricFamily(name, text, labels=["model_name"])
            gauge.add_metric([model], value)
            yield gauge


def _signature(path: Path) -> Signature:
    """What differs between two versions of a file; None without a file."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_mode
