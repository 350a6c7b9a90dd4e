"""Reinforcement learning from rewards: GRPO, Dr. GRPO, RLOO, REINFORCE++, ReMax, and PPO with a critic.

    ray job submit --working-dir . -- python -m trainer.train_ppo --config trainer/recipes/demo.yaml trainer.steps=5

One driver, actors for policy, critic, reference and rollout engines, one loop. Killed at any moment, the same command resumes from the
last complete checkpoint; with rollout.mode=sync it computes the very numbers that it would have computed without the kill.
"""

from __future__ import annotations

import math
import signal
import sys
import time
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from trainer import preflight
from trainer.cli import exits_cleanly, parse
from trainer.configs.ppo import PpoConfig
from trainer.configs.sections import values_read
from trainer.metrics import model_card
from trainer.online import first_look
from trainer.runs import faults


def read(argv: list[str]) -> PpoConfig:
    """The settings, once all that they name has been looked at."""
    checks, before_start = preflight.CHECKS[PpoConfig.ENTRY], (preflight.hub, preflight.cluster)
    prog = "python -m trainer.train_ppo"
    return parse(argv, prog=prog, model=PpoConfig, checks=checks, before_start=before_start, without_start=(first_look.prompts,))


if __name__ == "__main__":  # errors are reported, and --help printed, before the seconds that torch takes to import
    with exits_cleanly():
        CONFIG = read(sys.argv[1:])


from trainer.chat.tokenizer import load_tokenizer
from trainer.checkpoints.background import Background
from trainer.checkpoints.folders import Checkpoint, Checkpoints
from trainer.checkpoints.reshard import reshard
from trainer.cli.paths import run_folder
from trainer.cluster import spans
from trainer.cluster.start_signals import ENDED
from trainer.cluster.stopping import Stopped, Stopping, stop_signals
from trainer.data.loader import make_loader
from trainer.data.prompts import say_day
from trainer.data.rows import told
from trainer.episodes import Episode, Prompt
from trainer.errors import STOPPED, ConfigError, RunError
from trainer.metrics import Metrics, plot
from trainer.metrics.episodes import Episodes
from trainer.metrics.sinks import sinks
from trainer.objectives.kl import KlController, kl
from trainer.online.clock import Clock
from trainer.online.continuous import Continuous
from trainer.online.processes import WorkerGroups, start
from trainer.online.producer import Batches, Producer
from trainer.online.roles import Rollout
from trainer.online.scored import advantages, describe, evaluations, left_out, punish_overlong, require_sampled, truncated
from trainer.online.sets import read as read_sets
from trainer.online.tracing import Tracing
from trainer.rewards.here import scorer_of
from trainer.rewards.scorer import Scorer
from trainer.runs import alive, dated, held, save_resolved
from trainer.runs.divergence import Diverged, Skips, go_back, require_finite, slowed

# Mean difference of log-probabilities beyond that of any kernels, by model.dtype: experts that a weight sync garbles are off by 1.7.
GARBLED = {"float32": 0.1, "bfloat16": 0.5}


@dataclass
class Run:
    """What the loop works with."""

    config: PpoConfig
    folder: Path
    workers: WorkerGroups
    producer: Producer
    sets: dict[str, list[Prompt]]  # evaluated on; "" is what data holds out
    rewards: Scorer | None  # None: an environment says what episodes are worth
    controller: KlController
    checkpoints: Background
    record: Episodes
    skips: Skips
    trace: Tracing

    def restore(self, last: Checkpoint) -> None:
        ranks, trainer = self.config.placement.ranks, self.config.trainer
        last.require_model(self.workers.fingerprint)
        self.workers.load_shards(last.folder, reshard(last, ranks, trainer.timeout, trainer.mesh))
        self.workers.learned = last.step
        self.producer.load(last.state["loader"])
        self.controller.load(last.state["kl"])

    def save(self, step: int, score: float | None, last: bool) -> float:
        """Begin a checkpoint; the `last` of this start is complete on return. Returns the seconds that it held the run up."""
        begin = time.perf_counter()
        workers, ranks = self.workers, self.config.placement.ranks
        workers.to_ranks()
        self.record.flush()
        state = {"model": workers.fingerprint, "world_size": ranks, "mesh": self.config.trainer.mesh}
        state |= {"loader": self.producer.state(), "kl": self.controller.state()}
        if workers.journal and (complete := self.checkpoints.checkpoints.complete()):
            workers.journal.forget(complete[0].step)
        self.checkpoints.write(step, state, workers.save_shards, workers.saved, score=score, expected=workers.shards())
        if last:
            self.checkpoints.wait()
            if workers.journal:
                workers.journal.forget(step)
        spans.lap("checkpoint")
        return time.perf_counter() - begin

    def export(self, step: int, folder: Path) -> None:
        self.workers.to_ranks()
        self.workers.policy.call("export", folder, model_card.files(self.folder, values_read(self.config), step))
        print(f"model: {folder}", flush=True)
        spans.lap("export")

    def evaluate(self, step: int, stopping: Stopping) -> dict[str, float]:
        """What answers to the prompts of all sets are worth; nothing where the run is asked to stop first."""
        if not self.sets:
            return {}
        self.producer.settle()
        self.workers.sync()
        samples = self.config.trainer.eval_samples
        by_set: dict[str, list[Episode]] = {}
        for name, prompts in self.sets.items():
            episodes = self.workers.episodes(self.workers.start(prompts, samples, self.config.run.seed, greedy=samples == 1))
            require_sampled(episodes, self.workers.learned)
            try:
                score(self.rewards, self.folder, episodes, step, stopping)
            except Stopped:
                return {}
            except (ConfigError, TimeoutError) as error:
                raise type(error)(f"evals.{name}: {error}" if name else str(error)) from error
            by_set[name] = episodes
        self.record.evaluated(step, by_set)
        return evaluations(by_set, self.config)

    def require_sound(self, rollout: Rollout, step: int) -> None:
        """Raises Diverged where the policy's weights after `step` give no numbers any more."""
        self.workers.to_ranks()
        some = Rollout.of(rollout.episodes[: self.config.algorithm.group_size])
        require_finite(self.workers.policy.score(some).tolist(), step, step - self.skips.in_row)


def loop(run: Run, done: int, metrics: Metrics, stopping: Stopping) -> int:
    """All steps after `done`. Returns the exit code: 0, or 143 when it was asked to stop and has saved."""
    schedule = run.config.trainer
    if done == 0 and run.sets:
        metrics.log(0, run.evaluate(0, stopping))
    run.trace.ahead(done + 1)
    run.producer.sync_and_begin(done + 1, Clock())
    blocked: dict[str, float] = {}  # by the checkpoint of the step before
    for step in range(done + 1, schedule.steps + 1):
        run.trace.begin(step)
        clock, last = Clock(), step == schedule.steps
        run.checkpoints.check()
        alive.say(doing=f"step {step}: waiting for answers")
        try:
            episodes = run.producer.next(step, stopping, clock)
        except Stopped as late:
            return stopped(run, late, step - 1)
        rollout = Rollout.of(episodes, left_out(run.config, episodes), truncated(run.config, episodes))
        values = describe(rollout, run.config.reward, with_environment=bool(run.config.environment.function))
        alive.say(doing=f"step {step}: learning")
        # The first step of a start has weights that were synced and not learned since, whatever rollout.mode.
        values |= learn(run.config, run.workers, rollout, run.controller, step, clock, newest=step == done + 1)
        run.workers.learned = step
        run.trace.ahead(step + 1)
        run.producer.sync_and_begin(step + 1, clock)  # the weight sync; with rollout.mode=one_step `next` has done it
        if last or (schedule.eval_every and step % schedule.eval_every == 0):
            alive.say(doing=f"step {step}: evaluating")
            values |= run.evaluate(step, stopping)
            clock.lap("evaluate")
        metrics.log(step, values | blocked | run.producer.metrics() | clock.report(rollout))
        blocked = {}
        run.record.log(step, episodes, rollout.kept, rollout.known_N)
        spans.lap("log")
        run.skips.count(step, values)
        stop, exporting = bool(stopping) or step == run.config.run.pause_at, schedule.export_every and step % schedule.export_every == 0
        saving = last or stop or (step % schedule.checkpoint_every == 0 and not run.skips.in_row)
        if saving or exporting or run.skips.in_row:  # else the next step's answers show it
            run.require_sound(rollout, step)
        if exporting:  # before the checkpoint, or a kill in between would leave it out
            run.export(step, run.folder / "models" / f"step_{step}")
        if saving:
            blocked = {"seconds_checkpoint": run.save(step, values.get("eval_reward"), last=last or stop)}
        if last:
            show(episodes[:: run.config.algorithm.group_size][:2], run.config.data.prompt)
        elif stop:
            print(f"{stopping or 'run.pause_at'}: saved after step {step}; the same command resumes", flush=True)
            return STOPPED
    run.trace.end()
    run.export(schedule.steps, run.folder / "model")
    return 0


def score(rewards: Scorer | None, folder: Path, episodes: list[Episode], step: int, stopping: Stopping, *, whole: bool = False) -> None:
    """Their rewards. Raises as `Scorer.score` does; without `whole` all of them may fail, as in one set of several to evaluate on."""
    if rewards is None:  # an environment has said what they are worth
        return
    rewards.score(episodes, step, stopping, whole=whole)
    if rewards.lost:
        faults.note(folder, step, rewards.lost)


def score_to_learn(config: PpoConfig, rewards: Scorer | None, folder: Path, episodes: list[Episode], step: int, stopping: Stopping) -> None:
    """`score`, and what is taken off rewards that are learned from."""
    together = config.rollout.mode != "async" and config.rollout.no_signal == "keep"  # they are all that the step has
    score(rewards, folder, episodes, step, stopping, whole=together)
    punish_overlong(episodes, config.reward.overlong, config.rollout.max_new_tokens)


def stopped(run: Run, why: Stopped, learned: int) -> int:
    """Save what was learned before a step whose episodes the run did not wait for."""
    run.checkpoints.wait()
    saved = run.checkpoints.checkpoints.complete()
    if learned > (saved[0].step if saved else 0):
        run.save(learned, None, last=True)
    print(f"{why}; step {learned + 1} was not learned; the same command resumes", flush=True)
    return STOPPED


def train(config: PpoConfig, folder: Path) -> int:
    """Train to the end, back to a good checkpoint where it diverges. Returns the exit code."""
    if known := "; ".join(told(config.data.sources() | config.eval_data())):
        print(f"data: {known}", flush=True)
        faults.note(folder, None, known, faults.ROWS)
    while True:
        try:
            return _train(slowed(config, folder), folder)
        except Diverged as error:
            diverged = error.with_traceback(None)  # it would keep the handles of the run's processes
        go_back(config, folder, diverged)


def _train(config: PpoConfig, folder: Path) -> int:
    """Read the data, start all processes, run the loop, export the model."""
    schedule = config.trainer
    tokenizer = load_tokenizer(config.model)
    say_day(config.data, tokenizer)
    sets = read_sets(config, tokenizer)
    loader = make_loader(config.data, sets.prompts, schedule.prompts_per_step, config.run.seed)
    controller = KlController(config.algorithm.kl.coef, config.algorithm.kl.target, config.algorithm.kl.horizon)
    checkpoints = Checkpoints(folder / "checkpoints", schedule.keep_checkpoints, schedule.keep_best)
    last = checkpoints.to_resume(config.run.resume)
    done = last.step if last else 0
    if last and done >= schedule.steps and last.is_exported(folder / "model"):
        print(f"{folder} has all {done} steps; to train on raise trainer.steps, to train anew choose another run.name")
        return 0
    kind = Continuous if config.rollout.mode == "async" else Batches
    with (
        start(config, folder) as workers,
        scorer_of(config, sets.prompts) as rewards,  # may have processes on the cluster
        Background(checkpoints, schedule.timeout) as background,
        Metrics(folder, total=schedule.steps, done=done, sinks=sinks(config, folder, done)) as metrics,
        closing(kind(config, workers, loader, partial(score_to_learn, config, rewards, folder))) as producer,
        Tracing(config.log.trace, folder, workers.launcher, done) as trace,
        stop_signals() as stopping,
        Episodes(folder, tokenizer, config.log.episodes, config.data.prompt, done) as record,
    ):
        run = Run(
            *(config, folder, workers, producer, sets.evaluated, rewards, controller, background, record),
            *(Skips(config.divergence.patience), trace),
        )
        if last:
            run.restore(last)
        print(f"step {done} of {schedule.steps}, {len(sets.prompts)} prompts ({sets.dropped} too long), in {folder}", flush=True)
        code = loop(run, done, metrics, stopping)
    if code == 0:
        print(metrics.cost.report(schedule.steps))
        if config.log.plot:
            print(f"plot: {plot(folder)}", flush=True)
    return code


def learn(
    config: PpoConfig, workers: WorkerGroups, rollout: Rollout, controller: KlController, step: int, clock: Clock, *, newest: bool
) -> dict[str, float]:
    """Advantages of a batch of scored episodes, then the optimizer steps on them. `newest`: the policy's own weights sampled them.

    Raises RunError where those and the policy differ by more than rollout.max_logprob_diff, or GARBLED.
    """
    algorithm, flat = config.algorithm, rollout.flat
    tokens_N = {"mask": flat.mask_N, "rollout": flat.rollout_N}
    workers.to_ranks()
    if workers.turns.shared:
        clock.lap("turn")
    kl_in_reward = algorithm.kl.coef > 0 and algorithm.kl.where == "reward"
    if algorithm.epochs * algorithm.minibatches > 1 or kl_in_reward:
        tokens_N["old"] = workers.policy.score(rollout)
    if workers.reference:
        tokens_N["reference"] = workers.reference.score(rollout)
    values_N = workers.critic.score(rollout) if workers.critic else None
    clock.lap("score")
    tokens_N["advantages"], returns_N = advantages(
        config.algorithm, rollout, values_N, kl(tokens_N["old"], tokens_N["reference"], "k1") if kl_in_reward else None, controller.coef
    )
    stats = workers.policy.train(rollout, tokens_N, step, kl_coef=controller.coef)
    if config.log.episodes:
        policy_N = tokens_N["old"] if "old" in tokens_N else workers.policy.said(rollout)
        rollout.known_N = {"policy": policy_N, "advantages": tokens_N["advantages"], "mask": flat.mask_N}
    if workers.critic and values_N is not None and returns_N is not None:
        targets_N = {"mask": flat.mask_N, "values": values_N, "returns": returns_N}
        of_critic = workers.critic.train(rollout, targets_N, step)
        stats |= {f"value_{name}": of_critic[name] for name in ("loss", "grad_norm", "skipped")}
    clock.lap("train")
    difference, limit = stats["logprob_diff"], config.rollout.max_logprob_diff
    if limit is None and config.rollout.top_p == 1:  # else the engines' log-probabilities are of the nucleus
        limit = GARBLED[config.model.dtype]
    newest |= config.rollout.mode == "sync"  # older weights differ by what was learnt since
    if limit is not None and newest and difference > limit:
        raise RunError(
            f"step {step}: rollout engines and policy differ by {difference:.3g} in mean log-probability, rollout.max_logprob_diff is "
            f"{limit:g}; the rollout engines' weights, precision or sampling settings are not the policy's"
        )
    if workers.reference and math.isfinite(stats["kl"]):
        controller.update(stats["kl"], len(rollout.episodes))
        stats["kl_coef"] = controller.coef
    return {"kl": stats["kl_old"]} | stats  # without a reference: how far the update moved from what sampled


def show(episodes: list[Episode], prompt_column: str) -> None:
    for episode in episodes:
        print(f"prompt {episode.prompt.row[prompt_column]!r}  answer {episode.text!r}  reward {episode.reward:g}")


def main(config: PpoConfig) -> int:
    """Exit codes: 0 done, 1 failed, 2 a mistake in settings, data or paths, 143 stopped and saved."""
    folder = run_folder(config)
    with held(folder):
        config = dated(config, folder)
        save_resolved(config, folder, sys.orig_argv)
        try:
            return train(config, folder)
        except (RunError, TimeoutError) as error:
            faults.note(folder, None, str(error))
            print(f"error: {error}", file=sys.stderr)
            return 1
        except SystemExit as error:  # with a code of Ray's, where it was waited for
            if not ENDED and error.code != signal.SIGTERM:  # the latter while Ray itself starts
                raise
            print("SIGTERM: stopped before it began; the same command starts again", flush=True)
            return STOPPED


if __name__ == "__main__":
    with exits_cleanly():
        sys.exit(main(CONFIG))  # pyright: ignore[reportPossiblyUnboundVariable]  # read above, under the same condition
