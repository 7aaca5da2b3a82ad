"""Decisions. Pure Python standard library: no clock, no I/O, no threads, no global random.

Everything here is a state machine that is told the time (``now``, integer nanoseconds) and returns what should be
done. The same objects run live and in the simulator.
"""
