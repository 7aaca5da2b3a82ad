"""Simulations that answer the planner's questions, and a simulated fleet that a planner changes."""
