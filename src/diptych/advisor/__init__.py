"""Which fleet to run for a load: layouts, what each would do, and which of them to take.

One place answers it for ``diptych plan``, ``diptych advise``, a diagnosis, the planner of a live fleet and the guide.
"""
