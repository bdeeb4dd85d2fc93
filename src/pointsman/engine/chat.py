"""Chat messages become a prompt, by the Jinja template that a model brings along, in a sandbox.

Templates come out of model files, which are data of strangers: they may not reach attributes, the disk or the clock.
"""

from collections.abc import Mapping, Sequence
from typing import NoReturn

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

__all__ = ["CHATML", "ChatTemplate", "TemplateRefused"]

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""For models without a template of their own."""


class TemplateRefused(ValueError):
    """The template does not take these messages, such as two user turns in a row."""


class ChatTemplate:
    """A compiled chat template.

    >>> ChatTemplate(CHATML).render([{"role": "user", "content": "Hi"}])
    '<|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\n'
    """

    def __init__(self, source: str, *, bos_token: str = "", eos_token: str = "") -> None:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _refuse
        self._template = environment.from_string(source)
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The prompt up to where the assistant is to speak.

        Raises:
            TemplateRefused: the template says no, or stumbles over the messages.
        """
        try:
            return self._template.render(
                messages=list(messages), add_generation_prompt=True, **self._tokens
            )
        except (TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise TemplateRefused(str(error)) from error


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)
