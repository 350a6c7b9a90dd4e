"""The driver of a sweep: starts legs, notes what they reached, keeps to the budget. Killed at any moment, the same command resumes.

What is durable: the study's trials with their points and values, and the trials' own run folders. A leg that a killed driver left is
judged by its folder: it has reached its rung where a complete checkpoint says so, and is started again otherwise.
"""

from __future__ import annotations

import fcntl
import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from sweeps import best, objective, population, report
from sweeps.budget import Budget
from sweeps.checks import named, overrides
from sweeps.decisions import Leg, Trial, next_leg
from sweeps.jobs import ENDED, Job, Jobs, Status
from sweeps.plan import Plan
from sweeps.space import FILE
from sweeps.study import Study, promotable
from trainer.checkpoints.folders import Checkpoints
from trainer.cli.paths import runs_root
from trainer.cluster.stopping import Stopping
from trainer.errors import STOPPED, ConfigError
from trainer.metrics.sinks import SWEEP

POLL = 0.5  # seconds
NOTED = 5.0  # seconds of a trial that a kill of the driver may forget
SAVE_SECONDS = 120  # for what a killed driver left
PAUSE_SECONDS = 900  # for a trial that is asked to pause: the step at work, and a checkpoint
NO_BUDGET = 3  # exit code: the budget is used up, the same command with more resumes


@dataclass
class Running:
    """A leg at work."""

    trial: int
    job: str
    seconds: float  # of the trial, with those before
    noted: float
    asked: float | None = None  # when, to save and pause


class Driver:
    def __init__(self, plan: Plan, folder: Path, study: Study, jobs: Jobs, budget: Budget, parallel: int, retries: int) -> None:
        self.plan, self.folder, self.study, self.jobs, self.budget = plan, folder, study, jobs, budget
        self.parallel, self.retries = parallel, retries
        self.running: dict[int, Running] = {}
        self.out_of_budget: str | None = None

    def run(self, stopping: Stopping, wait: Callable[[float], None] = time.sleep) -> int:
        """0: the sweep is over. 143: asked to stop. 3: the budget is used up. Trials that ran have paused. Raises ConfigError."""
        self._take_over()
        last = time.monotonic()
        while True:
            now = time.monotonic()
            self._look(now - last)
            last = now
            if not stopping and not self.out_of_budget:
                self._keep_to_budget()
            if stopping or self.out_of_budget:
                self._pause_all()
            elif self._start():
                continue
            if not self.running:
                break
            wait(POLL)
        if stopping:
            self.say(f"{stopping}: all trials have saved; the same command resumes")
            return STOPPED
        if self.out_of_budget:
            self.say(self.out_of_budget)
            return NO_BUDGET
        self._end_the_others()
        return 0

    def conclude(self) -> None:
        """What the trials have shown so far: the best one's settings as a file, and what all have cost."""
        trials = self.study.trials()
        spent = self._spent()
        cost = self.budget.cost(spent)
        self.say(f"{len(trials)} trials, {spent / 3600:.2f} hours of trials" + (f", {cost:.2f} USD" if cost is not None else ""))
        if failed := [self.plan.run(trial.number) for trial in trials if trial.state == "failed"]:
            self.say(f"failed: {', '.join(failed)}")
        if found := best.best(trials, self.plan.metric):
            run, file = self.plan.run(found.number), self.folder / best.FILE
            best.write(runs_root() / run, file)
            value = f"{self.plan.metric.key} {found.values[found.reached]:.6g} at step {found.reached}"
            self.say(f"best: {run}, {value}: {named(found.point)}")
            self.say(f"its settings: {file}")
        if trials:
            report.write(self.plan, trials, runs_root(), self.budget, self.folder / report.FILE)
            self.say(f"report: {self.folder / report.FILE}")

    def say(self, line: str) -> None:
        print(line, flush=True)
        with (self.folder / "sweep.log").open("a") as log:
            log.write(f"{time.strftime('%Y-%m-%dT%H:%M:%S%z')} {line}\n")

    # --- what a driver before this one left ---

    def _take_over(self) -> None:
        known = self.jobs.jobs()
        for trial in self.study.trials():
            if trial.parent is not None and trial.legs == 0:
                self._complete(trial)
            if trial.state == "open" and trial.target is not None:
                job = self._job_name(trial)
                if job in known and known[job].state not in ENDED:
                    self.running[trial.number] = Running(trial.number, job, trial.seconds, trial.seconds)
                else:
                    until_let_go(self.plan.run(trial.number))
                    self._judge(trial, known.get(job, Status("failed")), lost=job not in known)

    def _job_name(self, trial: Trial) -> str:
        return f"{self.plan.run(trial.number)}.{trial.legs}"

    # --- legs ---

    def _start(self) -> bool:
        """Start one leg where there is room; True where it did, or where another may be next."""
        if len(self.running) >= self.parallel:
            return False
        trials = self.study.trials()
        found = self._next(trials)
        if isinstance(found, population.Exploit):
            self._exploit(found)
            return True
        if found == "new":
            return self._affordable(self.plan.rungs[0]) and self._new(len(trials))
        if not isinstance(found, Leg):
            return False
        trial = self.study.trial(found.number)
        if fits := self._affordable(found.to - self._steps(trial)):
            self._submit(trial, found)
        return fits

    def _new(self, count: int) -> bool:
        """Start a trial of a new point. Where the search space has no other, those that there are, are all."""
        if trial := self.study.new():
            self._submit(trial, Leg(trial.number, self.plan.rungs[0], named(trial.point)))
        else:
            self.plan = replace(self.plan, trials=count)
            self.say(f"{count} trials are all that the search space has")
        return True

    def _next(self, trials: list[Trial]) -> Leg | population.Exploit | str | None:
        """First what an earlier driver, or a failure, left."""
        left = (trial for trial in trials if trial.state == "open" and trial.number not in self.running)
        for trial in left:
            if trial.target is not None:
                return Leg(trial.number, trial.target, "from where it saved" if trial.values else named(trial.point))
            if not trial.values:
                return Leg(trial.number, self.plan.rungs[0], named(trial.point))
        if self.plan.stop == "pbt":
            return population.next_of(self.plan, trials)
        return next_leg(self.plan, trials, promotable)

    def _exploit(self, exploit: population.Exploit) -> None:
        """A trial takes another's place, with a copy of its checkpoint."""
        parent = self.study.trial(exploit.parent)
        point = population.perturbed(self.plan, parent.point, exploit, self.study.refused)
        links = {"parent": parent.number, "since": exploit.rung, "replaces": exploit.loser}
        child = self.study.add(point, {exploit.rung: parent.values[exploit.rung]}, **links)
        self._complete(child)
        run, loser = self.plan.run(child.number), self.plan.run(exploit.loser)
        self.say(f"{run} takes the place of {loser}, from {self.plan.run(parent.number)} at step {exploit.rung}: {named(point)}")

    def _complete(self, child: Trial) -> None:
        """Its folder, and the end of the trial whose place it takes."""
        runs, loser = runs_root(), self.study.trial(child.replaces or 0)
        population.copy(runs / self.plan.run(child.parent or 0), runs / self.plan.run(child.number), child.since or 0)
        if loser.state == "open":
            self.study.end(loser.number, "pruned")

    def _submit(self, trial: Trial, leg: Leg) -> None:
        run, last = self.plan.run(trial.number), leg.to == self.plan.steps
        self.study.set(trial.number, target=leg.to, legs=trial.legs + 1)
        pause = [] if last else [f"run.pause_at={leg.to}"]
        file = self.folder / "settings" / Path(trial.point.get(FILE, self.plan.files[0])).name
        words = ["--config", str(file), *overrides(self.plan.fixed, trial.point), f"run.name={run}", *pause]
        words += [f"run.allow=[{','.join(each.key for each in self.plan.space)}]"] if trial.parent is not None else []
        job = Job(
            name=f"{run}.{trial.legs + 1}",
            run=run,
            command=("-m", f"trainer.train_{self.plan.entry}", *words),
            log=self.folder / "logs" / f"{run}.log",
            env={SWEEP: self.plan.name},
        )
        self.jobs.submit(job)
        self.running[trial.number] = Running(trial.number, job.name, trial.seconds, trial.seconds)
        self.say(f"{run} {'resumes' if trial.legs or trial.values else 'starts'} to step {leg.to}: {leg.why}")

    def _look(self, seconds: float) -> None:
        """Note what ended, and how long the others have run."""
        known = self.jobs.jobs() if self.running else {}
        for number, leg in [*self.running.items()]:
            status = known.get(leg.job)
            if status is None or status.state != "waiting":  # also of what ended since the last look, however long ago that was
                leg.seconds += seconds
            ended = status is None or status.state in ENDED
            if ended or leg.seconds - leg.noted >= NOTED:
                self.study.set(number, seconds=leg.seconds)
                leg.noted = leg.seconds
            if ended:
                del self.running[number]
                self._judge(self.study.trial(number), status or Status("failed"), lost=status is None, asked=leg.asked is not None)

    def _steps(self, trial: Trial) -> int:
        saved = Checkpoints(runs_root() / self.plan.run(trial.number) / "checkpoints").complete()
        return saved[0].step if saved else 0

    def _judge(self, trial: Trial, status: Status, lost: bool = False, asked: bool = False) -> None:
        """What a leg that has ended has come to: its rung, a pause, another try or a failure. Raises ConfigError."""
        run, target = self.plan.run(trial.number), trial.target or 0
        folder, done = runs_root() / run, self._steps(trial)
        whole = target < self.plan.steps or (folder / "model").exists()
        if done >= target and whole and (lost or status.code in (0, STOPPED)):
            self._reached(trial, folder, target)
        elif lost or asked or (status.code == STOPPED and done > trial.reached):
            return  # it goes on from where it saved
        else:
            self._failed(trial, status)

    def _reached(self, trial: Trial, folder: Path, step: int) -> None:
        run, metric = self.plan.run(trial.number), self.plan.metric
        value = objective.value_at(folder, step, metric)
        if value is None:
            raise ConfigError(f"--metric {metric.key}: {run} has none at step {step}; it has {', '.join(objective.keys(folder))}")
        self.study.report(trial.number, step, value)
        self.say(f"{run} at step {step}: {metric.key} {value:.6g}")
        if math.isnan(value):
            self._lost(trial, f"{metric.key} at step {step} is not a number")
        elif step == self.plan.steps:
            self.study.end(trial.number, "done", value)

    def _failed(self, trial: Trial, status: Status) -> None:
        attempts = trial.attempts + 1
        why = f"exit code {status.code}: {self._last_words(trial)}"
        if status.code == 2 or attempts > self.retries:
            self._lost(trial, why)
        else:
            self.study.set(trial.number, attempts=attempts)
            self.say(f"{self.plan.run(trial.number)} failed with {why}; started again ({attempts} of {self.retries}, --retries)")

    def _lost(self, trial: Trial, why: str) -> None:
        self.study.set(trial.number, error=why)
        self.study.end(trial.number, "failed")
        self.say(f"{self.plan.run(trial.number)} has failed, which counts as the worst: {why}")

    def _last_words(self, trial: Trial) -> str:
        """The last error of its log, else the last line."""
        file = self.folder / "logs" / f"{self.plan.run(trial.number)}.log"
        lines = [line for line in file.read_text(errors="replace").splitlines() if line.strip()] if file.exists() else []
        errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        return (errors or lines or ["it has printed nothing"])[-1][:300]

    # --- pausing ---

    def _pause_all(self) -> None:
        for leg in self.running.values():
            if leg.asked is None:
                leg.asked = time.monotonic()
                self.jobs.hold(leg.job)
            elif time.monotonic() - leg.asked > PAUSE_SECONDS:
                self.say(
                    f"{self.plan.run(leg.trial)} has not saved within {PAUSE_SECONDS} s; ended by force, its last checkpoint is complete"
                )
                self.jobs.cancel(leg.job)

    def _keep_to_budget(self) -> None:
        spent = self._spent()
        if self.budget.crossed(spent):
            self.out_of_budget = f"budget: {self.budget.shown(spent)}; trials that ran have saved, and the same command with more resumes"

    def _spent(self) -> float:
        """Seconds of all trials."""
        running = {number: leg.seconds for number, leg in self.running.items()}
        return sum(running.get(trial.number, trial.seconds) for trial in self.study.trials())

    def _affordable(self, steps: int) -> bool:
        """Whether a leg of so many steps fits beside what runs. Where nothing runs and it does not, the budget is used up."""
        trials = self.study.trials()
        done = sum(self._steps(trial) for trial in trials)
        each = self._spent() / done if done else 0.0
        ahead = sum(max(0, (t.target or 0) - self._steps(t)) for t in trials if t.number in self.running)
        spent = self._spent()
        if not self.budget.crossed(spent + each * (ahead + steps)):
            return True
        if not self.running:
            self.out_of_budget = (
                f"budget: {self.budget.shown(spent)}, and the next {steps} steps would take about {self.budget.amount(each * steps)}; "
                "the same command with more resumes"
            )
        return False

    def _end_the_others(self) -> None:
        for trial in self.study.trials():
            if trial.state == "open":
                self.study.end(trial.number, "pruned")


def until_let_go(run: str) -> None:
    """Until the process that a killed driver left has saved: it holds a lock beside the run's folder. Raises ConfigError at a deadline."""
    file = runs_root() / f".{run}.lock"
    deadline = time.monotonic() + SAVE_SECONDS
    said = False
    while file.exists():
        with file.open("a") as lock, suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        if time.monotonic() > deadline:
            raise ConfigError(f"{run}: a process of an earlier driver still writes it after {SAVE_SECONDS} s; end it, and start again")
        if not said:
            print(f"waiting for {run}, which an earlier driver left, to save: at most {SAVE_SECONDS} s", flush=True)
            said = True
        time.sleep(0.2)
