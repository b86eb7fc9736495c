"""The time that exchanges take of a scheduled program, and the better meshes that a plan names."""

import pytest

from jaxtrain.parallel import chips
from jaxtrain.plan import hlo, traffic
from jaxtrain.plan.exposure import Links, exposure, links_of
from jaxtrain.plan.target import parse_target
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
    assert links_of(parse_target("gpu:h100x8*4"), {}).has_latency
    assert not links_of(parse_target("tpu:v5e:4x4"), {}).has_latency


@pytest.mark.parametrize(
    ("target", "mesh", "places", "rate"),
    [
        ("tpu:v5e:2x4", {"data": 2, "fsdp": 4}, 1, 50e9),  # of 100 GB/s at a corner of the slice
        ("tpu:v5e:16x16", {"data": 16, "fsdp": 16}, 1, 50e9),  # of 200
        ("tpu:v5e:16x16", {"data": 16, "fsdp": 16}, 15, 50e9),  # backwards
        ("tpu:v5e:16x16", {"data": 16, "fsdp": 16}, 4, 12.5e9),  # four share a link
        ("tpu:v5e:16x16", {"data": 16, "fsdp": 16}, 13, 50e9 / 3),
        ("tpu:v5p:4x4x4", {"data": 16, "fsdp": 4}, 1, 100e9),  # of 600
        ("tpu:tpu7x:4x4x4", {"data": 16, "fsdp": 8}, 1, 50e9),  # each core has half a chip's
        ("gpu:h100x8", {"data": 2, "fsdp": 4}, 1, 0.82 * 450e9),  # by the switch
    ],
)
def test_a_permute_takes_one_link_of_a_tpu(target, mesh, places, rate):
    n = mesh["fsdp"]
    target = parse_target(target)
    pairs = [[i, i - i % n + (i + places) % n] for i in range(mesh["data"] * n)]
    permute = hlo.Collective("collective-permute", (), 1 << 20, pairs, 1, False)
    assert (1 << 20) / links_of(target, mesh).seconds(permute) == pytest.approx(rate)


def permute_start(name, pairs):
    shape = "f32[1000000]{0}"
    return (
        f"  %{name} = ({shape}, {shape}, u32[], u32[]) collective-permute-start(%x),"
        f" source_target_pairs={pairs}"
    )


def permute_done(name):
    return f"  %{name}-done = f32[1000000]{{0}} collective-permute-done(%{name})"


@pytest.mark.parametrize(
    ("ring", "second", "milliseconds"),
    [
        (4, "backwards", 4),  # at once
        (0, "backwards", 8),  # both take each link of a row that is not closed
        (4, "forwards", 8),
        (4, "sum", 6),  # of 6 MB by all three links, of which the permute has one
        (4, "data", 4),  # over the links of another axis
    ],
)
def test_permutes_in_opposite_directions_of_a_ring_go_at_once(ring, second, milliseconds):
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
    links = Links(within=3e9, network=1e9, per_node=8, link=1e9, ring=ring, mesh=MESH)
    found = exposure(program, MESH, {}, links)
    assert 1e3 * found.exposed == pytest.approx(3 * milliseconds)
