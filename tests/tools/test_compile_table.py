"""The tables of compiled programs, from answers that a compiler could have given."""

from jaxtrain import plan
from jaxtrain.plan import hlo, worker
from tools import compile_table

# A product of 1,000 × 1,000 in bfloat16, during which 2 MB are gathered.
PROGRAM = """HloModule step, is_scheduled=true, num_partitions=8

ENTRY %main (x: bf16[1000,1000], s: bf16[125,1000]) -> bf16[1000,1000] {
  %x = bf16[1000,1000]{1,0} parameter(0)
  %s = bf16[125,1000]{1,0} parameter(1)
  %begun = (bf16[125,1000]{1,0}, bf16[1000,1000]{1,0}) all-gather-start(%s), replica_groups=[1,8]<=[8], dimensions={0}
  %y = bf16[1000,1000]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %done = bf16[1000,1000]{1,0} all-gather-done(%begun)
}
"""


def answer():
    moves = hlo.collectives(PROGRAM)
    mesh = {"data": 1, "fsdp": 8, "model": 1}
    step = plan.Compiled(2 * 10**9, 10**9, 3 * 10**9, hlo.summary(moves, mesh), 7.0, text=PROGRAM)
    return worker.Answer(step)


def printed(capsys, monkeypatch, *more):
    monkeypatch.setattr(
        worker,
        "ask",
        lambda jobs: [worker.Answer(None, "it is too warm"), *[answer()] * (len(jobs) - 1)],
    )
    assert compile_table.main(["--workloads", "trm", "--meshes", "data", "fsdp", *more]) == 0
    said = capsys.readouterr()
    return said.out.strip().splitlines(), said.err


def test_a_step_is_a_row_and_a_mesh_a_column_and_one_that_does_not_compile_says_why(
    capsys, monkeypatch
):
    lines, errors = printed(capsys, monkeypatch)
    assert errors == "trm, published, data: it is too warm\n"
    assert lines[0] == "| gpu:h100x8, GB of each device | data | fsdp |"
    assert lines[2] == "| trm, published | does not compile | 3.00 |"
    assert lines[-1] == "| trm, published |  | 1 of 1 all-gather |"
