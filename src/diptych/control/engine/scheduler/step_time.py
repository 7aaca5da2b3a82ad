"""The step-time model: how long a step would take, fitted online to the steps that were measured.

    t = c0 + c1 * prefill tokens + c2 * prefill attention pairs + c3 * decode sequences + c4 * decode context tokens

and of a mixture of experts + c5 * experts that the tokens visit (ExpertLaw), with c >= 0: a non-negative least squares
fit of the *relative* error, on exponentially forgotten sufficient statistics. Steps with and without prefill are
remembered apart, so that an hour of pure decoding does not erase what is known of prefill. Pure Python: one prediction
is five multiplications, one fit about 0.1 ms.
"""

from collections.abc import Sequence

from diptych.control.expert_law import ExpertLaw
from diptych.control.step import StepFeatures, chunk_attention

NUM_TERMS = 6
FORGET = 0.995  # weight of a step after one more of its kind: a memory of about 200 steps
REFIT_EVERY = 8  # while the model is young; four times as many later
LEARN_EVERY = 32  # pure decode steps, all alike, from one that is looked at to the next once the model is trusted
OUTLIER_RATIO = 4.0
OUTLIERS_BELIEVED = 4  # outliers in a row that are believed
RIDGE = 1e-6
KEPT = 0.001  # weight of what was measured on other compute units: all of it counts less than one new step
# Before anything was measured: 5 ms a step, 50 us a prompt token, 0.2 ms a decode sequence. Wrong for most machines,
# and replaced by the warm-up's measurements before the first request.
PRIOR_NS = (5e6, 5e4, 1.0, 2e5, 50.0)

Vector = list[float]


class _Statistics:
    """X'WX and X'Wy of one kind of step, forgotten exponentially: the upper triangle of the one, row by row, then the
    other."""

    __slots__ = ("_sums",)

    def __init__(self) -> None:
        self._sums: Vector = [0.0] * (NUM_TERMS * (NUM_TERMS + 1) // 2 + NUM_TERMS)

    def add(self, a: float, b: float, c: float, d: float, e: float, f: float) -> None:
        """One step: its terms divided by its duration, so that the target is 1."""
        products = (
            a * a, a * b, a * c, a * d, a * e, a * f, b * b, b * c, b * d, b * e, b * f, c * c, c * d, c * e, c * f,
            d * d, d * e, d * f, e * e, e * f, f * f, a, b, c, d, e, f,
        )  # fmt: skip
        self._sums = [FORGET * old + new for old, new in zip(self._sums, products, strict=True)]

    def rescale(self, ratio: float) -> None:
        """Rescale as if every step had taken ``ratio`` times as long, and with little weight."""
        num_products = len(self._sums) - NUM_TERMS
        self._sums = [
            KEPT * value / (ratio * ratio if at < num_products else ratio) for at, value in enumerate(self._sums)
        ]

    def copy(self) -> "_Statistics":
        """The same sums, to be added to apart."""
        other = _Statistics()
        other._sums = self._sums  # replaced, never changed
        return other

    def gram(self) -> list[Vector]:
        """X'WX as a full matrix."""
        triangle = iter(self._sums)
        matrix = [[0.0] * NUM_TERMS for _ in range(NUM_TERMS)]
        for i in range(NUM_TERMS):
            for j in range(i, NUM_TERMS):
                matrix[i][j] = matrix[j][i] = next(triangle)
        return matrix

    def moment(self) -> Vector:
        """X'Wy."""
        return self._sums[-NUM_TERMS:]


class StepTimeModel:
    """Predicts and learns step durations in nanoseconds. experts: of a mixture; expert_ns: what each costs that a step
    visits."""

    def __init__(
        self, coefficients: Sequence[float] = PRIOR_NS, experts: ExpertLaw | None = None, expert_ns: float = 0.0
    ) -> None:
        self.coefficients: tuple[float, ...] = tuple(coefficients)
        self.experts = experts
        self.expert_ns = expert_ns
        self.num_observed = 0
        self.relative_error = 0.0  # recent mean of |predicted - measured| / measured
        self.spread = 1.0  # high recent quantile of measured / predicted, at least 1
        self._kinds = (_Statistics(), _Statistics())
        self._outliers = 0

    def copy(self) -> "StepTimeModel":
        """A model that knows what this one knows, and learns apart from it."""
        other = StepTimeModel(self.coefficients, self.experts, self.expert_ns)
        other.num_observed, other._outliers = self.num_observed, self._outliers
        other.relative_error, other.spread = self.relative_error, self.spread
        other._kinds = (self._kinds[0].copy(), self._kinds[1].copy())
        return other

    @property
    def is_trusted(self) -> bool:
        """Whether enough steps were measured to judge new ones by the model."""
        return self.num_observed >= 2 * REFIT_EVERY

    def wants(self, features: StepFeatures, tick: int) -> bool:
        """Whether a step is worth learning from; ``tick`` counts decode steps."""
        return features.prefill_tokens > 0 or tick % LEARN_EVERY == 0 or not self.is_trusted

    def predict_ns(self, features: StepFeatures) -> int:
        """Expected duration of a step."""
        c0, c1, c2, c3, c4 = self.coefficients
        total = (
            c0
            + c1 * features.prefill_tokens
            + c2 * features.prefill_attention
            + c3 * features.decode_seqs
            + c4 * features.decode_context
        )
        if self.experts is not None:
            total += self.expert_ns * self.experts.touched(features.prefill_tokens + features.decode_seqs)
        return int(total)

    def prefill_work_ns(self, start: int, num_tokens: int, beside: int = 0) -> int:
        """What computing these prompt tokens adds to the steps that they are part of. beside: tokens that the step
        computes without them, whose experts it reads anyway."""
        linear = self.coefficients[1] * num_tokens + self.coefficients[2] * chunk_attention(start, num_tokens)
        return int(linear + self.experts_work_ns(num_tokens, beside))

    def experts_work_ns(self, num_tokens: int, beside: int) -> float:
        """What the experts cost that these tokens visit, and the tokens beside them do not."""
        if self.experts is None:
            return 0.0
        return self.expert_ns * (self.experts.touched(beside + num_tokens) - self.experts.touched(beside))

    def largest_chunk(self, start: int, available_ns: float, beside: int = 0) -> int:
        """The most prompt tokens after ``start`` whose work fits in the time (0 when none does). beside: see
        prefill_work_ns."""
        most = self._largest_chunk(start, available_ns)
        if self.experts is None or not most:
            return most
        # Experts cost more than nothing, and no more than all that the step does not read yet: in between, the work
        # grows with every token.
        least = self._largest_chunk(start, available_ns - self.experts_work_ns(most, beside))
        while least < most:
            middle = (least + most + 1) // 2
            if self.prefill_work_ns(start, middle, beside) <= available_ns:
                least = middle
            else:
                most = middle - 1
        return least

    def _largest_chunk(self, start: int, available_ns: float) -> int:
        """Without the experts."""
        if available_ns <= 0:
            return 0
        per_token, per_pair = self.coefficients[1], self.coefficients[2]
        linear, square = per_token + per_pair * (start + 0.5), 0.5 * per_pair
        if square <= 0:
            return int(available_ns / linear) if linear > 0 else 1 << 30
        # the root of square * n^2 + linear * n = available, in the form that does not cancel
        return int(2.0 * available_ns / (linear + (linear * linear + 4 * square * available_ns) ** 0.5))

    def observe(self, features: StepFeatures, duration_ns: int) -> None:
        """Learn from one measured step."""
        if duration_ns <= 0:
            return
        ratio = duration_ns / max(self.predict_ns(features), 1)
        trusted = self.is_trusted
        if trusted and ratio > OUTLIER_RATIO and self._outliers < OUTLIERS_BELIEVED:
            self._outliers += 1
            return
        self._outliers = 0
        if trusted:
            self.relative_error += 0.05 * (abs(1 / ratio - 1) - self.relative_error)
            # a quantile tracker: rises by 9 when above for every 1 it falls, so that it settles at the 90th percentile
            self.spread = min(1.5, max(1.0, self.spread + (0.018 if ratio > self.spread else -0.002)))
        touched = self.experts.touched(features.prefill_tokens + features.decode_seqs) if self.experts else 0.0
        self._kinds[1 if features.prefill_tokens else 0].add(
            1.0 / duration_ns,
            features.prefill_tokens / duration_ns,
            features.prefill_attention / duration_ns,
            features.decode_seqs / duration_ns,
            features.decode_context / duration_ns,
            touched / duration_ns,
        )
        self.num_observed += 1
        every = REFIT_EVERY if self.num_observed < 32 * REFIT_EVERY else 4 * REFIT_EVERY
        if self.num_observed % every == 0 or self.num_observed < REFIT_EVERY:
            self._refit()

    def rescale(self, ratio: float) -> None:
        """The compute units are others from now on, and steps are expected to take ``ratio`` times as long (above 0).

        No cold start: every prediction is scaled. What is measured from now on soon outweighs it, term by term; terms
        that are not measured keep their scaled prices. No step is an outlier until the model is trusted again, and
        each of the first is learned from.
        """
        assert ratio > 0, f"ratio is {ratio}"
        self.coefficients = tuple([ratio * price for price in self.coefficients])
        self.expert_ns *= ratio
        for kind in self._kinds:
            kind.rescale(ratio)
        self.num_observed = self._outliers = 0

    def _refit(self) -> None:
        decode, prefill = self._kinds
        # each term is scaled to unit diagonal, and a little of the present belief keeps unseen terms where they are
        gram = [[a + b for a, b in zip(p, q, strict=True)] for p, q in zip(decode.gram(), prefill.gram(), strict=True)]
        moment = [a + b for a, b in zip(decode.moment(), prefill.moment(), strict=True)]
        scale = [gram[i][i] ** 0.5 if gram[i][i] > 0 else 0.0 for i in range(NUM_TERMS)]
        terms = [i for i in range(NUM_TERMS) if scale[i] > 0]
        coefficients = [*self.coefficients, self.expert_ns]
        belief = [coefficients[i] * scale[i] for i in terms]
        matrix = [[gram[i][j] / (scale[i] * scale[j]) + (RIDGE if i == j else 0.0) for j in terms] for i in terms]
        target = [moment[i] / scale[i] + RIDGE * b for i, b in zip(terms, belief, strict=True)]
        solution = nonnegative_least_squares(matrix, target)
        for i, value in zip(terms, solution, strict=True):
            coefficients[i] = value / scale[i]
        self.expert_ns = coefficients.pop()
        self.coefficients = tuple(coefficients)


def nonnegative_least_squares(matrix: list[Vector], target: Vector) -> Vector:
    """argmin x'Ax/2 - b'x with x >= 0, for a small positive definite A (Lawson and Hanson 1974, chapter 23)."""
    size = len(target)
    solution = [0.0] * size
    passive: list[int] = []
    for _ in range(3 * size):
        gradient = [target[i] - sum(matrix[i][j] * solution[j] for j in passive) for i in range(size)]
        candidates = [i for i in range(size) if i not in passive and gradient[i] > 1e-12]
        if not candidates:
            break
        passive.append(max(candidates, key=lambda i: (gradient[i], -i)))
        while True:
            trial = _solve(matrix, target, passive)
            if all(value > 0 for value in trial):
                for i, value in zip(passive, trial, strict=True):
                    solution[i] = value
                break
            step = min(
                solution[i] / (solution[i] - value) if solution[i] > value else 1.0
                for i, value in zip(passive, trial, strict=True)
                if value <= 0
            )
            for i, value in zip(passive, trial, strict=True):
                solution[i] += step * (value - solution[i])
            dropped = [i for i, value in zip(passive, trial, strict=True) if value <= 0 and solution[i] <= 1e-15]
            for i in dropped or [passive[-1]]:
                solution[i] = 0.0
                passive.remove(i)
            if not passive:
                break
    return solution


def _solve(matrix: list[Vector], target: Vector, indices: Sequence[int]) -> Vector:
    """Gaussian elimination on the chosen rows and columns (they are positive definite: no pivoting needed)."""
    rows = [[matrix[i][j] for j in indices] + [target[i]] for i in indices]
    size = len(rows)
    for k in range(size):
        pivot = rows[k][k]
        for i in range(k + 1, size):
            factor = rows[i][k] / pivot
            for j in range(k, size + 1):
                rows[i][j] -= factor * rows[k][j]
    solution = [0.0] * size
    for k in range(size - 1, -1, -1):
        solution[k] = (rows[k][size] - sum(rows[k][j] * solution[j] for j in range(k + 1, size))) / rows[k][k]
    return solution
