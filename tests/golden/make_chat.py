"""Writes chat.json.gz: chat templates with what templates of models use, conversations, and the
texts that transformers makes of them.

Run:    python3 tests/golden/make_chat.py     (seconds; needs transformers and jinja2, no network)
Made by: Python 3.11, transformers 5.23.
"""

import gzip
import json
from pathlib import Path

from transformers.utils.chat_template_utils import render_jinja_template

PLAIN = """\
{% for m in messages %}{{ m['role'] | capitalize }}: {{ m['content'].strip() }}
{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"""

HEADERS = """\
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = 'Be kind.' %}
{%- endif %}
{{- '<|start|>system<|end|>\\n\\n' + system_message + '<|eot|>' }}
{%- for message in messages %}
    {{- '<|start|>' + message['role'] + '<|end|>\\n\\n' + message['content'] | trim + '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start|>assistant<|end|>\\n\\n' }}
{%- endif %}
"""

NAMESPACE = """\
{% set ns = namespace(turns=0, last='') %}
{% for message in messages if message.role != 'system' %}
  {% set ns.turns = ns.turns + 1 %}
  {% if loop.last %}{% set ns.last = message.content %}{% endif %}
[{{ loop.index0 }}/{{ loop.length }}] {{ message.role | upper }}
{{ message.content.split('\\n')[0] }}
{% endfor %}
turns={{ ns.turns }} last={{ ns.last | tojson }} all={{ messages | tojson }}
{% if not tools is defined or not tools %}no tools{% endif %}
"""

MACRO = """\
{% macro turn(role, text) -%}
<{{ role }}>{{ text | replace('<', '(') }}</{{ role }}>
{%- endmacro %}
{% for message in messages %}
{% if message.role == 'assistant' %}
{% generation %}{{ turn('bot', message.content) }}{% endgeneration %}{{ eos_token }}
{% else %}{{ turn(message.role, message['content']) }}
{% endif %}
{% endfor %}
{{- '<bot>' if add_generation_prompt else '' }}"""

LOOPS = """\
{%- for message in messages %}
{% if message.role == 'assistant' %}{% continue %}{% endif %}
{{ message.content[:5] }}|{{ message.content.startswith('a') }}|
{{- message.content.lower().endswith('!') }}|{{ message.content.rstrip('!') }};
{% if loop.index > 3 %}{% break %}{% endif %}
{% endfor %}
{{ messages[-1].content | length }}{{ ' ' * 3 }}{{ messages | map(attribute='role') | join(',') }}
{{ {'a': 1, 'b': [1, 2.5, none, true]} | tojson(indent=2) }}"""

TEMPLATES = {
    "plain": PLAIN,
    "headers": HEADERS,
    "namespace": NAMESPACE,
    "macro": MACRO,
    "loops": LOOPS,
}


def message(role, content):
    return {"role": role, "content": content}


CONVERSATIONS = [
    [message("user", '  hello <world> & "you"\n')],
    [
        message("system", " Short. "),
        message("user", "What's é?\nsecond"),
        message("assistant", "aß <b>!"),
        message("user", "again!!"),
    ],
]


def rendered(template, conversation):
    texts, _ = render_jinja_template(
        conversations=[conversation],
        chat_template=template,
        add_generation_prompt=True,
        bos_token="<s>",
        eos_token="</s>",
        tools=None,
        documents=None,
    )
    return texts[0]


golden = {
    "templates": TEMPLATES,
    "conversations": CONVERSATIONS,
    "rendered": {
        name: [rendered(template, conversation) for conversation in CONVERSATIONS]
        for name, template in TEMPLATES.items()
    },
}
text = json.dumps(golden, indent=1, ensure_ascii=False).encode()
Path(__file__).with_name("chat.json.gz").write_bytes(gzip.compress(text, mtime=0))
