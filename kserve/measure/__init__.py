"""Measuring: durations with their intervals, for benchmarks, sweeps and acceptance."""
