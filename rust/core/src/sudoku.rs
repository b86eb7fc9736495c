//! Sudoku boards: a solver that counts solutions and guesses, and a generator of puzzles with one solution.
//!
//! A board is `side`² cells, row by row, 0 for a blank and 1 … side for a digit; side is 4, 6 (boxes of 2 rows and 3
//! columns) or 9. Candidates are bits. `sudoku_grades` says which steps of reasoning a puzzle needs. The solver fills
//! forced cells (a cell with one candidate; a digit with one possible cell in a row, column or box) until there are
//! none, then guesses in the cell with the fewest candidates. The number of guesses, over the whole search that also
//! proves that the solution is unique, is the puzzle's difficulty: 0 means that forced cells alone solve it.

use crate::order::{hash, mix, GOLDEN};

/// Domain separation of hashes; see `order`.
const PUZZLE: u64 = 16;

pub(crate) const MAX_CELLS: usize = 81;

/// Rows, columns and boxes of a board, and the units of each cell.
pub struct Rules {
    pub(crate) side: usize,
    pub(crate) boxed: (usize, usize), // rows and columns of a box
    pub(crate) units: Vec<Vec<usize>>,
    pub(crate) units_of: Vec<[usize; 3]>,
    all: u16,
}

/// The result of a search: the number of solutions (it stops at the limit), the guesses, those of them that led to no
/// solution, and the first solution.
#[derive(Default)]
pub struct Search {
    pub solutions: u32,
    pub guesses: u32,
    pub backtracks: u32,
    pub first: Option<Vec<u8>>,
}

/// A puzzle, its only solution, and the guesses that the solver needs.
pub struct Puzzle {
    pub board: Vec<u8>,
    pub solution: Vec<u8>,
    pub guesses: u32,
}

/// Candidates of every cell (0 once it is filled) and digits of every cell.
#[derive(Clone)]
pub(crate) struct State {
    pub(crate) open: [u16; MAX_CELLS],
    pub(crate) digit: [u8; MAX_CELLS],
    used: [u16; 27],
    left: usize,
}

/// splitmix64, seeded by a hash: small, and identical on every platform.
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(GOLDEN);
        (((mix(self.0) >> 32) * n as u64) >> 32) as usize
    }

    fn shuffle<T>(&mut self, items: &mut [T]) {
        for i in (1..items.len()).rev() {
            items.swap(i, self.below(i + 1));
        }
    }
}

impl Rules {
    /// The rules for a side of 4, 6 or 9. None for any other.
    pub fn new(side: usize) -> Option<Self> {
        let (high, wide) = match side {
            4 => (2, 2),
            6 => (2, 3),
            9 => (3, 3),
            _ => return None,
        };
        let boxed = |cell: usize| cell / side / high * high + cell % side / wide;
        let units_of: Vec<_> =
            (0..side * side).map(|i| [i / side, side + i % side, 2 * side + boxed(i)]).collect();
        let mut units = vec![Vec::with_capacity(side); 3 * side];
        for (cell, cell_units) in units_of.iter().enumerate() {
            for &unit in cell_units {
                units[unit].push(cell);
            }
        }
        Some(Self { side, boxed: (high, wide), units, units_of, all: (1 << side) - 1 })
    }

    pub fn n_cells(&self) -> usize {
        self.side * self.side
    }

    /// Searches for up to `limit` solutions. A board that breaks the rules, or has a digit above `side`, has none.
    pub fn solve(&self, board: &[u8], limit: u32) -> Search {
        let mut result = Search::default();
        if let Some(state) = self.start(board) {
            self.search(state, limit, &mut result, &mut None);
        }
        result
    }

    /// Puzzle number `index` of a seed: a pure function. The number of blanks is drawn from [min_blanks, max_blanks].
    /// It is smaller if removing another digit would allow a second solution.
    pub fn generate(&self, seed: u64, index: u64, min_blanks: usize, max_blanks: usize) -> Puzzle {
        let n = self.n_cells();
        let mut random = Random(hash(&[PUZZLE, seed, index]));
        let max_blanks = max_blanks.min(n);
        let min_blanks = min_blanks.min(max_blanks);
        let target = min_blanks + random.below(max_blanks - min_blanks + 1);
        let mut result = Search::default();
        let empty = self.start(&vec![0; n]).expect("an empty board breaks no rule");
        self.search(empty, 1, &mut result, &mut Some(&mut random));
        let solution = result.first.expect("an empty board has solutions");
        let mut board = solution.clone();
        let mut cells: Vec<usize> = (0..n).collect();
        random.shuffle(&mut cells);
        let mut blanks = 0;
        for cell in cells {
            if blanks == target {
                break;
            }
            let digit = std::mem::replace(&mut board[cell], 0);
            // The board had one solution with this digit here. It still has only that one, unless another digit leads
            // to one.
            if self.other_solution(&board, cell, digit) {
                board[cell] = digit;
            } else {
                blanks += 1;
            }
        }
        let guesses = self.solve(&board, 2).guesses;
        Puzzle { board, solution, guesses }
    }

    fn other_solution(&self, board: &[u8], cell: usize, digit: u8) -> bool {
        let Some(mut state) = self.start(board) else { return false };
        state.open[cell] &= !(1 << (digit - 1));
        let mut result = Search::default();
        self.search(state, 1, &mut result, &mut None);
        result.solutions > 0
    }

    pub(crate) fn start(&self, board: &[u8]) -> Option<State> {
        let mut state = State {
            open: [self.all; MAX_CELLS],
            digit: [0; MAX_CELLS],
            used: [0; 27],
            left: self.n_cells(),
        };
        for (cell, &digit) in board.iter().enumerate() {
            if digit != 0
                && (usize::from(digit) > self.side
                    || !self.place(&mut state, cell, 1 << (digit - 1)))
            {
                return None;
            }
        }
        Some(state)
    }

    /// Places a digit. False when it is already in one of the cell's units, or ruled out there.
    fn place(&self, state: &mut State, cell: usize, bit: u16) -> bool {
        if self.candidates(state, cell) & bit == 0 {
            return false;
        }
        for unit in self.units_of[cell] {
            state.used[unit] |= bit;
        }
        state.open[cell] = 0;
        state.digit[cell] = bit.trailing_zeros() as u8 + 1;
        state.left -= 1;
        true
    }

    pub(crate) fn candidates(&self, state: &State, cell: usize) -> u16 {
        let [row, column, square] = self.units_of[cell];
        state.open[cell] & !(state.used[row] | state.used[column] | state.used[square])
    }

    /// Fills forced cells. None for a contradiction, otherwise the open cell with the fewest candidates, if any is
    /// left.
    pub(crate) fn propagate(&self, state: &mut State) -> Option<Option<usize>> {
        loop {
            let (mut moved, mut best, mut smallest) = (false, None, u32::MAX);
            for cell in 0..self.n_cells() {
                if state.digit[cell] != 0 {
                    continue;
                }
                let open = self.candidates(state, cell);
                match open.count_ones() {
                    0 => return None,
                    1 => {
                        self.place(state, cell, open);
                        moved = true;
                    }
                    n if n < smallest => (best, smallest) = (Some(cell), n),
                    _ => {}
                }
            }
            if moved {
                continue;
            }
            if state.left == 0 {
                return Some(None);
            }
            for unit in 0..self.units.len() {
                let (mut once, mut twice) = (0, 0);
                for &cell in &self.units[unit] {
                    if state.digit[cell] == 0 {
                        let open = self.candidates(state, cell);
                        twice |= once & open;
                        once |= open;
                    }
                }
                if (once | state.used[unit]) != self.all {
                    return None;
                }
                let mut single = once & !twice;
                while single != 0 {
                    let bit = single & single.wrapping_neg();
                    single ^= bit;
                    let open = |&&cell: &&usize| {
                        state.digit[cell] == 0 && self.candidates(state, cell) & bit != 0
                    };
                    // An earlier single of this unit may have taken the cell: then the board contradicts itself.
                    let &cell = self.units[unit].iter().find(open)?;
                    self.place(state, cell, bit);
                    moved = true;
                }
            }
            if !moved {
                return Some(best);
            }
        }
    }

    fn search(
        &self, mut state: State, limit: u32, result: &mut Search, random: &mut Option<&mut Random>,
    ) {
        match self.propagate(&mut state) {
            None => {}
            Some(None) => {
                result.solutions += 1;
                if result.first.is_none() {
                    result.first = Some(state.digit[..self.n_cells()].to_vec());
                }
            }
            Some(Some(cell)) => {
                let open = self.candidates(&state, cell);
                let mut bits = [0u16; 9];
                let mut n = 0;
                for digit in 0..self.side {
                    if open >> digit & 1 == 1 {
                        bits[n] = 1 << digit;
                        n += 1;
                    }
                }
                if let Some(random) = random {
                    random.shuffle(&mut bits[..n]);
                }
                for &bit in &bits[..n] {
                    let before = result.solutions;
                    result.guesses += 1;
                    let mut next = state.clone();
                    self.place(&mut next, cell, bit);
                    self.search(next, limit, result, random);
                    result.backtracks += u32::from(result.solutions == before);
                    if result.solutions >= limit {
                        return;
                    }
                }
            }
        }
    }
}

/// Computes `f` of every index in [0, n) on `threads` threads. The results are in order.
pub fn parallel<T: Send>(n: usize, threads: usize, f: impl Fn(usize) -> T + Sync) -> Vec<T> {
    let share = n.div_ceil(threads.max(1)).max(1);
    std::thread::scope(|scope| {
        let f = &f;
        let parts: Vec<_> = (0..n)
            .step_by(share)
            .map(|start| {
                let work = move || (start..n.min(start + share)).map(f).collect::<Vec<_>>();
                // If no thread can be started, its part is done here.
                std::thread::Builder::new().spawn_scoped(scope, work).map_err(|_| work())
            })
            .collect();
        let done = |thread: std::thread::ScopedJoinHandle<_>| {
            thread.join().expect("solving does not panic")
        };
        parts.into_iter().flat_map(|part| part.map_or_else(|done| done, done)).collect()
    })
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn board(text: &str) -> Vec<u8> {
        text.bytes().map(|b| if b == b'.' { 0 } else { b - b'0' }).collect()
    }

    /// Backtracking without any forced cells: slow, and clearly right.
    fn count(rules: &Rules, board: &mut Vec<u8>, limit: u32) -> u32 {
        let Some(cell) = board.iter().position(|&d| d == 0) else { return 1 };
        let mut total = 0;
        for digit in 1..=rules.side as u8 {
            let clash =
                |&unit: &usize| rules.units[unit].iter().any(|&other| board[other] == digit);
            if !rules.units_of[cell].iter().any(clash) {
                board[cell] = digit;
                total += count(rules, board, limit - total);
                board[cell] = 0;
                if total >= limit {
                    break;
                }
            }
        }
        total
    }

    #[test]
    fn known_puzzles() {
        let rules = Rules::new(9).unwrap();
        let easy =
            "53..7....6..195....98....6.8...6...34..8.3..17...2...6.6....28....419..5....8..79";
        let result = rules.solve(&board(easy), 2);
        let solved =
            "534678912672195348198342567859761423426853791713924856961537284287419635345286179";
        assert_eq!((result.solutions, result.guesses), (1, 0));
        assert_eq!(result.first.unwrap(), board(solved));
        let hard =
            "8..........36......7..9.2...5...7.......457.....1...3...1....68..85...1..9....4..";
        let result = rules.solve(&board(hard), 2);
        assert_eq!(result.solutions, 1);
        assert!(result.guesses > 5);
    }

    #[test]
    fn boards_without_and_with_many_solutions() {
        let rules = Rules::new(9).unwrap();
        assert_eq!(rules.solve(&[0; 81], 2).solutions, 2);
        let mut broken = vec![0; 81];
        (broken[0], broken[8]) = (5, 5);
        assert_eq!(rules.solve(&broken, 2).solutions, 0);
        broken[0] = 10;
        assert_eq!(rules.solve(&broken, 2).solutions, 0);
    }

    #[test]
    fn all_4_by_4_boards_are_found() {
        let rules = Rules::new(4).unwrap();
        assert_eq!(rules.solve(&[0; 16], u32::MAX).solutions, 288);
    }

    #[test]
    fn counts_equal_plain_backtracking() {
        let rules = Rules::new(4).unwrap();
        for index in 0..300 {
            let mut board = rules.generate(7, index, 16, 16).board;
            let extra = Random(index).below(16);
            board[extra] = 0; // often a second solution
            let expected = count(&rules, &mut board.clone(), 5);
            assert_eq!(rules.solve(&board, 5).solutions, expected, "{board:?}");
        }
    }

    #[test]
    fn minimal_puzzles_cannot_be_dug_further() {
        let rules = Rules::new(9).unwrap();
        for index in 0..5 {
            let puzzle = rules.generate(2, index, 81, 81);
            for cell in (0..81).filter(|&cell| puzzle.board[cell] != 0) {
                let mut dug = puzzle.board.clone();
                dug[cell] = 0;
                assert_eq!(rules.solve(&dug, 2).solutions, 2);
            }
        }
    }

    #[test]
    fn parallel_keeps_the_order() {
        for (n, threads) in [(0, 3), (1, 3), (10, 3), (10, 1), (3, 8), (4, 0)] {
            assert_eq!(parallel(n, threads, |i| i), (0..n).collect::<Vec<_>>());
        }
    }
}
