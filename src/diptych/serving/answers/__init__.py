"""Answers while they are made: tokens in, text out."""
