"""Models of a run besides the one that it trains: whether they can be read, and have the same tokens."""

from __future__ import annotations

from transformers import AutoConfig

from trainer import models
from trainer.configs.sections import Config, ModelConfig, OtherModel
from trainer.errors import ConfigError

SCORES = ("ForSequenceClassification", "ForTokenClassification")  # classes of reward models, and of critics that others save


def require(config: Config) -> None:
    """Raises ConfigError for one that cannot be read, or that has other tokens than the policy."""
    for other in config.other_models():
        try:
            models.without_weights(other.model, classifier=other.role == "critic" and is_classifier(other.model))
            theirs = models.load_tokenizer(other.model).get_vocab()
        except ConfigError as error:
            raise of_setting(other, error) from error
        ours = models.load_tokenizer(config.model).get_vocab()
        if differ := sorted(token for token, number in ours.items() if theirs.get(token) != number):  # what it has besides is never asked
            token = differ[0]
            raise ConfigError(
                f"{other.setting}={other.model.path}: has other tokens than the policy: {len(differ)} differ, such as {token!r}, which is "
                f"{theirs.get(token, 'none')} there and {ours[token]} here; take a {other.role} with the policy's tokenizer"
            )


def of_setting(other: OtherModel, error: ConfigError) -> ConfigError:
    """What is said of model.path, said of the setting that names this model."""
    return ConfigError(f"{other.setting}{str(error).removeprefix('model.path')}")


def is_classifier(model: ModelConfig) -> bool:
    """Whether it has a head of scores, as reward models do. Raises ConfigError."""
    try:
        names = AutoConfig.from_pretrained(model.path or "").architectures or []
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path: {model.path}: {error}") from error
    return any(name.endswith(SCORES) for name in names)
