"""The weights of a checkpoint: finding, sizing, reading and placing them, whatever format of file holds them."""
