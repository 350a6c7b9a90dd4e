"""Settings that are right in themselves and wrong together, or that nothing reads."""

from __future__ import annotations

import re

import pytest
from support.configs import BASE, errors, ok, recipe, unplaced

from trainer.configs.preferences import DpoConfig, RmConfig
from trainer.configs.sections import broken_rules
from trainer.configs.sft import SftConfig

pytestmark = pytest.mark.usefixtures("runs")


TAUGHT = ["algorithm.name=distillation", "teacher.path=gpt2"]
CONFLICTS = {
    "algorithm.group_size, algorithm.name": ["algorithm.group_size=1"],
    "critic.lr, algorithm.name": ["critic.lr=1"],
    "critic.path, algorithm.name": ["critic.path=gpt2"],
    "critic.head_start, trainer.steps": ["algorithm.name=ppo", "critic.head_start=9", "trainer.steps=9"],
    "algorithm.kl.reference, algorithm.kl.coef": ["algorithm.kl.reference=gpt2"],
    "algorithm.mask_truncated, algorithm.name": [*TAUGHT, "algorithm.mask_truncated=true"],
    "algorithm.lam, algorithm.name": ["algorithm.lam=0.5"],
    "algorithm.value_clip, algorithm.name": ["algorithm.value_clip=null"],
    "algorithm.gamma, algorithm.name": ["algorithm.gamma=0.9", "algorithm.name=rloo"],
    "algorithm.kl.where, algorithm.kl.coef": ["algorithm.kl.where=reward"],
    "algorithm.kl.horizon, algorithm.kl.target": ["algorithm.kl.horizon=7", "algorithm.kl.coef=0.1"],
    "rollout.options, rollout.engine": ["rollout.options.a=1", "rollout.engine=hf"],
    "rollout.gpu_memory, rollout.engine": ["rollout.gpu_memory=0.9", "rollout.engine=hf"],
    "rollout.max_logprob_diff, rollout.mode": ["rollout.max_logprob_diff=1", "rollout.mode=one_step"],
    "rollout.max_staleness, rollout.mode": ["rollout.max_staleness=1"],
    "rollout.slow, rollout.mode": ["rollout.slow=20"],
    "rollout.elastic, rollout.mode": ["rollout.elastic=true", "rollout.mode=one_step"],
    "rollout.elastic, rollout.tensor_parallel": ["rollout.elastic=true", "rollout.mode=async", "rollout.tensor_parallel=2"],
    "rollout.max_engines, rollout.elastic": ["rollout.max_engines=4", "rollout.mode=async"],
    "rollout.max_engines, rollout.engines": [
        "rollout.elastic=true",
        "rollout.mode=async",
        "rollout.max_engines=2",
        "rollout.engines=3",
    ],
    "rollout.no_signal, algorithm.group_size": [
        "rollout.mode=async",
        "rollout.no_signal=replace",
        "algorithm.group_size=1",
        "algorithm.name=ppo",
    ],
    "rollout.top_p, algorithm.importance_cap, rollout.max_logprob_diff": ["rollout.top_p=0.9"],
    "rollout.no_signal, rollout.mode": ["rollout.mode=one_step", "rollout.no_signal=replace"],
    "rollout.extra_rounds, rollout.no_signal": ["rollout.extra_rounds=2"],
    "rollout.extra_rounds, rollout.mode": ["rollout.mode=async", "rollout.no_signal=replace", "rollout.extra_rounds=2"],
    "algorithm.name, rollout.mode": ["algorithm.name=remax", "rollout.mode=async"],
    "model.attention, trainer.sequence_parallel": [
        "model.attention=eager",
        "trainer.sequence_parallel=2",
        "placement.ranks=2",
    ],
    "trainer.sequence_parallel, placement.ranks": ["trainer.sequence_parallel=2", "placement.ranks=3"],
    "trainer.sequence_parallel, trainer.tensor_parallel, placement.ranks": [
        "trainer.sequence_parallel=2",
        "trainer.tensor_parallel=2",
        "placement.ranks=2",
    ],
    "trainer.tensor_parallel, placement.ranks": ["trainer.tensor_parallel=2", "placement.ranks=3"],
    "trainer.expert_parallel, placement.ranks": ["trainer.expert_parallel=4", "placement.ranks=2"],
    "model.lora.rank, trainer.tensor_parallel": ["trainer.tensor_parallel=2", "placement.ranks=2", "model.lora.rank=4"],
    "model.lora.rank, trainer.expert_parallel": ["trainer.expert_parallel=2", "placement.ranks=2", "model.lora.rank=4"],
    "model.freeze, trainer.expert_parallel": ["trainer.expert_parallel=2", "placement.ranks=2", "model.freeze=[mlp.gate]"],
    "trainer.offload_optimizer, trainer.expert_parallel": [
        "trainer.expert_parallel=2",
        "placement.ranks=2",
        "trainer.offload_optimizer=true",
        "trainer.zero_stage=2",
    ],
    "trainer.tensor_parallel, trainer.expert_parallel, trainer.zero_stage": [
        "trainer.tensor_parallel=2",
        "trainer.expert_parallel=2",
        "placement.ranks=2",
        "trainer.zero_stage=2",
    ],
    "algorithm.name, teacher.path": ["algorithm.name=distillation"],
    "teacher.beta, teacher.path": ["teacher.beta=0.5"],
    "teacher.coef, teacher.path": ["teacher.coef=2"],
    "algorithm.loss, algorithm.name": [*TAUGHT, "algorithm.loss=gspo"],
    "algorithm.entropy_coef, algorithm.name": [*TAUGHT, "algorithm.entropy_coef=0.1"],
    "algorithm.importance_cap, algorithm.name": [*TAUGHT, "algorithm.importance_cap=3"],
    "algorithm.name, algorithm.kl.coef": [*TAUGHT, "algorithm.kl.coef=0.1"],
    "algorithm.name, rollout.no_signal": [*TAUGHT, "rollout.no_signal=replace"],
    "algorithm.name, reward.overlong.buffer": [*TAUGHT, "reward.overlong.buffer=10"],
    "teacher.path, placement.colocate, trainer.zero_stage": ["teacher.path=gpt2", "placement.colocate=true", "trainer.zero_stage=3"],
    "algorithm.baseline, algorithm.name": ["algorithm.name=remax", "algorithm.baseline=false"],
    "algorithm.clip_low, algorithm.loss": ["algorithm.loss=cispo", "algorithm.clip_low=0.1"],
    "algorithm.clip_high, algorithm.loss": ["algorithm.loss=sapo", "algorithm.clip_high=0.3"],
    "algorithm.dual_clip, algorithm.loss": ["algorithm.loss=gspo", "algorithm.dual_clip=3"],
    "algorithm.tau_pos, algorithm.loss": ["algorithm.tau_pos=1"],
    "algorithm.tau_neg, algorithm.loss": ["algorithm.loss=cispo", "algorithm.tau_neg=2"],
    "algorithm.tau_neg, algorithm.tau_pos": ["algorithm.loss=sapo", "algorithm.tau_pos=1.2"],
    "algorithm.importance_level, algorithm.importance_cap": ["algorithm.importance_cap=null", "algorithm.importance_level=sequence"],
    "algorithm.importance_mode, algorithm.importance_cap": ["algorithm.importance_mode=mask", "algorithm.importance_cap=0.5"],
    "algorithm.importance_low, algorithm.importance_mode": ["algorithm.importance_low=0.5"],
    "algorithm.importance_low": ["algorithm.importance_mode=mask", "algorithm.importance_low=1.5"],
    "algorithm.importance_low, algorithm.importance_cap": [
        "algorithm.importance_mode=mask",
        "algorithm.importance_low=1",
        "algorithm.importance_cap=1",
    ],
    "reward.overlong.max_length, reward.overlong.buffer": ["reward.overlong.max_length=100"],
    "reward.overlong.buffer, reward.overlong.max_length": ["reward.overlong.buffer=101", "reward.overlong.max_length=100"],
    "reward.overlong.buffer, rollout.max_new_tokens": ["reward.overlong.buffer=1025"],
    "reward.overlong.max_length, reward.overlong.buffer, rollout.max_new_tokens": [
        "reward.overlong.max_length=2000",
        "reward.overlong.buffer=100",
    ],
    "reward.overlong.buffer, reward.terms": ["reward.overlong.buffer=10", "reward.terms.overlong.function=numeric"],
    "trainer.keep_best, trainer.eval_prompts, evals": ["trainer.keep_best=true", "trainer.eval_prompts=0"],
    "data.args, data.path": ["data.path={rows}", "data.args.a=1"],
    "model.path, model.init": ["model.init={a: 1}", "model.tokenizer=gpt2"],
    "trainer.prompts_per_step, algorithm.group_size, algorithm.minibatches, placement.ranks": ["placement.ranks=7"],
    "trainer.micro_batch_tokens, data.max_prompt_tokens, rollout.max_new_tokens": ["trainer.micro_batch_tokens=2047"],
    "trainer.offload_optimizer, trainer.zero_stage": ["trainer.offload_optimizer=true"],
    "optim.warmup_steps, optim.schedule, trainer.steps": ["optim.schedule=cosine", "optim.warmup_steps=100"],
    "algorithm.kl.target, algorithm.kl.coef": ["algorithm.kl.target=0.1"],
    "rollout.tensor_parallel, rollout.engine": ["rollout.engine=hf", "rollout.tensor_parallel=2"],
    "placement.gpus_per_engine, rollout.tensor_parallel, rollout.pipeline_parallel": [
        "rollout.tensor_parallel=2",
        "placement.gpus_per_engine=1",
    ],
    "model.lora.alpha, model.lora.rank": ["model.lora.alpha=16"],
    "model.lora.targets, model.lora.rank": ["model.lora.targets=[q_proj]", "model.lora.rank=null"],
    "model.lora.quantize, model.init": [
        "model.path=null",
        "model.init={model_type: qwen2}",
        "model.tokenizer=gpt2",
        "model.lora={rank: 8, quantize: nf4}",
    ],
    "model.lora.quantize, trainer.zero_stage": ["model.lora={rank: 8, quantize: nf4}", "trainer.zero_stage=3"],
    "model.freeze, model.lora.rank": ["model.freeze=[embed_tokens]", "model.lora.rank=8"],
    "model.freeze, placement.colocate, trainer.zero_stage": [
        "model.freeze=[embed_tokens]",
        "placement.colocate=true",
        "trainer.zero_stage=3",
    ],
    "model.lora.rank, rollout.engine": ["model.lora.rank=513"],
    "model.lora.rank, rollout.options": ["model.lora.rank=8", "rollout.options.max_lora_rank=16"],
    "model.lora.rank, rollout.expert_parallel": ["model.lora.rank=8", "rollout.expert_parallel=true", "rollout.tensor_parallel=2"],
    "model.lora.rank, placement.colocate, rollout.sleep_level": [
        "model.lora.rank=8",
        "placement.colocate=true",
        "trainer.zero_stage=2",
    ],
    "model.lora.rank, placement.colocate, trainer.zero_stage": [
        "model.lora.rank=8",
        "placement.colocate=true",
        "trainer.zero_stage=3",
        "rollout.sleep_level=1",
    ],
    "placement.colocate, rollout.mode": ["placement.colocate=true", "rollout.mode=one_step", "placement.gpus_per_rank=0"],
    "placement.colocate, rollout.engines, placement.ranks": ["placement.colocate=true", "placement.ranks=2", "trainer.zero_stage=2"],
    "placement.colocate, placement.gpus_per_engine": ["placement.colocate=true", "placement.gpus_per_engine=0.5", "trainer.zero_stage=2"],
    "placement.colocate, placement.gpus_per_rank": ["placement.colocate=true", "placement.gpus_per_rank=0.5", "trainer.zero_stage=2"],
    "placement.colocate, rollout.tensor_parallel, rollout.pipeline_parallel": [
        "placement.colocate=true",
        "rollout.tensor_parallel=2",
        "rollout.nodes_per_engine=2",
        "trainer.zero_stage=2",
    ],
    "placement.colocate, algorithm.kl.coef, trainer.zero_stage": [
        "placement.colocate=true",
        "algorithm.kl.coef=0.1",
        "trainer.zero_stage=3",
    ],
    "placement.colocate, model.dtype, trainer.zero_stage": ["placement.colocate=true"],
    "rollout.sleep_level, placement.colocate": ["rollout.sleep_level=1"],
    "rollout.sleep_level, rollout.engine": [
        "placement.colocate=true",
        "placement.gpus_per_rank=0",
        "rollout.engine=hf",
        "rollout.sleep_level=1",
    ],
    "placement.gpus_per_rank, placement.ranks": ["placement.gpus_per_rank=0.5", "placement.ranks=2"],
    "placement.reference_resources, algorithm.kl.coef": ["placement.reference_resources.v100=1"],
    "placement.gpus_per_reference, placement.reference_resources": ["placement.gpus_per_reference=0.5"],
    "placement.gpus_per_reference, placement.ranks": [
        "placement.reference_resources.v100=1",
        "placement.gpus_per_reference=0.5",
        "placement.ranks=2",
        "algorithm.kl.coef=0.1",
    ],
    "rollout.pipeline_parallel, placement.gpus_per_engine, placement.gpus_per_rank": [
        "rollout.pipeline_parallel=2",
        "placement.gpus_per_engine=0",
    ],
    "rollout.pipeline_parallel, rollout.engine": ["rollout.pipeline_parallel=2", "rollout.engine=hf"],
    "rollout.expert_parallel, rollout.engine": [
        "rollout.expert_parallel=false",
        "rollout.engine=hf",
    ],
    "rollout.nodes_per_engine, rollout.engine": ["rollout.nodes_per_engine=1", "rollout.engine=hf"],
    "rollout.one_domain, rollout.nodes_per_engine": ["rollout.one_domain=false"],
    "rollout.nodes_per_engine, rollout.tensor_parallel, rollout.pipeline_parallel": [
        "rollout.tensor_parallel=4",
        "rollout.nodes_per_engine=3",
    ],
    "rollout.expert_parallel, rollout.tensor_parallel": ["rollout.expert_parallel=true"],
    "rollout.router_replay, rollout.pipeline_parallel": ["rollout.router_replay=required", "rollout.pipeline_parallel=2"],
    "rollout.router_replay, rollout.options": ["rollout.router_replay=required", "rollout.options.enable_prefix_caching=false"],
    "rollout.options": ["rollout.options.data_parallel_size=2"],
    "rollout.options, placement.gpus_per_engine, placement.gpus_per_rank": [
        "rollout.options.speculative_config.method=ngram",
        "placement.gpus_per_rank=0",
    ],
    "critic.warmup_steps, critic.schedule, trainer.steps": ["algorithm.name=ppo", "critic.schedule=linear", "critic.warmup_steps=100"],
    "trainer.eval_every, trainer.eval_prompts, evals": ["trainer.eval_every=5", "trainer.eval_prompts=0"],
    "model.attention, model.dtype, placement.gpus_per_rank": ["model.attention=flash_attention_2", "model.dtype=float32"],
}


@pytest.mark.parametrize("keys", CONFLICTS)
def test_settings_that_do_not_fit_together_are_refused(keys, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1", "answer": "2"}')
    (line,) = errors(*BASE, *(setting.replace("{rows}", str(rows)) for setting in CONFLICTS[keys]))
    assert ", ".join(re.findall(r"(?:^|, )([a-z]+[a-z_.]*)=", unplaced(line))) == keys
    assert line.startswith("command line: ")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["rollout.mode=async", "rollout.elastic=true"], "placement.colocate=true, rollout.mode=async: rollout engines that sleep while"),
        (["rollout.engines=2"], "rollout.engines=2, placement.ranks=1: there cannot be more colocated rollout engines than ranks"),
        (["rollout.pipeline_parallel=2"], "rollout.pipeline_parallel=2: a colocated rollout engine lives in one rank's bundle"),
        (["placement.gpus_per_engine=1"], "placement.gpus_per_engine=1.0: colocated rollout engines have the ranks' GPUs"),
        (
            ["trainer.zero_stage=1"],
            "model.dtype=bfloat16, trainer.zero_stage=1: DeepSpeed moves the states of bfloat16 models off the GPU in",
        ),
        (["rollout.options.enable_sleep_mode=false"], "enable_sleep_mode: not for options; use "),
    ],
)
def test_what_cannot_be_colocated_is_refused_once(argv, said):
    (line,) = errors(*BASE, "placement.colocate=true", "trainer.zero_stage=2", *argv)
    assert said in line


def test_who_asks_vllm_for_experts_itself_is_told_the_setting():
    (line,) = errors(*BASE, "rollout.options.enable_return_routed_experts=true")
    assert line.endswith('rollout.options={"enable_return_routed_experts": true}: rollout.router_replay has vLLM return them')


def test_a_conflict_names_values_and_where_each_was_read(tmp_path):
    file = recipe(tmp_path, "model: {path: gpt2}\ndata: {path: a.b:rows}\nalgorithm:\n  name: rloo\n")
    assert errors("--config", file, "algorithm.group_size=1") == [
        f"command line, {file}:4: algorithm.group_size=1, algorithm.name=rloo: "
        "answers are compared within their group, so a group needs at least 2"
    ]


@pytest.mark.parametrize(
    "argv",
    [
        ["algorithm.name=ppo", "algorithm.group_size=1", "critic.lr=1e-4"],
        ["algorithm.name=reinforce_plus_plus", "algorithm.group_size=1"],
        ["rollout.mode=one_step", "algorithm.epochs=2"],
        ["trainer.zero_stage=1", "trainer.offload_optimizer=true"],
        ["placement.gpus_per_engine=0"],
        ["placement.reference_resources.v100=1", "placement.gpus_per_reference=0", "algorithm.kl.coef=0.1"],
        ["placement.gpus_per_rank=0", "placement.colocate=true"],
        ["placement.colocate=true", "rollout.sleep_level=1", "trainer.zero_stage=2"],
        ["placement.colocate=true", "rollout.engine=hf", "trainer.zero_stage=2"],
        ["model.lora={rank: 8, alpha: 16, targets: [q_proj, v_proj]}", "trainer.zero_stage=3", "algorithm.kl.coef=0.1"],
        ["model.lora.rank=600", "rollout.engine=hf"],
        ["model.lora.rank=8", "placement.colocate=true", "trainer.zero_stage=2", "rollout.sleep_level=1"],
        ["placement.colocate=true", "model.dtype=float32"],
        ["placement.colocate=true", "algorithm.kl.coef=0.1", "trainer.zero_stage=3", "placement.reference_resources.v100=1"],
        ["placement.colocate=true", "placement.ranks=2", "rollout.engines=2", "trainer.zero_stage=3"],
        ["algorithm.name=ppo", "critic.schedule=linear", "critic.warmup_steps=150", "algorithm.epochs=2"],
        ["placement.gpus_per_engine=0.5", "placement.gpus_per_rank=0.5"],
        ["trainer.micro_batch_tokens=2048"],
        ["algorithm.minibatches=4", "placement.ranks=8"],
        ["rollout.router_replay=required"],
        ["rollout.pipeline_parallel=2"],
    ],
)
def test_settings_that_fit_are_not_refused(argv):
    assert broken_rules(ok(*argv)) == []


@pytest.mark.parametrize(
    ("argument", "why"),
    [
        ("rollout.engines=8", "it samples no answers"),
        ("reward.function=nonsense", "it learns from the answers of the data, not from rewards"),
        ("critic.lr=1", "it trains no value model"),
        ("algorithm.name=ppo", "there are no advantages; of this section it reads algorithm.aggregation alone"),
        ("trainer.eval_pass=2", "it samples no answers"),
        ("trainer.keep_best=true", "its evaluation has no reward; the newest checkpoints stay"),
        ("trainer.silence=20", "torchrun watches its processes, and trainer.timeout their collectives"),
        ("placement.ranks=2", "torchrun starts its processes, not Ray"),
    ],
)
def test_what_an_entry_point_does_not_read_is_refused(argument, why):
    assert errors(*BASE, argument, model=SftConfig) == [f"command line: {argument}: not read by train_sft; {why}"]


@pytest.mark.parametrize(
    ("model", "argv", "said"),
    [
        (SftConfig, ["trainer.eval_every=5"], "trainer.eval_every=5, trainer.eval_prompts=0: not read; without rows that are held out"),
        (SftConfig, ["data.learn=[user]"], 'data.learn=["user"], data.messages=null: not read; without conversations the answer is'),
        (SftConfig, ["data.messages=m", "data.learn=[critic]"], "data.learn[0]: 'critic' is not one of "),
        (SftConfig, ["data.messages=m", "data.learn=[]"], "data.learn: [] is not a list of at least 1 "),
        (SftConfig, ["data.messages=m", "data.system=x"], "data.messages=m, data.system=x: conversations are learned as they are"),
        (SftConfig, ["data.messages=m", "data.chat=never"], "data.messages=m, data.chat=never: conversations need the chat template"),
        (SftConfig, ["data.messages=m", "data.answer=a"], "data.answer=a, data.messages=m: a conversation has it already"),
        (SftConfig, ["data.messages=m", "data.prompt=p"], "data.prompt=p, data.messages=m: a conversation has it already"),
        (RmConfig, ["data.answer=a"], "data.answer=a: not read; it learns from data.chosen and data.rejected"),
        (RmConfig, ["data.chosen=a", "data.rejected=a"], "data.chosen=a, data.rejected=a: they must be two columns"),
        (RmConfig, ["algorithm.center=-1"], "algorithm.center: -1 is not a number >= 0"),
        (RmConfig, ["algorithm.beta=1"], "algorithm.beta=1: not read by train_rm; it learns from pairs"),
        (RmConfig, ["reward.function=x"], "reward.function=x: not read by train_rm; it learns from data, not from rewards"),
        (DpoConfig, ["algorithm.loss=dpo"], "algorithm.loss: 'dpo' is not one of sigmoid, ipo, robust, simpo, kto"),
        (DpoConfig, ["algorithm.beta=0"], "algorithm.beta: 0 is not a number > 0"),
        (DpoConfig, ["algorithm.loss=robust"], "algorithm.loss=robust, algorithm.label_smoothing=0.0: robust corrects for a share of"),
        (
            DpoConfig,
            ["algorithm.loss=ipo", "algorithm.label_smoothing=0.1"],
            "algorithm.loss=ipo: not read; the others know no wrong labels",
        ),
        (DpoConfig, ["algorithm.label_smoothing=0.5"], "algorithm.label_smoothing: 0.5 is not a number"),
        (DpoConfig, ["algorithm.gamma=1"], "algorithm.loss=sigmoid: not read; simpo alone has it"),
        (DpoConfig, ["algorithm.loss=simpo", "algorithm.length_normalized=true"], "not read; simpo is so, kto is not"),
        (DpoConfig, ["algorithm.loss=simpo", "algorithm.reference=gpt2"], "algorithm.loss=simpo: not read; simpo has none"),
        (DpoConfig, ["data.label=good"], "data.label=good, algorithm.loss=sigmoid: the other losses compare two answers to a prompt"),
        (
            DpoConfig,
            ["algorithm.loss=kto", "data.label=good", "data.chosen=better"],
            "data.label=good, data.chosen=better, data.rejected=rejected: rows have data.answer and its label, or two answers",
        ),
        (RmConfig, ["data.label=good"], "data.label: unknown key"),
        (DpoConfig, ["algorithm.desirable=2"], "algorithm.loss=sigmoid: not read; kto alone has it"),
        (DpoConfig, ["algorithm.loss=kto", "algorithm.undesirable=0"], "algorithm.undesirable: 0 is not a number > 0"),
        (DpoConfig, ["algorithm.loss=kto", "trainer.prompts_per_step=1"], "kto compares a prompt with the answers of others"),
        (DpoConfig, ["rollout.engines=2"], "rollout.engines=2: not read by train_dpo; it samples no answers"),
        (DpoConfig, ["data.margin=m"], "data.margin: unknown key"),
    ],
)
def test_mistakes_of_learning_from_data_are_one_error_each(model, argv, said):
    (line,) = errors(*BASE, *argv, model=model)
    assert said in line


def test_what_a_file_sets_in_vain_is_named_with_its_lines(tmp_path):
    file = recipe(tmp_path, "model: {path: gpt2}\ndata: {path: a.b:rows}\nrollout:\n  engines: 8\n  options: {a: 1}\nreward: {}\n")
    lines = errors("--config", file, model=SftConfig)
    assert f"{file}:4: rollout.engines=8: not read by train_sft; it samples no answers" in lines
    assert f'{file}:5: rollout.options={{"a": 1}}: not read by train_sft; it samples no answers' in lines


def test_what_an_algorithm_does_not_read_is_refused_with_the_reason():
    assert errors(*BASE, "algorithm.lam=0.5", "algorithm.value_clip=9", "critic.lr=1", "algorithm.kl.estimator=k1") == [
        "command line: algorithm.lam=0.5, algorithm.name=grpo: not read; only ppo trains a value model",
        "command line: algorithm.value_clip=9.0, algorithm.name=grpo: not read; only ppo trains a value model",
        "command line: algorithm.kl.estimator=k1, algorithm.kl.coef=0.0: not read; a coefficient of 0 leaves the reference model out",
        "command line: critic.lr=1.0, algorithm.name=grpo: not read; only ppo trains a value model",
    ]
    assert ok("algorithm.name=ppo", "algorithm.lam=0.5", "algorithm.value_clip=null").algorithm.value_clip is None


def test_a_setting_that_is_named_in_vain_is_refused_with_its_default_too(tmp_path):
    file = recipe(tmp_path, "model: {path: gpt2}\ndata: {path: a.b:rows}\ncritic: {lr: 1.0e-5}\nrollout: {engine: hf, options: {}}\n")
    assert errors("--config", file, "algorithm.lam=0.95", "algorithm.kl={horizon: 10000}") == [
        "command line: algorithm.lam=0.95, algorithm.name=grpo: not read; only ppo trains a value model",
        "command line: algorithm.kl.horizon=10000, algorithm.kl.target=null: not read; without a target the coefficient is fixed",
        f"{file}:4: rollout.options={{}}, rollout.engine=hf: not read; vLLM alone has it",
        f"{file}:3: critic.lr=1e-05, algorithm.name=grpo: not read; only ppo trains a value model",
    ]
    assert ok("algorithm.kl={}", "algorithm={}") == ok(), "a section without settings names none"
    assert ok("rollout.mode=one_step", "rollout.max_logprob_diff=null"), "null takes back what a file sets"


def test_another_setting_of_the_critic_leaves_its_learning_rate_alone():
    """It is not the policy's, whose section has the same settings."""
    config = ok("algorithm.name=ppo", "critic.weight_decay=0.1")
    assert (config.critic.lr, config.optim.lr) == (1e-5, 1e-6)
