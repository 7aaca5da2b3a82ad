"""Changing the fleet to fit its load: what to observe, what to ask a simulation, when to change."""
