"""Chat templates in the manner of models that people train, written for these tests from how each model's conversations are described, and
tokenizers that have their special tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from trainer.models import character_tokenizer

LETTERS = "".join(map(chr, range(32, 127))) + "\n"
EACH = "{% for m in messages %}"
CONTENT = "{{ m.content }}"
CHATML = (
    EACH
    + "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HERMES_TOOLS = (
    "{% if tools %}<|im_start|>system\n<tools>{% for t in tools %}{{ t | tojson }}\n{% endfor %}</tools><|im_end|>\n{% endif %}" + EACH
) + (
    "{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n{% else %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ '\n' if m.content or not loop.first }}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": '
    "{{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Thoughts stand before </think>; those before the last question are left out, and the last answer has some, if empty ones.
QWEN3 = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}"
    "{% endfor %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}{% set content = m.content %}{% set thought = '' %}"
    "{% if '</think>' in content %}{% set thought = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}<|im_start|>assistant\n"
    "{% if loop.index0 > ns.last and (loop.last or thought) %}<think>\n{{ thought }}\n</think>\n\n{% endif %}{{ content }}"
    "{% for c in m.tool_calls or [] %}{{ '\n' if content or not loop.first }}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}<|im_end|>\n'
    "{% elif m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
    "{% endif %}{% endif %}"
)
LLAMA2 = (
    "{% if messages[0].role == 'system' %}{% set head = '<<SYS>>\n' ~ messages[0].content ~ '\n<</SYS>>\n\n' %}"
    "{% set talk = messages[1:] %}"
    "{% else %}{% set head = '' %}{% set talk = messages %}{% endif %}{% for m in talk %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must take turns') }}{% endif %}"
    "{% if m.role == 'user' %}<s>[INST] {{ (head if loop.first else '') ~ m.content.strip() }} [/INST]"
    "{% else %} {{ m.content.strip() }} </s>{% endif %}{% endfor %}"
)
LLAMA3 = (
    "<|begin_of_text|>{% if tools %}<|start_header_id|>system<|end_header_id|>\n\n{% for t in tools %}{{ t | tojson }}"
    "{% endfor %}<|eot_id|>"
    "{% endif %}"
    + EACH
    + "<|start_header_id|>{{ 'ipython' if m.role == 'tool' else m.role }}<|end_header_id|>\n\n{% if 'tool_calls' in m %}"
    '{% if m.tool_calls | length != 1 %}{{ raise_exception("one call at a time") }}{% endif %}'
    '{"name": "{{ m.tool_calls[0].function.name }}", "parameters": {{ m.tool_calls[0].function.arguments | tojson }}}'
    "{% else %}{{ m.content | trim }}{% endif %}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
MISTRAL = (
    "<s>{% if tools %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    + EACH
    + "{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]"
    "{% elif m.role == 'tool' %}{% if m.tool_call_id | length != 9 %}{{ raise_exception('ids have 9 letters') }}{% endif %}"
    '[TOOL_RESULTS] {"content": {{ m.content | tojson }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]'
    "{% elif m.tool_calls %}[TOOL_CALLS] [{% for c in m.tool_calls %}"
    "{% if c.id | length != 9 %}{{ raise_exception('ids have 9 letters') }}{% endif %}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, "id": "{{ c.id }}"}'
    "{{ ', ' if not loop.last }}{% endfor %}]</s>{% elif m.role == 'assistant' %} {{ m.content }}</s>{% endif %}{% endfor %}"
)
GEMMA = (
    "<bos>{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    + EACH
    + "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
PHI3 = (
    EACH + "<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% else %}<|endoftext|>"
    "{% endif %}"
)
PHI4 = (
    EACH
    + "<|im_start|>{{ m.role }}<|im_sep|>{{ m.content }}<|im_end|>{% endfor %}"
    + ("{% if add_generation_prompt %}<|im_start|>assistant<|im_sep|>{% endif %}")
)
DEEPSEEK = (  # V3: arguments of calls are texts already
    "<|bos|>{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}"
    "{% elif m.role == 'user' %}<|User|>{{ m.content }}{% elif m.role == 'tool' %}<|tool_output|>{{ m.content }}"
    "{% else %}<|Assistant|>{{ m.content }}{% for c in m.tool_calls or [] %}"
    "<|tool_call|>{{ c.function.name + '\n```json\n' + c.function.arguments + '\n```' }}{% endfor %}<|eos|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|Assistant|>{% endif %}"
)
DEEPSEEK_R1 = (  # asked for an answer it begins to think; thoughts are in no history
    "<|bos|>{% for m in messages %}{% if m.role == 'user' %}<|User|>{{ m.content }}{% elif m.role == 'assistant' %}"
    "<|Assistant|>{{ m.content.split('</think>')[-1] }}<|eos|>{% else %}{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|Assistant|><think>\n{% endif %}"
)
GLM4 = (  # nothing ends a turn but the next one
    "[gMASK]<sop>{% if tools %}<|system|>\n{% for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}"
    + EACH
    + "{% if m.role == 'tool' %}<|observation|>\n{{ m.content }}{% elif m.tool_calls %}<|assistant|>"
    "{% for c in m.tool_calls %}{{ c.function.name }}\n{{ c.function.arguments | tojson }}{% endfor %}"
    "{% else %}<|{{ m.role }}|>\n{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
COMMAND_R = (
    "<BOS_TOKEN>{% for m in messages %}<|START_OF_TURN_TOKEN|><|{{ 'CHATBOT' if m.role == 'assistant' else m.role | upper }}_TOKEN|>"
    "{{ m.content.strip() }}<|END_OF_TURN_TOKEN|>{% endfor %}"
    "{% if add_generation_prompt %}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{% endif %}"
)
ZEPHYR = EACH + "<|{{ m.role }}|>\n{{ m.content }}</s>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
VICUNA = (
    "<s>{% for m in messages %}{% if m.role == 'user' %}USER: {{ m.content }} {% elif m.role == 'assistant' %}ASSISTANT: "
    "{{ m.content }}</s>"
    "{% else %}{{ m.content }} {% endif %}{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
GRANITE = (
    EACH + "<|start_of_role|>{{ 'tool_response' if m.role == 'tool' else m.role }}<|end_of_role|>{{ m.content }}"
    "{% if m.tool_calls %}<|tool_call|>["
    '{% for c in m.tool_calls %}{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    '{{ ", " if not loop.last }}'
    "{% endfor %}]{% endif %}<|end_of_text|>\n{% endfor %}{% if tools %}{{ '' }}{% endif %}"
    "{% if add_generation_prompt %}<|start_of_role|>assistant<|end_of_role|>{% endif %}"
).replace(EACH, "{% if tools %}<|start_of_role|>tools<|end_of_role|>{{ tools | tojson }}<|end_of_text|>\n{% endif %}" + EACH, 1)
OLMO2 = (
    "<|endoftext|>" + EACH + "{% if m.role == 'assistant' %}<|assistant|>\n{{ m.content }}<|endoftext|>{{ '' if loop.last else '\n' }}"
    "{% else %}<|{{ m.role }}|>\n{{ m.content }}\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
FALCON = "{% for m in messages %}{{ '\n\n' if not loop.first }}{{ m.role | capitalize }}: {{ m.content }}{% endfor %}" + (
    "{{ '\n\nAssistant:' if add_generation_prompt }}"
)
GPT_OSS = (  # the last answer ends with another token than those before
    EACH + "<|start|>{{ m.role }}{{ '<|channel|>final' if m.role == 'assistant' }}<|message|>{{ m.content }}"
    "{{ '<|return|>' if m.role == 'assistant' and loop.last else '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant<|channel|>final<|message|>{% endif %}"
)


@dataclass(frozen=True)
class Kind:
    """A template and what it needs of a tokenizer."""

    template: str
    end: str  # of a turn
    eos: str
    spaced: str = ""  # "first", "always" or "prepend": how a tokenizer of the kind of Llama 2's puts a space before what it is given
    also: tuple[str, ...] = ()  # special tokens that are no <...>
    system: bool = True

    def tokenizer(self) -> PreTrainedTokenizerFast:
        import re

        marks = re.findall(r"<\|?[A-Za-z_ ]+\|?>|</s>|<s>|\[/?[A-Z_]{4,}\]", self.template)
        names = {mark.strip() for mark in marks if "tool_" not in mark or "|" in mark} - {"<think>", "<tools>"}
        roles = {f"<|{role}|>" for role in ("system", "user", "assistant")} if "<|{{ m.role }}|>" in self.template else set()
        cohere = {f"<|{role}_TOKEN|>" for role in ("SYSTEM", "USER", "CHATBOT")} if "_TOKEN|>" in self.template else set()
        made = spaced_tokenizer(self.spaced) if self.spaced else character_tokenizer(LETTERS)
        made.add_special_tokens({"additional_special_tokens": sorted({*names, *roles, *cohere, self.end, *self.also} - {"<eos>"})})
        made.eos_token, made.chat_template = self.eos, self.template
        return made


def spaced_tokenizer(scheme: str) -> PreTrainedTokenizerFast:
    """One token per character, and a space before what it is given, as SentencePiece has it."""
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", *LETTERS.replace(" ", "▁")])}
    made: Any = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<pad>"))
    if scheme == "prepend":  # Llama 2's first tokenizers
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    else:
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
        made.decoder = decoders.Metaspace(prepend_scheme=scheme, split=False)
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", clean_up_tokenization_spaces=False)


KINDS = {
    "chatml": Kind(CHATML, "<|im_end|>", "<|im_end|>"),
    "qwen2.5-base": Kind(HERMES_TOOLS, "<|im_end|>", "<|endoftext|>", also=("<|endoftext|>",)),
    "hermes": Kind(HERMES_TOOLS, "<|im_end|>", "<|im_end|>", also=("<tool_call>", "</tool_call>")),
    "qwen3": Kind(QWEN3, "<|im_end|>", "<|im_end|>"),
    "smollm": Kind(CHATML, "<|im_end|>", "<|endoftext|>", also=("<|endoftext|>",)),
    "yi": Kind(CHATML, "<|im_end|>", "<|endoftext|>", spaced="first", also=("<|endoftext|>",)),
    "internlm2": Kind("<s>" + CHATML, "<|im_end|>", "</s>", spaced="prepend", also=("</s>",)),
    "llama2": Kind(LLAMA2, "</s>", "</s>", spaced="prepend"),
    "llama3": Kind(LLAMA3, "<|eot_id|>", "<|end_of_text|>", also=("<|end_of_text|>",)),
    "mistral": Kind(MISTRAL, "</s>", "</s>", spaced="first", system=False),
    "gemma": Kind(GEMMA, "<end_of_turn>", "<eos>", system=False),
    "phi3": Kind(PHI3, "<|end|>", "<|endoftext|>", spaced="prepend"),
    "phi4": Kind(PHI4, "<|im_end|>", "<|im_end|>"),
    "deepseek-v3": Kind(DEEPSEEK, "<|eos|>", "<|eos|>"),
    "deepseek-r1": Kind(DEEPSEEK_R1, "<|eos|>", "<|eos|>"),
    "glm4": Kind(GLM4, "<|user|>", "<|endoftext|>", also=("<|endoftext|>", "[gMASK]")),
    "command-r": Kind(COMMAND_R, "<|END_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>"),
    "zephyr": Kind(ZEPHYR, "</s>", "</s>", spaced="always"),
    "vicuna": Kind(VICUNA, "</s>", "</s>", spaced="first"),
    "granite": Kind(GRANITE, "<|end_of_text|>", "<|end_of_text|>"),
    "olmo2": Kind(OLMO2, "<|endoftext|>", "<|endoftext|>"),
    "gpt-oss": Kind(GPT_OSS, "<|end|>", "<|return|>"),
    "falcon": Kind(FALCON, "<eos>", "<eos>"),  # no token ends a turn
}
