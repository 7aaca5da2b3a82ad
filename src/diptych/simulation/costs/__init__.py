"""How long a step takes: cost models behind one seam (see cost_model.py)."""
