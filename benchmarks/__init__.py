"""Benchmarks: each measures its baselines in the same run, and reports ratios of medians of paired runs.

`python -m benchmarks.datapath --help`. They run from a checkout; docs/performance.md says how to read and repeat them.
"""
