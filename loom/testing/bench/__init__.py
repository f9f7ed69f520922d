"""The benchmarks of docs/benchmarks.md: each figure beside a reference from the same run (``loom bench``)."""
