"""What a prompt token and an answer's token take, by replies that come whole and show only how long they took in all.

    time = token_ns * (prompt tokens computed meanwhile) + gap_ns * (tokens of the answer)

Fitted by least squares over recent replies (older ones count less and less), with a weak prior: where all replies are
alike, one equation cannot tell two prices, and their ratio stays the one assumed. Asks nothing, knows no clock.
"""

MEMORY = 0.98  # of older replies, at each new one
PRIOR_PROMPT, PRIOR_ANSWER = 256.0, 4.0  # tokens of the two replies that the prior counts as
LEAST_SHARE = 0.01  # of a price assumed, that is believed


class ReplyTimes:
    """token_ns, gap_ns: assumed at first, then fitted."""

    def __init__(self, token_ns: float, gap_ns: float) -> None:
        self.token_ns, self.gap_ns = token_ns, gap_ns
        self._least = LEAST_SHARE * token_ns, LEAST_SHARE * gap_ns
        self._prior = token_ns * PRIOR_PROMPT**2, gap_ns * PRIOR_ANSWER**2
        self._prompt2 = self._both = self._answer2 = self._prompt_ns = self._answer_ns = 0.0

    def observe(self, num_prompt: int, num_answer: int, duration_ns: int) -> None:
        """A reply took so long, while so many prompt tokens were computed."""
        prompt2 = self._prompt2 = self._prompt2 * MEMORY + num_prompt * num_prompt
        both = self._both = self._both * MEMORY + num_prompt * num_answer
        answer2 = self._answer2 = self._answer2 * MEMORY + num_answer * num_answer
        prompt_ns = self._prompt_ns = self._prompt_ns * MEMORY + num_prompt * duration_ns
        answer_ns = self._answer_ns = self._answer_ns * MEMORY + num_answer * duration_ns
        prompt2, prompt_ns = prompt2 + PRIOR_PROMPT**2, prompt_ns + self._prior[0]
        answer2, answer_ns = answer2 + PRIOR_ANSWER**2, answer_ns + self._prior[1]
        determinant = prompt2 * answer2 - both * both  # above 0: the prior's two replies are not alike
        token_ns = (prompt_ns * answer2 - answer_ns * both) / determinant
        gap_ns = (answer_ns * prompt2 - prompt_ns * both) / determinant
        if gap_ns < self._least[1]:
            gap_ns = self._least[1]
            token_ns = (prompt_ns - gap_ns * both) / prompt2
        elif token_ns < self._least[0]:
            gap_ns = (answer_ns - self._least[0] * both) / answer2
        self.token_ns, self.gap_ns = max(self._least[0], token_ns), max(self._least[1], gap_ns)
