"""The mesh, and the rules from logical axes to mesh axes."""

import jax
import pytest
from jax.sharding import PartitionSpec

from jaxtrain.parallel.layout import (
    LayoutError,
    make_layout,
    make_mesh,
    mesh_sizes,
    require_slices,
)


def layout(data=2, fsdp=2, model=2, **rules):
    return make_layout(make_mesh(data, fsdp, model), rules)


@pytest.mark.parametrize(
    ("asked", "given"),
    [
        ((-1, 1, 1), (8, 1, 1)),
        ((2, -1, 2), (2, 2, 2)),
        ((1, 4, -1), (1, 4, 2)),
        ((8, 1, 1), (8, 1, 1)),
    ],
)
def test_one_mesh_axis_may_be_the_rest(asked, given):
    assert tuple(make_mesh(*asked).shape.values()) == given


def test_a_mesh_over_some_devices():
    devices = jax.devices()[2:4]
    assert list(make_mesh(1, -1, 1, devices=devices).devices.flat) == devices


@pytest.mark.parametrize(
    "sizes", [(3, 1, 1), (2, 2, 1), (-1, 3, 1), (16, 1, 1), (-1, -1, 1), (-1, 0, 1)]
)
def test_a_mesh_that_does_not_fit_names_its_sizes(sizes):
    with pytest.raises(LayoutError, match=f"'data': {sizes[0]}.*8 devices"):
        make_mesh(*sizes)


def test_a_cpu_is_divided_for_a_mesh_of_more_devices():
    flag = "divide the CPU into 8 devices with XLA_FLAGS=--xla_force_host_platform_device_count=8"
    cpu = jax.devices()[:1]
    with pytest.raises(LayoutError, match=f"multiple of 8 .* is 1 device .cpu.; {flag}"):
        make_mesh(-1, 8, 1, devices=cpu)
    with pytest.raises(LayoutError, match=f"8 places.* is 1 device .cpu.; set one .* or {flag}"):
        make_mesh(1, 8, 1, devices=cpu)
    with pytest.raises(LayoutError) as error:
        mesh_sizes((-1, 8, 1), 1, "NVIDIA H100")
    assert "XLA_FLAGS" not in str(error.value)


@pytest.mark.parametrize(
    ("axes", "shape", "expected"),
    [
        (("embed", "mlp"), (4, 8), ("fsdp", "model")),
        (
            ("layer", "embed", None, "heads", "head_dim"),
            (3, 4, 3, 2, 5),
            (None, "fsdp", None, "model"),
        ),
        (("batch", None), (4, 7), (("data", "fsdp"),)),
        (("seq",), (7,), ()),
        ((), (), ()),
    ],
)
def test_logical_axes_become_mesh_axes(axes, shape, expected):
    assert layout().spec(axes, shape) == PartitionSpec(*expected)


def test_equal_layouts_have_equal_shardings():
    assert layout().sharding(("embed", None), (4, 3)) == layout().sharding(("embed",), (4,))


def test_a_mesh_axis_of_size_one_splits_nothing():
    assert layout(8, 1, 1).spec(("embed", "mlp"), (3, 5)) == PartitionSpec()
    assert layout(8, 1, 1).spec(("batch",), (8,)) == PartitionSpec("data")


def test_a_dimension_that_does_not_divide_is_named():
    with pytest.raises(LayoutError) as error:
        layout(1, 4, 2).spec(("embed", "mlp"), (6, 8), path="encoder/w_up")
    for part in (
        "encoder/w_up",
        "'embed'",
        "6",
        "'fsdp'",
        "4",
        "config.mesh.axis_rules",
        "'fsdp?'",
    ):
        assert part in str(error.value)


def test_rows_that_do_not_divide_name_the_number_that_does():
    with pytest.raises(LayoutError, match="'batch' of size 12 .* make train.batch a multiple of 8"):
        layout(2, 4, 1).spec(("batch",), (12,), path="tokens")


def test_a_question_mark_lets_a_dimension_stay_whole():
    rules = layout(1, 2, 4)
    # the default rule of vocab is "model?"
    assert rules.spec(("embed", "vocab"), (4, 10)) == PartitionSpec("fsdp")
    assert rules.spec(("embed", "vocab"), (4, 12)) == PartitionSpec("fsdp", "model")


def test_the_remedy_that_the_message_names_works():
    assert layout(1, 4, 2, embed="fsdp?").spec(("embed", "mlp"), (6, 8)) == PartitionSpec(
        None, "model"
    )


def test_a_mesh_axis_can_split_one_dimension_only():
    with pytest.raises(LayoutError, match="w: axes 'heads' and 'mlp' both want mesh axis 'model'"):
        layout().spec(("heads", "mlp"), (2, 2), path="w")


def test_a_dimension_that_stays_whole_wants_no_mesh_axis():
    assert layout(2, 2, 2).spec(("vocab", "mlp"), (3, 2)) == PartitionSpec(None, "model")


def test_an_unknown_axis_lists_the_known_ones():
    with pytest.raises(
        LayoutError, match="w: axis 'embde' has no rule; expected one of: .*'embed'"
    ):
        layout().spec(("embde",), (4,), path="w")


def test_axes_and_dimensions_must_be_as_many():
    with pytest.raises(LayoutError, match="w: 1 axes .* 2 dimensions"):
        layout().spec(("embed",), (4, 4), path="w")


def test_config_overrides_and_adds_rules():
    rules = layout(embed="", frames="data,model")
    assert rules.spec(("embed",), (3,)) == PartitionSpec()
    assert rules.spec(("frames",), (4,)) == PartitionSpec(("data", "model"))


def test_a_rule_that_names_no_mesh_axis_is_an_error():
    with pytest.raises(
        LayoutError, match=r"rules\['embed'\] = 'fdsp' names \['fdsp'\]; the mesh axes are"
    ):
        layout(embed="fdsp")


def test_shard_pins_an_array_inside_jit():
    place = layout()
    y = jax.jit(lambda x: place.shard(x * 2, "batch", "mlp"))(jax.numpy.ones((8, 4)))
    assert y.sharding.is_equivalent_to(place.sharding(("batch", "mlp"), (8, 4)), 2)


def test_nodes_of_gpus_may_share_a_replica_and_no_part_of_model():
    """Slices of TPUs may not, since fsdp would leave their links."""
    for sizes in ((2, 8, 1), (1, 16, 1), (1, 8, 2)):
        require_slices(sizes, 2, "gpu")
    require_slices((2, 8, 1), 2, "tpu")
    with pytest.raises(LayoutError, match="the 2 slices do not divide data=1; fsdp and model"):
        require_slices((1, 16, 1), 2, "tpu")
    with pytest.raises(LayoutError, match=r"4 nodes do not divide data × fsdp = 2; model must"):
        require_slices((1, 2, 8), 4, "gpu")


def test_a_mesh_over_nodes_has_the_gpus_of_a_node_side_by_side():
    class Gpu:
        def __init__(self, number, node):
            self.id, self.slice_index, self.process_index = number, node, node
            self.platform, self.device_kind = "gpu", "NVIDIA H100 80GB HBM3"

    gpus = [Gpu(i, i // 4) for i in range(8)]
    mesh = make_mesh(1, 8, 1, devices=[*gpus[4:], *gpus[:4]])
    assert [gpu.id for gpu in mesh.devices.flat] == [*range(8)]
    assert dict(mesh.shape) == {"data": 1, "fsdp": 8, "model": 1}
