"""Start ``diptych`` as blows.py needs it: with a clock that can be set, KV over relays, and short pauses.

    python blow_launch.py CLOCK RELAYS COMMAND ...

CLOCK: a file of one double, the seconds by which ``time.time`` is wrong. RELAYS: JSON, the port of the relay for that
of each KV connector. COMMAND: what ``diptych`` is given. What is replaced here stands for a host: its clock, its
network, and the patience of whoever starts processes again.
"""

import json
import mmap
import struct
import sys
import time


def set_clock(path: str) -> None:
    """Read the wall clock with the error that the file holds."""
    with open(path, "rb") as file:
        error = mmap.mmap(file.fileno(), 8, prot=mmap.PROT_READ)
    true_s, true_ns = time.time, time.time_ns

    def error_s() -> float:
        return float(struct.unpack("d", error[:8])[0])

    time.time = lambda: true_s() + error_s()
    time.time_ns = lambda: true_ns() + int(error_s() * 1e9)


def relay_kv(relays: dict[str, int]) -> None:
    """Let the front end tell senders of KV the relay in place of the receiver."""
    import msgspec

    from diptych.serving.fleet import joined_worker
    from diptych.serving.link.messages import Ready, WorkerMessage

    decode = joined_worker.decode_from_worker

    def relayed(data: bytes) -> WorkerMessage:
        message = decode(data)
        if isinstance(message, Ready) and message.address:
            host, _, port = message.address.rpartition(":")
            message = msgspec.structs.replace(message, address=f"{host}:{relays.get(port, port)}")
        return message

    joined_worker.decode_from_worker = relayed


if __name__ == "__main__":
    set_clock(sys.argv[1])
    from diptych.cli.main import main
    from diptych.serving.fleet import supervisor
    from diptych.serving.join import worker_agent

    supervisor.LONGEST_PAUSE_S = worker_agent.LONGEST_FAILURE_PAUSE_S = 1.0
    relay_kv(json.loads(sys.argv[2]))
    sys.argv[:3] = ["diptych"]
    main()
