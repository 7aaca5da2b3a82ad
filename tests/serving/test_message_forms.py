"""What crosses a socket or is kept in a file: what was read cannot be changed, messages between a front end
and its workers are arrays, and those of hosts that join are objects with the names of their fields."""

from types import ModuleType

import msgspec
import pytest

from diptych.serving.answers import stream_journal
from diptych.serving.fleet import twin_link
from diptych.serving.join import join_messages
from diptych.serving.link import engine_options, messages
from diptych.serving.worker import connector_driver

CHANGED = {"StreamRecord"}  # grows with the stream that it is of


def structs(module: ModuleType) -> dict[str, type[msgspec.Struct]]:
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, msgspec.Struct) and value.__module__ == module.__name__
    }


@pytest.mark.parametrize(
    ("module", "is_array"),
    [(messages, True), (stream_journal, True), (connector_driver, True), (join_messages, False),
     (engine_options, False), (twin_link, False)],
    ids=lambda value: value.__name__.rpartition(".")[2] if isinstance(value, ModuleType) else "",
)  # fmt: skip
def test_messages_are_frozen_and_have_the_form_of_their_link(module: ModuleType, is_array: bool) -> None:
    found = {name: value.__struct_config__ for name, value in structs(module).items() if name not in CHANGED}
    assert found
    assert {name for name, config in found.items() if not config.frozen} == set()
    assert {name for name, config in found.items() if config.array_like is not is_array} == set()


def test_a_message_begins_with_what_it_is() -> None:
    tags = {name: value.__struct_config__.tag for name, value in structs(messages).items()}
    assert {tag for tag in tags.values() if tag} == {
        "orders", "start_over", "shutdown", "loading", "ready", "failed", "report",
    }  # fmt: skip
    joining = structs(join_messages)
    assert {name: value.__struct_config__.tag for name, value in joining.items()} == {
        name: name.lower() for name in joining
    }


def test_options_are_named_when_they_are_given() -> None:
    for value in structs(engine_options).values():
        with pytest.raises(TypeError):
            value(1)
