"""run.yaml from other trainers' commands: what is written, what is left out, and the worked examples of the pages."""

from __future__ import annotations

import ast
import os
import re
import shlex
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from trainer.cli import elsewhere, yaml_io
from trainer.cli.convert import command, openrlhf_tables, trl_tables, verl_tables
from trainer.cli.convert.shell import Script
from trainer.errors import ConfigError

DOCS = Path(__file__).parents[4] / "docs"
VERL = "python3 -m verl.trainer.main_ppo data.train_files=a.parquet actor_rollout_ref.model.path=m trainer.total_training_steps=9 "
PPO = "python3 -m openrlhf.cli.train_ppo_ray --data.prompt_dataset a/b --actor.model_name_or_path m --reward.model_name_or_path r "
GRPO = "trl grpo --model_name_or_path m --dataset_name a/b --max_steps 9 "


def made(trainer: str, text: str, rows: int | None = 1000) -> command.Made:
    return command.read(trainer, None, shlex.split(text), rows)


def examples() -> list[tuple[str, str, str, list[str], str]]:
    found = []
    for trainer in ("verl", "openrlhf", "trl"):
        page = (DOCS / f"from-{trainer}.md").read_text()
        pattern = r"## [^\n]+\n\n```(bash|python)\n(.*?)```\n\n`flotilla convert \w+`(?: \(`([^`]*)`\))? makes of it:\n\n```yaml\n(.*?)```"
        found += [(trainer, kind, text, more.split(), made) for kind, text, more, made in re.findall(pattern, page, re.DOTALL)]
    return found


@pytest.mark.parametrize(
    ("trainer", "kind", "text", "more", "expected"), examples(), ids=lambda value: value if value in ("verl", "trl") else ""
)
def test_the_worked_examples_of_the_pages_are_what_it_makes(trainer, kind, text, more, expected, tmp_path, capsys):
    script = tmp_path / ("run.py" if kind == "python" else "run.sh")
    script.write_text(text)
    command.main([trainer, str(script), *more, "--output", "-"])
    out, err = capsys.readouterr()
    assert out.split("\n", 1)[1] == expected
    refused = [line for line in err.splitlines() if line.startswith("  ") and "fix before" in err]
    assert all("'?'" in line for line in refused[:1])  # a reward that a person has to write


def test_each_page_has_two_worked_examples():
    assert [trainer for trainer, *_ in examples()] == ["verl", "verl", "openrlhf", "openrlhf", "trl", "trl"]


@pytest.mark.parametrize("trainer", elsewhere.NAMES)
def test_the_table_of_a_page_is_that_of_the_error(trainer):
    page = DOCS / f"from-{trainer.lower()}.md"
    head, flag = f"| {trainer} | here |", "--" if trainer == "OpenRLHF" else ""
    sections = "run|model|data|optim|trainer|placement|log|evals|algorithm|reward|rollout|critic|teacher|environment"
    setting = re.compile(rf"\b(?:evals\b|(?:{sections})\.[a-z_.]*[a-z](?:=[a-z0-9_]+)?)")
    rows = [f"| `{flag}{key}` | {setting.sub(lambda found: f'`{found[0]}`', ours)} |" for key, ours in elsewhere.NAMES[trainer].items()]
    table = "\n".join([head, "|---|---|", *rows]) + "\n"
    before = page.read_text().partition(head)[0]
    if os.environ.get("UPDATE_GOLDEN"):
        page.write_text(before + table)
    assert page.read_text() == before + table


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("N=3\nrun a=$N b=${N} c='$N' d=\"$N\"", ["a=3", "b=3", "c=$N", "d=3"]),
        ("export N=3\nrun a=$((N * 2 + 1)) b=$(((N + 1) * 2))", ["a=7", "b=8"]),
        ("run a=${N:-5} b=${M:-${N:-6}}", ["a=5", "b=6"]),
        ("A=(\n  x=1\n  # y=2\n  z='3 4'\n)\nrun \"${A[@]}\" b=2", ["x=1", "z=3 4", "b=2"]),
        ("A=(x=1 y=2)\nrun ${A[@]}", ["x=1", "y=2"]),
        ("run a=1 \\\n  b=2 \\\n# c=3\n  d=4 $@", ["a=1", "b=2", "d=4"]),
        ("set -x\nread -r -d '' C <<EOF\nrun \\\n  a=1\nEOF", ["a=1"]),
        ("N=1\nif true; then\nN=2\nfi\nrun a=$N", ["a=2"]),
        ("F=\"['$HOME/a', '$HOME/b']\"\nrun a=\"$F\"", ["a=['~/a', '~/b']"]),
        ("run a=$X", ["a=$X"]),
        ('run a=\'["console","wandb"]\'', ['a=["console","wandb"]']),
        ("S=a\nS=${S}_b\nrun x=${S}_c", ["x=a_b_c"]),
    ],
)
def test_a_script_is_read_as_a_shell_would(script, words):
    assert Script(script, lambda words: words[:1] == ["run"]).command[1:] == words


def test_variables_that_a_script_leaves_to_its_environment_are_named():
    assert Script("run a=$X b=${Y}", lambda words: words[:1] == ["run"]).unknown == {"X", "Y"}


@pytest.mark.parametrize(
    ("typed", "setting", "value"),
    [
        ("actor_rollout_ref.rollout.n=5", "algorithm.group_size", 5),
        ("algorithm.adv_estimator=grpo algorithm.norm_adv_by_std_in_grpo=False", "algorithm.name", "dr_grpo"),
        ("algorithm.adv_estimator=gae", "algorithm.lam", 1.0),
        ("algorithm.adv_estimator=reinforce_plus_plus", "algorithm.baseline", False),
        ("algorithm.adv_estimator=reinforce_plus_plus_baseline", "algorithm.name", "reinforce_plus_plus"),
        ("data.train_batch_size=512 actor_rollout_ref.actor.ppo_mini_batch_size=128", "algorithm.minibatches", 4),
        ("actor_rollout_ref.actor.policy_loss.loss_mode=gspo", "algorithm.aggregation", "sequence"),
        ("actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm", "algorithm.aggregation", "constant"),
        ("", "algorithm.dual_clip", 3.0),
        ("", "optim.betas", [0.9, 0.999]),
        ("", "optim.weight_decay", 0.01),
        ("", "algorithm.importance_cap", None),
        ("algorithm.rollout_correction.rollout_is=sequence", "algorithm.importance_level", "sequence"),
        ("algorithm.use_kl_in_reward=True", "algorithm.kl.where", "reward"),
        ("algorithm.use_kl_in_reward=True", "algorithm.kl.estimator", "k1"),
        ("actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.04", "algorithm.kl.coef", 0.04),
        ("actor_rollout_ref.actor.clip_ratio_high=0.28", "algorithm.clip_high", 0.28),
        ("trainer.nnodes=2 trainer.n_gpus_per_node=4", "placement.ranks", 8),
        ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4", "trainer.micro_batch_tokens", 4 * 1024),
        ("actor_rollout_ref.actor.use_dynamic_bsz=True", "trainer.micro_batch_tokens", 16384),
        ("actor_rollout_ref.model.lora_rank=32", "rollout.sleep_level", 1),
        ("actor_rollout_ref.model.enable_gradient_checkpointing=False", "model.gradient_checkpointing", None),
        ("actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.5", "optim.warmup_steps", 18),
        ("actor_rollout_ref.rollout.enforce_eager=True", "rollout.options", {"enforce_eager": True}),
        (
            "data.val_files=\"['x/test.parquet','y/test.parquet']\"",
            "evals",
            {"x_test": {"path": "x/test.parquet"}, "y_test": {"path": "y/test.parquet"}},
        ),
        ("custom_reward_function.path=a/b.py custom_reward_function.name=f", "reward.function", "b:f"),
        ("reward_model.enable=True reward_model.model.path=r", "reward.args", {"model": "r"}),
        ("trainer.logger=['console','wandb'] trainer.project_name=p", "log.wandb", "p"),
        ("trainer.experiment_name='a b/c'", "run.name", "a-b-c"),
        ("actor_rollout_ref.actor.router_replay.mode=R3", "rollout.router_replay", "required"),
        ("actor_rollout_ref.actor.router_replay.mode=disabled", "rollout.router_replay", None),
        ("algorithm.filter_groups.enable=True algorithm.filter_groups.max_num_gen_batches=10", "rollout.extra_rounds", 10),
        ("+trainer.save_freq=20", "trainer.checkpoint_every", 20),
        ("trainer.save_freq=-1", "trainer.checkpoint_every", None),
    ],
)
def test_a_setting_of_verl_is_written_as_ours(typed, setting, value):
    assert made("verl", VERL + typed).settings.get(setting) == value


@pytest.mark.parametrize(
    ("typed", "setting", "value"),
    [
        ("--algo.advantage.estimator group_norm", "algorithm.name", "grpo"),
        ("--advantage_estimator reinforce_baseline", "algorithm.name", "reinforce_plus_plus"),
        ("--rollout.batch_size 256 --rollout.n_samples_per_prompt 4 --train.batch_size 128", "algorithm.minibatches", 8),
        ("--n_samples_per_prompt 4", "algorithm.group_size", 4),
        ("--actor.eps_clip_low_high 0.2 0.27", "algorithm.clip_high", 0.27),
        ("--algo.kl.use_loss --algo.kl.estimator k3", "algorithm.kl.where", None),
        ("", "algorithm.kl.where", "reward"),
        ("--algo.advantage.is_correction_enable", "algorithm.importance_cap", 5.0),
        ("--algo.advantage.is_correction_enable --algo.advantage.is_correction_type icepop", "algorithm.importance_mode", "mask"),
        ("--vllm.num_engines 4 --vllm.tensor_parallel_size 2", "rollout.tensor_parallel", 2),
        ("--ds.tensor_parallel_size 4", "trainer.tensor_parallel", 4),
        ("--ds_tensor_parallel_size 4", "trainer.tensor_parallel", 4),
        ("--train.async_enable --train.async_queue_size 3", "rollout.max_staleness", 3),
        ("--data.max_len 2048 --rollout.max_new_tokens 1500", "data.max_prompt_tokens", 548),
        ("--prompt_max_len 700 --generate_max_len 300", "data.max_prompt_tokens", 700),
        ("", "critic.path", "r"),
        ("--ds.zero_stage 3", "trainer.zero_stage", 3),
        ("--ds.lora.rank 8 --ds.lora.target_modules q_proj v_proj", "model.lora.targets", ["q_proj", "v_proj"]),
    ],
)
def test_a_flag_of_openrlhf_is_written_as_ours(typed, setting, value):
    assert made("openrlhf", PPO + typed).settings.get(setting) == value


@pytest.mark.parametrize(
    ("typed", "setting", "value"),
    [
        ("--num_generations 4 --per_device_train_batch_size 8 --gradient_accumulation_steps 2", "trainer.prompts_per_step", 4),
        ("--steps_per_generation 4 --gradient_accumulation_steps 2", "algorithm.minibatches", 2),
        ("--scale_rewards none", "algorithm.name", "dr_grpo"),
        ("--loss_type dr_grpo", "algorithm.aggregation", "constant"),
        ("--loss_type cispo", "algorithm.loss", "cispo"),
        ("--importance_sampling_level sequence", "algorithm.loss", "gspo"),
        ("--epsilon_high 0.28", "algorithm.clip_high", 0.28),
        ("--use_vllm", "algorithm.importance_mode", "mask"),
        ("", "rollout.engine", "hf"),
        ("", "optim.schedule", "linear"),
        ("--beta 0.04", "algorithm.kl.coef", 0.04),
    ],
)
def test_a_flag_of_trl_is_written_as_ours(typed, setting, value):
    assert made("trl", GRPO + typed).settings.get(setting) == value


@pytest.mark.parametrize(
    ("text", "setting"),
    [
        ("trl sft --model_name_or_path m --dataset_name a/b --max_steps 3", "data.messages"),
        ("trl dpo --model_name_or_path m --dataset_name a/b --max_steps 3 --loss_type ipo", "algorithm.length_normalized"),
        ("trl kto --model_name_or_path m --dataset_name a/b --max_steps 3", "data.label"),
        ("trl reward --model_name_or_path m --dataset_name a/b --max_steps 3 --center_rewards_coefficient 0.01", "algorithm.center"),
        ("accelerate launch --config_file zero3.yaml sft.py --model_name_or_path m --dataset_name a/b --max_steps 3", "trainer.zero_stage"),
    ],
)
def test_the_other_trainers_of_trl_have_settings_of_ours_that_are_taken(text, setting):
    found = made("trl", text)
    assert setting in found.settings and not command.refused(found)


@pytest.mark.parametrize(
    ("typed", "line"),
    [
        ("algorithm.adv_estimator=gpg", "algorithm.name: 'gpg' is not one of grpo, "),
        ("actor_rollout_ref.actor.policy_loss.loss_mode=geo_mean", "algorithm.loss: 'geo_mean' is not one of clip, "),
        ("actor_rollout_ref.rollout.name=trtllm", "rollout.engine: 'trtllm' is not one of vllm, hf"),
    ],
)
def test_a_method_that_is_not_here_is_written_so_that_no_start_takes_it(typed, line):
    assert any(each.startswith(line) for each in command.refused(made("verl", VERL + typed)))


def test_epochs_of_unknown_rows_are_no_number_of_steps(tmp_path):
    words = f"python3 -m verl.trainer.main_ppo data.train_files={tmp_path}/none.parquet data.train_batch_size=8 trainer.total_epochs=2"
    found = made("verl", words, rows=None)
    assert found.settings["trainer.steps"] == "2 x ROWS / 8"
    assert any(line.startswith("trainer.steps: '2 x ROWS / 8' is not an integer") for line in command.refused(found))
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"a": 1}\n' * 17)
    assert made("verl", words.replace("none.parquet", "rows.jsonl"), rows=None).settings["trainer.steps"] == 4


@pytest.mark.parametrize(
    ("typed", "kind", "start"),
    [
        ("actor_rollout_ref.actor.megatron.tensor_model_parallel_size=4", "left_out", "actor_rollout_ref.actor.megatron"),
        ("actor_rollout_ref.rollout.multi_turn.enable=True", "left_out", "actor_rollout_ref.rollout.multi_turn"),
        ("some.key.of.tomorrow=1", "left_out", "some.key.of.tomorrow=1"),
        ("data.truncation=left", "left_out", "data.truncation=left"),
        ("actor_rollout_ref.model.use_remove_padding=True", "not_needed", "actor_rollout_ref.model.use_remove_padding"),
        ("algorithm.adv_estimator=grpo critic.optim.lr=1e-5", "not_needed", "critic.optim.lr=1e-5"),
        ("actor_rollout_ref.rollout.top_k=50", "left_out", "actor_rollout_ref.rollout.top_k=50"),
    ],
)
def test_a_setting_without_a_counterpart_is_listed(typed, kind, start):
    assert any(setting.startswith(start) for setting, _ in getattr(made("verl", VERL + typed), kind))


@pytest.mark.parametrize("key", [key for key in elsewhere.VERL if key not in ("data.train_files", "trainer.total_epochs")])
def test_each_key_of_the_table_is_known_to_the_converter(key):
    value = verl_tables.DEFAULTS.get(key, "x" if key.endswith(("path", "name", "files", "key", "dir")) else 1)
    found = made("verl", f"{VERL} {key}={'null' if value is None else value}")
    unknown = [setting for setting, why in found.left_out if why == "no setting here does this"]
    assert not unknown


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        (["verl", "none.sh"], "none.sh: no such file; a command is given after --"),
        (["verl", "--output=-", "--", "python3", "train.py"], "the command: verl is not started in it; expected verl.trainer.main_ppo"),
        (["openrlhf", "--output=-", "--", "python3", "train.py"], "the command: openrlhf is not started in it; expected openrlhf.cli"),
        (["trl", "--output=-", "--", "python3", "train.py"], "the command: TRL is not started in it"),
        (["trl", "grpo.yaml"], "grpo.yaml: which trainer reads it? Write: flotilla convert trl -- trl grpo --config grpo.yaml"),
        (["trl", "none.py"], "none.py: no such file"),
        (["verl", "--output=old.yaml", "--", "x"], "--output=old.yaml: exists; give another name, or --force to replace it"),
        (["trl", "--output=-", "--", "trl", "grpo", "--config", "none.yaml"], "--config none.yaml: no such file"),
        (["verl", "--output=-", "--", *VERL.split(), "trainer.nnodes=$N"], "trainer.nnodes=$N: no number; put the variables in it"),
    ],
)
def test_mistakes_are_one_line(argv, error, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("old.yaml").touch()
    with pytest.raises(ConfigError, match="^" + re.escape(error)):
        command.main(argv)
    assert Path("old.yaml").read_text() == ""


def test_a_python_script_of_trl_is_read_and_not_run(tmp_path):
    (tmp_path / "sft.py").write_text(
        "raise SystemExit(1)\nLR = 3e-5\nargs = SFTConfig(learning_rate=LR, max_steps=4, output_dir=f'{x}')\n"
        "SFTTrainer('m', args=args, model='q', train_dataset=load_dataset('json', data_files='rows.jsonl'), "
        "peft_config=LoraConfig(r=8, lora_alpha=4))\n"
    )
    found = command.read("trl", tmp_path / "sft.py", [], None)
    wanted = {
        "optim.lr": 3e-5,
        "model.path": "q",
        "data.path": "rows.jsonl",
        "model.lora.rank": 8,
        "model.lora.alpha": 4,
        "trainer.steps": 4,
    }
    assert {key: found.settings.get(key) for key in wanted} == wanted
    assert any(line.startswith("output_dir=") for line in found.checks)


def test_the_file_is_what_a_start_reads(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    command.main(["verl", "--rows=80", "--", *VERL.split(), "data.train_batch_size=8"])
    assert yaml_io.load(Path("run.yaml").read_text())["trainer"]["prompts_per_step"] == 8
    assert capsys.readouterr().err.splitlines()[-1].startswith("run.yaml has ")
    assert yaml.safe_load(Path("run.yaml").read_text())["data"]["path"] == "a.parquet"


@pytest.mark.parametrize("kind", ["grpo", "sft", "dpo"])
def test_the_defaults_of_trl_are_those_of_its_source(kind):
    """A field whose default is written in the class itself; those of transformers' own are not."""
    package = find_spec("trl")
    source = Path((package and package.origin) or "").parent / "trainer" / f"{kind}_config.py"
    written = {}
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and isinstance(node.value, ast.Call):
            for keyword in node.value.keywords:
                if keyword.arg == "default" and isinstance(keyword.value, ast.Constant):
                    written[node.target.id] = keyword.value.value
    shared = {key: value for key, value in trl_tables.DEFAULTS[kind].items() if key in written and written[key] is not None}
    assert shared == {key: written[key] for key in shared} and len(shared) > 2


def test_reasons_are_text_or_nothing():
    tables = [getattr(module, name) for module in (verl_tables, openrlhf_tables, trl_tables) for name in ("NOT_NEEDED", "NO_COUNTERPART")]
    assert all(isinstance(why, str) for table in tables for why in table.values())


def test_a_secret_that_was_typed_is_not_shown():
    assert ("hub_token=***", "no setting here does this") in made("trl", GRPO + "--hub_token hf_abc").left_out
