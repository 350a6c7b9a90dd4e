"""Search-R1: PPO and GRPO of a model that searches, on its fork of verl, and what its retriever needs.

The retriever is a service of the stack, on every node: `search_r1/retriever` brings the fork, index, corpus and the retriever's packages
onto shared storage, and then the stack names the service.
"""

from __future__ import annotations

from collections.abc import Mapping

from cluster_tasks.recipes import steps
from cluster_tasks.recipes.recipe import Place, Recipe, RecipeError, Run, Step
from stacks.settings.service import OWN_PORTS, taken

COMMIT = "a14dc3a4ffc6fe88c1e95038d9738e21ba3f7a06"
REPOSITORY = "https://github.com/PeterGriffinJin/Search-R1"
PAGE = f"{REPOSITORY}/blob/main/docs/multinode.md"
SERVICE, PORT = "retriever", 8000
ENCODER = "intfloat/e5-base-v2"
FILES = ("index", "corpus")  # of the retriever, where search_r1/retriever does not fetch them
OWN = (*FILES, "port")
NODES, GPUS = "trainer.nnodes", "trainer.n_gpus_per_node"
TP = "actor_rollout_ref.rollout.tensor_model_parallel_size"
# Of the server; torch and faiss agree on CUDA 12.
SERVER = (
    "faiss-gpu-cu12==1.14.1.post1",
    "torch==2.8.0",
    "transformers==4.57.1",
    "datasets==4.5.0",
    "uvicorn==0.54.0",
    "fastapi==0.165.0",
)
# The fork is not on the package index, and flash-attn is built with the image; docs/other-trainers/search-r1.md has its lines.
PACKAGES = ("vllm==0.6.3",)
CHECK = ("python", "-c", "import codetiming, flash_attn, hydra, ray, tensordict, transformers, vllm")
OFFLOAD = ("param_offload", "grad_offload", "optimizer_offload")


def source(place: Place) -> str:
    return f"{place.shared}/sources/search-r1-{COMMIT[:7]}"


def fetched_source(place: Place) -> Step:
    """Of this commit alone."""
    script = f'set -e; git init -q "$0"; cd "$0"; git fetch -q --depth 1 {REPOSITORY} {COMMIT}; git checkout -q FETCH_HEAD'
    return Step(f"Search-R1 {COMMIT[:7]}", ("bash", "-c", script, "{part}"), source(place))


def files(place: Place, overrides: Mapping[str, str]) -> tuple[str, str]:
    """Index and corpus. Raises RecipeError where only one is given, or one by a path that nodes cannot share."""
    found = [overrides.get(key) for key in FILES]
    for key, path in zip(FILES, found, strict=True):
        if path and not path.startswith("/"):
            raise RecipeError(f"{key}={path} is no absolute path of the nodes")
    if any(found) and not all(found):
        missing = FILES[0] if found[1] else FILES[1]
        raise RecipeError(
            f"{missing}= is missing: the lines of the corpus are found by their number in the index, so give index= and corpus="
        )
    folder = place.data("wiki-18")
    return found[0] or f"{folder}/e5_Flat.index", found[1] or f"{folder}/wiki-18.jsonl"


def port(place: Place, overrides: Mapping[str, str]) -> int:
    """Of the service. Raises RecipeError where another has it."""
    given = overrides.get("port", str(PORT))
    if not given.isdecimal() or not 0 < int(given) < 65536:
        raise RecipeError(f"port={given} is not a port, 1 to 65535")
    if taken(int(given)):
        raise RecipeError(f"port={given} {OWN_PORTS}, such as {PORT}")
    owner = place.ports.get(int(given), "")
    if owner and owner != f"flotilla:task.services.{SERVICE}":
        raise RecipeError(f"port={given} is the port of {owner} of {place.stack}; give another, such as port=8100")
    return int(given)


def no_amd(place: Place) -> None:
    if place.vendor == "amd":
        raise RecipeError(f"Search-R1 needs NVIDIA GPUs (faiss-gpu, vLLM up to 0.6.3); the stack {place.stack} has AMD GPUs")


# The retriever


def starter(place: Place) -> str:
    return f"{place.shared}/sources/search-r1-serve.py"


def service_lines(place: Place, overrides: Mapping[str, str], encoder: str) -> str:
    """For the stack file. Raises RecipeError."""
    index, corpus = files(place, overrides)
    number = port(place, overrides)
    python = f"{place.shared}/sources/search-r1-retriever/bin/python {starter(place)} {number}"
    return "\n".join(
        (
            "flotilla:task:",
            "  services:",
            f"    {SERVICE}:",
            f"      command: {python} {source(place)}/search_r1/search/retrieval_server.py --index_path {index} --corpus_path {corpus}"
            f" --topk 3 --retriever_name e5 --retriever_model {encoder} --faiss_gpu",
            "      on: every",
            f"      port: {number}",
            "      timeout: 3600",
        )
    )


def retriever(place: Place, model: str, overrides: Mapping[str, str]) -> Run:
    """Raises RecipeError."""
    no_amd(place)
    if unknown := sorted(set(overrides) - set(OWN)):
        raise RecipeError(f"{unknown[0]}: search_r1/retriever takes index=, corpus= and port= alone")
    index, corpus = files(place, overrides)
    encoder, fetched = steps.model(place, model)
    folder = f"{place.shared}/sources/search-r1-retriever"
    packages = Step(
        "the retriever's packages",
        ("bash", "-c", 'set -e; python -m venv "$0"; "$0/bin/python" -m pip install -q "$@"', "{part}", *SERVER),
        folder,
    )
    done = ("python", "-c", f"print({service_lines(place, overrides, encoder)!r})")
    if set(overrides) & set(FILES):
        data = tuple(steps.there(key, path) for key, path in zip(FILES, (index, corpus), strict=True))
    else:
        download = f"python -m {steps.JOB}.download"
        script = (
            f'set -e; {download} PeterJinGo/wiki-18-e5-index "$0" --dataset; cat "$0"/part_* > "$0/e5_Flat.index"; rm "$0"/part_*; '
            f'{download} PeterJinGo/wiki-18-corpus "$0/corpus" --dataset; gunzip -c "$0/corpus/wiki-18.jsonl.gz" > "$0/wiki-18.jsonl"; '
            'rm -r "$0/corpus"'
        )
        data = (Step("index and corpus of Wikipedia", ("bash", "-c", script, "{part}"), place.data("wiki-18"), timeout=14400),)
    start = Step("the retriever's start", ("cp", f"{steps.JOB.replace('.', '/')}/retriever.py", "{part}"), starter(place))
    return Run(done, steps=(fetched_source(place), packages, start, *fetched, *data))


# Training


def training(place: Place, model: str, own: Mapping[str, str], overrides: Mapping[str, str]) -> Run:
    """Raises RecipeError."""
    no_amd(place)
    given = dict(overrides)
    url = given.get("retriever.url")
    if SERVICE not in place.services and not url:
        text = f"flotilla:task.services of {place.stack} has no {SERVICE}"
        after = f"first: flotilla launch {place.stack} --recipe search_r1/retriever, then add to the stack and start it again:"
        raise RecipeError(f"{text}; {after}\n{service_lines(place, overrides, steps.model(place, ENCODER)[0])}")
    for key in OWN:
        given.pop(key, None)
    path, found = steps.model(place, model)
    data = place.data("nq-search")
    script = f'set -e; mkdir -p "$0"; python {source(place)}/scripts/data_process/nq_search.py --local_dir "$0"'
    prepared = (fetched_source(place), *found, Step("data nq", ("bash", "-c", script, "{part}"), data))
    micro = 4 * place.world
    mini = -(-256 // micro) * micro
    settings = {
        "data.train_files": f"{data}/train.parquet",
        "data.val_files": f"{data}/test.parquet",
        "data.train_batch_size": str(2 * mini),
        "data.val_batch_size": str(mini),
        "data.max_prompt_length": "4096",
        "data.max_response_length": "500",
        "data.max_start_length": "2048",
        "data.max_obs_length": "500",
        "actor_rollout_ref.model.path": path,
        "actor_rollout_ref.model.enable_gradient_checkpointing": "true",
        "actor_rollout_ref.model.use_remove_padding": "True",
        "actor_rollout_ref.actor.optim.lr": "1e-6",
        "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio": "0.285",
        "actor_rollout_ref.actor.ppo_mini_batch_size": str(mini),
        "actor_rollout_ref.actor.ppo_micro_batch_size": str(micro),
        "actor_rollout_ref.actor.state_masking": "true",
        "actor_rollout_ref.rollout.name": "vllm",
        TP: "1",
        "actor_rollout_ref.rollout.gpu_memory_utilization": "0.6",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size": str(8 * place.world),
        "actor_rollout_ref.rollout.temperature": "1",
        "actor_rollout_ref.ref.log_prob_micro_batch_size": str(8 * place.world),
        "algorithm.no_think_rl": "false",
        "trainer.critic_warmup": "0",
        "trainer.logger": "[console]",
        "+trainer.val_only": "false",
        "+trainer.val_before_train": "false",
        "trainer.default_hdfs_dir": "null",
        NODES: str(place.nodes),
        GPUS: str(place.gpus),
        "trainer.save_freq": "100",
        "trainer.test_freq": "100",
        "trainer.project_name": "flotilla",
        "trainer.experiment_name": place.run,
        "trainer.total_epochs": "15",
        "trainer.total_training_steps": "1005",
        "trainer.default_local_dir": place.checkpoints,
        "max_turns": "4",
        # On the node that asks: the nearest retriever.
        "retriever.url": f"${{oc.env:FLOTILLA_SERVICE_{SERVICE.upper()}}}/retrieve",
        "retriever.topk": "3",
        **own,
    }
    settings |= {f"+{key}" if f"+{key}" in settings else key: value for key, value in given.items()}
    fits(place, settings)
    env = {
        "PYTHONPATH": source(place),
        "PYTHONUNBUFFERED": "1",
        "VLLM_ATTENTION_BACKEND": "XFORMERS",
        "TORCH_NCCL_AVOID_RECORD_STREAMS": "1",
    }
    command = ("python", "-m", "verl.trainer.main_ppo", *(f"{key}={value}" for key, value in settings.items()))
    return Run(command, steps=prepared, env=env, resumes=None, check=CHECK)


def fits(place: Place, settings: Mapping[str, str]) -> None:
    """Raises RecipeError."""
    for key, has in ((NODES, place.nodes), (GPUS, place.gpus), (TP, place.gpus)):
        value = settings[key]
        if not value.isdecimal() or not 0 < int(value) <= has:
            raise RecipeError(f"{key}={value}: the stack {place.stack} has {place.nodes} nodes with {place.gpus} GPUs each")
    world = int(settings[NODES]) * int(settings[GPUS])
    for key in ("data.train_batch_size", "actor_rollout_ref.actor.ppo_mini_batch_size", "actor_rollout_ref.actor.ppo_micro_batch_size"):
        value = settings[key]
        if not value.isdecimal() or value == "0" or int(value) % world:
            raise RecipeError(f"{key}={value} is not a multiple of the {world} GPUs")


def ppo(place: Place, model: str, overrides: Mapping[str, str]) -> Run:
    path, _ = steps.model(place, model)
    own = {
        "algorithm.adv_estimator": "gae",
        "algorithm.kl_ctrl.kl_coef": "0.001",
        "actor_rollout_ref.rollout.n_agent": "1",
        "actor_rollout_ref.rollout.top_p": "1.0",
        "critic.model.path": path,
        "critic.model.enable_gradient_checkpointing": "true",
        "critic.model.use_remove_padding": "True",
        "critic.optim.lr": "1e-5",
        "critic.optim.lr_warmup_steps_ratio": "0.015",
        "critic.ppo_micro_batch_size": str(place.world),
    }
    return training(place, model, own, overrides)


def grpo(place: Place, model: str, overrides: Mapping[str, str]) -> Run:
    own = {
        "algorithm.adv_estimator": "grpo",
        "actor_rollout_ref.actor.use_kl_loss": "true",
        "actor_rollout_ref.actor.kl_loss_coef": "0.001",
        "actor_rollout_ref.actor.kl_loss_type": "low_var_kl",
        **{f"actor_rollout_ref.actor.fsdp_config.{key}": "true" for key in OFFLOAD},
        "actor_rollout_ref.ref.fsdp_config.param_offload": "True",
        "actor_rollout_ref.rollout.n_agent": "5",
    }
    return training(place, model, own, overrides)


RECIPES = (
    Recipe("search_r1/retriever", "index, corpus and server of the retriever", PAGE, (), None, ENCODER, retriever, gpus=0),
    Recipe("search_r1/ppo", "PPO with searches on Natural Questions", PAGE, PACKAGES, None, "Qwen/Qwen2.5-7B", ppo, installable=False),
    Recipe(
        "search_r1/grpo",
        "GRPO with searches on Natural Questions",
        PAGE,
        PACKAGES,
        None,
        "Qwen/Qwen2.5-3B",
        grpo,
        installable=False,
    ),
)
