"""The tables of what was compiled, from answers that a compiler could have given."""

from jaxtrain import plan
from jaxtrain.plan import hlo, worker
from tools import compile_table

# A product of 1,000 × 1,000 in bfloat16, beside which 2 MB are gathered.
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
    monkeypatch.setattr(worker, "ask", lambda jobs: [worker.Answer(None, "it is too warm"), *[answer()] * (len(jobs) - 1)])
    assert compile_table.main(["--workloads", "trm", "--meshes", "data", "fsdp", *more]) == 0
    return capsys.readouterr().out.strip().splitlines()


def test_a_step_is_a_line_and_one_that_does_not_compile_says_why(capsys, monkeypatch):
    head, _, failed, compiled = printed(capsys, monkeypatch)
    assert failed.endswith("| **does not compile** | | it is too warm |")
    cells = dict(zip(head.strip("| ").split(" | "), compiled.strip("| ").split(" | "), strict=True))
    assert cells["compiled [GB]"] == "3.00" and cells["compiled in"] == "7 s"
    assert "1 all-gather over fsdp (1 async), 2 MB" in compiled
    assert head.count("|") == compiled.count("|") == failed.count("|")


def test_the_docs_form_has_a_column_for_each_mesh(capsys, monkeypatch):
    lines = printed(capsys, monkeypatch, "--form", "docs")
    assert lines[0] == "| gpu:h100x8, GB of each device | data | fsdp |"
    assert lines[2] == "| trm, published | does not compile | 3.00 |"
    assert lines[-1] == "| trm, published |  | 1 of 1 all-gather |"
