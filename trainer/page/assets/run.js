"use strict";
// One run: what it is, its curves as they grow, why a number moved, settings, events, machines.
F.TABS = { "": "Overview", episodes: "Episodes", prompts: "Prompts", timeline: "Timeline", machines: "Machines", settings: "Settings", events: "Events" };
F.SHOWN = 12; // curves that are drawn at once; the others on request

F.views.run = async (name, tab = "", ...rest) => {
  const run = await F.ask("run", { name });
  const tabs = F.h("nav", { class: "tabs", "aria-label": "Parts of this run" }, Object.entries(F.TABS).map(([key, title]) => F.a(title, key ? ["run", name, key] : ["run", name], {}, { "aria-current": key === tab ? "page" : null })));
  const head = F.h("div", {}, F.runHead(run));
  const body = F.h("div", {});
  F.show(F.h("h1", {}, run.name), head, tabs, body);
  F.refresh = null;
  await (F.tabs[tab] || F.tabs[""])(run, body, head, ...rest);
};

F.runHead = (run) => [
  F.facts([["state", F.state(run.state)], ["step", `${F.number(run.step)}${run.steps ? ` of ${F.number(run.steps)}` : ""}`], ["reward", run.reward === null ? null : F.number(run.reward)], ["loss", run.reward === null ? F.number(run.loss) : null], ["evaluation", run.eval_reward === null ? null : F.number(run.eval_reward)],
    ["a step takes", run.seconds ? `${F.number(run.seconds, 3)} s` : null], ["tokens/s", run.tokens_per_second === null ? null : F.number(Math.round(run.tokens_per_second))], ["cost", run.cost_usd === null ? null : F.usd(run.cost_usd)], ["owner", run.owner], ["algorithm", run.algorithm], ["model", run.model], ["started", run.started], ["starts", run.starts], ["data", run.data]]),
  run.word ? F.h("p", { class: ["failed", "killed"].includes(run.state) ? "error" : "soft" }, run.word) : null,
  run.damaged.length ? F.h("p", { class: "error" }, `metrics.jsonl: lines ${run.damaged.join(", ")} are damaged and left out`) : null,
];

F.tabs = {};

F.tabs[""] = async (run, body, head) => {
  const name = run.name, moved = F.h("div", { id: "moved", "aria-live": "polite" }), charts = F.h("div", { class: "charts" }), summary = F.h("div", {});
  let all = false, last = -1;
  const onStep = async (step) => {
    moved.replaceChildren(F.note(`Looking at step ${step} …`));
    try { moved.replaceChildren(F.moved(name, await F.ask("moved", { name, step }))); } catch (error) { moved.replaceChildren(F.failed(error)); }
  };
  const marks = (now) => [...now.events.filter((event) => event.step !== null && event.step !== undefined)];
  const draw = async (now) => {
    if (now.last === last) return;
    last = now.last;
    const keys = all ? now.keys : now.keys.filter((key) => !key.startsWith("seconds_")).slice(0, F.SHOWN);
    const told = await F.ask("curves", { name, keys: keys.join(",") });
    F.clearPlots();
    F.fill(charts, keys.filter((key) => told.curves[key]).map((key) => F.chart(F.name(key), [{ name: key, ...told.curves[key] }], { marks: marks(now), onStep })));
    const jumps = now.jumps.map((jump) => F.h("li", {}, `${now.keys.includes("reward") ? "reward" : "loss"} ${jump.by < 0 ? "fell" : "rose"} by ${F.number(Math.abs(jump.by), 3)} at step ${jump.step}: `, F.h("button", { type: "button", onclick: () => onStep(jump.step) }, "what moved")));
    F.fill(
      summary,
      jumps.length || now.words.length ? F.h("section", { class: "card" }, F.h("h2", {}, "Worth a look"), F.h("ul", { class: "words" }, jumps, now.words.map((word) => F.h("li", {}, word)))) : null,
      now.before ? F.h("details", { class: "card" }, F.h("summary", {}, `${now.changed.length} setting${now.changed.length === 1 ? "" : "s"} changed since `, F.a(now.before, ["run", now.before]), ", the run before"), now.changed.length ? F.settingsTable(now.changed, [now.before, name]) : F.note("None."), F.a("Compare the two", ["compare", `${now.before},${name}`])) : null,
    );
  };
  const more = run.keys.length > F.SHOWN ? F.h("button", { type: "button", onclick: async (event) => { all = !all; last = -1; event.target.textContent = all ? "Fewer curves" : "All curves"; await draw(await F.ask("run", { name })); } }, "All curves") : null;
  F.fill(body, summary, moved, F.h("h2", {}, "Curves"), run.keys.length ? F.note("Over steps. Click a step to see what moved there; drag to zoom, double-click to zoom out. Lines: ", F.h("span", { class: "bad" }, "errors"), ", ", F.h("span", { class: "warn" }, "rollbacks"), ".") : F.note("No step was logged yet."), charts, more, F.h("h2", {}, "Where the time went"), F.phases(run.phases), F.suites(run.suites));
  await draw(run);
  if (F.place().query.step) onStep(F.place().query.step);
  F.refresh = async () => { const now = await F.ask("run", { name }); F.fill(head, F.runHead(now)); await draw(now); };
};

F.moved = (name, told) => F.h("section", { class: "card" }, F.h("h2", {}, `Step ${told.step}: what moved`),
  told.moved.length ? F.table(["metric", "#10 steps before", "#from here", "#times its noise", "what it may mean"], told.moved.map((row) => F.h("tr", {}, F.cell(F.h("code", {}, row.key)), ...F.numbers(row.before, row.after, row.score), F.cell(row.meaning, "text soft")))) : F.note("No metric moved by more than its noise around this step."),
  told.events.length ? F.h("ul", { class: "words" }, told.events.map((event) => F.h("li", {}, `step ${event.step}, ${event.kind}: ${event.text}`))) : null,
  told.words.length ? F.h("ul", { class: "words" }, told.words.map((word) => F.h("li", {}, word))) : null,
  F.h("p", {}, F.a(`Worst answers of step ${told.step}`, ["run", name, "episodes"], { step: told.step, order: "worst" }), " · ", F.a("best", ["run", name, "episodes"], { step: told.step, order: "best" })),
  F.h("details", {}, F.h("summary", {}, "All numbers of this step"), F.table(["metric", "#value"], Object.entries(told.row).map(([key, value]) => F.h("tr", {}, F.cell(F.h("code", {}, key)), ...F.numbers(value))))));

F.phases = (phases) => (phases.length ? F.table(["part of the steps", "#seconds", "#share", ""], phases.map((phase) => F.h("tr", {}, F.cell(F.name(phase.name)), ...F.numbers(phase.seconds), F.cell(F.percent(phase.share), "number"), F.h("td", {}, F.h("span", { class: "bar", style: { width: `${Math.round(160 * phase.share)}px` } }))))) : F.note("Nothing yet."));

F.suites = (suites) => (suites.length ? [F.h("h2", {}, "Benchmarks"), F.table(["suite", "task", "metric", "#value", "#± error", "#step", "package"], suites.map((row) => F.h("tr", {}, F.cell(row.suite), F.cell(row.task), F.cell(row.metric), ...F.numbers(row.value, row.stderr, row.step), F.cell(`${row.package ?? ""} ${row.version ?? ""}`))))] : []);

F.settingsTable = (rows, names) => F.table(["setting", ...names], rows.map((row) => F.h("tr", {}, F.cell(F.h("code", {}, row.name)), row.values.map((value) => F.cell(value, "text")))));

F.tabs.settings = async (run, body) => {
  const search = F.h("input", { type: "search", id: "search", placeholder: "part of a name or value", oninput: () => draw() }), list = F.h("div", {});
  const draw = () => {
    const rows = Object.entries(run.settings).filter(([name, value]) => `${name} ${JSON.stringify(value)}`.toLowerCase().includes(search.value.toLowerCase()));
    list.replaceChildren(F.table(["setting", "value"], rows.map(([name, value]) => F.h("tr", {}, F.cell(F.h("code", {}, name)), F.cell(typeof value === "string" ? value : JSON.stringify(value), "text")))));
  };
  draw();
  F.fill(body, run.before ? F.h("section", { class: "card" }, F.h("h2", {}, `Changed since ${run.before}`), run.changed.length ? F.settingsTable(run.changed, [run.before, run.name]) : F.note("Nothing.")) : null, F.h("p", {}, F.h("label", {}, "Find ", search)), list);
};

F.tabs.events = async (run, body) => {
  const draw = (events) => F.fill(body, events.length ? F.table(["time", "#step", "kind", "what"], [...events].reverse().map((event) => F.h("tr", {}, F.cell(event.time), ...F.numbers(event.step), F.cell(event.kind, event.kind === "fault" ? "bad" : ""), F.cell(event.text, "text")))) : F.note("Nothing happened yet."));
  draw(run.events);
  F.refresh = async () => draw((await F.ask("run", { name: run.name })).events);
};

F.tabs.machines = async (run, body) => {
  const draw = async () => {
    const { alive, actors, engines, now } = await F.ask("machines", { name: run.name });
    const rows = actors.map((actor) => F.h("tr", {}, F.cell(actor.name), F.cell(actor.node), F.cell(actor.now, actor.now?.includes("no sign of life") ? "bad" : ""), ...F.numbers(actor.asked, actor.tokens_per_second, actor.seconds_per_step), F.cell(actor.slow ? `${actor.slow.toFixed(1)} times the others` : "", "bad")));
    F.fill(
      body,
      alive ? F.facts([["driver", `process ${alive.pid} on ${alive.host}`], ["last sign of life", F.ago(alive.time, now)], ["doing", alive.ended ? "has ended" : alive.doing]]) : F.note("This run says nothing of its processes (it was written by an older version, or never started)."),
      F.h("h2", {}, "Processes"), rows.length ? F.table(["process", "node", "now", "#requests", "#tokens/s", "#seconds per engine step", ""], rows) : F.note("None is known now."),
      F.h("h2", {}, "Engines, over the last 20 steps"), engines.length ? F.table(["engine", "#episodes", "#tokens", "#|log-prob difference|", "#staleness"], engines.map((row) => F.h("tr", {}, F.cell(F.a(row.engine, ["run", run.name, "episodes"], { engine: row.engine })), ...F.numbers(row.episodes, row.tokens, row.difference, row.staleness)))) : F.note("No episode names its engine."),
    );
  };
  await draw();
  F.refresh = draw;
};
