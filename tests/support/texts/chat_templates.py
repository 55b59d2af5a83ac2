# ruff: noqa: E501 - templates have the lines that they have
"""Chats of plain turns; and templates as each family publishes them, with what it writes by them."""

from __future__ import annotations

from dataclasses import dataclass

from tokenpod.service.calls.chats import ChatMessage, ChatPrompt

#: Jinja, as templates of models are: blocks lose the line's end behind them.
QWEN = """
{%- if tools -%}
<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Call with <tool_call>.<|im_end|>
{% endif %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
    {%- if m.role == 'tool' -%}
<|im_start|>user
<tool_response>
{{ m.content }}
</tool_response><|im_end|>
{% elif m.role == 'assistant' -%}
<|im_start|>assistant
{% if m.reasoning_content is defined and loop.index0 > ns.last %}<think>
{{ m.reasoning_content.strip('\\n') }}
</think>

{% endif %}
        {{- m.content.lstrip('\\n') }}
        {%- for call in m.tool_calls or [] %}
            {%- if m.content or not loop.first %}{{ '\\n' }}{% endif %}
            {%- set call = call.function or call -%}
<tool_call>
{"name": "{{ call.name }}", "arguments": {{ call.arguments | tojson }}}
</tool_call>
        {%- endfor %}<|im_end|>
{% else -%}
<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% endif %}
{%- endif %}
"""

#: Opens the reasoning itself, and drops it from turns of the past.
DEEPSEEK = """
{{- bos_token }}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}{{ '<|A|>' + m.content.split('</think>')[-1] + eos_token }}
    {%- else %}{{ '<|U|>' + m.content }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|A|><think>\\n' }}{% endif %}
"""

MISTRAL = """
{{- bos_token }}
{%- set asked = messages | selectattr('role', 'equalto', 'user') | list %}
{%- for m in messages %}
    {%- if m.role == 'user' %}
        {%- if tools is not none and m == asked[-1] %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
        {{- '[INST] ' + m.content + '[/INST]' }}
    {%- elif m.tool_calls is defined %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in m.tool_calls %}
            {%- if call.id is not defined or call.id | length != 9 %}{{ raise_exception('ids have 9 letters') }}{% endif %}
            {{- '{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson }}
            {{- ', "id": "' + call.id + '"}' + ('' if loop.last else ', ') }}
        {%- endfor %}
        {{- ']' + eos_token }}
    {%- elif m.role == 'tool' %}
        {%- if m.tool_call_id | length != 9 %}{{ raise_exception('ids have 9 letters') }}{% endif %}
        {{- '[TOOL_RESULTS] {"content": ' + m.content + ', "call_id": "' + m.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- else %}{{ ' ' + m.content + eos_token }}{% endif %}
{%- endfor %}
"""

MISTRAL_NAMES = """
{{- bos_token }}
{%- if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{%- for m in messages %}
    {%- if m.role == 'user' %}{{ '[INST]' + m.content + '[/INST]' }}
    {%- elif m.role == 'tool' %}{{ '[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' }}
    {%- else %}
        {{- m.content }}
        {%- for call in m.tool_calls or [] %}
            {{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' + call.function.arguments | tojson }}
        {%- endfor %}
        {{- eos_token }}
    {%- endif %}
{%- endfor %}
"""

LLAMA = """
{{- bos_token }}
{%- for m in messages %}
    {%- if m.role == 'assistant' and m.tool_calls is defined %}
        {%- if m.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}
        {%- set call = m.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
        {{- '{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + '}' + eos_token }}
    {%- else %}
        {{- '<|start_header_id|>' + ('ipython' if m.role == 'tool' else m.role) + '<|end_header_id|>\\n\\n' }}
        {%- if tools is not none and loop.first %}{{ tools | tojson(indent=4) + '\\n' }}{% endif %}
        {{- m.content + eos_token }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}
"""

PYTHONIC = """
{{- bos_token }}
{%- if tools %}{{ 'Answer with [func_name1(name1=value1)]: ' + tools | tojson }}{% endif %}
{%- for m in messages %}
    {{- '<|header_start|>' + m.role + '<|header_end|>\\n\\n' }}
    {%- if m.tool_calls is defined %}
        {{- '[' }}
        {%- for call in m.tool_calls %}
            {{- call.function.name + '(' }}
            {%- for name, value in call.function.arguments.items() %}
                {{- name + '=' + value | tojson + ('' if loop.last else ', ') }}
            {%- endfor %}
            {{- ')' + ('' if loop.last else ', ') }}
        {%- endfor %}
        {{- ']' }}
    {%- else %}{{ m.content }}{% endif %}
    {{- eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|header_start|>assistant<|header_end|>\\n\\n' }}{% endif %}
"""


@dataclass(frozen=True)
class Written:
    """What a family's model writes, and what that is; `again`: what its template makes of it.

    `again` is None where it is what the model wrote.
    """

    template: str
    written: str
    text: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    again: str | None = None


PARIS, ROME = '{"city": "Paris", "days": 2}', '{"city": "Köln"}'
_HERMES = '<tool_call>\n{{"name": "get_weather", "arguments": {}}}\n</tool_call>'

FAMILIES = {
    "qwen": Written(
        QWEN,
        f"<think>\nParis, then.\n</think>\n\nLet me see.\n{_HERMES.format(PARIS)}\n{_HERMES.format(ROME)}",
        "Let me see.",
        "Paris, then.",
        (("get_weather", PARIS), ("get_weather", ROME)),
    ),
    "qwen, a call alone": Written(QWEN, _HERMES.format(PARIS), calls=(("get_weather", PARIS),)),
    "qwen, no call": Written(QWEN, "<think>\nNo.\n</think>\n\nIt rains.", "It rains.", "No."),
    "deepseek": Written(
        DEEPSEEK,
        "It may rain.\n</think>\n\nIt rains.",
        "It rains.",
        "It may rain.",
        again="It rains.",
    ),
    "mistral": Written(
        MISTRAL,
        f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {PARIS}}},'
        f' {{"name": "get_weather", "arguments": {ROME}}}]',
        calls=(("get_weather", PARIS), ("get_weather", ROME)),
        again=f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {PARIS}, "id": "ID"}},'
        f' {{"name": "get_weather", "arguments": {ROME}, "id": "ID"}}]',
    ),
    "mistral, names": Written(
        MISTRAL_NAMES,
        f"Let me see.[TOOL_CALLS]get_weather[ARGS]{PARIS}[TOOL_CALLS]get_weather[ARGS]{ROME}",
        "Let me see.",
        calls=(("get_weather", PARIS), ("get_weather", ROME)),
    ),
    "llama": Written(
        LLAMA, f'{{"name": "get_weather", "parameters": {PARIS}}}', calls=(("get_weather", PARIS),)
    ),
    "llama, tagged": Written(
        LLAMA,
        f'<|python_tag|>{{"name": "get_weather", "parameters": {PARIS}}}',
        calls=(("get_weather", PARIS),),
        again=f'{{"name": "get_weather", "parameters": {PARIS}}}',
    ),
    "llama, JSON that is no call": Written(LLAMA, '{"name": "Ada"}', '{"name": "Ada"}'),
    "pythonic": Written(
        PYTHONIC,
        '[get_weather(city="Paris", days=2), get_weather(city="Köln")]',
        calls=(("get_weather", PARIS), ("get_weather", ROME)),
    ),
}
#: Tokens of theirs that text does not show.
SPECIAL_TOKENS = ("[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<|im_start|>", "<|im_end|>")


def turns(*said: tuple[str, str], add_generation_prompt: bool = True) -> ChatPrompt:
    """A chat of plain turns: pairs of role and content."""
    return ChatPrompt([ChatMessage(*pair) for pair in said], add_generation_prompt)
