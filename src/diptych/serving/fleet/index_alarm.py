"""Says in the log when the router's picture of the prefix caches goes wrong, and when it is right again."""

import logging

logger = logging.getLogger(__name__)


class IndexAlarm:
    """What was said last."""

    def __init__(self) -> None:
        self._alarm = ""

    def check(self, alarm: str) -> None:
        """alarm: of the router, now; empty where its picture is right."""
        if bool(alarm) != bool(self._alarm):
            if alarm:
                logger.warning("the router's picture of the prefix caches is wrong: %s", alarm)
            else:
                logger.warning("the router's picture of the prefix caches is right again")
        self._alarm = alarm
