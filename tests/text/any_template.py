"""The renderer's process, but each chat brings its template as its first message: thousands can be tried in one process."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from disagg.text import render_process
from disagg.text.chat import ChatTemplate
from disagg.types.errors import ConfigError, InvalidRequest


class AnyTemplate:
    def __init__(self, text: str, special_tokens: Mapping[str, str]) -> None:
        pass

    def render(self, messages: list[Any], **options: Any) -> str:
        try:
            template = ChatTemplate(messages[0])
        except ConfigError as error:
            raise InvalidRequest(str(error), "messages") from error.__cause__
        return template.render(messages[1:], **options)


if __name__ == "__main__":
    render_process.ChatTemplate = AnyTemplate  # type: ignore[misc,assignment]
    render_process.main(int(sys.argv[1]))
