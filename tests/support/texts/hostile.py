"""Model folders whose tokenizer or chat template does what a server must survive."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from support.checkpoints.demo import DEMO

#: What a chat's only message says decides what the template does with it.
TEMPLATE = """
{%- set word = messages[-1].content.split(' ')[0] -%}
{%- if word == 'loop' -%}
  {%- set steps = range(300)|list -%}
  {%- for a in steps %}{% for b in steps %}{% for c in steps %}{% for d in steps -%}
  {%- endfor %}{% endfor %}{% endfor %}{% endfor -%}
{%- elif word == 'double' -%}
  {%- set ns = namespace(text='aaaa') -%}
  {%- for step in range(60) %}{% set ns.text = ns.text ~ ns.text %}{% endfor -%}
{%- elif word == 'lipsum' -%}
  {{- lipsum(n=1000000) -}}
{%- elif word == 'constant' -%}
  {{- "a" * 10 ** 12 -}}
{%- elif word == 'schema' -%}
  {%- macro show(schema) %}{% for name, inner in schema.items() %}{{ name }}{{ show(inner) }}
  {%- endfor %}{% endmacro -%}
  {{- show(tools[0].function.parameters) }} <tool_call>
{%- elif word == 'think' -%}
  {{- messages[-1].content + mood + '\n<think>\n' -}}
{%- else -%}
  {{- messages[-1].content -}}
{%- endif -%}
"""


def with_template(folder: Path, source: str = TEMPLATE) -> Path:
    """The embedded model with a chat template."""
    shutil.copytree(DEMO, folder)
    (folder / "chat_template.jinja").write_text(source)
    return folder


def with_token(folder: Path, text: str) -> int:
    """Make the padding token of such a folder a plain one with this text; its id."""
    path, config = folder / "tokenizer.json", folder / "tokenizer_config.json"
    file = json.loads(path.read_text())
    (token,) = (each for each in file["added_tokens"] if each["content"] == "<|pad|>")
    del file["model"]["vocab"][token["content"]]
    file["model"]["vocab"][text] = token["id"]
    token |= {"content": text, "special": False}
    path.write_text(json.dumps(file))
    settings = json.loads(config.read_text())
    del settings["pad_token"]
    config.write_text(json.dumps(settings))
    return int(token["id"])


def with_tokenizer(folder: Path, **changes: Any) -> Path:
    """The embedded model with parts of its tokenizer.json replaced."""
    shutil.copytree(DEMO, folder)
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder
