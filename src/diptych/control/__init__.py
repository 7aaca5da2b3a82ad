"""Decisions. Pure Python standard library: no clock, no I/O, no threads, no global random.

Every class with state is a state machine: its calls take the time as an argument (``now``, integer nanoseconds) and
return what is to be done. The same objects run live and in the simulator.
"""
