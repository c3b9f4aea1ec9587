"""Models for tests of tools and reasoning: the bundled model with chat templates written here, in the forms that the
formats of models/chat tell apart."""
import json
import os
import shutil

from conftest import ROOT

# Calls and tools as Hermes models write them.
HERMES = """{%- if tools %}<system>Tools:{% for t in tools %}{{ '\\n' ~ (t | tojson) }}{% endfor %}{{ '\\n' }}Write <tool_call>{"name": ..., "arguments": ...}</tool_call>.
{% endif %}
{%- for m in messages %}
    {{- '<' ~ m.role ~ '>' ~ (m.content or '') }}
    {%- for c in m.tool_calls or [] %}{{ '\\n<tool_call>\\n{"name": "' ~ c.function.name ~ '", "arguments": ' ~ c.function.arguments | tojson ~ '}\\n</tool_call>' }}{% endfor %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"""
# The same, with reasoning that the template opens unless it is switched off, and shows in its history.
REASONING = HERMES.replace("(m.content or '')", "('<think>' ~ m.reasoning_content ~ '</think>' if m.reasoning_content else '') ~ (m.content or '')").replace(
    "{{ '<assistant>' }}", "{{ '<assistant>' ~ ('' if enable_thinking is defined and not enable_thinking else '<think>') }}")


def model_with(directory, template, **config):
    """A copy of the bundled model, in a directory that does not exist yet, with this template and
    these members of its configuration."""
    shutil.copytree(os.path.join(ROOT, "models", "demo"), directory)
    members = {"tokenizer_config.json": {"chat_template": template}, "config.json": config}
    for name, changed in members.items():
        path = os.path.join(directory, name)
        with open(path) as f:
            made = json.load(f) | changed
        with open(path, "w") as f:
            json.dump(made, f)
    return str(directory)
