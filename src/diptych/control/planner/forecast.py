"""Level and trend of a rate (Holt 1957: double exponential smoothing), for forecasts of a minute or less.

level = a * rate + (1 - a) * (level + d * trend)    trend = b * (level - level before) + (1 - b) * d * trend

The trend is damped (Gardner and McKenzie 1985): a rise goes on, each tick by d of the tick before. One that goes on for
ever is expected beyond the peak of every wave, and changes made for a load that never comes are the worst of all.
"""

import math

LEVEL_WEIGHT = 0.4
TREND_WEIGHT = 0.15
DAMPING = 0.8
MOST_CHANGE = 2.0  # a forecast over the level is at most this, and at least its inverse


class RateForecast:
    """One rate, observed once a tick."""

    def __init__(self) -> None:
        self.level = 0.0
        self.trend = 0.0  # per tick
        self.num_observed = 0

    def observe(self, rate: float) -> None:
        """The rate of the tick that has ended."""
        if not self.num_observed:
            self.level = rate
        else:
            before = self.level
            self.level = LEVEL_WEIGHT * rate + (1 - LEVEL_WEIGHT) * (before + DAMPING * self.trend)
            self.trend = TREND_WEIGHT * (self.level - before) + (1 - TREND_WEIGHT) * DAMPING * self.trend
        self.level = max(0.0, self.level)
        self.num_observed += 1

    def ahead(self, num_ticks: float) -> float:
        """The rate expected in ``num_ticks`` ticks, within MOST_CHANGE of the level."""
        expected = self.level + self.trend * DAMPING * (1 - math.pow(DAMPING, num_ticks)) / (1 - DAMPING)
        return min(max(expected, self.level / MOST_CHANGE), self.level * MOST_CHANGE)
