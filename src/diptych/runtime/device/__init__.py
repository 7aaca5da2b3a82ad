"""The processor or GPU that a worker computes on: its threads, its multiprocessors, its large memory."""
