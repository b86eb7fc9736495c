"""Puzzles solved by a trained recursive model: the board, how sure it is, and its steps."""

import csv
import io
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.arrays import run_workload, stored, stored_params
from jaxtrain.arrays import source as source_lib
from jaxtrain.arrays.stored import StoredError
from jaxtrain.parallel import layout as layout_lib
from jaxtrain.types import Shard, Variables
from jaxtrain.workloads.trm import rollouts
from jaxtrain.workloads.trm.model import Config, make_specs
from jaxtrain.workloads.trm.rollouts import Search
from loaders.base import DataError
from loaders.io import files
from loaders.sudoku import puzzle_files
from loaders.sudoku import puzzles as kinds

MAX_CYCLES = 100_000  # cycles of all steps, and tokens, of a run that may be anyone's
MAX_BYTES = 1 << 30  # [bytes] of a table of puzzles
CHOICES = ("q", "check")
QUESTION, ANSWER = ("question", "puzzle", "board", "quizzes"), ("answer", "solution", "solutions")


class Solver(NamedTuple):
    """A model with its parameters, on all devices of this process."""

    c: Config
    variables: Variables
    name: str  # of the step, and its parameters
    shard: Shard

    @property
    def side(self) -> int:
        return math.isqrt(self.c.n_cells or 0)

    @property
    def kind(self) -> str:
        return kinds.kind_of(self.c.n_cells or 0, self.c.vocab or 0)


class Puzzle(NamedTuple):
    """A board as text, row by row, "." for a Sudoku's blank, and its solution, or ""."""

    question: str
    answer: str


class How(NamedTuple):
    """Values that a compiled search takes, and the batch."""

    noise: float = 0.0  # [1] of `rollouts.explore`
    # the rollout that the halting head prefers, or, by "check", one that keeps the rules, if any
    # does
    choose: str = "q"
    seed: int = 0
    batch: int = 64  # [boards] searched together, rounded up to a multiple of the devices


ALONE = How()


class Solved(NamedTuple):
    """The model's answer to a puzzle."""

    board: str  # after all steps
    q: float  # the logit of the model's own head that the board is right
    steps: int  # the first step whose board is the last one
    halted: int  # the first step at which the model was sure; 0: never
    valid: bool  # it keeps the givens and the rules
    rollout: int  # its number; 0 is the model's own
    taken: float  # [supervision steps] of a rollout, on average
    logits: np.ndarray  # float32 [rollouts] of the head at the end of each
    solved: np.ndarray  # bool [rollouts] whose board is valid
    sure: np.ndarray  # int32 [rollouts] first step at which the head was sure; 0: never

    def q_valid(self, n: int) -> bool:
        """Return whether the board that the head prefers among the first n rollouts is valid."""
        return bool(self.solved[self.logits[:n].argmax()])

    def halts(self) -> float:
        """Return the share of the rollouts, without the first of several, that were sure."""
        return float((self.sure[min(1, len(self.sure) - 1) :] > 0).mean())


def load(run: str, *, step: int | None = None, ema: bool = False) -> Solver:
    """Read a run of jaxtrain.workloads.trm, or an export. Raises StoredError, WarmStartError."""
    source = source_lib.find(run, step)
    config = source.config(__package__)
    c = run_workload.model_section(config, Config)
    if not kinds.kind_of(max(c.n_cells or 0, 0), c.vocab or 0):
        raise StoredError(
            f"{source.path} solves boards of {c.n_cells} cells and {c.vocab} symbols; expected"
            " Sudoku or mazes"
        )
    limit_cycles(c, c.halt_steps, str(source.path))
    devices = jax.local_devices()
    layout = layout_lib.make_layout(layout_lib.make_mesh(len(devices), 1, 1, devices=devices), {})
    arrays = source.arrays()
    model_state = {}
    for name in ("init_h", "init_l"):
        path = f"{stored.MODEL_STATE}{name}"
        if path not in arrays or arrays[path].shape != (c.embed,):
            remedy = "export the run again" if source.is_export else "name another step"
            raise StoredError(f"{source.path} holds no {path} of {c.embed} values; {remedy}")
        model_state[name] = jax.device_put(
            np.asarray(arrays[path].read(()), np.float32), layout.replicated()
        )
    params = stored_params.read(source, make_specs(c), layout, ema=ema)
    return Solver(c, Variables(params, model_state=model_state), source.name(ema=ema), layout.shard)


def limit_cycles(c: Config, steps: int, what: str) -> None:
    """Raise StoredError for more work than any config of ours asks for."""
    if max(steps * c.cycles_high * c.cycles_low, c.n_tokens) > MAX_CYCLES:
        raise StoredError(
            f"{what} takes {steps} steps of {c.cycles} cycles over {c.n_tokens} tokens: no config"
            " of ours"
        )


def need_head(solver: Solver) -> None:
    """Raise StoredError if the halting head, which chooses rollouts, has never been trained."""
    if not np.any(np.asarray(solver.variables.params["w_q"])):
        raise StoredError(
            f"{solver.name.split()[0]} has a halting head that was never trained (w_q is 0), and it"
            " chooses rollouts; use --choose=check, or train it: a run that warm-starts from this"
            " one does (metric q_halt_loss)"
        )


def read_puzzles(path: str, kind: str, side: int) -> list[Puzzle]:
    """Return the puzzles of a table with a column question, or of text with a board a line.

    `jaxtrain sudoku` writes such a table.

    Raises DataError, with the line and the cell: another size, other symbols, no solution or
    several, or an answer that is none.
    """
    rows = _rows(path)
    header = [name.casefold() for name in rows[0][1]] if rows else []
    question = next((header.index(name) for name in QUESTION if name in header), None)
    answer = next((header.index(name) for name in ANSWER if name in header), None)
    if question is not None:
        rows = rows[1:]
    elif len(header) > 1 and len(header[0]) != side * side:
        raise DataError(
            f"{path} has no column question; it begins with {', '.join(rows[0][1])[:90]!r}; name"
            " the column so"
        )
    if not rows:
        raise DataError(f"{path} holds no board; expected a column question, or a board a line")
    found = []
    for _, row in rows:
        board, solution = (
            row[at] if at is not None and at < len(row) else "" for at in (question or 0, answer)
        )
        found.append(Puzzle(board.replace("0", ".") if kind in kinds.BOXES else board, solution))
    questions = [puzzle.question for puzzle in found]
    answers = {i: puzzle.answer for i, puzzle in enumerate(found) if puzzle.answer}
    puzzle_files.to_boards(kind, side, questions, answers, lambda i: f"{path}:{rows[i][0]}")
    return found


def _rows(path: str) -> list[tuple[int, list[str]]]:
    """Return the rows of a table that are not blank, each with its line."""
    text = files.read_text(files.expanded(path), most=MAX_BYTES)
    rows = csv.reader(io.StringIO(text, newline=None))
    try:
        stripped = [(rows.line_num, [field.strip() for field in row]) for row in rows]
    except csv.Error as error:
        raise DataError(f"{path} cannot be read as a table: {error}") from error
    return [(line, row) for line, row in stripped if any(row)]


def program(solver: Solver, search: Search) -> Callable[..., dict[str, Any]]:
    """Compile the search: (variables, inputs, noise, key) -> arrays of each board and rollout."""

    @jax.jit
    def run(
        variables: Variables, inputs_bs: jax.Array, noise: jax.Array, key: jax.Array
    ) -> dict[str, Any]:
        rows = {"inputs": inputs_bs, "puzzle": jnp.zeros(len(inputs_bs), jnp.int32)}
        found = rollouts.explore(solver.c, variables, rows, search, noise, key, solver.shard)
        arrays = {name: getattr(found, name) for name in ("solved", "sure", "since", "steps")}
        best = {by: found.best(by) for by in CHOICES}
        return {**arrays, "boards": found.logits.argmax(-1), "logits": found.q[..., 0], **best}

    return run


def solve(
    solver: Solver,
    puzzles: Sequence[Puzzle],
    search: Search,
    how: How = ALONE,
    *,
    run: Callable[..., Any] | None = None,
) -> Iterator[Solved]:
    """Solve boards, in order. ``run`` is the `program` of the search, to use it again."""
    n_devices = len(jax.local_devices())
    batch = -(-how.batch // n_devices) * n_devices
    run = run or program(solver, search)
    for start in range(0, len(puzzles), batch):
        some = puzzles[start : start + batch]
        boards = kinds.to_symbols(solver.kind, [puzzle.question for puzzle in some])
        inputs = np.concatenate(
            [boards, np.ones((batch - len(some), boards.shape[1]), np.uint8)]
        ).astype(np.int32)
        try:
            out = jax.device_get(
                run(solver.variables, inputs, np.float32(how.noise), jax.random.key(how.seed))
            )
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):  # JAX has no type of its own for it
                raise
            raise DataError(
                f"{batch} boards with {search.rollouts} rollouts each need more memory than there"
                " is; lower --batch, --rollouts"
            ) from error
        for i in range(len(some)):
            at = out[how.choose][i]
            yield Solved(
                board=kinds.to_text(solver.kind, out["boards"][i, at]),
                q=float(out["logits"][i, at]),
                steps=int(out["since"][i, at]),
                halted=int(out["sure"][i, at]),
                valid=bool(out["solved"][i, at]),
                rollout=int(at),
                taken=float(out["steps"][i].mean()),
                logits=out["logits"][i],
                solved=out["solved"][i],
                sure=out["sure"][i],
            )
