"""StepCompiler compiles programs ahead of the steps that need them."""

import threading
import time

import pytest

from jaxtrain.run.step_compiler import CompileAhead


def test_programs_are_compiled_once_each_in_order_and_before_they_are_needed():
    order, gate = [], threading.Event()

    def compiled(stage):
        if stage == 2:
            gate.wait(10)
        order.append(stage)
        return lambda: stage

    programs = CompileAhead(lambda step: min(step // 5, 3), compiled)
    programs.start(3, 19)
    assert programs.starts == {0: 3, 1: 5, 2: 10, 3: 15}
    assert programs.at(3)() == 0 and programs.at(4)() == 0 and programs.at(5)() == 1
    late = threading.Thread(target=programs.at, args=(10,))
    late.start()
    gate.set()
    late.join(10)
    assert [programs.at(step)() for step in (10, 18)] == [2, 3] and order == [0, 1, 2, 3]
    assert 10 in programs.late and 3 not in programs.late
    programs.close()


def test_a_compilation_that_fails_is_raised_at_its_step_and_not_before():
    def compiled(stage):
        if stage:
            raise ValueError("stage 1 does not fit")
        return lambda: stage

    programs = CompileAhead(lambda step: step, compiled)
    programs.start(0, 2)
    assert programs.at(0)() == 0
    with pytest.raises(ValueError, match="stage 1 does not fit"):
        programs.at(1)
    programs.close()


def test_an_evaluation_is_compiled_after_the_first_step_and_its_failure_ends_the_run_early():
    order = []

    def compiled(stage):
        order.append(stage)
        return lambda: stage

    def evaluation():
        order.append("evaluation")
        return lambda: "evaluated"

    programs = CompileAhead(lambda step: step // 5, compiled)
    programs.start(0, 10, others=[evaluation])
    assert programs.at(0)() == 0 and programs.other(0)() == "evaluated" and programs.at(9)() == 1
    assert order == [0, "evaluation", 1]
    programs.close()

    def too_large():
        raise ValueError("the evaluation does not fit")

    programs = CompileAhead(lambda step: 0, compiled)
    programs.start(0, 1_000_000, others=[too_large])
    with pytest.raises(ValueError, match="does not fit"):
        # at one of the first steps, although the evaluation was not requested
        for step in range(1_000_000):
            programs.at(step)
    with pytest.raises(ValueError, match="does not fit"):
        programs.other(0)
    programs.close()


def test_a_run_without_steps_left_has_its_evaluation():
    programs = CompileAhead(lambda step: 0, lambda stage: None)
    programs.start(5, 5, others=[lambda: lambda: "evaluated"])
    assert programs.other(0)() == "evaluated"
    programs.close()


def test_the_program_of_a_likely_first_step_is_compiled_before_it_is_known_and_once():
    order = []

    def compiled(stage):
        order.append(stage)
        return lambda: stage

    programs = CompileAhead(lambda step: step // 5, compiled)
    programs.expect(6)
    deadline = time.monotonic() + 60
    while not order and time.monotonic() < deadline:
        time.sleep(0.001)
    programs.start(5, 15, others=[lambda: lambda: order.append("evaluation")])
    assert programs.at(5)() == 1 and programs.at(14)() == 2
    programs.other(0)()
    assert order == [1, 2, "evaluation"]
    programs.close()

    order.clear()
    programs = CompileAhead(lambda step: step // 5, compiled)
    # the newest checkpoint was damaged, and the run resumes from the one before it
    programs.expect(9)
    programs.start(4, 8)
    assert programs.at(4)() == 0 and programs.at(7)() == 1 and sorted(order) == [0, 1]
    programs.close()
