"""Chat templates: rendered as models expect, and locked in."""

import pytest

from pointsman.engine.chat import CHATML, ChatTemplate, TemplateRefused

HI = [{"role": "user", "content": "Hi"}]


def test_chatml_renders_every_turn_and_opens_the_assistants() -> None:
    messages = [{"role": "system", "content": "Be brief."}, *HI]
    assert ChatTemplate(CHATML).render(messages) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_template_sees_the_models_own_tokens() -> None:
    template = ChatTemplate(
        "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}", bos_token="<s>", eos_token="</s>"
    )
    assert template.render(HI) == "<s>Hi</s>"


def test_a_template_may_refuse_and_its_reason_is_told() -> None:
    with pytest.raises(TemplateRefused, match="roles must alternate"):
        ChatTemplate("{{ raise_exception('roles must alternate') }}").render(HI)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ nothing.here }}",
        "{{ messages[0].content + 1 }}",
        "{{ 1 / 0 }}",
        "{{ range(100000000000) }}",
    ],
)
def test_a_hostile_or_broken_template_is_refused(source: str) -> None:
    with pytest.raises(TemplateRefused):
        ChatTemplate(source).render(HI)
