"""Renders a conversation with the model's own chat template, as transformers does, in a sandbox.

The template comes from the model directory and is compiled once. What a request brings is only ever a value that the
template reads: it is rebuilt from plain JSON types and never evaluated. The sandbox keeps a template from what is not its
business; it cannot bound the time and memory that one takes. So routers compile and render in a process of its own
(`renderer`, `render_process`).
"""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NoReturn, Self

import jinja2
import jinja2.compiler
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from msgspec import Struct

from disagg.text.declared import roles_of
from disagg.text.model_files import CHAT_TEMPLATE, SPECIAL_TOKENS_MAP, TOKENIZER_CONFIG, ModelFiles
from disagg.types.errors import ConfigError, InvalidRequest
from disagg.types.plain import clip

_FILES = (CHAT_TEMPLATE, TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP)
_VARIABLES = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
MAX_SAID_CHARS = 400  # of a template's own words, in an error
RENDER_S = 5.0  # beside the event loop, for thousands of messages; most templates need 20 us for each
MAX_REPEATED = 1 << 20  # elements or characters of what a template multiplies
MAX_POWER_BITS = 1 << 16
_until_s: ContextVar[float] = ContextVar("until_s")


class OutOfTime(jinja2.TemplateRuntimeError):
    """The template has not ended after RENDER_S."""


class TemplateSource(Struct, frozen=True):
    """A template as the model directory has it. special_tokens: variables of the template: bos_token, eos_token, ..."""

    text: str
    special_tokens: dict[str, str] = {}

    @classmethod
    def of(cls, files: ModelFiles) -> TemplateSource | None:
        """None where the model has no chat template, as base models. chat_template.jinja goes before the rest."""
        config = files.json(TOKENIZER_CONFIG)
        text = files.text(CHAT_TEMPLATE)
        if text is None:
            text = _pick(config.get("chat_template"), files.model_dir)
        if text is None:
            return None
        roles, _ = roles_of(files)
        return cls(
            text, {role: token for role, token in roles.items() if role.isidentifier() and role not in _VARIABLES}
        )


class ChatTemplate:
    """A compiled template. `special_tokens` are variables of the template: bos_token, eos_token, ..."""

    def __init__(self, template: str, special_tokens: Mapping[str, str] | None = None) -> None:
        """Raises ConfigError where the template has a syntax error."""
        self._special_tokens = dict(special_tokens or {})
        try:
            self._template = _environment().from_string(template)
        except Exception as error:  # of a program by whoever made the model, anything
            raise ConfigError(f"the model's chat template cannot be compiled: {_words(error)}") from error

    @classmethod
    def load(cls, model_dir: Path) -> Self | None:
        """None where the model has no chat template, as base models. chat_template.jinja goes before the rest."""
        return cls.of(ModelFiles.read(model_dir, _FILES))

    @classmethod
    def of(cls, files: ModelFiles) -> Self | None:
        """The same, from files that were read already."""
        source = TemplateSource.of(files)
        return None if source is None else cls(source.text, source.special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        max_chars: int | None = None,
    ) -> str:
        """The prompt's text, special tokens included: encode it with `add_special_tokens=False`.

        A content of text parts is joined with newlines, as vLLM does. Raises InvalidRequest for other contents, for a
        text of more than max_chars as soon as it is that long, and with the template's own words where it refuses the
        conversation.
        """
        if not messages:
            raise InvalidRequest("messages is empty; a chat needs at least one message", "messages")
        _until_s.set(time.monotonic() + RENDER_S)
        plain = [_message(message, f"messages[{at}]") for at, message in enumerate(messages)]
        pieces: list[str] = []
        chars = 0
        try:
            for piece in self._template.generate(
                messages=plain,
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            ):
                chars += len(piece)
                if max_chars is not None and chars > max_chars:
                    break
                if piece:
                    pieces.append(piece)
            else:
                return "".join(pieces)
        except Exception as error:  # the same
            raise InvalidRequest(
                f"the model's chat template refuses the messages: {_words(error)}", "messages"
            ) from error
        raise InvalidRequest(
            f"the model's chat template makes more than {max_chars} characters of the messages, which is more than any "
            "text has that fits the model's context",
            "messages",
        )


def _words(error: Exception) -> str:
    """What an error says. A template may raise one whose words cannot be written, or would fill the memory."""
    try:
        return clip(str(error), MAX_SAID_CHARS) or type(error).__name__
    except Exception:  # noqa: BLE001  these words, too, are a program's
        return type(error).__name__


def _pick(template: object, model_dir: Path) -> str | None:
    """A template as such, or the default of a list of named ones."""
    if template is None or isinstance(template, str):
        return template
    if isinstance(template, list):
        for row in template:
            if isinstance(row, Mapping) and row.get("name") == "default" and isinstance(row.get("template"), str):
                return str(row["template"])
    raise ConfigError(
        f"chat_template of {model_dir / 'tokenizer_config.json'} must be a string, or a list of named templates with "
        "one named 'default'"
    )


def _message(message: Mapping[str, Any], param: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidRequest(f"{param} must be an object with a role and a content", param)
    if not isinstance(message.get("role"), str):
        raise InvalidRequest(f"{param}.role must be a string", f"{param}.role")
    content = _content(message.get("content"), f"{param}.content")
    others = {key: _plain(value) for key, value in message.items() if value is not None and key != "content"}
    return {**others, "content": content}


def _content(content: object, param: str) -> str:
    if isinstance(content, str):
        return str(content)
    if not isinstance(content, Sequence) or isinstance(content, bytes | bytearray):
        raise InvalidRequest(f"{param} must be a string or a list of text parts", param)
    texts = []
    for at, part in enumerate(content):
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise InvalidRequest(f'{param}[{at}] must be {{"type": "text", "text": "..."}}', f"{param}[{at}]")
        texts.append(str(part["text"]))
    return "\n".join(texts)


def _plain(value: object) -> Any:
    """The value as plain JSON types, so that a template finds no methods on it that the sandbox does not know."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [_plain(item) for item in value]
    return f"<{type(value).__name__}>"


class _Generation(jinja2.ext.Extension):
    """Accepts {% generation %}, with which templates mark what to train on; here its body is just rendered."""

    tags = {"generation"}  # noqa: RUF012  the library's own declaration

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Generator(jinja2.compiler.CodeGenerator):
    """Computes nothing while it compiles: constants may be as large as anybody likes ("a" * 10 ** 9)."""

    def _output_child_to_const(self, node: jinja2.nodes.Expr, frame: Any, finalize: Any) -> str:
        if not isinstance(node, jinja2.nodes.TemplateData):
            raise jinja2.nodes.Impossible
        return super()._output_child_to_const(node, frame, finalize)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Ends a rendering that takes too long, at the next value that it looks up or calls; multiplies within limits only."""

    code_generator_class = _Generator
    intercepted_binops = frozenset(("*", "**"))

    def getattr(self, obj: Any, attribute: str) -> Any:
        _in_time()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        _in_time()
        return super().getitem(obj, argument)

    def call(__self, __context: jinja2.runtime.Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        _in_time()
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        _in_time()
        if operator == "*":
            for many, times in ((left, right), (right, left)):
                if isinstance(times, int) and hasattr(many, "__len__") and len(many) * times > MAX_REPEATED:
                    raise jinja2.TemplateRuntimeError(f"{len(many)} elements are repeated {times} times")
        elif isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > MAX_POWER_BITS:
            raise jinja2.TemplateRuntimeError(f"a number is raised to the power of {right}")
        return super().call_binop(context, operator, left, right)


def _in_time() -> None:
    if time.monotonic() > _until_s.get():
        raise OutOfTime(f"it is not rendered after {RENDER_S:g} s")


def _environment() -> ImmutableSandboxedEnvironment:
    environment = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike jinja's own filter, without HTML escapes: prompts are no web pages."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
