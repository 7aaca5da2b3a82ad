"""Computation: turn a SchedulerOutput into tokens with torch. Knows nothing of sockets, clients or policies."""
