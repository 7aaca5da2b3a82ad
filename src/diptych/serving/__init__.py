"""Processes, sockets and the wall clock around the pure cores."""
