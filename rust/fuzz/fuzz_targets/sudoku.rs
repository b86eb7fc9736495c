//! Arbitrary bytes as a board: the solver's solution solves it, and the search ends.
#![no_main]

mod bounds;

use bounds::{within, Bounds};
use jaxtrain_loader::sudoku::Rules;

const BOARD: Bounds = Bounds { memory: 1 << 20, memory_per_byte: 0, seconds: 5.0, seconds_per_byte: 0.0 };

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    for side in [4, 6, 9] {
        let Some(board) = data.get(..side * side) else { continue };
        let rules = Rules::new(side).expect("4, 6 and 9 are sides");
        within(&BOARD, board.len(), || {
            rules.grade(board);
            let search = rules.solve(board, 2);
            assert!(search.solutions <= 2 && search.first.is_some() == (search.solutions > 0));
            let Some(first) = search.first else { return };
            assert!(board.iter().zip(&first).all(|(given, found)| *given == 0 || given == found));
            assert_eq!(rules.solve(&first, 2).solutions, 1, "a solution is a board that breaks no rule");
        });
    }
});
