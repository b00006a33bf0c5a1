"""Chat templates by Jinja alone, against transformers' texts."""

import pytest
from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from toolkit.models.templates import rendered

MESSAGES = [{"role": "system", "content": "Be <brief>."}, {"role": "user", "content": "naïve?"}]
WORDS = {"bos_token": "<s>", "eos_token": "</s>"}
TEMPLATES = [
    "{{ bos_token }}{% for message in messages %}\n  {% if loop.first %}[{% endif %}{{ message['content'] | trim }}\n"
    "{% endfor %}\n{% if add_generation_prompt %}<|assistant|>{% endif %}{{ eos_token }}",
    "{% for message in messages %}{{ message | tojson }}{{ message | tojson(indent=2) }}{% endfor %}",
    "{% set ns = namespace(count=0) %}{% for message in messages %}{% set ns.count = ns.count + 1 %}"
    "{% if ns.count == 1 %}{% continue %}{% endif %}{{ ns.count }}{% break %}{% endfor %}",
    "{% for message in messages %}{% generation %}{% set x = message.content %}{{ x }}{% endgeneration %}{{ x }}"
    "{% endfor %}",
    "{{ dict(a=1).items() | list }}{{ dict.fromkeys(['b'], 2) }}{{ strftime_now('%Y') }}",
    "{% if tools is none and documents is none and custom is not defined %}none{% endif %}",
]
REFUSED = [
    "{{ raise_exception('roles must alternate') }}",
    "{{ ''.__class__.__mro__ }}",
    "{{ dict.__class__.__subclasses__() }}",
    "{{ namespace(_x=1) }}",
    "{% set ns = namespace() %}{% set ns._x = 1 %}",
    "{{ messages.append(1) }}",
    "{% include 'secrets' %}",
]


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("answering", [False, True])
def test_texts_are_those_of_transformers(template, answering):
    (expected,), _ = render_jinja_template([MESSAGES], chat_template=template, add_generation_prompt=answering, **WORDS)
    assert rendered(template, MESSAGES, answering, WORDS) == expected


@pytest.mark.parametrize("template", REFUSED)
def test_a_template_cannot_leave_its_sandbox(template):
    for render in (
        lambda: render_jinja_template([MESSAGES], chat_template=template, **WORDS),
        lambda: rendered(template, MESSAGES, False, WORDS),
    ):
        with pytest.raises((TemplateError, TypeError)):
            render()
