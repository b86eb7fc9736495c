"""Sudoku boards: tables, generation and augmentation."""
