"""How long a step takes: cost models behind one seam (see interface.py)."""
