"""Prefix misses, explained while serving: prompts in, reasons out."""
