"""Data of the simulator: hardware and models, each figure with its source. No code may live here."""
