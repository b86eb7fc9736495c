"""Puzzles solved by a trained recursive model: the board, how sure it is, and after how many steps."""

import csv
import io
import math
import pathlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.arrays import run_workload, stored, stored_params
from jaxtrain.arrays import source as source_lib
from jaxtrain.arrays.stored import StoredError
from jaxtrain.types import Variables
from jaxtrain.workloads.trm import loss
from jaxtrain.workloads.trm.model import Config, make_specs
from loaders.base import DataError
from loaders.io import files

MAX_CYCLES = 100_000  # cycles of all steps, and tokens, of a run that may be anyone's
MAX_BYTES = 1 << 30  # [bytes] of a table of puzzles
QUESTION, ANSWER = ("question", "puzzle", "board", "quizzes"), ("answer", "solution", "solutions")


class Solver(NamedTuple):
    """A model with its parameters, on one device."""

    model: loss.Model
    variables: Variables
    name: str  # of the step, and its parameters

    @property
    def side(self) -> int:
        return math.isqrt(self.model.c.n_cells)


class Puzzle(NamedTuple):
    """A board as text, "." for a blank, row by row, and its solution, or "" if the table has none."""

    question: str
    answer: str


class Solved(NamedTuple):
    """The model's answer to a puzzle."""

    board: str  # after all steps
    confidence: float  # that the board is right, by the model's own head, in [0, 1]
    steps: int  # the first step whose board is the last one
    halted: int  # the first step at which the model was sure; 0: never
    valid: bool  # it keeps the given digits, and every row, column and box holds each digit once


def load(run: str, *, step: int | None = None, ema: bool = False) -> Solver:
    """Read a run of jaxtrain.workloads.trm, or an export of one. Raises StoredError, WarmStartError."""
    source = source_lib.find(run, step)
    config = source.config(__package__)
    c = run_workload.model_section(config, Config)
    side = math.isqrt(max(c.n_cells or 0, 0))
    if side not in (4, 9) or side * side != c.n_cells or c.vocab != side + 2:
        raise StoredError(f"{source.path} solves boards of {c.n_cells} cells and {c.vocab} symbols; expected Sudoku of 4 or 9")
    if max(c.halt_steps * c.cycles_high * c.cycles_low, c.n_tokens) > MAX_CYCLES:
        raise StoredError(
            f"{source.path} takes {c.halt_steps} steps of {c.cycles} cycles over {c.n_tokens} tokens: no config of ours"
        )
    layout = stored_params.one_device()
    arrays = source.arrays()
    carry = {}
    for name in ("init_h", "init_l"):
        path = f"{stored.CARRY}{name}"
        if path not in arrays or arrays[path].shape != (c.embed,):
            remedy = "export the run again" if source.is_export else "name another step"
            raise StoredError(f"{source.path} holds no {path} of {c.embed} values; {remedy}")
        carry[name] = jnp.asarray(arrays[path].read(()), jnp.float32)
    params = stored_params.read(source, make_specs(c), layout, ema=ema)
    return Solver(loss.Model(c, layout.shard, 0), Variables(params, carry=carry), source.name(ema=ema))


def read_puzzles(path: str, side: int) -> list[Puzzle]:
    """Return the puzzles of a table with a column question, as `jaxtrain sudoku` writes it, or of text with a board a line.

    Raises DataError, with the line.
    """
    text = files.read_text(pathlib.Path(path).expanduser(), most=MAX_BYTES)
    lines = files.lines(text)
    header = [name.strip().casefold() for name in lines[0].split(",")] if lines else []
    question = next((header.index(name) for name in QUESTION if name in header), None)
    answer = next((header.index(name) for name in ANSWER if name in header), None)
    found = []
    try:
        for number, row in enumerate(csv.reader(io.StringIO(text)), 1):
            if not any(field.strip() for field in row) or (question is not None and number == 1):
                continue
            fields = [row[at].strip() if at is not None and at < len(row) else "" for at in (question or 0, answer)]
            board = fields[0].replace("0", ".")
            if len(board) != side * side or set(board) - {".", *map(str, range(1, side + 1))}:
                raise DataError(
                    f"{path}:{number}: {fields[0][:90]!r} is no board; expected {side * side} of 1 to {side}, or . for a blank"
                )
            found.append(Puzzle(board, fields[1]))
    except csv.Error as error:
        raise DataError(f"{path} cannot be read as a table: {error}") from error
    if not found:
        raise DataError(f"{path} holds no board; expected a column question, or a board a line")
    return found


def solve(solver: Solver, puzzles: Sequence[Puzzle], *, batch: int = 64) -> Iterator[Solved]:
    """Solves boards, in order, ``batch`` at a time."""
    model, side = solver.model, solver.side

    @jax.jit
    def run(variables: Variables, inputs_bs: jax.Array) -> tuple[jax.Array, jax.Array]:
        rows = {"inputs": inputs_bs, "puzzle": jnp.zeros(len(inputs_bs), jnp.int32)}
        keep = lambda logits_bsv, q_b2: (logits_bsv.argmax(-1), q_b2[:, 0])  # noqa: E731
        return loss.solve(model, variables, rows, keep)[2]

    for start in range(0, len(puzzles), batch):
        some = puzzles[start : start + batch]
        texts = [puzzle.question for puzzle in some] + ["." * side * side] * (batch - len(some))
        symbols = np.frombuffer("".join(texts).replace(".", "0").encode(), np.uint8).reshape(batch, -1).astype(np.int32)
        boards, q = (
            np.asarray(x) for x in run(solver.variables, jnp.asarray(symbols - ord("0") + 1))
        )  # [steps, B, S], [steps, B]
        for i, puzzle in enumerate(some):
            same = (boards[:, i] == boards[-1, i]).all(1)
            sure = np.flatnonzero(q[:, i] > 0)
            board = "".join("." if not 2 <= s <= side + 1 else str(s - 1) for s in boards[-1, i].tolist())
            first = len(same) - int(np.argmin(same[::-1])) if not same.all() else 0  # the one behind the last that differs
            confidence = float(1 / (1 + np.exp(-np.clip(q[-1, i], -80, 80))))
            yield Solved(
                board, confidence, first + 1, int(sure[0]) + 1 if len(sure) else 0, is_solution(puzzle.question, board)
            )


def is_solution(question: str, board: str) -> bool:
    """Whether a board keeps the given digits, and every row, column and box holds each digit once."""
    side = math.isqrt(len(board))
    box = math.isqrt(side)
    cells = np.array(list(board)).reshape(side, side)
    boxes = cells.reshape(box, box, box, box).swapaxes(1, 2).reshape(side, side) if box * box == side else cells
    digits = set(map(str, range(1, side + 1)))
    lines = [*cells, *cells.T, *boxes]
    return all(set(line) == digits for line in lines) and all(q in (".", b) for q, b in zip(question, board, strict=True))
