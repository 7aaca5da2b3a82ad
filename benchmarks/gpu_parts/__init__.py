"""The parts of benchmarks/gpu.py: programs that print a row as JSON, a line each."""
