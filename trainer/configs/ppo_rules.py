"""Which settings of train_ppo do not go together, and what to do about it. Pure functions of the settings."""

from __future__ import annotations

from collections.abc import Mapping

from trainer.configs.ppo_sections import PpoSections
from trainer.configs.sections import Rule

# Arguments of vLLM that settings own, or that a rollout engine relies on.
OWNED = {"tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "enable_expert_parallel", "nnodes", "node_rank"} | {
    *("master_addr", "master_port", "distributed_executor_backend", "model", "worker_extension_cls", "logprobs_mode"),
    "enable_sleep_mode",
}
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # of adapters that vLLM has room for
OWNED_WITH_LORA = {"enable_lora", "max_loras", "max_lora_rank", "max_cpu_loras", "lora_dtype", "lora_target_modules"}


def rules(config: PpoSections) -> list[Rule]:
    """Of no other entry point."""
    by_theme = (_batches, _learning, _environment, _teacher, _overlong, _engines, _lora, _gpus, _turns, _one_process)
    return [rule for of_theme in by_theme for rule in of_theme(config)]


def _batches(config: PpoSections) -> list[Rule]:
    """What a step is made of."""
    algorithm, step, place = config.algorithm, config.trainer, config.placement
    sequences = step.prompts_per_step * algorithm.group_size
    groups = max(1, place.ranks // step.shared)  # of ranks, each with sequences of its own
    longest = config.data.max_prompt_tokens + config.max_response_tokens()
    environment, answer = config.environment, ["rollout.max_new_tokens"]
    if environment.function:
        answer = ["environment.max_tokens"] if environment.max_tokens else ["environment.max_turns", *answer]
    return [
        Rule(
            sequences % (algorithm.minibatches * groups) != 0,
            ("trainer.prompts_per_step", "algorithm.group_size", "algorithm.minibatches", "placement.ranks"),
            f"{sequences} sequences per step do not divide into {algorithm.minibatches} x {groups} equal parts (minibatches x ranks)",
        ),
        Rule(
            place.ranks % step.shared != 0,
            (*(f"trainer.{way}" for way in ("sequence_parallel", "tensor_parallel") if getattr(step, way) > 1), "placement.ranks"),
            f"{place.ranks} ranks do not divide into groups of {step.shared} that share sequences",
        ),
        Rule(
            place.ranks % step.expert_parallel != 0,
            ("trainer.expert_parallel", "placement.ranks"),
            f"{place.ranks} ranks do not divide into groups of {step.expert_parallel} that have all experts",
        ),
        Rule(
            step.micro_batch_tokens < longest,
            ("trainer.micro_batch_tokens", "data.max_prompt_tokens", *answer),
            f"the longest sequence ({longest} tokens) must fit into a micro-batch",
        ),
    ]


def _learning(config: PpoSections) -> list[Rule]:
    """Advantages, losses and corrections."""
    algorithm, rollout, critic = config.algorithm, config.rollout, config.critic
    return [
        Rule(
            algorithm.group_size == 1 and algorithm.name in ("grpo", "dr_grpo", "rloo"),
            ("algorithm.group_size", "algorithm.name"),
            "answers are compared within their group, so a group needs at least 2",
        ),
        Rule(
            rollout.top_p < 1 and (algorithm.importance_cap is not None or rollout.max_logprob_diff is not None),
            ("rollout.top_p", "algorithm.importance_cap", "rollout.max_logprob_diff"),
            "the rollout engines' log-probabilities are of the nucleus, the policy's of all tokens; set both to null, or top_p to 1",
        ),
        Rule(
            critic.schedule != "constant" and critic.warmup_steps >= config.updates() and algorithm.name == "ppo",
            ("critic.warmup_steps", "critic.schedule", "trainer.steps"),
            "the warm-up must end before the run does",
        ),
        Rule(
            0 < config.trainer.steps <= critic.head_start and algorithm.name == "ppo",
            ("critic.head_start", "trainer.steps"),
            "the policy must have steps to learn in",
        ),
        Rule(
            rollout.mode != "one_step" and rollout.no_signal == "replace" and algorithm.group_size == 1 and algorithm.name != "remax",
            ("rollout.no_signal", "algorithm.group_size"),
            "one answer is like itself; groups of 2 and more differ or do not",
        ),
        Rule(
            rollout.mode == "async" and rollout.no_signal == "replace" and rollout.extra_rounds is not None,
            ("rollout.extra_rounds", "rollout.mode"),
            "async has no rounds; it samples on until a step is full",
        ),
        Rule(
            algorithm.name == "remax" and rollout.mode != "sync",
            ("algorithm.name", "rollout.mode"),
            "remax compares an answer with the greedy one of the same weights; use mode sync",
        ),
        Rule(
            algorithm.importance_mode == "mask"
            and algorithm.importance_cap is not None
            and (algorithm.importance_low or 0) >= algorithm.importance_cap,
            ("algorithm.importance_low", "algorithm.importance_cap"),
            "no weight is above the one and below the other; lower importance_low",
        ),
        Rule(
            algorithm.importance_mode == "mask" and algorithm.importance_cap is not None and algorithm.importance_cap < 1,
            ("algorithm.importance_mode", "algorithm.importance_cap"),
            "tokens on which rollout engine and policy agree weigh 1, and would be masked; use a cap of 1 or more",
        ),
        Rule(
            (algorithm.importance_low or 0) > 1,
            ("algorithm.importance_low",),
            "tokens on which rollout engine and policy agree weigh 1, and would be masked; use 1 or less",
        ),
        Rule(
            algorithm.loss == "sapo" and algorithm.tau_neg < algorithm.tau_pos,
            ("algorithm.tau_neg", "algorithm.tau_pos"),
            "the gate of bad answers must not be the wider one; SAPO wants tau_neg at least tau_pos",
        ),
    ]


def _environment(config: PpoSections) -> list[Rule]:
    environment, reward, rollout = config.environment, config.reward, config.rollout
    if not environment.function:
        return []
    most = environment.max_tokens
    return [
        Rule(
            bool(reward.terms) or reward.function != "exact" or bool(reward.args),
            ("environment.function", "reward.terms" if reward.terms else "reward.function"),
            "what the environment returns is the reward; leave reward.function, args and terms out",
        ),
        Rule(
            reward.overlong.buffer > 0,
            ("environment.function", "reward.overlong.buffer"),
            "an episode has tokens that the policy did not write; leave it at 0, and punish length in the environment",
        ),
        Rule(
            most is not None and most < rollout.max_new_tokens,
            ("environment.max_tokens", "rollout.max_new_tokens"),
            f"an episode must have room for one turn of {rollout.max_new_tokens} tokens",
        ),
        Rule(
            environment.sandbox.provider is None and (environment.function in ("shell", "task") or _has_sandbox_tools(environment.args)),
            ("environment.function", "environment.sandbox.provider"),
            "it works in a sandbox; set the provider to auto",
        ),
    ]


def _has_sandbox_tools(args: Mapping[str, object]) -> bool:
    tools = args.get("tools")
    return isinstance(tools, dict) and any(isinstance(tool, dict) and tool.get("kind") == "sandbox" for tool in tools.values())


def _engines(config: PpoSections) -> list[Rule]:
    """How rollout engines are cut, and what they are given."""
    rollout, place = config.rollout, config.placement
    gpus, split = place.gpus_per_engine, rollout.tensor_parallel * rollout.pipeline_parallel
    owned = sorted(OWNED & rollout.options.keys())
    sampling_on_cpus = gpus == 0 or (gpus is None and place.gpus_per_rank == 0)
    return [
        Rule(
            rollout.engine == "hf" and rollout.tensor_parallel > 1,
            ("rollout.tensor_parallel", "rollout.engine"),
            "only vllm spreads a rollout engine over GPUs",
        ),
        Rule(
            rollout.engine == "vllm" and rollout.pipeline_parallel > 1 and sampling_on_cpus,
            ("rollout.pipeline_parallel", "placement.gpus_per_engine", "placement.gpus_per_rank"),
            "vLLM has no pipeline of CPUs; use tensor_parallel",
        ),
        Rule(
            split % rollout.nodes_per_engine != 0,
            ("rollout.nodes_per_engine", "rollout.tensor_parallel", "rollout.pipeline_parallel"),
            f"tensor_parallel x pipeline_parallel is {split}, which does not divide into {rollout.nodes_per_engine} equal parts",
        ),
        Rule(
            not rollout.one_domain and rollout.nodes_per_engine == 1,
            ("rollout.one_domain", "rollout.nodes_per_engine"),
            "a rollout engine on one node is in one domain",
        ),
        Rule(
            rollout.expert_parallel and split == 1,
            ("rollout.expert_parallel", "rollout.tensor_parallel"),
            "experts are spread over the processes of a rollout engine, and it has one",
        ),
        Rule(
            bool(owned),
            ("rollout.options",),
            f"{', '.join(owned)}: not for options; use rollout.tensor_parallel, pipeline_parallel, expert_parallel, nodes_per_engine; "
            "rollout.engines are data parallel already, and weight sync, sleep and log-probabilities need the rest as it is",
        ),
        Rule(
            "enable_return_routed_experts" in rollout.options,
            ("rollout.options",),
            "rollout.router_replay has vLLM return them",
        ),
        Rule(
            rollout.router_replay == "required" and rollout.pipeline_parallel > 1,
            ("rollout.router_replay", "rollout.pipeline_parallel"),
            "vLLM returns no experts from the stages of a pipeline; use tensor_parallel",
        ),
        Rule(
            rollout.router_replay == "required" and not sampling_on_cpus and rollout.options.get("enable_prefix_caching") is False,
            ("rollout.router_replay", "rollout.options"),
            "vLLM keeps experts beside its cache of prefixes; leave enable_prefix_caching out",
        ),
        Rule(
            sampling_on_cpus and "speculative_config" in rollout.options,
            ("rollout.options", "placement.gpus_per_engine", "placement.gpus_per_rank"),
            "vLLM's speculative decoding on CPUs gives log-probabilities that are not the model's; leave speculative_config out",
        ),
        Rule(
            bool(gpus) and gpus != split and (gpus > 1 or split > 1),
            ("placement.gpus_per_engine", "rollout.tensor_parallel", "rollout.pipeline_parallel"),
            "a rollout engine has tensor_parallel x pipeline_parallel GPUs, or a share of one; leave gpus_per_engine out",
        ),
        Rule(
            rollout.elastic and rollout.tensor_parallel > 1,
            ("rollout.elastic", "rollout.tensor_parallel"),
            "rollout engines that come and go are one process each; use tensor_parallel 1",
        ),
        Rule(
            rollout.max_engines is not None and rollout.max_engines < rollout.engines,
            ("rollout.max_engines", "rollout.engines"),
            f"the {rollout.engines} rollout engines that stay count too; raise max_engines, or leave it out",
        ),
    ]


def _gpus(config: PpoSections) -> list[Rule]:
    """Shares of GPUs."""
    place = config.placement
    return [
        Rule(
            0 < place.gpus_per_rank < 1 and place.ranks > 1,
            ("placement.gpus_per_rank", "placement.ranks"),
            "NCCL takes one rank per GPU; use gpus_per_rank 1, or 1 rank",
        ),
        Rule(
            bool(place.reference_resources) and 0 < (place.gpus_per_reference or 0) < 1 and place.ranks > 1,
            ("placement.gpus_per_reference", "placement.ranks"),
            "NCCL takes one rank per GPU; use gpus_per_reference 1, or 1 rank",
        ),
    ]


def _turns(config: PpoSections) -> list[Rule]:
    """Ranks and rollout engines that take turns on the same devices."""
    algorithm, rollout, step, place = config.algorithm, config.rollout, config.trainer, config.placement
    gpus, split = place.gpus_per_engine, rollout.tensor_parallel * rollout.pipeline_parallel
    return [
        Rule(
            place.colocate and bool(gpus or (place.gpus_per_rank and gpus is not None)),
            ("placement.colocate", "placement.gpus_per_engine"),
            "colocated rollout engines have the ranks' GPUs; leave gpus_per_engine out",
        ),
        Rule(
            place.colocate and 0 < place.gpus_per_rank < 1,
            ("placement.colocate", "placement.gpus_per_rank"),
            "a rank and its rollout engine take turns on a whole GPU; use 1, or 0 for CPUs",
        ),
        Rule(
            place.colocate and place.gpus_per_rank > 0 and config.model.dtype == "bfloat16" and step.zero_stage < 2,
            ("placement.colocate", "model.dtype", "trainer.zero_stage"),
            "DeepSpeed moves the states of bfloat16 models off the GPU in stages 2 and 3 only",
        ),
        Rule(
            place.colocate and split > 1,
            ("placement.colocate", "rollout.tensor_parallel", "rollout.pipeline_parallel"),
            "a colocated rollout engine lives in one rank's bundle; use 1 of both, and as many engines as ranks",
        ),
        Rule(
            place.colocate and place.gpus_per_rank > 0 and rollout.engines < place.ranks,
            ("placement.colocate", "rollout.engines", "placement.ranks"),
            "there must be a rollout engine per rank, or GPUs would idle while others sample",
        ),
        Rule(
            place.colocate and rollout.engines > place.ranks,
            ("placement.colocate", "rollout.engines", "placement.ranks"),
            "there cannot be more colocated rollout engines than ranks",
        ),
        Rule(
            place.colocate and algorithm.kl.coef > 0 and step.zero_stage == 3 and not place.reference_resources,
            ("placement.colocate", "algorithm.kl.coef", "trainer.zero_stage"),
            "DeepSpeed cannot move a sharded model that does not learn off the GPU; use zero_stage 2, or placement.reference_resources",
        ),
        Rule(
            place.colocate and rollout.engine != "vllm" and rollout.sleep_level != 2,
            ("rollout.sleep_level", "rollout.engine"),
            "vLLM alone has it; hf keeps its weights in CPU memory while the ranks train",
        ),
        Rule(
            place.colocate and rollout.mode != "sync",
            ("placement.colocate", "rollout.mode"),
            "rollout engines that sleep while the ranks train cannot sample ahead; use mode sync or GPUs of their own",
        ),
    ]


def _one_process(config: PpoSections) -> list[Rule]:
    """What is told apart by its process."""
    rollout, place = config.rollout, config.placement
    one, split = place.processes == "one", rollout.tensor_parallel * rollout.pipeline_parallel * rollout.nodes_per_engine
    return [
        Rule(one and place.ranks > 1, ("placement.processes", "placement.ranks"), "one process is one rank; set ranks to 1"),
        Rule(
            one and split > 1,
            ("placement.processes", "rollout.tensor_parallel", "rollout.pipeline_parallel", "rollout.nodes_per_engine"),
            "a rollout engine in one process has no others; set all to 1",
        ),
        Rule(one and rollout.elastic, ("placement.processes", "rollout.elastic"), "no node joins one process; set elastic to false"),
        Rule(
            one and bool(place.reference_resources),
            ("placement.processes", "placement.reference_resources"),
            "one process has no bundles of resources; leave them out",
        ),
    ]


def _teacher(config: PpoSections) -> list[Rule]:
    alone, taught = config.algorithm.name == "distillation", config.teacher.path is not None
    return [
        Rule(
            alone and not taught,
            ("algorithm.name", "teacher.path"),
            "distillation learns from a teacher; set teacher.path",
        ),
        Rule(
            alone and config.algorithm.kl.coef > 0,
            ("algorithm.name", "algorithm.kl.coef"),
            "the teacher is what distillation stays near; leave kl.coef at 0",
        ),
        Rule(
            alone and config.rollout.no_signal == "replace",
            ("algorithm.name", "rollout.no_signal"),
            "distillation learns from answers whose rewards are alike too; use keep",
        ),
        Rule(
            alone and config.reward.overlong.buffer > 0,
            ("algorithm.name", "reward.overlong.buffer"),
            "distillation does not learn from rewards; leave it at 0",
        ),
        Rule(
            taught and config.placement.colocate and config.trainer.zero_stage == 3,
            ("teacher.path", "placement.colocate", "trainer.zero_stage"),
            "DeepSpeed cannot move a sharded model that does not learn off the GPU; use zero_stage 2",
        ),
    ]


def _lora(config: PpoSections) -> list[Rule]:
    rank, rollout, colocate = config.model.lora.rank or 0, config.rollout, config.placement.colocate
    sharded = colocate and config.placement.gpus_per_rank > 0 and config.trainer.zero_stage == 3
    why = "DeepSpeed cannot move frozen weights that it has sharded off the GPU; use zero_stage 2"
    if not rank:
        return [Rule(bool(config.model.freeze) and sharded, ("model.freeze", "placement.colocate", "trainer.zero_stage"), why)]
    owned = sorted(OWNED_WITH_LORA & rollout.options.keys())
    return [
        Rule(
            rollout.engine == "vllm" and rank > RANKS[-1],
            ("model.lora.rank", "rollout.engine"),
            f"vLLM has room for adapters of rank {RANKS[-1]} and less",
        ),
        Rule(
            bool(owned),
            ("model.lora.rank", "rollout.options"),
            f"{', '.join(owned)}: not for options; model.lora says what vLLM makes room for",
        ),
        Rule(
            rollout.engine == "vllm" and rollout.expert_parallel,
            ("model.lora.rank", "rollout.expert_parallel"),
            "vLLM has no adapters on experts that are spread over GPUs; use tensor_parallel alone",
        ),
        Rule(
            colocate and rollout.engine == "vllm" and rollout.sleep_level == 2,
            ("model.lora.rank", "placement.colocate", "rollout.sleep_level"),
            "adapters alone are sent to vLLM, so it must keep the weights below them while it sleeps; use sleep_level 1",
        ),
        Rule(sharded, ("model.lora.rank", "placement.colocate", "trainer.zero_stage"), why),
    ]


def _overlong(config: PpoSections) -> list[Rule]:
    reward, most = config.reward, config.rollout.max_new_tokens
    buffer, given = reward.overlong.buffer, reward.overlong.max_length
    longest = given or most
    return [
        Rule(
            buffer > longest,
            ("reward.overlong.buffer", "reward.overlong.max_length" if given else "rollout.max_new_tokens"),
            f"the buffer is a part of the {longest} tokens; lower it",
        ),
        Rule(
            0 < buffer <= longest and longest - buffer >= most,
            ("reward.overlong.max_length", "reward.overlong.buffer", "rollout.max_new_tokens"),
            f"the punishment begins at {longest - buffer} tokens, which no answer exceeds; lower max_length",
        ),
        Rule(
            buffer > 0 and "overlong" in reward.term_weights(),
            ("reward.overlong.buffer", "reward.terms" if reward.terms else "reward.weights"),
            "there is a term of that name, which would be punished twice; rename it, or leave one of them out",
        ),
    ]
