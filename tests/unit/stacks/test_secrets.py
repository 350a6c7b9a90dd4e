"""flotilla:task.env names secrets, and does not hold them."""

from __future__ import annotations

import pytest

from stacks.settings.task import variable_errors

LONG = "a1" * 20


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HF_TOKEN", f"hf_{LONG}"),
        ("WANDB_API_KEY", LONG),
        ("AWS_SECRET_ACCESS_KEY", "wJalrXUtnFEMIK7MDENGbPxRfiCYEXAMPLEKEY"),
        ("aws_access_key", "x" * 20),
        ("DB_PASSWORD", "hunter2hunter2"),
        ("OPENAI_API_KEY", f"sk-proj-{LONG}"),
        ("WHATEVER", f"ghp_{LONG}"),
        ("WHO", "AKIAIOSFODNN7EXAMPLE"),
        ("GOOGLE", "AIza" + "b" * 35),
        ("JWT", "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.x"),
        ("KEY", "-----BEGIN OPENSSH PRIVATE KEY-----"),
        ("DATABASE_URL", "postgres://me:secret@db/runs"),
        ("https_proxy", "http://me:secret@proxy:3128"),
    ],
)
def test_a_secret_in_plain_text_is_refused_without_its_value(name, value):
    [error] = variable_errors(name, value)
    assert "looks like a secret" in str(error) and value not in str(error)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HF_TOKEN", None),
        ("HF_TOKEN_PATH", "/shared/me/token"),
        ("HF_TOKEN", ""),
        ("VLLM_API_KEY", "EMPTY"),
        ("EOS_TOKEN", "<|im_end|>"),
        ("TOKENIZERS_PARALLELISM", "false"),
        ("MAX_TOKENS", "4096000000"),
        ("SSH_PRIVATE_KEY", "/home/me/.ssh/id_ed25519"),
        ("http_proxy", "http://proxy.example.com:3128"),
        ("WANDB_BASE_URL", "https://wandb.example.com"),
        ("RUN_NAME", "sk-8"),
        ("MODEL", "hf_model"),
        ("GIT_COMMIT", "0123456789abcdef0123456789abcdef01234567"),
    ],
)
def test_what_is_none_is_not(name, value):
    assert not [*variable_errors(name, value)]
