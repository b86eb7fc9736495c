//! The difficulty of a Sudoku for a person, and a number that every symmetric copy of a board shares.
//!
//! A grade is the hardest step that a puzzle needs, when an easier one is always taken first:
//!
//! - 0, singles: a cell with one candidate, or a digit with one place in a row, column or box.
//! - 1, pairs: a digit whose places in a unit all lie in a second unit, two cells of a unit with the same two candidates, or
//!   two digits with the same two places.
//! - 2, chains: a candidate that contradicts itself through links of two. A link is a cell with two candidates, or a digit
//!   with two places.
//! - 3, guesses: none of these solves it.

use crate::order::mix;
use crate::sudoku::{Rules, State, MAX_CELLS};

/// The grade of guesses.
pub const GUESSES: u8 = 3;

const ROUNDS: usize = 4;

/// Both places of a digit in a unit that has two of them.
type Pairs = Vec<[Option<(usize, usize)>; 9]>;

impl Rules {
    /// The grade of a board, 0 to 3. A board that has no solution, or several, has the last one, if no step contradicts
    /// that.
    pub fn grade(&self, board: &[u8]) -> u8 {
        let Some(mut state) = self.start(board) else { return GUESSES };
        let mut grade = 0;
        loop {
            match self.propagate(&mut state) {
                None => return GUESSES,
                Some(None) => return grade,
                Some(Some(_)) => {}
            }
            if self.pairs(&mut state) {
                grade = grade.max(1);
            } else if self.chains(&mut state) {
                grade = 2;
            } else {
                return GUESSES;
            }
        }
    }

    fn open(&self, state: &State, cell: usize) -> u16 {
        if state.digit[cell] == 0 {
            self.candidates(state, cell)
        } else {
            0
        }
    }

    /// Removes candidates. True if there were any.
    fn remove(&self, state: &mut State, cell: usize, bits: u16) -> bool {
        let found = self.open(state, cell) & bits != 0;
        state.open[cell] &= !bits;
        found
    }

    /// The cells of a unit that can have a digit.
    fn places(&self, state: &State, unit: usize, digit: usize) -> Vec<usize> {
        self.units[unit]
            .iter()
            .copied()
            .filter(|&cell| self.open(state, cell) >> digit & 1 == 1)
            .collect()
    }

    fn pairs(&self, state: &mut State) -> bool {
        let mut moved = false;
        for unit in 0..self.units.len() {
            let places: Vec<_> =
                (0..self.side).map(|digit| self.places(state, unit, digit)).collect();
            for (digit, cells) in places.iter().enumerate().filter(|(_, cells)| !cells.is_empty()) {
                for &other in self.units_of[cells[0]].iter().filter(|&&other| other != unit) {
                    if cells.iter().all(|&cell| self.units_of[cell].contains(&other)) {
                        for &cell in self.units[other].iter().filter(|cell| !cells.contains(cell)) {
                            moved |= self.remove(state, cell, 1 << digit);
                        }
                    }
                }
                for (second, others) in places.iter().enumerate().skip(digit + 1) {
                    if cells.len() == 2 && others == cells {
                        for &cell in cells {
                            moved |= self.remove(state, cell, !(1 << digit | 1 << second));
                        }
                    }
                }
            }
            for (i, &a) in self.units[unit].iter().enumerate() {
                let open = self.open(state, a);
                let twin = self.units[unit][i + 1..].iter().find(|&&b| self.open(state, b) == open);
                if let (2, Some(&b)) = (open.count_ones(), twin) {
                    for &cell in self.units[unit].iter().filter(|&&cell| cell != a && cell != b) {
                        moved |= self.remove(state, cell, open);
                    }
                }
            }
        }
        moved
    }

    fn chains(&self, state: &mut State) -> bool {
        let pairs: Pairs = (0..self.units.len())
            .map(|unit| {
                std::array::from_fn(|digit| match self.places(state, unit, digit)[..] {
                    [a, b] => Some((a, b)),
                    _ => None,
                })
            })
            .collect();
        let open: Vec<u16> = (0..self.n_cells()).map(|cell| self.open(state, cell)).collect();
        let mut moved = false;
        for cell in 0..self.n_cells() {
            for digit in (0..self.side).filter(|digit| open[cell] >> digit & 1 == 1) {
                if self.contradicts(&open, &pairs, cell, digit) {
                    moved |= self.remove(state, cell, 1 << digit);
                }
            }
        }
        moved
    }

    /// Whether a candidate, taken as right, makes another one both right and wrong.
    fn contradicts(&self, open: &[u16], pairs: &Pairs, cell: usize, digit: usize) -> bool {
        let (mut right, mut wrong) = ([0u16; MAX_CELLS], [0u16; MAX_CELLS]);
        let mut queue = vec![(cell, digit)];
        right[cell] = 1 << digit;
        while let Some((cell, digit)) = queue.pop() {
            let others = (0..self.side).filter(|&other| other != digit).map(|other| (cell, other));
            let peers = self.units_of[cell]
                .iter()
                .flat_map(|&unit| &self.units[unit])
                .filter(|&&peer| peer != cell);
            for (at, of) in others.chain(peers.map(|&peer| (peer, digit))) {
                if (open[at] & !wrong[at]) >> of & 1 == 0 {
                    continue;
                }
                wrong[at] |= 1 << of;
                if right[at] >> of & 1 == 1 {
                    return true;
                }
                let rest = open[at] & !(1 << of);
                let by_cell =
                    (open[at].count_ones() == 2).then(|| (at, rest.trailing_zeros() as usize));
                let by_unit = self.units_of[at]
                    .map(|unit| pairs[unit][of].map(|(a, b)| (if a == at { b } else { a }, of)));
                for (next, of) in by_unit.into_iter().flatten().chain(by_cell) {
                    if right[next] >> of & 1 == 0 {
                        right[next] |= 1 << of;
                        if wrong[next] >> of & 1 == 1 {
                            return true;
                        }
                        queue.push((next, of));
                    }
                }
            }
        }
        false
    }

    /// A hash that a board shares with each of its symmetric copies. In a copy, the digits have other names, and the
    /// bands, the rows in them, the stacks and the columns in them have other orders. If the boxes are square, the
    /// transposed board is a copy, too.
    ///
    /// Each cell in turn gets a colour of its own. A cell's next colour follows from the colours of its row and band,
    /// of its column and stack, of its box, and of the cells of its digit.
    pub fn invariant(&self, board: &[u8]) -> u64 {
        (0..self.n_cells())
            .fold(0u64, |sum, cell| sum.wrapping_add(mix(self.colours_around(board, cell))))
    }

    fn colours_around(&self, board: &[u8], marked: usize) -> u64 {
        let (n, side) = (self.n_cells(), self.side);
        let mut colours: Vec<u64> =
            (0..n).map(|i| u64::from(board[i] != 0) + 2 * u64::from(i == marked)).collect();
        let total = |values: &mut dyn Iterator<Item = u64>| {
            values.fold(0u64, |sum, value| sum.wrapping_add(mix(value)))
        };
        for _ in 0..ROUNDS {
            let units: Vec<u64> = self
                .units
                .iter()
                .map(|cells| total(&mut cells.iter().map(|&cell| colours[cell])))
                .collect();
            let group = |line: usize| {
                let size = if line < side { self.boxed.0 } else { self.boxed.1 };
                let first = line - line % side % size;
                mix(units[line]).wrapping_add(
                    mix(total(&mut units[first..first + size].iter().copied())).rotate_left(7),
                )
            };
            let lines: Vec<u64> = (0..2 * side).map(|line| mix(group(line))).collect();
            let digits: Vec<u64> = (0..=side)
                .map(|digit| {
                    total(
                        &mut (0..n).filter(|&i| usize::from(board[i]) == digit).map(|i| colours[i]),
                    )
                })
                .collect();
            colours = (0..n)
                .map(|i| {
                    let [row, column, square] = self.units_of[i];
                    let turned = if self.boxed.0 == self.boxed.1 {
                        lines[column]
                    } else {
                        mix(lines[column])
                    };
                    let around = lines[row].wrapping_add(turned).rotate_left(13);
                    let same = mix(digits[usize::from(board[i])]).rotate_left(29);
                    mix(colours[i]
                        ^ mix(around.wrapping_add(mix(units[square]).rotate_left(43)) ^ same))
                })
                .collect();
        }
        total(&mut colours.into_iter())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sudoku::tests::board;

    #[test]
    fn known_puzzles_have_their_grades() {
        let rules = Rules::new(9).unwrap();
        for (text, grade) in [
            (
                "53..7....6..195....98....6.8...6...34..8.3..17...2...6.6....28....419..5....8..79",
                0,
            ),
            (
                "8..........36......7..9.2...5...7.......457.....1...3...1....68..85...1..9....4..",
                3,
            ),
            // Slow for a search that guesses from the first cell on, and solved by singles alone.
            (
                "..............3.85..1.2.......5.7.....4...1...9.......5......73..2.1........4...9",
                0,
            ),
        ] {
            assert_eq!(rules.grade(&board(text)), grade, "{text}");
        }
    }

    #[test]
    fn a_step_removes_no_candidate_of_the_solution() {
        for side in [4, 6, 9] {
            let rules = Rules::new(side).unwrap();
            for index in 0..60 {
                let puzzle = rules.generate(5, index, side * side, side * side);
                let mut state = rules.start(&puzzle.board).unwrap();
                while rules.pairs(&mut state) || rules.chains(&mut state) {
                    for (cell, &digit) in puzzle
                        .solution
                        .iter()
                        .enumerate()
                        .filter(|(cell, _)| state.digit[*cell] == 0)
                    {
                        assert_eq!(
                            rules.candidates(&state, cell) >> (digit - 1) & 1,
                            1,
                            "side {side}, puzzle {index}"
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn all_grades_are_generated() {
        let rules = Rules::new(9).unwrap();
        let mut found = [0; 4];
        for index in 0..200 {
            found[usize::from(rules.grade(&rules.generate(1, index, 81, 81).board))] += 1;
        }
        assert!(found.iter().all(|&n| n > 0), "{found:?}");
    }
}
