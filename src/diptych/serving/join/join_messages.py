"""What a front end and the agent of a worker on another host say to each other.

A frame is one byte that says what follows, and that: RELAYED, a message of messages.py between front end and worker,
which the agent passes on unread; or TOLD, one of the structs here in msgpack. Hosts have clocks of their own: times
are durations.
"""

import msgspec

from diptych.control.config import ModelImplName
from diptych.control.errors import ConfigError
from diptych.control.router.topology import Role
from diptych.serving import edge_limits
from diptych.serving.link.engine_options import EngineOptions

PROTOCOL = 2
RELAYED, TOLD = b"\x00", b"\x01"


class Registration(msgspec.Struct, frozen=True, kw_only=True, tag="registration"):
    """A worker's first word. model: fingerprint of its checkpoint as model_impl reads it. agent: random, for the life
    of the agent. number: of the worker that it was (None: it is new). is_warm: it holds weights and a cache. clock: see
    host_clock.py."""

    protocol: int
    version: str
    model: str
    model_name: str
    model_impl: ModelImplName = "auto"
    agent: bytes
    host: str
    rack: str
    role: Role
    num_cores: int
    number: int | None = None
    is_warm: bool = False
    clock: str = ""

    def __post_init__(self) -> None:
        for name in ("host", "rack"):
            value = getattr(self, name)
            if len(value) > edge_limits.WORKER_LABEL or not value.isprintable():
                raise ConfigError(
                    f"{name} is {value!r}; at most {edge_limits.WORKER_LABEL} printable characters", param=name
                )


class Accepted(msgspec.Struct, frozen=True, kw_only=True, tag="accepted"):
    """The answer: be worker ``number`` with these options (the model, the device and the address are the agent's own).
    life: of the worker process; it grows. silence_s: how long either end may say nothing."""

    number: int
    life: int
    options: EngineOptions
    silence_s: float


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The other answer. is_final: another try would end the same way."""

    message: str
    is_final: bool


class Vital(msgspec.Struct, frozen=True, tag="vital"):
    """A Pulse of the worker process as durations: how long ago it stamped, and for how long its turn has lasted.
    now_ns: the time of its host's clock, from which another host estimates how far apart their clocks are."""

    age_ns: int = 0
    num_turns: int = 0
    busy_ns: int = 0
    predicted_ns: int = 0
    now_ns: int = 0


class Beat(msgspec.Struct, frozen=True, tag="beat"):
    """The front end is alive."""


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """The worker process has ended; the connection follows. See Loss. failed: what runs it has failed by a defect, and
    left this recording on its host ("": none)."""

    message: str
    crashed: bool
    failed: bool = False
    recording: str = ""


class Leaving(msgspec.Struct, frozen=True, tag="leaving"):
    """The agent is asked to end: drain its worker, then tell it to leave."""


class Kill(msgspec.Struct, frozen=True, tag="kill"):
    """End the worker process, which does not answer."""

    because: str


class Leave(msgspec.Struct, frozen=True, tag="leave"):
    """The worker was removed: end, and do not come back."""


AgentMessage = Registration | Vital | Ended | Leaving
DoorMessage = Accepted | Refused | Beat | Kill | Leave

_encoder = msgspec.msgpack.Encoder()
_from_agent: msgspec.msgpack.Decoder[AgentMessage] = msgspec.msgpack.Decoder(AgentMessage)
_from_door: msgspec.msgpack.Decoder[DoorMessage] = msgspec.msgpack.Decoder(DoorMessage)


def told(message: AgentMessage | DoorMessage) -> bytes:
    """A struct as a frame."""
    return TOLD + _encoder.encode(message)


def read_from_agent(data: bytes) -> AgentMessage:
    """The struct of a frame, without its first byte. Raises msgspec.DecodeError."""
    return _from_agent.decode(data)


def read_from_door(data: bytes) -> DoorMessage:
    """The same at the agent. Raises msgspec.DecodeError."""
    return _from_door.decode(data)
