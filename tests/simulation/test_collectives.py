"""What devices send to each other: the laws, and measurements that nothing here was fitted to."""

from dataclasses import replace

import pytest

from diptych.control.errors import ConfigError
from diptych.simulation.costs.collectives import all_reduce, all_to_all, pipeline_hops
from diptych.simulation.costs.roofline import collective_costs
from diptych.simulation.hardware import load_hardware
from diptych.simulation.model_catalogue import load_model
from diptych.simulation.parallelism import Parallelism

H100, A100, PRO = load_hardware("h100"), load_hardware("a100"), load_hardware("rtx-pro-6000")


def test_one_device_sends_nothing() -> None:
    for law in (all_reduce, all_to_all):
        assert law(H100, 1).seconds(1e9) == 0


def test_large_sums_take_what_vidur_measured_on_eight_h100() -> None:
    for num_bytes, measured_ms in ((15_564_800, 0.111), (31_457_280, 0.188), (62_914_560, 0.329)):
        assert all_reduce(H100, 8).seconds(num_bytes) * 1e3 == pytest.approx(measured_ms, rel=0.25)


def test_a_sum_over_two_hosts_takes_what_vidur_measured_on_sixteen_a100() -> None:
    """Its cluster's network carries 10 GB/s a host (two devices, one a host: 11.4 ms for 67 MB both ways)."""
    assert A100.network is not None
    cluster = replace(A100, network=replace(A100.network, bandwidth=10e9 / 8))
    for num_bytes, measured_ms in ((31_457_280, 3.876), (47_185_920, 5.137), (66_846_720, 7.087)):
        assert all_reduce(cluster, 16).seconds(num_bytes) * 1e3 == pytest.approx(measured_ms, rel=0.15)


def test_exchanges_take_what_nccl_takes_for_large_messages() -> None:
    """aiconfigurator's NCCL tables: 134 MB of each device."""
    measured = ((H100, 2, 0.2596), (H100, 8, 0.4024), (A100, 8, 0.6405), (load_hardware("b200"), 8, 0.2366))
    for hardware, devices, milliseconds in measured:
        assert all_to_all(hardware, devices).seconds(134_217_728) * 1e3 == pytest.approx(milliseconds, rel=0.2)


def test_a_link_without_measured_sums_follows_rabenseifner() -> None:
    two, eight = all_reduce(PRO, 2), all_reduce(PRO, 8)
    assert (two.latency_s, two.seconds(16e9) - two.latency_s) == pytest.approx((40e-6, 1.0))
    assert (eight.latency_s, eight.seconds(16e9) - eight.latency_s) == pytest.approx((120e-6, 1.75))


def test_devices_of_several_hosts_need_a_network() -> None:
    assert all_reduce(H100, 16).seconds(1e6) > all_reduce(H100, 8).seconds(1e6)
    assert all_to_all(H100, 16).seconds(1e6) > all_to_all(H100, 8).seconds(1e6)
    with pytest.raises(ConfigError, match="NVLink 4 joins at most 8 x h100-sxm, and its entry has no network"):
        all_reduce(replace(H100, network=None), 16)


def test_stages_that_fit_into_one_host_hop_over_its_links() -> None:
    near, far = pipeline_hops(H100, Parallelism(4, 2)), pipeline_hops(H100, Parallelism(8, 2))
    assert near == all_reduce(H100, 2)
    assert H100.network is not None
    assert far.latency_s == H100.network.latency_s
    both = pipeline_hops(H100, Parallelism(4, 4))  # two stages a host: near, far, near
    assert both.latency_s == pytest.approx(2 * near.latency_s + far.latency_s)


def test_groups_that_share_experts_exchange_their_tokens() -> None:
    model = load_model("deepseek-v3")
    cut, whole = (collective_costs(model, H100, Parallelism(1, expert=experts, data=8)) for experts in (1, 8))
    moe_layers = model.num_moe_layers
    assert cut.latency_s == pytest.approx(moe_layers * all_reduce(H100, 8).latency_s)
    assert whole.latency_s == pytest.approx(2 * moe_layers * all_to_all(H100, 8).latency_s)
    # each group's token as a sum over all groups' tokens, or to eight experts and back
    assert cut.byte_s == pytest.approx(moe_layers * 8 * 2 * model.hidden * all_reduce(H100, 8).byte_s)
    assert whole.byte_s == pytest.approx(2 * moe_layers * 8 * 2 * model.hidden * all_to_all(H100, 8).byte_s)
