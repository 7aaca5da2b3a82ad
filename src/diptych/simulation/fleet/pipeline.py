"""The stages of one pipeline, under virtual time: passes go through them one after the other.

The lanes of a replica begin their passes as they please; a pass enters a stage when it has left the stage before and
the pass in front of it has left this one. Bubbles need no formula: they are the time for which a stage waits for its
next pass. All stages take the same part of a pass.
"""


class Pipeline:
    """The calendar of the stages. Passes enter in the order of the calls, so that a later one changes nothing."""

    def __init__(self, num_stages: int) -> None:
        self._free_ns = [0] * num_stages

    def enter(self, now: int, pass_ns: int) -> int:
        """A pass that takes ``pass_ns`` in an empty pipeline begins: when it has left the last stage."""
        stage_ns, rest = divmod(pass_ns, len(self._free_ns))
        left_ns = now
        for stage, free_ns in enumerate(self._free_ns):
            left_ns = max(left_ns, free_ns) + stage_ns + (stage < rest)
            self._free_ns[stage] = left_ns
        return left_ns
