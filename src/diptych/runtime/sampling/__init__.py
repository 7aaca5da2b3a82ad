"""The choice of the next token: distributions, penalties, seeds, and what a grammar allows."""
