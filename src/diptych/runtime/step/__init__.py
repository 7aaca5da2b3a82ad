"""A step: the plan of control becomes one forward pass, and what came out becomes a StepResult."""
