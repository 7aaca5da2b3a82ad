"""The same control code under virtual time: a heap instead of a clock, a cost model instead of a model."""
