"""The parts that models are composed of, and how they are loaded; native_step.py is the fast path for decode steps."""
