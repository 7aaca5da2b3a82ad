"""``python -m diptych.advisor.twin_process``: a twin in a process of its own, of the lowest priority.

    in    TwinSettings, then TwinQuestions       one JSON record a line
    out   TwinAnswered or TwinFailed             one for each question

It ends with its standard input.
"""

import os
import sys
import time
from typing import BinaryIO

import msgspec

from diptych.advisor.twin import Twin
from diptych.base.stop_signals import leave_terminal_to_parent
from diptych.control.errors import DiptychError
from diptych.control.planner.planner_events import TwinAnswered, TwinFailed, TwinQuestion, TwinSettings

LOWEST_PRIORITY = 19


def serve(lines: BinaryIO, answers: BinaryIO) -> None:
    """Answer questions until there are no more."""
    twin = Twin(msgspec.json.decode(lines.readline(), type=TwinSettings))
    questions = msgspec.json.Decoder(TwinQuestion)
    while line := lines.readline():
        question = questions.decode(line)
        answers.write(msgspec.json.encode(answer(twin, question)) + b"\n")
        answers.flush()


def answer(twin: Twin, question: TwinQuestion) -> TwinAnswered | TwinFailed:
    """Answer a question, with the processor time that it took. What fails in a simulation is a reply, too, which says
    whether it is a defect: anything but a refusal and a lack of memory."""
    begun_ns = time.process_time_ns()
    try:
        predictions = twin.answer(question)
    except Exception as error:
        is_defect = not isinstance(error, DiptychError | MemoryError)
        return TwinFailed(question.number, f"{type(error).__name__}: {error}", is_defect)
    return TwinAnswered(question.number, predictions, time.process_time_ns() - begun_ns)


if __name__ == "__main__":
    leave_terminal_to_parent()
    os.nice(LOWEST_PRIORITY)
    serve(sys.stdin.buffer, sys.stdout.buffer)
