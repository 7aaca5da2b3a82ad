"""The twin: what a recorded load would have met in other configurations of the fleet, by simulating each.

The simulated workers cost what the step-time models of the live ones say, and the same ClusterCore decides. A replay
begins with the streams that run, divided among the workers as the router does it, and with the requests that wait.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from diptych.control.config import PresetName, SchedulerConfig, prefill_scheduler, reshaped
from diptych.control.planner.fleet_layout import Layout
from diptych.control.planner.planner_events import Prediction, TwinQuestion, TwinSettings
from diptych.control.router.topology import Role
from diptych.control.slo import NS_PER_S, Slo
from diptych.simulation.costs.terms_cost import StepTermsCost
from diptych.simulation.fleet.pools import Pool, Pools
from diptych.simulation.results import RequestTable
from diptych.simulation.run import simulate
from diptych.simulation.scenario import Scenario
from diptych.workload.spec import RequestSpec

NETWORK = "ib400"  # between workers that send KV


def settings_for(scheduler: SchedulerConfig, slo: Slo, role: Role, shape: PresetName) -> SchedulerConfig:
    """What a worker that was started with ``scheduler`` schedules by in this role and shape."""
    is_shaped = (scheduler.budget.kind == "whole") == (shape == "unified")
    base = scheduler if is_shaped else reshaped(scheduler, shape)
    return prefill_scheduler(base, slo) if role == "prefill" else base


class Twin:
    """The planner's simulator of one fleet."""

    def __init__(self, settings: TwinSettings) -> None:
        self._settings = settings

    def answer(self, question: TwinQuestion) -> tuple[Prediction, ...]:
        """What each candidate would have done, in their order."""
        requests = [
            RequestSpec(
                arrival_ns=arrival.at_ns,
                prompt_tokens=arrival.num_prompt_tokens,
                output_tokens=arrival.num_output_tokens,
                slo=arrival.slo,
                is_running=arrival.is_running,
            )
            for arrival in question.arrivals
        ]
        return tuple(
            prediction_of(self.serve(question, candidate, requests), requests, question.num_before, question.span_ns)
            for candidate in question.candidates
        )

    def serve(self, question: TwinQuestion, candidate: Layout, requests: Sequence[RequestSpec]) -> RequestTable:
        """These requests after the simulation of a candidate, whose workers cost what the question says."""
        scenario = Scenario(
            engine=self._settings.engine,
            cost=StepTermsCost(*question.costs[0].terms),
            workload=requests,
            cluster=self._settings.cluster,
            pools=self._pools(question, candidate),
        )
        return simulate(scenario).requests

    def _pools(self, question: TwinQuestion, candidate: Layout) -> Pools:
        costs = {each.group: each for each in question.costs}
        own = {pool.name: pool for pool in self._settings.pools}
        counts = Counter((*setting.kind, setting.num_cores) for setting in candidate.settings)
        pools = []
        for (group, role, shape, num_cores), count in sorted(counts.items()):
            cost = costs[group]
            started = own[group].engine if group in own else self._settings.engine
            cache = replace(
                started.cache,
                num_blocks=cost.num_blocks,
                block_size=cost.block_size,
                first_block=0,
                groups=cost.groups or started.cache.groups,
            )
            scheduler = settings_for(started.scheduler, started.slo, role, shape)
            pools.append(
                Pool(
                    name="-".join((role, shape, str(num_cores), group)),
                    role=role,
                    replicas=count,
                    engine=started.with_(cache=cache, scheduler=scheduler),
                    cost=StepTermsCost(*cost.terms_on(num_cores)),
                    model_copy=own[group].model_copy if group in own else 0,
                )
            )
        link = "shared_memory" if self._settings.shares_memory else NETWORK
        return Pools(kv_bytes_per_token=self._settings.kv_bytes_per_token, link=link, named=tuple(pools))


def prediction_of(table: RequestTable, requests: list[RequestSpec], num_before: int, span_ns: int) -> Prediction:
    """Sums over the requests; the first ``num_before`` are only a part of the throughput."""
    met, near, count, progress = 0, 0.0, 0, 0
    for row in range(len(table)):
        number, is_completed = table.number[row], table.is_completed(row)
        if is_completed:
            arrival_ns = table.arrival_ns[row]
            has_begun = arrival_ns + table.ttft_ns(row) <= span_ns and not requests[number].is_running
            progress += has_begun + (arrival_ns + table.e2e_ns(row) <= span_ns)
        if number < num_before:
            continue
        count += 1
        if is_completed:
            met += table.slo_met[row] != 0
            near += nearness(table, row, requests[number].slo)
    seconds = max(1, span_ns) / NS_PER_S
    return Prediction(met / seconds, met / max(1, count), near / seconds, progress / (2 * seconds))


def nearness(table: RequestTable, row: int, slo: Slo | None) -> float:
    """How near a request came to its objectives: 1 where it met them, less the farther it missed them."""
    near = 1.0
    if slo is not None and slo.ttft_ns is not None:
        near = min(near, slo.ttft_ns / max(1, table.ttft_ns(row)))
    tpot_ns = table.tpot_ns(row)
    if slo is not None and slo.tpot_ns is not None and tpot_ns:
        near = min(near, slo.tpot_ns / tpot_ns)
    return near
