"""The growth of a run with its devices: the sizes of a range, their tables, and what is lost."""

import pytest

from jaxtrain import cli, plan
from jaxtrain.plan import candidates, hlo, mesh_search, scale, scale_report, worker
from jaxtrain.plan.compile import Compiled
from jaxtrain.plan.exposure import Exchange
from jaxtrain.plan.forecast import Forecast
from tests.plan.cases import load
from tests.plan.compilers import compiled_as, quickly
from tests.plan.scheduled import WITHIN, kernel, start, text
from tests.support import small_runs

RANGE = "gpu:h100x8..32"


@pytest.fixture
def language(tmp_path, monkeypatch):
    """Return a function: overrides -> a config of a small language model with 64 rows."""

    def make(*overrides):
        return load("language", tmp_path, monkeypatch, ("model.depth", "2"), *overrides)

    return make


def table(report, growth):
    """Return the cells of a table, a list for each row."""
    lines = report.partition(f"{growth} scaling")[2].split("\n\n")[1].splitlines()
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:]]


@pytest.mark.parametrize(
    ("range", "names"),
    [
        ("tpu:v5p:2..16", ["v5p:2x1x1", "v5p:2x2x1", "v5p:2x2x2", "v5p:2x2x4"]),
        ("tpu:v5e:1..8", ["v5e:1x1", "v5e:2x2", "v5e:2x4"]),  # there are no two chips
        ("tpu:v4:512..3072", ["v4:8x8x8", "v4:8x8x16", "v4:8x16x16", "v4:12x16x16"]),
        ("TPU:tpu7x:4..4", ["tpu7x:2x2x1"]),
        ("tpu:v5litepod-16..32", ["v5litepod-16", "v5litepod-32"]),
        ("tpu:v5litepod-1..8", ["v5litepod-1", "v5litepod-4", "v5litepod-8"]),
        ("tpu:v5e:16x16*1..4", ["v5e:16x16*1", "v5e:16x16*2", "v5e:16x16*4"]),
    ],
)
def test_a_range_has_each_doubling_that_exists_and_its_ends(range, names):
    assert [target.name for target in scale.parse_range(range)] == [f"tpu:{n}" for n in names]


def test_sizes_between_the_ends_that_do_not_exist_are_named(language, monkeypatch, capsys):
    noted = []
    assert len(scale.parse_range("tpu:v5p:4..4096", 3, noted.append)) == 2
    missing = ", ".join(f"tpu:v5p:{4 * 3**n}" for n in range(1, 7))
    assert noted == [f"tpu:v5p:4..4096 has no {missing}: there are no such slices"]
    with pytest.raises(plan.PlanError, match="no compiler is here"):
        plan.report_scale(language(), "tpu:v5e:4..16", 2)
    assert capsys.readouterr().err == ""
    with pytest.raises(plan.PlanError, match="no compiler is here"):
        plan.report_scale(language(), "tpu:v5e-1..4", 2)
    assert capsys.readouterr().err.count("tpu:v5e-1..4 has no tpu:v5e-2: there") == 1


def test_a_range_of_cards_has_whole_nodes():
    targets = scale.parse_range("gpu:h100x8..1024", 4)
    assert [(t.count, t.slices) for t in targets] == [(8, 1), (32, 4), (128, 16), (512, 64)] + [
        (1024, 128)
    ]


@pytest.mark.parametrize(
    ("range", "message"),
    [
        ("tpu:v5p:64..4", "64 is more than 4; write tpu:v5p:4..64"),
        ("gpu:h100x0..8", "the smallest size is 1; write gpu:h100x1..8"),
        ("gpu:h100x0..0", "the smallest size is 1; write gpu:h100x1..1"),
        ("tpu:v4:0..8", "the smallest size is 4; write tpu:v4:4..8"),
        ("tpu:v4-0..0", "the smallest size is 8; write tpu:v4-8..8"),
        (
            "tpu:v5p:3..64",
            "tpu:v5p:3..64: there is no slice of 3 v5p chips; the nearest: tpu:v5p:2x1x1 (2 chips)"
            " and tpu:v5p:2x2x1 (4 chips)",
        ),
        ("tpu:v5e:4..512", "no slice of 512 v5e chips; the nearest: tpu:v5e:16x16 (256 chips)"),
        ("gpu:h100..8", "--scale takes a range of sizes as tpu:v5p:4..4096, "),
        ("tpu:v5e:16x16..2", "--scale takes a range of sizes as tpu:v5p:4..4096, "),
        ("gpu:h100x8", "--scale takes a range of sizes as tpu:v5p:4..4096, "),
        ("", "--scale takes a range of sizes"),
        ("tpu:v9:4..8", "is unknown; expected for example"),
        ("gpu:k80x1..8", "is unknown; expected for example"),
    ],
)
def test_a_range_that_is_none_says_why(range, message):
    with pytest.raises(plan.PlanError) as error:
        scale.parse_range(range)
    assert message in str(error.value)


def test_batches_are_whole_rows(language):
    targets = scale.parse_range("gpu:h100x4..10")
    with pytest.raises(plan.PlanError) as error:
        scale.batches(language(("train.batch", "7")), targets)
    assert str(error.value) == (
        "gpu:h100x10 has 10 devices, and train.batch=7 is that of the 4 devices of gpu:h100x4: 17.5"
        " rows; make train.batch a multiple of 4"
    )


def test_each_size_is_compiled_with_its_rows(language, monkeypatch):
    """Weak and strong growth share the first size. A step takes 1 s for each row of a device, and
    0.5 s more on each doubling: two thirds of the rows a second are left on 16, half on 32."""
    quickly(monkeypatch)
    extra = {8: 0.0, 16: 0.5, 32: 1.0}
    asked = compiled_as(
        monkeypatch,
        seconds=lambda config: config.train.batch / config.mesh.data / 8 + extra[config.mesh.data],
    )
    report, fits, interrupted = plan.report_scale(language(), RANGE)
    assert fits and not interrupted
    sizes = [(config.mesh.data, config.train.batch) for config in asked]
    assert sizes == [(8, 64), (16, 128), (16, 64), (32, 256), (32, 64)]
    weak, strong = table(report, "weak"), table(report, "strong")
    assert [(row[0], row[2], row[8]) for row in weak] == [
        ("8", "64", "100%"),
        ("16", "128", "67%"),
        ("32", "256", "50%"),
    ]
    assert [row[8] for row in strong] == ["100%", "50%", "20%"]
    assert weak[0][1] == "8 × 1 × 1" and weak[0][3] == "1.00 GB"
    assert "mesh: data -1 × fsdp 1 × model 1, -1 takes the devices" in report


def sums_exposed_on_more_than(monkeypatch, few, kind):
    """Compile each step as a program of three sums over fsdp=4, exposed from more devices on."""
    program = text(start("a", WITHIN, ', backend_config={"is_sync":true}'), kernel("k"))

    def forecast_of(step, assembly, target):
        exposed = 0.0 if target.count == few else 1.0
        parts = {"product": 1.0, "exchange": exposed}
        exchanges = {("fsdp",): Exchange(1.0, exposed)}
        return Forecast(1.0 + exposed, parts, exposed, None, "uncalibrated", exchanges)

    compiled_as(monkeypatch, seconds=None)
    exchanges = {("all-reduce", ("fsdp",)): hlo.Exchanged(3, 18e6, 0)}
    step = Compiled(0, 0, 10**9, exchanges, 1.0, text=program)
    monkeypatch.setattr(
        worker.Process(kind).__enter__(), "ask", lambda job: worker.Answer(step), raising=False
    )
    monkeypatch.setattr(mesh_search, "forecast_of", forecast_of)


def test_a_loss_names_the_parts_that_grew(language, monkeypatch):
    """Two sums of the program, neither of them hidden, are the whole loss on 16 cards."""
    quickly(monkeypatch)
    sums_exposed_on_more_than(monkeypatch, 8, "gpu")
    config = language(("mesh.fsdp", "4"))
    report, _, _ = plan.report_scale(config, "gpu:h100x8..16")
    assert table(report, "weak")[1][5] == "18.00 MB all-reduce over fsdp"
    assert table(report, "weak")[1][9] == "product 50%, exchange over fsdp 50%"
    line = (
        "16 chips, 50% of 8: exchange over fsdp is 100% of the loss (1000.00 ms a step, 0.00 on 8):"
        " 3 × all-reduce in f32, 18.00 MB, 0 of them asynchronous"
    )
    assert line in report and "libtpu" not in report


def test_sums_of_whole_arrays_on_tpus_name_a_mesh_that_may_scatter_them(language, monkeypatch):
    quickly(monkeypatch)
    sums_exposed_on_more_than(monkeypatch, 4, "tpu")
    report, _, _ = plan.report_scale(language(("mesh.fsdp", "4")), "tpu:v5e:4..8")
    line = (
        "libtpu adds up whole arrays over fsdp=4, the largest of them f32[1000000], and cuts the"
        " sums, which sends twice the bytes of a scatter; compare data=8 fsdp=1, over which it may"
        " scatter them"
    )
    assert line in report


@pytest.mark.parametrize(
    ("first", "target", "fsdp", "other"),
    [
        ("tpu:v5p:2x4x4", "tpu:v5p:4x4x4", 64, "data=2 fsdp=32"),
        ("tpu:v5p:4x4x4", "tpu:v5p:4x4x4*2", 64, "data=4 fsdp=32"),
    ],
)
def test_sums_over_a_whole_torus_name_a_mesh_of_as_many_devices(
    language, first, target, fsdp, other
):
    def row(name, seconds):
        target = plan.parse_target(name)
        mesh = ("mesh.data", str(max(1, target.count // fsdp))), ("mesh.fsdp", str(fsdp))
        candidate = mesh_search.Candidate(
            candidates.NOTHING, language(("train.batch", "128"), *mesh), 1.0
        )
        settled = mesh_search.Settled(candidate, 1.0, seconds=seconds)
        return scale.Row(scale.STRONG, target, 128, settled)

    [cause] = scale_report._causes(row(target, 2.0), row(first, 1.0))
    assert f"compare {other}, which gathers parts" in cause


@pytest.mark.parametrize(("fsdp", "names"), [("1", False), ("8", True)])
def test_a_loss_names_the_first_mesh_of_a_search_if_it_is_much_faster(
    language, monkeypatch, fsdp, names
):
    """By the estimate, fsdp only adds exchanges to a small model."""
    quickly(monkeypatch)
    compiled_as(monkeypatch, seconds=lambda config: 1.0)
    report, _, _ = plan.report_scale(language(("mesh.fsdp", fsdp)), "gpu:h100x8..16")
    assert "16 chips, 50% of 8" in report
    assert ("fsdp=1 model=" in report and "which takes" in report) == names


def test_a_size_that_does_not_fit_has_its_lack_in_place_of_figures(language, monkeypatch):
    quickly(monkeypatch)
    compiled_as(
        monkeypatch,
        seconds=lambda config: 1.0,
        size=lambda config: 640e9 / config.mesh.data,
    )
    report, fits, _ = plan.report_scale(language(), RANGE)
    assert fits
    assert table(report, "weak")[0][3] == "its program takes 80.00 GB of 74.24 GB"
    assert "the smallest size of the range that fits is gpu:h100x16" in report
    assert [row[8] for row in table(report, "weak")] == ["", "100%", "100%"]


def test_the_table_has_the_values_on_auto(language, monkeypatch, capsys):
    """Two microbatches fit, or the mesh that a search takes."""
    quickly(monkeypatch)
    monkeypatch.setattr(plan.auto, "bound_of", mesh_search.bound_of)
    compiled_as(
        monkeypatch,
        seconds=lambda config: 1.0,
        size=lambda config: 90e9 / config.train.accumulate,
    )
    report, _, _ = plan.report_scale(language(("train.accumulate", "auto")), "gpu:h100x8..8")
    mesh = "--config.mesh.data=8 --config.mesh.fsdp=1 --config.mesh.model=1"
    assert report.count(f"8 chips: {mesh} --config.train.accumulate=2\n") == 2
    assert "gpu:h100x8, 64 rows: auto is train.accumulate=2: by its" in capsys.readouterr().err
    fields = ("mesh", "auto"), ("train.accumulate", "auto"), ("model.remat", "auto")
    report, _, _ = plan.report_scale(language(*fields), "gpu:h100x8..8")
    [line, _] = [line for line in report.splitlines() if line.startswith("8 chips: ")]
    assert "--config.mesh.data=" in line and "--config.train.accumulate=2" in line
    assert "--config.model.remat=none" in line


def test_a_range_without_room_names_the_smallest_size_that_may_do(language, monkeypatch):
    config = language(("mesh.data", "1"), ("mesh.fsdp", "-1"))
    compiled_as(monkeypatch, seconds=lambda config: 1.0)
    least = plan.memory.least(plan.abstractly(config, plan.parse_target("gpu:h100x4")), tiled=False)
    monkeypatch.setattr(plan.Target, "memory", 0.6 * least)
    report, fits, _ = plan.report_scale(config, "gpu:h100x2..4")
    assert not fits and "problem: no candidate fits" in report
    assert "The smallest target that may do, by its lower bound: gpu:h100x8" in report


def test_a_size_whose_fields_on_auto_cannot_be_decided_has_its_reason(language, monkeypatch):
    quickly(monkeypatch)
    monkeypatch.setattr(plan.auto, "bound_of", mesh_search.bound_of)
    compiled_as(monkeypatch, seconds=lambda config: 1.0)
    process = worker.Process("gpu").__enter__()

    def ask(job, ask=process.ask):
        if job.target.endswith("*2"):
            return worker.Answer(None, "INTERNAL: no tiles for this shape")
        return ask(job)

    monkeypatch.setattr(process, "ask", ask)
    auto = language(("train.accumulate", "auto"))
    report, fits, _ = plan.report_scale(auto, "gpu:h100x8*1..2")
    first, second = table(report, "weak")
    assert fits and first[8] == "100%"
    assert "cannot be decided: INTERNAL: no tiles" in second[3] and second[8] == ""


def test_mesh_auto_takes_the_first_mesh_that_fits(language, monkeypatch):
    quickly(monkeypatch)
    asked = compiled_as(monkeypatch, seconds=lambda config: 1.0)
    report, fits, _ = plan.report_scale(language(("mesh", "auto")), "gpu:h100x8..16")
    assert fits and len(asked) == 3
    assert "mesh: the first mesh that fits of a search at each size" in report


def test_programs_that_cannot_be_read_are_refused(language, monkeypatch):
    quickly(monkeypatch)
    step = Compiled(0, 0, 10**6, None, 1.0)
    monkeypatch.setattr(worker, "is_at_hand", lambda target: True)
    monkeypatch.setattr(worker, "answer", lambda job, versions: worker.Answer(step))
    with pytest.raises(plan.PlanError, match=r"cannot read that of tpu:v5e:2x2: .*than libtpu==0"):
        plan.report_scale(language(), "tpu:v5e:4..8")


def test_without_a_compiler_nothing_is_said(language):
    with pytest.raises(plan.PlanError, match="jaxtrain plan --setup gpu fetches it"):
        plan.report_scale(language(), RANGE)


def test_offloaded_arrays_of_cards_elsewhere_are_refused(language):
    config = language(("optim.offload", "True"))
    with pytest.raises(plan.PlanError, match="not with optim.offload: without a card, XLA's"):
        plan.report_scale(config, RANGE)


def run(tmp_path, *arguments):
    small_runs.rows(tmp_path)
    config = f"--config={tmp_path}/rows.py", f"--config.workdir={tmp_path}/run"
    return cli.main(["plan", *config, *arguments])


def test_ctrl_c_names_the_sizes_that_are_left(tmp_path, monkeypatch, capsys):
    compiled_as(monkeypatch, seconds=None)
    monkeypatch.setattr(mesh_search, "forecast_of", _interrupting(2))
    arguments = "gpu:h100x1..4", "--scale", "--config.train.batch=8"
    assert run(tmp_path, *arguments) == 130
    out = capsys.readouterr()
    assert "interrupted: this is known so far" in out.out
    assert "nothing is known of them: gpu:h100x2, gpu:h100x4" in out.out
    assert out.err.count("by its compiler") == 1


def test_ctrl_c_within_a_size_names_the_growth_that_is_left(tmp_path, monkeypatch, capsys):
    compiled_as(monkeypatch, seconds=None)
    monkeypatch.setattr(mesh_search, "forecast_of", _interrupting(3))
    arguments = "gpu:h100x1..4", "--scale", "--config.train.batch=8"
    assert run(tmp_path, *arguments) == 130
    left = "nothing is known of them: gpu:h100x2 (strong scaling), gpu:h100x4\n"
    assert left in capsys.readouterr().out


def _interrupting(number):
    """Return a forecast that the user interrupts at its n-th call."""
    calls = []

    def forecast_of(step, assembly, target):
        calls.append(target)
        if len(calls) == number:
            raise KeyboardInterrupt
        return Forecast(0.1, {}, 0.0, None, "")

    return forecast_of


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("gpu:h100x8..16", "--scale", "--search"), "--search and --scale are two plans; omit one"),
        (("--calibrate", "--scale"), "--calibrate plans nothing; omit --scale"),
        (("--calibrate", "gpu:h100x8"), "--calibrate plans nothing; omit gpu:h100x8"),
        (("--calibrate", "--setup=gpu"), "--calibrate plans nothing; omit --config="),
        (("--setup=gpu",), "--setup plans nothing; omit --config="),
        (("gpu:h100x8", "--by=4"), "--by is the factor between sizes of --scale"),
        (("gpu:h100x8..16", "--scale", "--by=1"), "'1'; it must be an integer of at least 2"),
        (("gpu:h100x8..16", "--scale", "--by=0"), "'0'; it must be an integer of at least 2"),
    ],
)
def test_options_that_contradict_each_other_are_refused(tmp_path, capsys, arguments, message):
    with pytest.raises(SystemExit):
        run(tmp_path, *arguments)
    assert message in capsys.readouterr().err


def test_a_range_without_scale_is_answered_with_the_option(tmp_path, capsys):
    assert run(tmp_path, "gpu:h100x8..16") == 2
    message = "--plan=gpu:h100x8..16 is a range of sizes: jaxtrain plan CONFIG gpu:h100x8..16"
    assert f"{message} --scale" in capsys.readouterr().err


def test_a_calibration_and_a_compiler_are_two_calls(capsys):
    with pytest.raises(SystemExit):
        cli.main(["plan", "--calibrate", "--setup=gpu"])
    assert "--calibrate plans nothing; omit --setup" in capsys.readouterr().err


def test_the_factor_also_decides_what_exists(tmp_path, monkeypatch, capsys):
    """There is no slice of two chips, and with this factor none is asked for."""
    compiled_as(monkeypatch, seconds=lambda config: 0.1)
    arguments = "tpu:v5e-1..16", "--scale", "--by=4", "--config.train.batch=16"
    assert run(tmp_path, *arguments) == 0
    out = capsys.readouterr()
    assert "3 sizes, each compiled" in out.out and "has no" not in out.err


def test_a_batch_that_no_size_divides_is_an_error(tmp_path, monkeypatch, capsys):
    compiled_as(monkeypatch, seconds=lambda config: 0.1)
    assert run(tmp_path, "gpu:h100x8..16", "--scale", "--config.train.batch=12") == 2
    assert "make train.batch a multiple of 8" in capsys.readouterr().err
