"""Model families: one file each, read from top to bottom; registry.py names them.

A family imports no torch when it is imported, because the front end reads configs through it: tensors come from the
parts in layers/, and annotations are for type checkers.
"""
