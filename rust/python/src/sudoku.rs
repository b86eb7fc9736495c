//! Sudoku boards as arrays.

use jaxtrain_loader::sudoku::{parallel, Rules};
use numpy::{IntoPyArray, PyArray1, PyArray2, PyArrayMethods, PyReadonlyArray2};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

type Boards<'py> = Bound<'py, PyArray2<u8>>;
type Counts<'py> = Bound<'py, PyArray1<i64>>;

/// Puzzles of one call, at most.
const MAX_PUZZLES: usize = 1 << 24;

fn check_threads(threads: usize) -> PyResult<()> {
    match threads {
        0..=1024 => Ok(()),
        _ => Err(PyValueError::new_err(format!("threads = {threads} must be at most 1024"))),
    }
}

/// Computes `of` every board.
fn each<T: Send>(
    py: Python<'_>, boards: &PyReadonlyArray2<'_, u8>, threads: usize,
    of: impl Fn(&Rules, &[u8]) -> T + Sync,
) -> PyResult<Vec<T>> {
    check_threads(threads)?;
    let (n, cells) = boards.as_array().dim();
    let rules = Rules::new(cells.isqrt()).filter(|rules| rules.n_cells() == cells);
    let wrong =
        || PyValueError::new_err(format!("boards have {cells} cells; expected 16, 36 or 81"));
    let (rules, boards) = (rules.ok_or_else(wrong)?, boards.as_slice()?);
    Ok(py.detach(|| parallel(n, threads, |i| of(&rules, &boards[i * cells..(i + 1) * cells]))))
}

/// Solve sudoku boards, counting their solutions.
#[pyfunction]
#[pyo3(signature = (boards, *, limit = 2, threads = 1))]
pub fn sudoku_solve<'py>(
    py: Python<'py>, boards: PyReadonlyArray2<'py, u8>, limit: u32, threads: usize,
) -> PyResult<(Counts<'py>, Counts<'py>, Boards<'py>)> {
    let (n, cells) = boards.as_array().dim();
    let searches = each(py, &boards, threads, |rules, board| rules.solve(board, limit))?;
    let (solutions, guesses): (Vec<i64>, Vec<i64>) = searches
        .iter()
        .map(|search| (i64::from(search.solutions), i64::from(search.guesses)))
        .unzip();
    let first: Vec<u8> = searches
        .into_iter()
        .flat_map(|search| search.first.unwrap_or_else(|| vec![0; cells]))
        .collect();
    Ok((
        solutions.into_pyarray(py),
        guesses.into_pyarray(py),
        first.into_pyarray(py).reshape([n, cells])?,
    ))
}

/// Generate sudoku puzzles with one solution each: numbers start to start + n - 1 of a seed.
#[pyfunction]
#[pyo3(signature = (n, *, side = 9, seed = 0, start = 0, blanks = (0, 81), threads = 1))]
pub fn sudoku_generate(
    py: Python<'_>, n: usize, side: usize, seed: u64, start: u64, blanks: (usize, usize),
    threads: usize,
) -> PyResult<(Boards<'_>, Boards<'_>, Counts<'_>)> {
    let rules = Rules::new(side)
        .ok_or_else(|| PyValueError::new_err(format!("side = {side} must be 4, 6 or 9")))?;
    check_threads(threads)?;
    if n > MAX_PUZZLES || start.checked_add(n as u64).is_none() {
        return Err(PyValueError::new_err(format!(
            "n = {n} from start = {start} on; expected at most {MAX_PUZZLES} below 2^64"
        )));
    }
    let puzzles = py.detach(|| {
        parallel(n, threads, |i| rules.generate(seed, start + i as u64, blanks.0, blanks.1))
    });
    let guesses: Vec<i64> = puzzles.iter().map(|puzzle| puzzle.guesses.into()).collect();
    let (mut boards, mut solutions) = (Vec::new(), Vec::new());
    for puzzle in puzzles {
        boards.extend(puzzle.board);
        solutions.extend(puzzle.solution);
    }
    let shape = [n, side * side];
    Ok((
        boards.into_pyarray(py).reshape(shape)?,
        solutions.into_pyarray(py).reshape(shape)?,
        guesses.into_pyarray(py),
    ))
}

/// Grade sudoku boards by the steps that they need, and count guesses without a solution.
#[pyfunction]
#[pyo3(signature = (boards, *, threads = 1))]
pub fn sudoku_grade<'py>(
    py: Python<'py>, boards: PyReadonlyArray2<'py, u8>, threads: usize,
) -> PyResult<(Counts<'py>, Counts<'py>)> {
    let of = |rules: &Rules, board: &[u8]| {
        (i64::from(rules.grade(board)), i64::from(rules.solve(board, 2).backtracks))
    };
    let (grades, backtracks): (Vec<i64>, Vec<i64>) =
        each(py, &boards, threads, of)?.into_iter().unzip();
    Ok((grades.into_pyarray(py), backtracks.into_pyarray(py)))
}

/// Hash sudoku boards so that symmetric copies of a board have the same number.
#[pyfunction]
#[pyo3(signature = (boards, *, threads = 1))]
pub fn sudoku_invariant<'py>(
    py: Python<'py>, boards: PyReadonlyArray2<'py, u8>, threads: usize,
) -> PyResult<Bound<'py, PyArray1<u64>>> {
    // A digit that is too large has no number.
    let of = |rules: &Rules, board: &[u8]| {
        let side = rules.n_cells().isqrt();
        let large = board.iter().find(|&&digit| usize::from(digit) > side);
        large.map_or_else(|| Ok(rules.invariant(board)), |digit| Err((*digit, side)))
    };
    let found: Result<Vec<u64>, _> = each(py, &boards, threads, of)?.into_iter().collect();
    let wrong = |(digit, side)| {
        PyValueError::new_err(format!("a board has the digit {digit}; expected at most {side}"))
    };
    Ok(found.map_err(wrong)?.into_pyarray(py))
}
