"""Chapter 1: the two phases on the roofline of a device.

Owns FLOPs and bytes of a prefill step and of a decode step, counted from the model's dimensions, and the places where
they sit under the device's roof (S. Williams, A. Waterman, D. Patterson, CACM 52(4), 2009). Durations are the
simulator's cost model, not this count.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec

from diptych.control.errors import ConfigError
from diptych.control.request import Phase
from diptych.control.step import SchedulerOutput, chunk_attention
from diptych.simulation.models import ModelSpec
from diptych.web.panels.formula import Formula, duration, formula, scaled, significant
from diptych.web.panels.machine import Machine, machine
from diptych.web.panels.query import Query
