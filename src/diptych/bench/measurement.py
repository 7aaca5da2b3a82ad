"""A measurement as a JSON object: settings, server, machine and results. Pages, files and comparisons read it."""

import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib import metadata
from typing import Any

import msgspec

from diptych.base.processor import read_processor
from diptych.bench.load import LoadResult
from diptych.bench.option_grammar import in_words
from diptych.bench.session import Probe, Session
from diptych.bench.stalls import longest_gaps
from diptych.bench.summary import classes, summarize
from diptych.report.statistics import wilson
from diptych.search.goodput_search import GoodputResult, SearchConfig

LIBRARIES = ("diptych", "msgspec", "uvloop")


def context(session: Session, command: str) -> dict[str, Any]:
    """Command, machine, server and settings; without the key."""
    config, facts = session.config, session.target.facts
    target = asdict(config.target)
    target["api_key"] = None
    return {
        "kind": "bench",
        "command": command,
        "when": datetime.now(UTC).strftime("%Y-%m-%dT%H:%MZ"),
        "machine": machine(),
        "server": asdict(facts),
        "settings": {
            "workload": msgspec.to_builtins(config.workload),
            "slo": in_words(config.slo),
            "seed": config.seed,
            "duration_s": config.duration_s,
            "ramp": None if config.ramp is None else asdict(config.ramp),
            "warm_up": config.warm_up,
            "target": target,
            "salt": session.salt,
        },
    }


def single_run(result: LoadResult) -> dict[str, Any]:
    """The measurement of a single run of a workload."""
    return {
        "summary": summarize(result),
        "classes": classes(result.records),
        "stalls": [asdict(stall) for stall in longest_gaps(result.records)],
    }


def points(probes: Sequence[Probe]) -> list[dict[str, Any]]:
    """The measurement of each run of a series or a search, in the order in which they were measured."""
    return [
        {
            "rate": probe.rate,
            "met": probe.met,
            "judged": probe.judged,
            "attainment": probe.share,
            "attainment_interval": wilson(probe.met, probe.judged) if probe.judged else None,
            "summary": summarize(probe.result),
        }
        for probe in probes
    ]


def search(found: GoodputResult, config: SearchConfig, probes: Sequence[Probe]) -> dict[str, Any]:
    """The measurement of a search for goodput."""
    return {"goodput": {**asdict(found), "config": asdict(config)}, "points": points(probes)}


def machine() -> dict[str, Any]:
    """The machine on which the client runs."""
    processor = read_processor()
    versions = {}
    for name in LIBRARIES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:  # a library that is not there has no version
            continue
    return {
        "cpu": processor.name,
        "cores": len(processor.cores),
        "processor": processor.describe(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "versions": versions,
    }
