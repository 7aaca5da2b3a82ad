"""Layer tables: laws of the interpolation, and of the costs that the shipped tables give."""

import random
from functools import cache

import pytest

from diptych.control.errors import ConfigError
from diptych.control.step import ScheduledPrefill, SchedulerOutput, StepFeatures, chunk_attention
from diptych.simulation.costs.interpolation import Curve, Grid, Surface
from diptych.simulation.costs.layer_tables import LayerTableCost, layer_table_names, load_layer_table

load = cache(load_layer_table)


def plan(*chunks: tuple[int, int], decodes: int = 0, context: int = 0) -> SchedulerOutput:
    """A step with these chunks (start, tokens) and a decode batch with this sum of contexts."""
    prefills = tuple(ScheduledPrefill(str(i), start, size, (), True) for i, (start, size) in enumerate(chunks))
    pairs = sum(chunk_attention(start, size) for start, size in chunks)
    features = StepFeatures(sum(size for _, size in chunks), pairs, decodes, context)
    return SchedulerOutput(0, prefills, decodes, features=features)


def test_a_curve_passes_through_its_knots_and_is_straight_between_them() -> None:
    curve = Curve((2.0, 4.0, 8.0), (1.0, 3.0, 5.0))
    assert [curve(x) for x in (0, 2, 3, 4, 6, 8)] == [1.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert curve(16) == 9.0  # as from half of the last knot to the last
    intercept, slope, end = curve.segment(5)
    assert (intercept + slope * 5, end) == (curve(5), 8.0)
    with pytest.raises(ConfigError, match="rise"):
        Curve((1.0, 1.0), (0.0, 0.0))


def test_a_surface_may_have_rows_of_different_length() -> None:
    surface = Surface((1.0, 3.0), (Curve((0.0, 10.0), (0.0, 10.0)), Curve((0.0, 4.0), (2.0, 10.0))))
    assert surface(1, 5) == 5.0
    assert surface(2, 2) == pytest.approx((2.0 + 6.0) / 2)
    assert surface(6, 4) == pytest.approx(20.0)  # in proportion to the last row
    assert surface(0, 5) == 5.0


def test_a_grid_reproduces_every_multilinear_function_inside_and_is_level_outside() -> None:
    axes = ((0.0, 1.0, 3.0), (1.0, 2.0), (0.0, 5.0, 6.0))
    values = tuple(2 * x + 3 * y * z + x * y for x in axes[0] for y in axes[1] for z in axes[2])
    grid = Grid(axes, values)
    for point in ((0.5, 1.5, 2.0), (3.0, 2.0, 6.0), (2.0, 1.0, 5.5)):
        x, y, z = point
        assert grid(point) == pytest.approx(2 * x + 3 * y * z + x * y)
    assert grid((99.0, 99.0, 99.0)) == values[-1]
    assert grid((-1.0, 0.0, -1.0)) == values[0]


@pytest.mark.parametrize("name", layer_table_names())
def test_every_table_says_where_its_numbers_come_from(name: str) -> None:
    info = load(name).info
    assert info.name == load(name).name == name
    assert info.sources and info.overhead_source
    for source in info.sources:
        assert source.licence in ("MIT", "Apache-2.0")
        assert "@" in source.repository and source.path and source.changes


def naive_decode_ns(cost: LayerTableCost, num_seqs: int, context: int) -> float:
    tables = cost.tables
    fullest = -(-num_seqs // tables.groups)
    layer = tables.decode_attention(fullest, context / num_seqs)
    fixed = tables.overhead(fullest) + tables.tokens(fullest) + tables.sequences(fullest)
    shared = tables.shared(num_seqs) if tables.shared is not None else 0.0
    return 1000 * (fixed + shared + cost.info.num_layers * layer)


@pytest.mark.parametrize("name", layer_table_names())
def test_decode_lines_follow_the_interpolated_table(name: str) -> None:
    cost, rng = load(name), random.Random(name)
    for _ in range(100):
        num_seqs = rng.choice((1, 2, 7, 33, 100, 256, 400))
        context = num_seqs + int(num_seqs * 30_000 * rng.random() ** 3)
        line = cost.decode_line(num_seqs, context)
        assert line.until_context > context
        assert line == cost.decode_line(num_seqs, context)
        assert line.step_ns(context) == cost.step_ns(plan(decodes=num_seqs, context=context))
        assert line.step_ns(context) == pytest.approx(naive_decode_ns(cost, num_seqs, context), rel=1e-6)


@pytest.mark.parametrize("name", layer_table_names())
def test_more_work_takes_longer(name: str) -> None:
    cost = load(name)
    for less, more in (
        (plan((0, 128)), plan((0, 1024))),
        (plan((0, 1024)), plan((0, 4096))),
        (plan((0, 512)), plan((8192, 512))),
        (plan((0, 512)), plan((0, 512), decodes=64, context=64 * 500)),
        (plan(decodes=64, context=64 * 500), plan((0, 512), decodes=64, context=64 * 500)),
        (plan(decodes=8, context=8 * 500), plan(decodes=8, context=8 * 20_000)),
        (plan(decodes=8, context=8 * 500), plan(decodes=200, context=200 * 500)),
    ):
        assert 0 < cost.step_ns(less) < cost.step_ns(more)


@pytest.mark.parametrize("name", layer_table_names())
def test_short_prompts_together_take_no_longer_than_one_long_one_and_no_less_than_the_longest(name: str) -> None:
    cost = load(name)
    together = cost.step_ns(plan(*[(0, 128)] * 8))
    outputs = 1000 * (cost.tables.sequences(8) - cost.tables.sequences(1))
    host = 1000 * (cost.tables.overhead(8) - cost.tables.overhead(1))
    assert together <= cost.step_ns(plan((0, 1024))) + outputs + host + 1  # whole nanoseconds
    assert together > cost.step_ns(plan((0, 128)))


def test_a_prompt_in_chunks_costs_more_than_whole() -> None:
    cost = load("a100-llama-2-70b-tp2-vidur")
    chunks = sum(cost.step_ns(plan((start, 512))) for start in range(0, 4096, 512))
    assert chunks > cost.step_ns(plan((0, 4096)))


def test_a_skewed_batch_takes_longer_where_the_skew_was_measured() -> None:
    even, skewed = (load_layer_table("rtxpro6000-llama-3.1-8b", skew=skew) for skew in (1.0, 3.0))
    step = plan(decodes=100, context=100 * 1200)
    assert even.step_ns(step) < skewed.step_ns(step) < 1.2 * even.step_ns(step)
    unmeasured = (load_layer_table("rtx4090-llama-3.1-8b", skew=skew) for skew in (1.0, 3.0))
    assert len({cost.step_ns(step) for cost in unmeasured}) == 1
    with pytest.raises(ConfigError, match="at least 1"):
        load_layer_table("rtxpro6000-llama-3.1-8b", skew=0.5)


def test_an_unknown_table_is_refused_with_the_names_of_the_known() -> None:
    with pytest.raises(ConfigError, match="rtx4090-llama"):
        load_layer_table("abacus")
