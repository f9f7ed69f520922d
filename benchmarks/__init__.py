"""Benchmarks: each figure is printed beside a reference from the same run."""
