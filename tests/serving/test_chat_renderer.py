"""How a conversation becomes a prompt: as transformers renders it, and in the form that each template takes."""

import json
import threading
from typing import Any

import pytest
from tests.serving.tool_model import CHAT_TEMPLATE
from transformers.utils.chat_template_utils import render_jinja_template

from diptych.control.errors import ChatTemplateError, InvalidRequestError
from diptych.serving.answers import chat_renderer, chat_template
from diptych.serving.answers.chat_renderer import ChatRenderer
from diptych.serving.answers.chat_template import ChatTemplate, OutOfTimeError, within
from diptych.serving.answers.template_messages import read_arguments
from diptych.serving.api.conversation import conversation
from diptych.serving.api.protocol import Message

SYSTEM, SECOND = {"role": "system", "content": "Be brief."}, {"role": "system", "content": "Speak German."}
LONG_LOOPS = "{% for i in range(2000) %}{% for j in range(2000) %}{{ i ~ j }}{% endfor %}{% endfor %}"
USER, AGAIN = {"role": "user", "content": "Bern?"}, {"role": "user", "content": "Basel?"}
ANSWER = {"role": "assistant", "content": "Sunny."}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]
PARTS = [{"type": "text", "text": "First."}, {"type": "text", "text": "Second."}]

PLAIN = """\
{%- for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif -%}
"""
STRICT = """\
{%- if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}{% set rest = messages[1:] %}
{%- else %}{% set system = '' %}{% set rest = messages %}{% endif -%}
{%- for m in rest -%}
{%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif -%}
<{{ m['role'] }}>{% if loop.first and system %}({{ system }}) {% endif %}{{ m['content'] }}
{%- endfor -%}
"""
ONLY_USERS = """\
{%- for m in messages -%}
{%- if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif -%}
<{{ m.role }}>{{ m.content }}
{%- endfor -%}
"""
CALLS_WITHOUT_CONTENT = """\
{%- for m in messages -%}
{%- if m.role == 'assistant' and m['content'] is none -%}
{%- for c in m.tool_calls -%}<call>{{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor -%}
{%- else -%}<{{ m.role }}>{{ m.content }}{% endif -%}
{%- endfor -%}
"""
TEXT_ARGUMENTS = """\
{%- for m in messages -%}<{{ m.role }}>{{ m.content or '' }}
{%- for c in m.tool_calls or [] %}<call>{{ c.function.name + ' ' + c.function.arguments }}{% endfor -%}
{%- endfor -%}
"""
ITEMS = """\
{%- for m in messages -%}<{{ m.role }}>{{ m.content or '' }}
{%- for c in m.tool_calls or [] %}<call>{{ c.function.name }}
{%- for name, value in c.function.arguments.items() %}<{{ name }}>{{ value }}{% endfor -%}
{%- endfor -%}
{%- endfor -%}
"""
LOOPS = """\
{%- for m in messages -%}<{{ m.role }}>
{%- if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif -%}
{%- endfor -%}
"""
LISTS_ALONE = "{% for m in messages %}<{{ m.role }}>{% for p in m.content %}{{ p['text'] }}{% endfor %}{% endfor %}"
IDS = """\
{%- for m in messages -%}<{{ m.role }}>{{ m.content or '' }}
{%- for c in m.tool_calls or [] -%}
{%- if c.id | length != 9 %}{{ raise_exception('ids have 9 characters') }}{% endif -%}
<call {{ c.id }}>{{ c.function.name }}
{%- endfor -%}
{%- if m.tool_call_id %}({{ m.tool_call_id }}){% endif -%}
{%- endfor -%}
"""
THOUGHT_OR_CONTENT = """\
{%- for m in messages -%}
{%- if m.tool_calls and m.content and m.thinking %}{{ raise_exception('content or thinking') }}{% endif -%}
<{{ m.role }}>{{ m.thinking or '' }}{{ m.content or '' }}{% for c in m.tool_calls or [] %}<call>{% endfor -%}
{%- endfor -%}
"""


def call(arguments: Any = '{"city": "Bern"}') -> dict[str, Any]:
    return {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": arguments}}


def calling(arguments: Any = '{"city": "Bern"}', **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": [call(arguments)], **fields}


def rendered(template: str, *messages: dict[str, Any], continues: bool = False, **variables: Any) -> str:
    """What a chat request with these messages becomes."""
    checked = conversation([Message.model_validate(message) for message in messages])
    return ChatRenderer({"default": template}, {"bos_token": "<s>"}).render(checked, variables, continues=continues)


def reference(template: str, *messages: dict[str, Any], **variables: Any) -> str:
    """The same by transformers."""
    [text], _ = render_jinja_template([list(messages)], chat_template=template, bos_token="<s>", **variables)
    return str(text)


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages | tojson }}",
        "{{ messages | tojson(indent=2) }}",
        "{{ messages | tojson(separators=(',', ':'), sort_keys=True) }}",
        "{{ messages | tojson(ensure_ascii=True) }}",
        "{% if tools is none %}none{% else %}{{ tools }}{% endif %}{{ documents if documents is defined }}",
        "{{ tools is defined }}{{ documents is none }}{{ unknown is defined }}{{ bos_token }}",
        "{% for m in messages %}{% generation %}{% set x = 1 %}{{ m.content }}{% endgeneration %}{{ x }}{% endfor %}",
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
        "{{ dict(a=1) }}{{ strftime_now('%Y') }}",
        "  {% for m in messages %}\n  {{ m.content }}\n  {% endfor %}\n",
    ],
)
def test_the_text_is_that_of_transformers(template: str) -> None:
    messages = ({"role": "user", "content": "\u00e9 <b> & 'q'"}, ANSWER)
    assert rendered(template, *messages) == reference(template, *messages)


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_has_the_names_that_transformers_gives_it(name: str) -> None:
    template = "{% for m in messages %}{{ m.reasoning_content }}|{{ m.thinking }}|{{ m.reasoning }};{% endfor %}"
    messages = (USER, {**ANSWER, name: "Hm."}, {**ANSWER, "reasoning": "a", "thinking": "b"})
    assert rendered(template, *messages) == reference(template, *messages)


def test_null_content_stays_null_where_only_then_a_call_is_written() -> None:
    assert rendered(CALLS_WITHOUT_CONTENT, USER, calling()) == '<user>Bern?<call>weather {"city": "Bern"}'
    profile = ChatRenderer({"default": CALLS_WITHOUT_CONTENT}, {}).profile
    assert profile is not None and profile.null_content == "null"


def test_null_content_is_no_text_where_the_template_fails_on_it() -> None:
    calls = "{% for c in m.tool_calls or [] %}<call>{% endfor %}"
    template = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] + '' }}" + calls + "{% endfor %}"
    assert rendered(template, USER, calling()) == "<user>Bern?<assistant><call>"
    assert rendered(template, USER, {**ANSWER, "content": None}) == "<user>Bern?<assistant>"


@pytest.mark.parametrize("given", ['{"city": "Bern"}', {"city": "Bern"}])
def test_arguments_are_a_text_or_an_object_as_the_template_reads_them(given: Any) -> None:
    assert rendered(TEXT_ARGUMENTS, calling(given)) == '<assistant><call>weather {"city": "Bern"}'
    assert '"arguments": {"city": "Bern"}}' in rendered(CHAT_TEMPLATE, calling(given))


@pytest.mark.parametrize(
    "cut", ['{"city": "Ber', '{"path": "C:\\Users"}', '{"a": True}', '{"a": 1,}', "[1, 2]", "7", '"x"', "no"]
)
def test_arguments_that_are_no_object_never_make_a_conversation_fail(cut: str) -> None:
    assert rendered(TEXT_ARGUMENTS, calling(cut)) == f"<assistant><call>weather {cut}"
    assert f'"arguments": {json.dumps(cut)}' in rendered(CHAT_TEMPLATE, calling(cut))
    assert rendered(ITEMS, calling(cut)) == f"<assistant><call>weather<incomplete>{cut}"


@pytest.mark.parametrize("given", [None, "", "null", "{}", {}])
def test_a_call_without_arguments_has_an_empty_object(given: Any) -> None:
    assert '"arguments": {}}' in rendered(CHAT_TEMPLATE, calling(given))


def test_raw_control_characters_in_arguments_are_read() -> None:
    assert read_arguments('{"text": "a\nb\tc"}') == {"text": "a\nb\tc"}
    assert json.dumps({"text": "a\nb"}) in rendered(CHAT_TEMPLATE, calling('{"text": "a\nb"}'))


def test_deep_arguments_are_a_text() -> None:
    assert "<incomplete>" in rendered(ITEMS, calling('{"a":' * 100_000))


def test_parts_go_to_templates_that_loop_over_them_and_others_get_a_text() -> None:
    message = {"role": "user", "content": PARTS}
    assert rendered(LOOPS, message) == reference(LOOPS, message) == "<user>First.Second."
    assert rendered(PLAIN, message) == "<user>First.\nSecond."


def test_a_template_that_reads_only_lists_gets_them() -> None:
    assert rendered(LISTS_ALONE, SYSTEM, USER) == "<system>Be brief.<user>Bern?"
    profile = ChatRenderer({"default": LISTS_ALONE}, {}).profile
    assert profile is not None and set(profile.only_parts) == {"system", "user", "assistant", "tool"}


def test_an_image_in_the_result_of_a_tool_is_a_text_and_elsewhere_refused() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    result = {"role": "tool", "tool_call_id": "a", "content": [PARTS[0], image]}
    assert rendered(PLAIN, result) == "<tool>First.\n[image left out: this model reads text only]"
    with pytest.raises(InvalidRequestError, match="text parts only") as caught:
        rendered(PLAIN, {"role": "user", "content": [image]})
    assert caught.value.param == "messages.0.content.0"


@pytest.mark.parametrize(
    ("messages", "prompt"),
    [
        ([SYSTEM, SECOND, USER], "<user>(Be brief.\n\nSpeak German.) Bern?"),
        (
            [SYSTEM, USER, ANSWER, SECOND, AGAIN],
            "<user>(Be brief.\n\nSpeak German.) Bern?<assistant>Sunny.<user>Basel?",
        ),
        ([{**SYSTEM, "role": "developer"}, USER], "<user>(Be brief.) Bern?"),
        ([USER, AGAIN], "<user>Bern?\n\nBasel?"),
        ([USER, ANSWER, ANSWER, AGAIN], "<user>Bern?<assistant>Sunny.\n\nSunny.<user>Basel?"),
        ([USER, {"role": "user", "content": PARTS}], "<user>Bern?\n\nFirst.\nSecond."),
    ],
)
def test_what_a_template_refuses_is_joined_and_rendered(messages: list[dict[str, Any]], prompt: str) -> None:
    assert rendered(STRICT, *messages) == prompt


def test_nothing_is_joined_where_the_template_takes_it() -> None:
    messages = (SYSTEM, SECOND, USER, AGAIN)
    assert rendered(PLAIN, *messages) == reference(PLAIN, *messages)
    alternating = (SYSTEM, USER, ANSWER, AGAIN)
    assert rendered(STRICT, *alternating) == reference(STRICT, *alternating)


def test_a_template_without_a_system_role_reads_it_before_the_user() -> None:
    assert rendered(ONLY_USERS, SYSTEM, USER, ANSWER) == "<user>Be brief.\n\nBern?<assistant>Sunny."


def test_ids_of_calls_are_short_where_the_template_wants_them_so() -> None:
    result = {"role": "tool", "tool_call_id": "call_1", "content": "18 C"}
    text = rendered(IDS, calling(), result)
    made, answered = text.split("<call ")[1][:9], text.rpartition("(")[2][:9]
    assert made == answered and made.isalnum()
    assert rendered(IDS, {**calling(), "tool_calls": [{**call(), "id": "abcdefghi"}]}).endswith(
        "<call abcdefghi>weather"
    )


def test_reasoning_beside_content_and_calls_stands_in_the_content_where_both_are_refused() -> None:
    message = calling(content="I look.", reasoning="Weather?")
    assert rendered(THOUGHT_OR_CONTENT, message) == "<assistant>Weather?\n\nI look.<call>"


def test_what_no_rule_mends_is_refused_with_the_words_of_the_template() -> None:
    with pytest.raises(InvalidRequestError, match="refused: roles must alternate") as caught:
        rendered(STRICT, ANSWER, USER)
    assert (caught.value.status, caught.value.param) == (400, "messages")


@pytest.mark.parametrize("template", [PLAIN, LOOPS, "{% for m in messages %}{{ m.content | trim }}</s>{% endfor %}"])
@pytest.mark.parametrize("content", ["The capital is", "The capital is ", PARTS])
def test_the_last_message_goes_on_as_with_transformers(template: str, content: Any) -> None:
    if isinstance(content, list) and template != LOOPS:
        pytest.skip("this template reads no lists")
    messages = (USER, {"role": "assistant", "content": content})
    assert rendered(template, *messages, continues=True) == reference(template, *messages, continue_final_message=True)


@pytest.mark.parametrize("last", [{**ANSWER, "content": None}, {**ANSWER, "content": []}])
def test_a_message_without_text_cannot_go_on(last: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match="no content") as caught:
        rendered(PLAIN, USER, last, continues=True)
    assert caught.value.param == "messages.1"


def test_a_message_that_the_template_leaves_out_cannot_go_on() -> None:
    with pytest.raises(InvalidRequestError, match="does not write the last message"):
        rendered("{{ messages[0].content }}", USER, ANSWER, continues=True)


@pytest.mark.parametrize(
    "template",
    [
        LONG_LOOPS,
        "{{ 'x' * 1000 }}",
        "{{ 7 ** 100000 }}",
        "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    ],
)
def test_a_template_that_takes_too_long_does_not_keep_a_server_from_its_start(
    monkeypatch: pytest.MonkeyPatch, template: str
) -> None:
    monkeypatch.setattr(chat_renderer, "PROBE_LIMIT_S", 0.01)
    monkeypatch.setattr(chat_template, "LONGEST_REPEATED", 100)
    renderer = ChatRenderer({"default": template}, {})
    assert renderer.complaints
    with pytest.raises(ChatTemplateError):
        renderer.render([USER], {})


@pytest.mark.parametrize(
    "template",
    [
        LONG_LOOPS,
        "{% for i in range(5000) recursive %}{{ loop(range(5000)) if loop.depth < 4 }}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) ~ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}",
        "{% for i in range(5000) if range(5000) | map('string') | join | length == 1 %}{% endfor %}" * 8,
    ],
)
def test_a_template_stops_itself(template: str) -> None:
    """So that no thread goes on for good, and nothing is raised where Python would drop it."""
    threads: list[threading.Thread] = []

    def work() -> str:
        threads.append(threading.current_thread())
        return ChatTemplate(template).render([])

    with pytest.raises(OutOfTimeError):
        within(0.01, work)
    [thread] = threads
    thread.join(60.0)
    assert not thread.is_alive()


def test_work_that_does_not_stop_itself_is_given_up() -> None:
    is_over = threading.Event()

    def work() -> None:
        while not is_over.is_set():
            pass

    with pytest.raises(OutOfTimeError):
        within(0.01, work)
    is_over.set()


def test_a_template_out_of_the_start_has_no_limit() -> None:
    """Requests are bounded by their size; a limit of one thread is not another's."""
    with pytest.raises(OutOfTimeError):
        within(0.0, lambda: ChatTemplate(LONG_LOOPS).render([]))
    assert within(60.0, lambda: ChatTemplate("{% for i in range(3) %}{{ i }}{% endfor %}").render([])) == "012"
    assert ChatTemplate("{% for i in range(3) %}{{ i }}{% else %}-{% endfor %}").render([]) == "012"


@pytest.mark.parametrize(
    "template", ["{% if %}", "{{", "{{ messages | no_such_filter }}", "{% for %}", "{% unknown_tag %}"]
)
def test_a_template_that_does_not_compile_is_said_in_one_sentence(template: str) -> None:
    renderer = ChatRenderer({"default": template}, {})
    [complaint] = renderer.complaints
    assert complaint.startswith("the chat template of this model cannot be used (line 1: ")
    assert not renderer.is_usable
    with pytest.raises(ChatTemplateError, match="chat template of this model cannot be used") as caught:
        renderer.render([USER], {})
    assert caught.value.param is None


def test_a_function_that_no_renderer_has_is_said_at_the_start() -> None:
    renderer = ChatRenderer({"default": PLAIN + "{% if tools %}{{ format_tools(tools) }}{% endif %}"}, {})
    [complaint] = renderer.complaints
    assert "calls format_tools()" in complaint
    assert renderer.render([USER], {}) == "<user>Bern?"
    with pytest.raises(ChatTemplateError, match="format_tools"):
        renderer.render([USER], {"tools": TOOLS})
    guarded = "{% if format_tools is defined %}{{ format_tools(tools) }}{% endif %}" + PLAIN
    assert not ChatRenderer({"default": guarded}, {}).complaints


def test_the_profile_says_what_a_template_takes() -> None:
    profile = ChatRenderer({"default": CHAT_TEMPLATE}, {}).profile
    assert profile is not None
    known = profile.as_dict()
    assert json.loads(json.dumps(known)) == known
    wanted = {"arguments": "object", "tools": True, "calls": True, "answers": None, "error": "", "documents": False}
    assert {name: known[name] for name in wanted} == wanted
    strict = ChatRenderer({"default": STRICT}, {}).profile
    assert strict is not None
    fates = (strict.system, strict.later_system, strict.several_systems, strict.developer, strict.same_role)
    assert fates == ("taken", "refused", "refused", "refused", "refused")
    leaves_out = ChatRenderer({"default": "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"}, {})
    assert leaves_out.profile is not None and leaves_out.profile.later_system == "left out"


def test_documents_and_reasoning_are_found_by_rendering() -> None:
    template = PLAIN + "{% for d in documents or [] %}{{ d.text }}{% endfor %}{{ messages[-1].reasoning_content }}"
    profile = ChatRenderer({"default": template}, {}).profile
    assert profile is not None and profile.documents and profile.reasoning == "reasoning_content"


def test_the_template_for_tools_is_rendered_with_tools() -> None:
    renderer = ChatRenderer({"default": "D", "tool_use": "T{{ tools[0].function.name }}"}, {})
    assert renderer.render([USER], {"tools": None}) == "D"
    assert renderer.render([USER], {"tools": TOOLS}) == "Tweather"
    assert renderer.tools_profile is not None and renderer.tools_profile.tools
