"""What to measure next: the highest rate that keeps the objectives, the smallest fleet that does."""
