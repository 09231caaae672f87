"""Benchmarks; each prints a table and, with --json, rows of one form."""
