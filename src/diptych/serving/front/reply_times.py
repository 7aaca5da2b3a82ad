"""What a prompt token and an answer's token take, by replies that come whole and show only how long they took in all.

    time = token_ns * (prompt tokens computed meanwhile) + gap_ns * (tokens of the answer)

Fitted by least squares over recent replies (older ones count less and less). An engine's own replies count besides some
of all engines, so that equal engines do not differ by chance; and a weak prior counts, too: where all replies are
alike, one equation cannot tell two prices, and their ratio stays the one assumed. Asks nothing, knows no clock.
"""

from dataclasses import dataclass

MEMORY = 0.98  # of older replies, at each new one
OTHERS = 20.0  # replies of all engines that count beside an engine's own
PRIOR_PROMPT, PRIOR_ANSWER = 256.0, 4.0  # tokens of the two replies that the prior counts as
LEAST_SHARE = 0.01  # of a price assumed, that is believed


@dataclass(slots=True)
class ReplySums:
    """Sums over recent replies: how many, and the sums of squares and products of prompt tokens, answer tokens and
    time."""

    count: float = 0.0
    prompt2: float = 0.0
    both: float = 0.0
    answer2: float = 0.0
    prompt_ns: float = 0.0
    answer_ns: float = 0.0

    def add(self, num_prompt: int, num_answer: int, duration_ns: int) -> None:
        """A reply."""
        self.count = self.count * MEMORY + 1
        self.prompt2 = self.prompt2 * MEMORY + num_prompt * num_prompt
        self.both = self.both * MEMORY + num_prompt * num_answer
        self.answer2 = self.answer2 * MEMORY + num_answer * num_answer
        self.prompt_ns = self.prompt_ns * MEMORY + num_prompt * duration_ns
        self.answer_ns = self.answer_ns * MEMORY + num_answer * duration_ns


class ReplyTimes:
    """token_ns, gap_ns: of one engine, assumed at first, then fitted. all_sums: of all engines."""

    def __init__(self, token_ns: float, gap_ns: float, all_sums: ReplySums) -> None:
        self.token_ns, self.gap_ns = token_ns, gap_ns
        self._least = LEAST_SHARE * token_ns, LEAST_SHARE * gap_ns
        self._prior = token_ns * PRIOR_PROMPT**2, gap_ns * PRIOR_ANSWER**2
        self._own, self._all = ReplySums(), all_sums

    def observe(self, num_prompt: int, num_answer: int, duration_ns: int) -> None:
        """Learn from a reply that took ``duration_ns`` and computed ``num_prompt`` prompt tokens."""
        own, every = self._own, self._all
        own.add(num_prompt, num_answer, duration_ns)
        every.add(num_prompt, num_answer, duration_ns)
        share = OTHERS / max(OTHERS, every.count)
        both = own.both + share * every.both
        prompt2 = own.prompt2 + share * every.prompt2 + PRIOR_PROMPT**2
        answer2 = own.answer2 + share * every.answer2 + PRIOR_ANSWER**2
        prompt_ns = own.prompt_ns + share * every.prompt_ns + self._prior[0]
        answer_ns = own.answer_ns + share * every.answer_ns + self._prior[1]
        determinant = prompt2 * answer2 - both * both  # above 0: the prior's two replies are not alike
        token_ns = (prompt_ns * answer2 - answer_ns * both) / determinant
        gap_ns = (answer_ns * prompt2 - prompt_ns * both) / determinant
        if gap_ns < self._least[1]:
            gap_ns = self._least[1]
            token_ns = (prompt_ns - gap_ns * both) / prompt2
        elif token_ns < self._least[0]:
            gap_ns = (answer_ns - self._least[0] * both) / answer2
        self.token_ns, self.gap_ns = max(self._least[0], token_ns), max(self._least[1], gap_ns)
