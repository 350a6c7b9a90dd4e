"""Classifiers of models that see, which transformers has of few families: what `learned.judged` makes of a conversation, they score.

Each is transformers' own mixin over the family's backbone, so it is loaded and saved as any other; its class is made where it is asked for.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForImageTextToText
from transformers.modeling_layers import GenericForSequenceClassification

NAMED = "ForSequenceClassification"


class Scorer:
    """In the place of AutoModelForSequenceClassification."""

    @staticmethod
    def from_config(config: Any, **settings: Any) -> Any:
        return _made(config)._from_config(config, **settings)

    @staticmethod
    def from_pretrained(path: str, num_labels: int | None = None, **settings: Any) -> Any:
        """Of a classifier's folder, or of a language model's, whose head is drawn at random. Raises as transformers does."""
        config = AutoConfig.from_pretrained(path, **({} if num_labels is None else {"num_labels": num_labels}))
        if is_scorer(config):
            return _made(config).from_pretrained(path, config=config, **settings)
        # By the class that the weights are of: of another one transformers would take some names for others.
        lm = AutoModelForImageTextToText.from_pretrained(path, **settings)
        config._attn_implementation = lm.config._attn_implementation
        return _made(config)(config, lm.model).to(lm.dtype)


def is_scorer(config: Any) -> bool:
    return any(name.endswith(NAMED) for name in config.architectures or ())


def _made(config: Any) -> Any:
    kind: Any = AutoModelForImageTextToText._model_mapping[type(config)]
    base = next(each for each in kind.__mro__ if each.__name__.endswith("PreTrainedModel"))

    def init(self: Any, config: Any, backbone: Any = None) -> None:
        """As the mixin's, or over a backbone that is there; post_init draws what nobody has loaded."""
        if backbone is None:
            GenericForSequenceClassification.__init__(self, config)
            return
        base.__init__(self, config)
        self.num_labels, self.model = config.num_labels, backbone
        self.score = torch.nn.Linear(config.get_text_config().hidden_size, config.num_labels, bias=False)
        self.post_init()

    name = kind.__name__.replace("ForConditionalGeneration", NAMED)
    return type(name, (GenericForSequenceClassification, base), {"__init__": init})
