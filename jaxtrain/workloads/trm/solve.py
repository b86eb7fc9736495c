"""Puzzles solved by a trained recursive model: the board, how sure it is, and its steps."""

import csv
import io
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
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
# the columns of a table, by any of these names
QUESTION = ("question", "puzzle", "board", "quizzes")
ANSWER = ("answer", "solution", "solutions")
# of `rollouts.Explored`, that a search returns for each board and rollout
EXPLORED = ("solved", "sure", "since", "steps")


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
    mean_steps: float  # [supervision steps] of a rollout, on average
    logits: np.ndarray  # float32 [rollouts] of the head at the end of each
    solved: np.ndarray  # bool [rollouts] whose board is valid
    sure: np.ndarray  # int32 [rollouts] first step at which the head was sure; 0: never

    def q_valid(self, n: int) -> bool:
        """Return whether the board that the head prefers among the first n rollouts is valid."""
        preferred = self.logits[:n].argmax()
        return bool(self.solved[preferred])

    def halts(self) -> float:
        """Return the share of the rollouts, without the first of several, that were sure."""
        first = min(1, len(self.sure) - 1)
        was_sure = self.sure[first:] > 0
        return float(was_sure.mean())


def load(run: str, *, step: int | None = None, ema: bool = False) -> Solver:
    """Read a run of jaxtrain.workloads.trm, or an export. Raises StoredError, WarmStartError."""
    source = source_lib.find_best(run, step)
    config = source.config(__package__)
    c = run_workload.model_section(config, Config)
    n_cells = max(c.n_cells or 0, 0)
    if not kinds.kind_of(n_cells, c.vocab or 0):
        raise StoredError(
            f"{source.path} solves boards of {c.n_cells} cells and {c.vocab} symbols; expected"
            " Sudoku or mazes"
        )
    limit_cycles(c, c.halt_steps, str(source.path))
    devices = jax.local_devices()
    mesh = layout_lib.make_mesh(len(devices), 1, 1, devices=devices)
    layout = layout_lib.make_layout(mesh, {})
    arrays = source.arrays()
    model_state = {}
    for name in ("init_h", "init_l"):
        initial = _read_initial(source, arrays, name, c.embed)
        model_state[name] = jax.device_put(initial, layout.replicated())
    params = stored_params.read(source, make_specs(c), layout, ema=ema)
    variables = Variables(params, model_state=model_state)
    return Solver(c, variables, source.name(ema=ema), layout.shard)


def _read_initial(
    source: source_lib.Source, arrays: Mapping[str, stored.Stored], name: str, size: int
) -> np.ndarray:
    """Return a state that boards begin with, float32 [D]. Raises StoredError if there is none."""
    path = f"{stored.MODEL_STATE}{name}"
    array = arrays.get(path)
    if array is None or array.shape != (size,):
        remedy = "export the run again" if source.is_export else "name another step"
        raise StoredError(f"{source.path} holds no {path} of {size} values; {remedy}")
    return np.asarray(array.read(()), np.float32)


def limit_cycles(c: Config, steps: int, what: str) -> None:
    """Raise StoredError for more work than any config of ours asks for."""
    n_cycles = steps * c.cycles_high * c.cycles_low
    if max(n_cycles, c.n_tokens) > MAX_CYCLES:
        raise StoredError(
            f"{what} takes {steps} steps of {c.cycles} cycles over {c.n_tokens} tokens: no config"
            " of ours"
        )


def need_head(solver: Solver) -> None:
    """Raise StoredError if the halting head, which chooses rollouts, has never been trained."""
    w_q = np.asarray(solver.variables.params["w_q"])
    if not w_q.any():
        run = solver.name.split()[0]
        raise StoredError(
            f"{run} has a halting head that was never trained (w_q is 0), and it"
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
    header: list[str] = []
    if rows:
        header = [name.casefold() for name in rows[0].fields]
    question = _column(header, QUESTION)
    answer = _column(header, ANSWER)
    if question is not None:
        rows = rows[1:]
    elif len(header) > 1 and len(header[0]) != side * side:
        beginning = ", ".join(rows[0].fields)[:90]
        raise DataError(
            f"{path} has no column question; it begins with {beginning!r}; name the column so"
        )
    if not rows:
        raise DataError(f"{path} holds no board; expected a column question, or a board a line")
    puzzles = []
    for row in rows:
        board = row.field(question or 0)
        if kind in kinds.BOXES:
            board = board.replace("0", ".")
        puzzles.append(Puzzle(board, row.field(answer)))
    questions = [puzzle.question for puzzle in puzzles]
    answers = {i: puzzle.answer for i, puzzle in enumerate(puzzles) if puzzle.answer}
    places = [f"{path}:{row.line}" for row in rows]
    puzzle_files.to_boards(kind, side, questions, answers, places.__getitem__)
    return puzzles


class Row(NamedTuple):
    """A row of a table."""

    line: int  # of the file, from 1
    fields: list[str]

    def field(self, column: int | None) -> str:
        """Return the text in a column, "" without one."""
        if column is None or column >= len(self.fields):
            return ""
        return self.fields[column]


def _column(header: Sequence[str], names: Sequence[str]) -> int | None:
    """Return the first column with one of these names."""
    for name in names:
        if name in header:
            return header.index(name)
    return None


def _rows(path: str) -> list[Row]:
    """Return the rows of a table that are not blank."""
    text = files.read_text(files.expanded(path), most=MAX_BYTES)
    reader = csv.reader(io.StringIO(text, newline=None))
    rows = []
    try:
        for values in reader:
            fields = [value.strip() for value in values]
            if any(fields):
                rows.append(Row(reader.line_num, fields))
    except csv.Error as error:
        raise DataError(f"{path} cannot be read as a table: {error}") from error
    return rows


def program(solver: Solver, search: Search) -> Callable[..., dict[str, Any]]:
    """Compile the search: (variables, inputs, noise, key) -> arrays of each board and rollout."""

    @jax.jit
    def run(
        variables: Variables, inputs_bs: jax.Array, noise: jax.Array, key: jax.Array
    ) -> dict[str, Any]:
        puzzle_b = jnp.zeros(len(inputs_bs), jnp.int32)
        rows = {"inputs": inputs_bs, "puzzle": puzzle_b}
        explored = rollouts.explore(solver.c, variables, rows, search, noise, key, solver.shard)
        arrays = {name: getattr(explored, name) for name in EXPLORED}
        for by in CHOICES:
            arrays[by] = explored.best(by)
        arrays["boards"] = explored.logits.argmax(-1)
        arrays["logits"] = explored.q[..., 0]
        return arrays

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
    n_rows = -(-how.batch // n_devices) * n_devices
    run = run or program(solver, search)
    noise = np.float32(how.noise)
    for start in range(0, len(puzzles), n_rows):
        batch = puzzles[start : start + n_rows]
        inputs = _padded(solver, batch, n_rows)
        try:
            explored = run(solver.variables, inputs, noise, jax.random.key(how.seed))
            arrays = jax.device_get(explored)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):  # JAX has no type of its own for it
                raise
            raise DataError(
                f"{n_rows} boards with {search.rollouts} rollouts each need more memory than there"
                " is; lower --batch, --rollouts"
            ) from error
        for i in range(len(batch)):
            of_board = {name: array[i] for name, array in arrays.items()}
            yield _solved(solver.kind, of_board, how.choose)


def _padded(solver: Solver, puzzles: Sequence[Puzzle], n_rows: int) -> np.ndarray:
    """Return the symbols of boards, int32 [n_rows, S], with boards of blanks at the end."""
    questions = [puzzle.question for puzzle in puzzles]
    boards = kinds.to_symbols(solver.kind, questions)
    n_boards, n_cells = boards.shape
    blanks = np.ones((n_rows - n_boards, n_cells), np.uint8)
    padded = np.concatenate([boards, blanks])
    return padded.astype(np.int32)


def _solved(kind: str, of_board: Mapping[str, Any], choose: str) -> Solved:
    """Return a board's answer, from the arrays of its rollouts and the number of the best ones."""
    rollout = int(of_board[choose])
    best = {name: of_board[name][rollout] for name in ("boards", "logits", *EXPLORED)}
    return Solved(
        board=kinds.to_text(kind, best["boards"]),
        q=float(best["logits"]),
        steps=int(best["since"]),
        halted=int(best["sure"]),
        valid=bool(best["solved"]),
        rollout=rollout,
        mean_steps=float(of_board["steps"].mean()),
        logits=of_board["logits"],
        solved=of_board["solved"],
        sure=of_board["sure"],
    )
