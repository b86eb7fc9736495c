"""The time that exchanges take of a scheduled program, and the better meshes that a plan names."""

import math

import numpy as np
import pytest

from jaxtrain.parallel import chips
from jaxtrain.parallel.layout import MESH_AXES
from jaxtrain.plan import hlo, traffic
from jaxtrain.plan.exposure import Links, exposure, links_of
from jaxtrain.plan.target import parse_target
from jaxtrain.plan.torus import Torus
from tests.plan.scheduled import BETWEEN, WITHIN, done, kernel, start, text

RATES = traffic.Rates(bandwidth=1e9, flops=1e12)
NETWORK = chips.by_name("h100").network
LINKS = Links(within=1e9, network=0.1e9, per_node=4)
MESH = {"data": 2, "fsdp": 4}


def measured(*body):
    program = hlo.Program(text(*body))
    seconds = traffic.seconds_of_each(traffic.traffic(program), RATES)
    found = exposure(program, MESH, seconds, LINKS)
    milliseconds = {axes: 1e3 * exchange.exposed for axes, exchange in found.exchanges.items()}
    return found, milliseconds


def test_kernels_between_a_start_and_its_end_hide_it():
    found, exposed = measured(start("a", WITHIN), kernel("k"), done("a"))
    assert exposed == {("fsdp",): 0}
    assert 1e3 * found.link == pytest.approx(3 * 6)
    assert 1e3 * found.computing == pytest.approx(3 * 8, rel=1e-3) and found.share == 0


@pytest.mark.parametrize("more", ["", ', backend_config={"is_sync":true}'])
def test_without_kernels_between_all_of_it_is_exposed(more):
    _, exposed = measured(start("a", WITHIN, more), done("a"), kernel("k"))
    assert exposed == pytest.approx({("fsdp",): 3 * 6})


def test_two_exchanges_share_the_links():
    """One kernel cannot hide 12 ms."""
    two = start("a", WITHIN), start("b", WITHIN), kernel("k"), done("a"), done("b")
    _, exposed = measured(*two)
    assert exposed == pytest.approx({("fsdp",): 3 * 4})


def test_the_network_and_the_links_of_a_node_are_apart():
    both = start("a", BETWEEN), start("b", WITHIN), kernel("k"), done("b"), done("a")
    found, exposed = measured(*both)
    assert exposed == pytest.approx({("fsdp",): 0, ("data",): 3 * 32})
    assert list(found.exchanges) == [("data",), ("fsdp",)], "the longest first"


def test_a_ring_over_whole_nodes_leaves_each_by_all_of_its_adapters():
    links = Links(within=370e9, network=NETWORK, per_node=8)

    def seconds(group):
        return links.seconds(hlo.Collective("all-gather", (), 16 << 30, [group], 1, False))

    part = 15 / 16 * (16 << 30)
    assert seconds([*range(16)]) == pytest.approx(part / (8 * NETWORK))
    assert seconds([0, 8]) == pytest.approx((8 << 30) / NETWORK)
    assert seconds([*range(8)]) == pytest.approx(7 / 8 * (16 << 30) / 370e9)


# As libtpu 0.0.42 writes them: a sum of which devices keep their parts, and a product that gathers
# the next matrix. The scatter sends 3 MB, 3 ms. The product reads and writes 8 MB, 8 ms.
TPU = """HloModule jit_step, is_scheduled=true, num_partitions=8

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}

%all-reduce-scatter.clone.1 (d: f32[1000,1000]) -> f32[250,1000] {
  %d = f32[1000,1000]{1,0} parameter(0)
  %i = s32[] constant(0)
  %all-reduce.9 = f32[1000,1000]{1,0} all-reduce(%d), channel_id=3, replica_groups=GROUPS, \
use_global_device_ids=true, to_apply=%add, \
frontend_attributes={from-cross-replica-sharding="true"}
  ROOT %slice = f32[250,1000]{1,0} dynamic-slice(%all-reduce.9, %i, %i), \
dynamic_slice_sizes={250,1000}
}

%product (f: f32[1000,1000], g: f32[PART,1000]) -> (f32[1000,1000], f32[WHOLE,1000]) {
  %f = f32[1000,1000]{1,0} parameter(0)
  %g = f32[PART,1000]{1,0:S(1)} parameter(1)
  %y = f32[1000,1000]{1,0} convolution(%f, %f), dim_labels=bf_io->bf
  %whole = f32[WHOLE,1000]{1,0:S(1)} all-gather(%g), channel_id=4, replica_groups=GROUPS, \
dimensions={0}
  ROOT %both = (f32[1000,1000]{1,0}, f32[WHOLE,1000]{1,0:S(1)}) tuple(%y, %whole)
}

ENTRY %main (x: f32[1000,1000], w: f32[PART,1000]) -> f32[250,1000] {
  %x = f32[1000,1000]{1,0} parameter(0)
  %w = f32[PART,1000]{1,0:S(1)} parameter(1)
  %y = (f32[1000,1000]{1,0}, f32[WHOLE,1000]{1,0:S(1)}) fusion(%x, %w), kind=kOutput, \
calls=%product
  %z = f32[1000,1000]{1,0} get-tuple-element(%y), index=0
  ROOT %sum = f32[250,1000]{1,0} fusion(%z), kind=kCustom, calls=%all-reduce-scatter.clone.1
}
""".replace("GROUPS", WITHIN)


@pytest.mark.parametrize(("part", "gathering"), [(250, 3), (1000, 12)])
def test_an_exchange_inside_of_a_tpus_fusion_takes_its_links(part, gathering):
    """A scatter waits for them. A product takes the longer time of its kernel and its gather."""
    text = TPU.replace("PART", str(part)).replace("WHOLE", str(4 * part))
    program = hlo.Program(text)
    seconds = traffic.seconds_of_each(traffic.traffic(program), RATES)
    found = exposure(program, MESH, seconds, LINKS)
    assert 1e3 * found.link == pytest.approx(gathering + 3)
    assert 1e3 * found.computing == pytest.approx(8)
    assert 1e3 * found.exposed == pytest.approx(max(0, gathering - 8) + 3)
    assert list(found.exchanges) == [("fsdp",)]


def test_each_step_of_a_ring_takes_a_latency():
    """An exchange of no bytes over eight GPUs of each of four nodes, by NCCL's own model. Sums take
    trees between many nodes."""
    links = Links(within=370e9, network=NETWORK, per_node=8, has_latency=True)

    def microseconds(kind, group):
        return 1e6 * links.seconds(hlo.Collective(kind, (), 0, [group], 1, False))

    assert microseconds("all-gather", [*range(32)]) == pytest.approx(28 * 1.9 + 3 * 4)
    assert microseconds("all-reduce", [*range(32)]) == pytest.approx(2 * (7 * 1.2 + 2 * 8.5))
    assert microseconds("all-reduce", [0, 8]) == pytest.approx(2 * 4)
    assert microseconds("collective-permute", [*range(8)]) == 0
    assert links_for("gpu:h100x8*4", (1, 32, 1)).has_latency
    assert not links_for("tpu:v5e:4x4", (1, 16, 1)).has_latency


def groups_of(sizes, axis):
    """The groups of a (data, fsdp, model) mesh along one axis."""
    places = np.arange(math.prod(sizes)).reshape(sizes)
    return np.moveaxis(places, MESH_AXES.index(axis), -1).reshape(-1, sizes[MESH_AXES.index(axis)])


def links_for(target, sizes):
    return links_of(parse_target(target), dict(zip(MESH_AXES, sizes, strict=True)))


@pytest.mark.parametrize(
    ("target", "sizes", "places", "rate"),
    [
        ("tpu:v5e:2x4", (2, 4, 1), 1, 50e9),  # of 100 GB/s at a corner of the slice
        ("tpu:v5e:16x16", (16, 16, 1), 1, 50e9),  # of 200
        ("tpu:v5e:16x16", (16, 16, 1), 15, 50e9),  # backwards
        ("tpu:v5e:16x16", (16, 16, 1), 4, 12.5e9),  # four share a link
        ("tpu:v5e:16x16", (16, 16, 1), 13, 50e9 / 3),
        ("tpu:v5e:16x16", (1, 256, 1), 16, 50e9),  # along the other side
        ("tpu:v5p:4x4x4", (16, 4, 1), 1, 100e9),  # of 600
        ("tpu:v5p:4x4x4", (1, 64, 1), 32, 100e9),  # across a ring, both ways
        ("tpu:v5p:4x4x4*2", (32, 4, 1), 1, 100e9),
        ("tpu:tpu7x:4x4x4", (16, 8, 1), 1, 100e9),  # one of two cores sends to another chip
        ("tpu:tpu7x:4x4x4", (16, 8, 1), 2, 50e9),  # both do
        ("gpu:h100x8", (2, 4, 1), 1, 0.82 * 450e9),  # by the switch
    ],
)
def test_a_permute_takes_single_links_of_a_tpu(target, sizes, places, rate):
    pairs = [
        [int(group[i]), int(group[(i + places) % sizes[1]])]
        for group in groups_of(sizes, "fsdp")
        for i in range(sizes[1])
    ]
    permute = hlo.Collective("collective-permute", (), 1 << 20, pairs, 1, False)
    assert (1 << 20) / links_for(target, sizes).seconds(permute) == pytest.approx(rate)


@pytest.mark.parametrize(
    ("target", "sizes", "axis", "kind", "milliseconds"),
    [
        ("tpu:v5p:4x4x4", (1, 32, 2), "model", "all-gather", 5.0),  # two neighbours
        ("tpu:v5p:4x4x4", (16, 4, 1), "fsdp", "all-gather", 3.75),  # a ring
        ("tpu:v5p:4x4x4", (4, 16, 1), "fsdp", "all-gather", 15 / 16 / 0.4),  # two rings
        ("tpu:v5p:4x4x4", (16, 2, 2), "fsdp", "all-gather", 5.0),
        ("tpu:v5e:4x4", (4, 4, 1), "fsdp", "all-gather", 15.0),  # a row
        ("tpu:v5e:16x16", (16, 16, 1), "fsdp", "all-gather", 15 / 16 / 0.1),
        ("tpu:v5e:16x16", (1, 256, 1), "fsdp", "all-to-all", 40.0),
        ("tpu:v5e:4x4", (4, 4, 1), "fsdp", "all-to-all", 20.0),
        ("tpu:v5p:4x4x4", (1, 64, 1), "fsdp", "all-to-all", 5.0),
        ("tpu:v5p:4x4x4", (16, 4, 1), "fsdp", "all-to-all", 5.0),
        ("gpu:h100x16", (1, 16, 1), "fsdp", "all-to-all", 8 / 16 * 1e12 / NETWORK),
    ],
)
def test_an_exchange_takes_the_links_that_its_group_spans(target, sizes, axis, kind, milliseconds):
    """Of 1 GB. No route between the chips takes less, by the links that cross some plane of the
    slice, but for the two rings."""
    groups = groups_of(sizes, axis).tolist()
    seconds = links_for(target, sizes).seconds(hlo.Collective(kind, (), 10**9, groups, 1, False))
    assert 1e3 * seconds == pytest.approx(milliseconds, rel=0.01)


def test_chips_between_the_members_of_a_group_share_its_links():
    """Every other chip of a ring of eight, and of a row."""
    places, group = [(i,) for i in range(8)], [0, 2, 4, 6]
    assert Torus(places, [8], [True]).links(group) == 2 / 2
    assert Torus(places, [8], [False]).links(group) == 1 / 2
    assert Torus(places, [8], [True]).links([0, 7]) == 1  # neighbours by the closing link


def permute_start(name, pairs):
    shape = "f32[1000000]{0}"
    return (
        f"  %{name} = ({shape}, {shape}, u32[], u32[]) collective-permute-start(%x),"
        f" source_target_pairs={pairs}"
    )


def permute_done(name):
    return f"  %{name}-done = f32[1000000]{{0}} collective-permute-done(%{name})"


@pytest.mark.parametrize(
    ("is_ring", "second", "milliseconds"),
    [
        (True, "backwards", 4),  # at once
        (False, "backwards", 8),  # both take each link of a row that is not closed
        (True, "forwards", 8),
        (True, "sum", 7),  # of 6 MB by both links of the ring, of which the permute has one
        (True, "data", 4),  # over the links of another side
    ],
)
def test_permutes_in_opposite_directions_of_a_ring_go_at_once(is_ring, second, milliseconds):
    forwards = "{{0,1},{1,2},{2,3},{3,0},{4,5},{5,6},{6,7},{7,4}}"
    pairs = {
        "forwards": forwards,
        "backwards": "{{0,3},{1,0},{2,1},{3,2},{4,7},{5,4},{6,5},{7,6}}",
        "data": "{{0,4},{1,5},{2,6},{3,7},{4,0},{5,1},{6,2},{7,3}}",
    }
    starts = [permute_start("a", forwards)]
    ends = [permute_done("a")]
    if second == "sum":
        starts.append(start("b", WITHIN))
        ends.append(done("b"))
    else:
        starts.append(permute_start("b", pairs[second]))
        ends.append(permute_done("b"))
    program = hlo.Program(text(*starts, *ends))
    torus = Torus(list(np.ndindex(2, 4)), (2, 4), (False, is_ring))
    links = Links(within=3e9, network=1e9, per_node=8, torus=torus, link=1e9)
    found = exposure(program, MESH, {}, links)
    assert 1e3 * found.exposed == pytest.approx(3 * milliseconds)
