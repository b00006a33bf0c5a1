"""Chat templates in Jinja's sandbox: they come with a model, and anyone may have written them.

The environment is that of transformers, whose `apply_chat_template` gives the same text; this needs Jinja alone.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, ClassVar

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace


def rendered(template: str, messages: Sequence[Mapping[str, str]], answering: bool, words: Mapping[str, str]) -> str:
    """The text of a conversation; with `answering`, up to where the model's next answer begins.

    `words` are the special tokens by their names, such as `eos_token`. Raises what Jinja raises, for any template.
    """
    plain = [dict(message) for message in messages]
    given = {"messages": plain, "tools": None, "documents": None, "add_generation_prompt": answering}
    return _compiled(template).render(**given, **words)


@lru_cache(4)
def _compiled(template: str) -> Template:
    """The template. Names that transformers gives to templates are there, and no others."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _json
    environment.globals |= {
        "raise_exception": _refuse,
        "strftime_now": lambda form: datetime.now().strftime(form),
        "dict": _Dict(),
        "namespace": _Names,
    }
    return environment.from_string(template)


class _Generation(Extension):
    """Blocks `{% generation %}`, which mark what a model said: their text as it is."""

    tags: ClassVar = {"generation"}

    def parse(self, parser: Any) -> nodes.Node:
        """The block as a call, whose variables stay inside."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_inside"), [], [], body).set_lineno(line)

    def _inside(self, caller: Any) -> str:
        return caller()


class _Dict:
    """`dict` without the attributes of a class, by which a template could leave the sandbox."""

    def __call__(self, *given: Any, **named: Any) -> dict:
        return dict(*given, **named)

    def fromkeys(self, *given: Any) -> dict:
        """See `dict.fromkeys`."""
        return dict.fromkeys(*given)


class _Names(Namespace):
    """A namespace without names that begin with an underscore."""

    def __init__(*given: Any, **named: Any):
        self, *values = given
        names = dict(*values, **named)
        for name in names:
            _check_name(name)
        Namespace.__init__(self, names)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a chat template must not store the name {name!r}")


def _json(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False):
    """JSON without HTML's escapes, which Jinja's own filter makes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> None:
    raise TemplateError(message)
