"""Signs of life, read from outside of the process."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from diptych.serving.link.heartbeat import Heartbeat, Pulse, read_pulse

DEAD_LOOP = """
import sys, time
from pathlib import Path
from diptych.serving.link.heartbeat import Heartbeat
heart = Heartbeat(Path(sys.argv[1]))
heart.begin_turn(time.monotonic_ns())
print("here", flush=True)
sys.stdin.read()
"""


def test_a_turn_is_overdue_only_after_the_step_it_predicts_and_never_while_the_loop_sleeps(tmp_path: Path) -> None:
    path = tmp_path / "heartbeat"
    assert read_pulse(path) is None
    heart = Heartbeat(path, clock=lambda: 1000)
    try:
        assert read_pulse(path) == Pulse(1000, 0, 0, 0)
        heart.begin_turn(5000)
        heart.begin_step(300)
        pulse = read_pulse(path)
        assert pulse == Pulse(1000, 1, 5000, 300)
        assert (pulse.overdue_ns(5300), pulse.overdue_ns(5400), pulse.age_ns(5400)) == (0, 100, 4400)
        heart.begin_turn(6000)
        assert read_pulse(path) == Pulse(1000, 2, 6000, 0)
        heart.rest()
        pulse = read_pulse(path)
        assert pulse is not None and pulse.overdue_ns(10**12) == 0
    finally:
        heart.close()


def test_a_file_of_another_program_is_refused_and_a_half_made_one_is_no_sign(tmp_path: Path) -> None:
    path = tmp_path / "heartbeat"
    path.write_bytes(bytes(40))
    assert read_pulse(path) is None
    path.write_bytes(b"\7" * 40)
    with pytest.raises(ValueError, match="layout"):
        read_pulse(path)


def test_a_dead_loop_keeps_stamping_and_a_stopped_process_does_not(tmp_path: Path) -> None:
    path = tmp_path / "heartbeat"
    command = (sys.executable, "-c", DEAD_LOOP, str(path))
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()
        first = read_pulse(path)
        assert first is not None
        while (pulse := read_pulse(path)) is None or pulse.stamp_ns == first.stamp_ns:
            time.sleep(0.02)
        assert pulse.num_turns == first.num_turns == 1
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        stopped = read_pulse(path)
        time.sleep(0.5)
        assert read_pulse(path) == stopped
        process.send_signal(signal.SIGCONT)
        process.kill()
